"""The HTTP API of a job: its operations, whose docstrings are in the OpenAPI description, and the table `ROUTES`.

The server (`transport/server.py` on the coordinator's port, `job_socket.py` on this machine) authorizes requests; this
module handles them, and `streams.py` writes streams.  Rules: (1) an error reply is JSON with one line of rule, value
and remedy; (2) every command is an event with its user, including rejected commands; (3) sizes, streams and waits are
bounded; (4) there are no cookies and no CORS, and a command needs the content type JSON, so no web page in an
operator's browser can send one.
"""

import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web
from msgspec import Struct, ValidationError, convert, to_builtins

from ripstop.api import routes
from ripstop.api.job_interface import (
    JobInterface,
    LimitedJobQueries,
    RequestRefused,
    find_job_node_of_rank,
    query_job_nodes,
)
from ripstop.api.page_files import PageFiles
from ripstop.api.replies import (
    Description,
    Done,
    Error,
    EventPage,
    FaultReply,
    HistoryColumns,
    LogText,
    Members,
    Ranks,
    RankStatus,
    Stacks,
    Usage,
)
from ripstop.api.routes import MAX_TAIL_LINES, PREFIX, ApiRoute, InvalidRequest, RouteParameter
from ripstop.api.streams import LOG_WAIT_S, LogChunk, OpenStreams, StreamKind
from ripstop.model.errors import QueryFailed
from ripstop.model.event_json import to_dict
from ripstop.model.events import OperatorAction
from ripstop.model.fault_injection import (
    INJECT_QUERY,
    MAX_BYTES,
    MAX_PERCENT,
    MAX_SECONDS,
    Fault,
    FaultKind,
    Injection,
    describe_fault_injection,
)
from ripstop.model.operator_commands import (
    DrainNode,
    OperatorCommand,
    RestartRound,
    ScaleJob,
    StopJob,
    describe_operator_command,
    operator_command_rejection,
)
from ripstop.model.status import JobStatus, NodeStatus

MAX_BODY = 16 * 1024  # bytes of a request
MAX_EVENTS = 1000  # in one reply
MAX_LOG_BYTES = 1 << 20  # in one reply
MAX_REASON_CHARACTERS = 200
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text format
QUERY_TIMEOUT_S = 5.0  # for a node's reply

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Authorize = Callable[[web.Request], str]  # returns the user of a request; raises `RequestRefused`
AuthorizeReader = Callable[[web.Request], Awaitable[str]]  # the same for a request for metrics


class ApiCall(Struct, frozen=True):
    """A parsed request: its user and its parameters."""

    request: web.Request
    user: str
    parameters: dict[str, Any]


class Api:
    """The API of one job.  `find_job` returns the job, or None while it is in another process."""

    def __init__(
        self,
        find_job: Callable[[], JobInterface | None],
        authorize: Authorize,
        authorize_reader: AuthorizeReader | None = None,
    ) -> None:
        self._find_job = find_job
        self._authorize = authorize
        self._authorize_reader = authorize_reader  # None: `authorize`
        self._queries = LimitedJobQueries()
        self._streams = OpenStreams()

    def mount(self, app: web.Application) -> None:
        """Add `ROUTES`, `/metrics` and the page to an application."""
        for route in ROUTES:
            app.router.add_route(route.method, route.path, self._handler(route))
        paths = dict.fromkeys(route.path for route in ROUTES)
        for path in paths:
            methods = [route.method for route in ROUTES if route.path == path]
            app.router.add_route("*", path, self._error_handler(405, f"use {' or '.join(methods)}", methods))
        app.router.add_route("*", "/api{rest:.*}", self._error_handler(404, f"the paths are {', '.join(paths)}"))
        app.router.add_get("/metrics", self._metrics)
        PageFiles().mount(app)
        app.on_shutdown.append(self._end_streams)

    def _handler(self, route: ApiRoute) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                user = self._authorize(request)
            except RequestRefused as refused:
                return http_api_error_response(refused, close=True)
            try:
                reply = await route.handler(self, await _parse_http_api_call(request, route, user))
                return reply if isinstance(reply, web.StreamResponse) else _http_api_json_response(reply)
            except RequestRefused as refused:
                return http_api_error_response(refused)
            except InvalidRequest as error:
                return http_api_error_response(RequestRefused(400, str(error)))
            except web.HTTPRequestEntityTooLarge:
                too_large = RequestRefused(413, f"the body is larger than {MAX_BODY} bytes; send less")
                return http_api_error_response(too_large, close=True)

        return handle

    def _error_handler(self, status: int, remedy: str, allowed: Iterable[str] = ()) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                self._authorize(request)
            except RequestRefused as refused:
                return http_api_error_response(refused, close=True)
            problem = f"{request.method}: wrong method" if status == 405 else f"{request.path[:80]}: no such path"
            response = http_api_error_response(RequestRefused(status, f"{problem}; {remedy}"), close=True)
            if allowed:
                response.headers["Allow"] = ", ".join(allowed)
            return response

        return handle

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        try:
            if self._authorize_reader is None:
                self._authorize(request)
            else:
                await self._authorize_reader(request)
            response = web.Response(body=await self.job.metrics(), headers={"Content-Type": METRICS_TYPE})
            response.force_close()
            return response
        except RequestRefused as refused:
            return http_api_error_response(refused, close=True)

    async def _end_streams(self, _: web.Application) -> None:
        self._streams.end()

    @property
    def job(self) -> JobInterface:
        job = self._find_job()
        if job is None or not job.decides:
            raise RequestRefused(503, "the job's coordinator is not in this process now; try again")
        return job

    # status -----------------------------------------------------------------------------------------------------------

    async def description(self, call: ApiCall) -> Description:
        """This description."""
        return routes.describe_routes(ROUTES)

    async def status(self, call: ApiCall) -> JobStatus:
        """The state of the job."""
        return await self.job.full_status()

    async def members(self, call: ApiCall) -> Members:
        """The nodes of the job, as in status."""
        return Members(self.job.status().nodes)

    async def ranks(self, call: ApiCall) -> Ranks:
        """The workers by rank; none between two rounds."""
        job = self.job
        nodes = sorted(job.status().nodes_in_round, key=lambda node: node.first_rank)
        ranks: list[RankStatus] = []
        for node, reply in await self._ask_all(job, nodes, "workers", {}):
            pids = reply["pids"] if isinstance(reply, dict) else []
            ranks += [
                RankStatus(
                    rank=node.first_rank + local,
                    node=node.name,
                    local_rank=local,
                    pid=pids[local] if local < len(pids) else None,
                    state=node.state,
                )
                for local in range(node.slots)
            ]
        return Ranks(tuple(ranks))

    async def usage(self, call: ApiCall) -> Usage:
        """What the workers and the GPUs do and use now, as columns."""
        return await self.job.usage()

    async def history(self, call: ApiCall) -> HistoryColumns:
        """Step time, goodput, memory and GPU utilisation since the job began, as columns."""
        return self.job.history_columns()

    async def stacks(self, call: ApiCall) -> dict[str, Any]:
        """The stacks of workers; with --hang-timeout, also the collectives they are in."""
        job, rank = self.job, call.parameters["rank"]
        nodes = job.status().nodes_in_round if rank is None else [find_job_node_of_rank(job.status(), rank)]
        argument = {} if rank is None else {"rank": rank}
        stacks, unanswered = [], []
        for node, reply in await self._ask_all(job, nodes, "stacks", argument):
            if isinstance(reply, dict):
                stacks += [{"node": node.name} | stack for stack in reply["ranks"]]
            else:
                unanswered.append({"node": node.name, "why": str(reply)})
        if unanswered and not stacks:
            raise RequestRefused(409, f"no node reported its workers' stacks: {unanswered[0]['why']}")
        return {"stacks": stacks, "unanswered": unanswered}

    async def _ask_all(
        self, job: JobInterface, nodes: list[NodeStatus], query: str, argument: dict[str, Any]
    ) -> list[tuple[NodeStatus, dict[str, Any] | QueryFailed]]:
        """Each node's reply or error, in the order of the nodes."""

        def ask_one(node: str) -> Awaitable[dict[str, Any]]:
            return self._queries.ask(job, node, query, argument, QUERY_TIMEOUT_S)

        # a query may wait for others first, and then for its reply
        replies = await query_job_nodes([node.name for node in nodes], ask_one, 2 * QUERY_TIMEOUT_S)
        return [(node, replies[node.name]) for node in nodes]

    # events -----------------------------------------------------------------------------------------------------------

    async def events(self, call: ApiCall) -> web.StreamResponse | dict[str, Any]:
        """The events of the job, in order; as text/event-stream, new events too."""
        job, since = self.job, call.parameters["since"]
        if "text/event-stream" in call.request.headers.get("Accept", ""):
            last = call.request.headers.get("Last-Event-ID", "")
            since = int(last) if last.isascii() and last.isdigit() and len(last) < 16 else since
            return await self._streams.send(call.request, StreamKind.EVENTS, self._streams.events(job.journal, since))
        found = job.journal.since(since)
        events = [{"number": number} | to_dict(entry) for number, entry in found[: call.parameters["limit"]]]
        last = events[-1]["number"] if events else min(since, job.journal.count)
        return {"events": events, "last": last, "more": len(events) < len(found)}

    # logs -------------------------------------------------------------------------------------------------------------

    async def logs(self, call: ApiCall) -> web.StreamResponse | LogText:
        """The output of a worker; with follow, plain text until the job ends."""
        parameters, job = call.parameters, self.job
        if parameters["offset"] is not None and parameters["tail"] is not None:
            raise RequestRefused(409, "tail and offset cannot be combined; remove one of them")
        start: dict[str, Any] = {"rank": parameters["rank"], "stream": parameters["stream"]}
        if parameters["offset"] is None:
            start["tail"] = 100 if parameters["tail"] is None else parameters["tail"]
        else:
            start["offset"] = parameters["offset"]
        if parameters["follow"]:
            start["reader"] = secrets.token_hex(8)
        node = find_job_node_of_rank(job.status(), parameters["rank"]).name
        try:
            first = await self._queries.ask(job, node, "log", start, QUERY_TIMEOUT_S)
            if not parameters["follow"]:
                return await self._read_to_end(job, node, start, first)
        except QueryFailed as error:
            raise RequestRefused(409, str(error)) from error
        chunks = self._streams.log(job.journal, parameters["rank"], first, self._next_chunk(job, node, start))
        return await self._streams.send(call.request, StreamKind.LOGS, chunks)

    def _next_chunk(
        self, job: JobInterface, node: str, start: dict[str, Any]
    ) -> Callable[[LogChunk, float], Awaitable[LogChunk]]:
        """A function that reads the chunk after another: from the same node until the log ends, then from the next."""

        async def next_chunk(chunk: LogChunk, wait_s: float) -> LogChunk:
            nonlocal node
            if chunk["end"]:
                node = find_job_node_of_rank(job.status(), start["rank"]).name
            argument = _next_http_api_log_query(start, chunk) | {"reader": start["reader"], "wait": wait_s}
            try:
                if wait_s:
                    return await self._queries.ask_at_once(job, node, "log", argument, 2 * LOG_WAIT_S)
                return await self._queries.ask(job, node, "log", argument, QUERY_TIMEOUT_S)
            except QueryFailed:
                node = find_job_node_of_rank(job.status(), start["rank"]).name
                raise

        return next_chunk

    async def _read_to_end(self, job: JobInterface, node: str, start: dict[str, Any], chunk: LogChunk) -> LogText:
        """Read from the first chunk to the log's size at that time, at most `MAX_LOG_BYTES`."""
        texts, offset, end = [chunk["text"]], chunk["offset"], min(chunk["size"], chunk["offset"] + MAX_LOG_BYTES)
        while chunk["next"] < end and chunk["text"]:
            chunk = await self._queries.ask(job, node, "log", _next_http_api_log_query(start, chunk), QUERY_TIMEOUT_S)
            texts.append(chunk["text"])
        return LogText(start["rank"], node, start["stream"], chunk["round"], offset, chunk["next"], text="".join(texts))

    # commands ---------------------------------------------------------------------------------------------------------

    async def restart(self, call: ApiCall) -> Done:
        """Start a new round on the same nodes."""
        status = self._apply(call, RestartRound(f"restart requested by {call.user}"))
        return Done(f"replacing round {status.round}")

    async def drain(self, call: ApiCall) -> Done:
        """Remove a node from the job."""
        node = call.parameters["node"]
        self._apply(call, DrainNode(node, f"drained by {call.user}"))
        return Done(f"draining node {node}")

    async def scale(self, call: ApiCall) -> Done:
        """Set the number of nodes the job runs on."""
        nodes = call.parameters["nodes"]
        status = self._apply(call, ScaleJob(nodes))
        return Done(f"scaling to {nodes} nodes; {len(status.nodes_in_round)} are in the round")

    async def stop(self, call: ApiCall) -> Done:
        """End the job on all nodes."""
        why = call.parameters["why"]
        self._apply(call, StopJob(f"stopped by {call.user}" + (f": {why}" if why else "")))
        return Done("stopping the job")

    async def may_inject_fault(self, call: ApiCall) -> Done:
        """Check that the job and all nodes of its round allow injected faults."""
        job = self._chaos_job()
        nodes = job.status().nodes_in_round
        for node, reply in await self._ask_all(job, nodes, INJECT_QUERY, {}):
            if isinstance(reply, dict) and reply.get("refused"):
                raise _http_api_chaos_refusal(f"node {node.name} was")
        return Done(f"faults can be injected into {len(nodes)} nodes")

    async def inject_fault(self, call: ApiCall) -> FaultReply:
        """Inject a fault, to test that the job heals; only with --allow-chaos."""
        job, given = self._chaos_job(), call.parameters
        fault = Fault(
            id=secrets.token_hex(4),
            kind=FaultKind(given["kind"]),
            rank=-1 if given["rank"] is None else given["rank"],
            seconds=given["seconds"],
            percent=given["percent"],
            bytes=given["bytes"],
        )
        what = describe_fault_injection(fault.kind, given["node"] or "", fault.rank)
        try:
            node, injection = await self._inject(job, fault, given["node"])
        except RequestRefused as refused:
            job.record(OperatorAction(what, call.user, f"refused: {refused}"))
            raise
        job.record(OperatorAction(what, call.user, f"skipped: {why}" if (why := injection.skipped) else "accepted"))
        return FaultReply(fault.id, node, injection.round, injection.skipped)

    async def _inject(self, job: JobInterface, fault: Fault, given_node: str | None) -> tuple[str, Injection]:
        node = _http_api_fault_node(job.status(), fault, given_node)
        try:
            reply = await self._queries.ask(job, node, INJECT_QUERY, to_builtins(fault), QUERY_TIMEOUT_S)
            injection = convert(reply, Injection)
        except (QueryFailed, ValidationError, ValueError) as error:
            raise RequestRefused(409, str(error)) from error
        if injection.refused:
            raise _http_api_chaos_refusal(f"node {node} was")
        return node, injection

    def _chaos_job(self) -> JobInterface:
        if not self.job.allows_chaos:
            raise _http_api_chaos_refusal("the coordinator was")
        return self.job

    def _apply(self, call: ApiCall, command: OperatorCommand) -> JobStatus:
        """Pass a command to the job, or reject it (rule 2).  Returns the job's status before the command."""
        job, status = self.job, self.job.status()
        why_not = operator_command_rejection(command, status)
        decision = f"refused: {why_not}" if why_not else "accepted"
        job.record(OperatorAction(describe_operator_command(command), call.user, decision))
        if why_not:
            is_unknown_node = isinstance(command, DrainNode) and not status.has_node(command.node)
            raise RequestRefused(404 if is_unknown_node else 409, why_not)
        job.apply_command(command)
        return status


# requests and replies -------------------------------------------------------------------------------------------------


def http_api_error_response(refused: RequestRefused, *, close: bool = False) -> web.Response:
    response = _http_api_json_response(Error(str(refused)), status=refused.status)
    if refused.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if close:
        response.force_close()
    return response


async def _parse_http_api_call(request: web.Request, route: ApiRoute, user: str) -> ApiCall:
    parameters = routes.parse_route_parameters(route.path_parameters, request.match_info.items())
    parameters |= routes.parse_route_parameters(route.query, request.query.items())
    if route.method == "POST":
        if request.content_type != "application/json":
            raise RequestRefused(
                415, f"the content type must be application/json, received {request.content_type[:80]}; send JSON"
            )
        parameters |= routes.parse_route_body(route.body, await request.read())
    return ApiCall(request, user, parameters)


def _http_api_chaos_refusal(who: str) -> RequestRefused:
    return RequestRefused(
        403, f"faults are injected only with --allow-chaos, and {who} started without it; add it on every node"
    )


def _http_api_fault_node(status: JobStatus, fault: Fault, node: str | None) -> str:
    """The node that injects the fault."""
    if fault.kind.has_rank:
        if fault.rank < 0 or node is not None:
            raise InvalidRequest(f"{fault.kind} is a fault of a worker; give its rank, and no node")
        return find_job_node_of_rank(status, fault.rank).name
    if node is None or fault.rank >= 0:
        raise InvalidRequest(f"{fault.kind} is a fault of a node; give the node, and no rank")
    if not status.has_node(node):
        raise RequestRefused(404, f"no node {node} is part of the job; `status` lists them")
    return node


def _http_api_json_response(content: object, status: int = 200) -> web.Response:
    return web.json_response(to_builtins(content), status=status, headers={"Cache-Control": "no-store"})


def _next_http_api_log_query(start: dict[str, Any], chunk: LogChunk) -> dict[str, Any]:
    """The argument of the query for the chunk after this one."""
    return {"rank": start["rank"], "stream": start["stream"], "round": chunk["round"], "offset": chunk["next"]}


# the table ------------------------------------------------------------------------------------------------------------

SINCE = RouteParameter("since", int, "only events after this number", default=0)
LIMIT = RouteParameter("limit", int, "the maximum number of events", minimum=1, maximum=MAX_EVENTS, default=MAX_EVENTS)
LOG_RANK = RouteParameter("rank", int, "the worker's rank")
STREAM = RouteParameter("stream", str, "the output stream", choices=("stdout", "stderr"), default="stderr")
TAIL = RouteParameter("tail", int, "the number of last lines (100)", maximum=MAX_TAIL_LINES)
OFFSET = RouteParameter("offset", int, "the first byte, instead of tail")
FOLLOW = RouteParameter("follow", bool, "continue with new output", default=False)
STACKS_RANK = RouteParameter("rank", int, "only this worker")
NODE = RouteParameter("node", str, "its name, as in status", minimum=1, maximum=256, required=True)
NODES = RouteParameter("nodes", int, "the number of nodes", minimum=1, required=True)
FAULT = RouteParameter("kind", str, "the kind of fault", choices=tuple(FaultKind), required=True)
FAULT_RANK = RouteParameter("rank", int, "the worker's rank", maximum=2**31 - 1)
FAULT_NODE = RouteParameter("node", str, "the node's name, for a fault of a node", minimum=1, maximum=256)
SECONDS = RouteParameter("seconds", int, "how long a lasting fault lasts", minimum=1, maximum=MAX_SECONDS, default=10)
PERCENT = RouteParameter(
    "percent", int, "the share of time for which a slow worker is stopped", minimum=1, maximum=MAX_PERCENT, default=50
)
BYTES = RouteParameter("bytes", int, "how much disk space is filled", minimum=1, maximum=MAX_BYTES, default=64 << 20)
WHY = RouteParameter("why", str, "the reason, for the report", maximum=MAX_REASON_CHARACTERS, default="")

ROUTES = (
    ApiRoute("GET", f"{PREFIX}/openapi.json", Api.description, Description),
    ApiRoute("GET", f"{PREFIX}/status", Api.status, JobStatus),
    ApiRoute("GET", f"{PREFIX}/members", Api.members, Members),
    ApiRoute("GET", f"{PREFIX}/ranks", Api.ranks, Ranks),
    ApiRoute("GET", f"{PREFIX}/usage", Api.usage, Usage),
    ApiRoute("GET", f"{PREFIX}/history", Api.history, HistoryColumns),
    ApiRoute("GET", f"{PREFIX}/events", Api.events, EventPage, (SINCE, LIMIT), stream_type="text/event-stream"),
    ApiRoute(
        "GET",
        f"{PREFIX}/logs/{{rank}}",
        Api.logs,
        LogText,
        query=(STREAM, TAIL, OFFSET, FOLLOW),
        path_parameters=(LOG_RANK,),
        errors=(404, 409),
        stream_type="text/plain",
    ),
    ApiRoute("GET", f"{PREFIX}/stacks", Api.stacks, Stacks, (STACKS_RANK,), errors=(404, 409)),
    ApiRoute("POST", f"{PREFIX}/restart", Api.restart, Done, errors=(409,)),
    ApiRoute("POST", f"{PREFIX}/drain", Api.drain, Done, body=(NODE,), errors=(404, 409)),
    ApiRoute("POST", f"{PREFIX}/scale", Api.scale, Done, body=(NODES,), errors=(409,)),
    ApiRoute("POST", f"{PREFIX}/stop", Api.stop, Done, body=(WHY,), errors=(409,)),
    ApiRoute("GET", f"{PREFIX}/faults", Api.may_inject_fault, Done),
    ApiRoute(
        "POST",
        f"{PREFIX}/faults",
        Api.inject_fault,
        FaultReply,
        body=(FAULT, FAULT_RANK, FAULT_NODE, SECONDS, PERCENT, BYTES),
        errors=(404, 409),
    ),
)
