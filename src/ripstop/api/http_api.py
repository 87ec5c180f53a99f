"""The HTTP API of a job: what it is and does, and what operators may do to it.  `ROUTES`, at the end, is all of it.

Whoever serves it (`transport/server.py` on the coordinator's port, `job_socket.py` on this machine) says who a request
is from, or refuses it; here is what it gets, and in `streams.py` what goes on.  Rules: (1) a refusal is JSON with one
line of rule, value and remedy; (2) every change is an event, refused ones included, with who wanted it; (3) sizes,
streams and waits are bounded; (4) no cookies and no CORS, and a change must say that its body is JSON, so that no page
in somebody's browser can ask for one.
"""

import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from ripstop.api import routes
from ripstop.api.job_interface import JobInterface, RequestRefused, node_of, placed
from ripstop.api.node_queries import NodeQueries, ask, ask_all
from ripstop.api.routes import MAX_TAIL, PREFIX, ApiRoute, Malformed, Parameter, array, record, schema_of
from ripstop.api.streams import WAIT, EventStreams, Kind, LogChunk
from ripstop.model.errors import QueryFailed
from ripstop.model.events import OperatorAction, to_dict
from ripstop.model.failure import CollectiveProgress
from ripstop.model.operator_commands import (
    DrainNode,
    OperatorCommand,
    RestartRound,
    ScaleJob,
    StopJob,
    describe,
    is_member,
    rejection_reason,
)
from ripstop.model.status import JobStatus, NodeStatus

MAX_BODY = 16 * 1024  # bytes of a request
MAX_EVENTS = 1000  # in one answer
MAX_LOG = 1 << 20  # bytes of a log in one answer
MAX_WHY = 200  # characters
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text format
PATIENCE = 5.0  # seconds for what many nodes are asked at once


class ApiCall(Struct, frozen=True):
    """A request that was read: who made it, and its words."""

    request: web.Request
    by: str
    words: dict[str, Any]


Admit = Callable[[web.Request], str]  # who a request is from; raises `RequestRefused`
AdmitReader = Callable[[web.Request], Awaitable[str]]  # the same, of one that only reads


class Api:
    """The API of one job.  `job` finds it: it may be elsewhere for a while."""

    def __init__(
        self, job: Callable[[], JobInterface | None], admit: Admit, admit_reader: AdmitReader | None = None
    ) -> None:
        self._find = job
        self._admit = admit
        self._admit_reader = admit_reader  # of metrics; None: as all else
        self._questions = NodeQueries()
        self._streams = EventStreams()

    def mount(self, app: web.Application) -> None:
        """Serve `ROUTES` in an application, and the page for Prometheus."""
        for route in ROUTES:
            app.router.add_route(route.method, route.path, self._serving(route))
        for path in dict.fromkeys(route.path for route in ROUTES):
            methods = [route.method for route in ROUTES if route.path == path]
            app.router.add_route("*", path, self._refusing(405, f"write {' or '.join(methods)}", methods))
        there = ", ".join(dict.fromkeys(route.path for route in ROUTES))
        app.router.add_route("*", "/api{rest:.*}", self._refusing(404, f"there are {there}"))
        app.router.add_get("/metrics", self._metrics)
        app.on_shutdown.append(self._end_streams)

    def _serving(self, route: ApiRoute) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def serve(request: web.Request) -> web.StreamResponse:
            try:
                by = self._admit(request)
            except RequestRefused as refused:
                return refusal(refused, close=True)
            try:
                answer: web.StreamResponse = await route.handler(self, await _read(request, route, by))
                return answer
            except RequestRefused as refused:
                return refusal(refused)
            except Malformed as flaw:
                return refusal(RequestRefused(400, str(flaw)))
            except web.HTTPRequestEntityTooLarge:
                return refusal(RequestRefused(413, f"a body has {MAX_BODY} bytes at most; send less"), close=True)

        return serve

    def _refusing(
        self, status: int, remedy: str, allowed: Iterable[str] = ()
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def refuse(request: web.Request) -> web.StreamResponse:
            try:
                self._admit(request)
            except RequestRefused as refused:
                return refusal(refused, close=True)
            what = request.method if status == 405 else request.path[:80]
            answer = refusal(RequestRefused(status, f"{what}: there is no such thing here; {remedy}"), close=True)
            if allowed:
                answer.headers["Allow"] = ", ".join(allowed)
            return answer

        return refuse

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        try:
            if self._admit_reader is None:
                self._admit(request)
            else:
                await self._admit_reader(request)
            response = web.Response(body=await self.job.metrics(), headers={"Content-Type": METRICS_TYPE})
            response.force_close()
            return response
        except RequestRefused as refused:
            return refusal(refused, close=True)

    async def _end_streams(self, _: web.Application) -> None:
        self._streams.end()

    @property
    def job(self) -> JobInterface:
        """The job, for whoever answers a call."""
        job = self._find()
        if job is None or not job.decides:
            raise RequestRefused(503, "the job's coordinator is not in this process now; ask again, `ripstop` finds it")
        return job

    # to see -----------------------------------------------------------------------------------------------------------

    async def description(self, call: ApiCall) -> web.StreamResponse:
        return _json(routes.describe(ROUTES))

    async def status(self, call: ApiCall) -> web.StreamResponse:
        job = self.job
        goodput = await job.goodput()
        return _json(to_builtins(replace(job.status(), goodput=goodput)))

    async def members(self, call: ApiCall) -> web.StreamResponse:
        return _json({"members": [to_builtins(node) for node in self.job.status().nodes]})

    async def ranks(self, call: ApiCall) -> web.StreamResponse:
        job = self.job
        ranks = []
        nodes = sorted(placed(job.status()), key=lambda node: node.first_rank)
        for node, answer in await self._ask_all(job, nodes, "workers", {}):
            pids = answer["pids"] if isinstance(answer, dict) else []
            ranks += [
                {
                    "rank": node.first_rank + local,
                    "node": node.name,
                    "local_rank": local,
                    "pid": pids[local] if local < len(pids) else None,
                    "state": node.state,
                }
                for local in range(node.slots)
            ]
        return _json({"ranks": ranks})

    async def stacks(self, call: ApiCall) -> web.StreamResponse:
        job, rank = self.job, call.words["rank"]
        nodes = placed(job.status()) if rank is None else [node_of(job.status(), rank)]
        details = {} if rank is None else {"rank": rank}
        stacks, unanswered = [], []
        for node, answer in await self._ask_all(job, nodes, "stacks", details):
            if isinstance(answer, dict):
                stacks += [{"node": node.name} | found for found in answer["ranks"]]
            else:
                unanswered.append({"node": node.name, "why": str(answer)})
        if unanswered and not stacks:
            raise RequestRefused(409, f"no node can tell its workers' stacks: {unanswered[0]['why']}")
        return _json({"stacks": stacks, "unanswered": unanswered})

    async def _ask_all(
        self, job: JobInterface, nodes: list[NodeStatus], question: str, details: dict[str, Any]
    ) -> list[tuple[NodeStatus, dict[str, Any] | QueryFailed]]:
        """In the order of the nodes."""

        def ask_one(node: str) -> Awaitable[dict[str, Any]]:
            return self._questions.ask(job, node, question, details, PATIENCE)

        answers = await ask_all([node.name for node in nodes], ask_one, 2 * PATIENCE)  # for a turn, and for the answer
        return [(node, answers[node.name]) for node in nodes]

    # events -----------------------------------------------------------------------------------------------------------

    async def events(self, call: ApiCall) -> web.StreamResponse:
        job, since = self.job, call.words["since"]
        if "text/event-stream" in call.request.headers.get("Accept", ""):
            last = call.request.headers.get("Last-Event-ID", "")
            since = int(last) if last.isascii() and last.isdigit() and len(last) < 16 else since
            return await self._streams.send(call.request, Kind.EVENTS, self._streams.events(job.journal, since))
        found = job.journal.since(since)
        events = [{"number": number} | to_dict(entry) for number, entry in found[: call.words["limit"]]]
        last = events[-1]["number"] if events else min(since, job.journal.count)
        return _json({"events": events, "last": last, "more": len(events) < len(found)})

    # logs -------------------------------------------------------------------------------------------------------------

    async def logs(self, call: ApiCall) -> web.StreamResponse:
        words, job = call.words, self.job
        if words["offset"] is not None and words["tail"] is not None:
            raise RequestRefused(409, "tail and offset both say where to begin; keep one of the two")
        begin: dict[str, Any] = {"rank": words["rank"], "stream": words["stream"]}
        if words["offset"] is None:
            begin["tail"] = 100 if words["tail"] is None else words["tail"]
        else:
            begin["offset"] = words["offset"]
        if words["follow"]:
            begin["reader"] = secrets.token_hex(8)
        node = node_of(job.status(), words["rank"]).name
        try:
            first = await self._questions.ask(job, node, "log", begin, PATIENCE)
            if not words["follow"]:
                return _json(await self._whole(job, node, begin, first))
        except QueryFailed as why:
            raise RequestRefused(409, str(why)) from why
        pieces = self._streams.log(job.journal, words["rank"], first, self._following(job, node, begin))
        return await self._streams.send(call.request, Kind.LOGS, pieces)

    def _following(
        self, job: JobInterface, node: str, begin: dict[str, Any]
    ) -> Callable[[LogChunk, float], Awaitable[LogChunk]]:
        """What asks for the next piece of a log: the node that has the present one until that is all, then the next."""

        async def after(piece: LogChunk, wait: float) -> LogChunk:
            nonlocal node
            if piece["end"]:
                node = node_of(job.status(), begin["rank"]).name
            details = _after(begin, piece) | {"reader": begin["reader"], "wait": wait}
            try:
                if wait:
                    return await ask(job, node, "log", details, 2 * WAIT)
                return await self._questions.ask(job, node, "log", details, PATIENCE)
            except QueryFailed:
                node = node_of(job.status(), begin["rank"]).name
                raise

        return after

    async def _whole(
        self, job: JobInterface, node: str, begin: dict[str, Any], piece: dict[str, Any]
    ) -> dict[str, Any]:
        """From the first piece to what was the end when it was read, within bounds."""
        texts, first, end = [piece["text"]], piece["offset"], min(piece["size"], piece["offset"] + MAX_LOG)
        while piece["next"] < end and piece["text"]:
            piece = await self._questions.ask(job, node, "log", _after(begin, piece), PATIENCE)
            texts.append(piece["text"])
        found = {"rank": begin["rank"], "node": node, "stream": begin["stream"], "round": piece["round"]}
        return found | {"offset": first, "next": piece["next"], "text": "".join(texts)}

    # to steer ---------------------------------------------------------------------------------------------------------

    async def restart(self, call: ApiCall) -> web.StreamResponse:
        status = self._steer(call, RestartRound(f"restart asked for by {call.by}"))
        return _json({"done": f"round {status.round} is being replaced"})

    async def drain(self, call: ApiCall) -> web.StreamResponse:
        node = call.words["node"]
        self._steer(call, DrainNode(node, f"drained by {call.by}"))
        return _json({"done": f"node {node} is leaving"})

    async def scale(self, call: ApiCall) -> web.StreamResponse:
        nodes = call.words["nodes"]
        status = self._steer(call, ScaleJob(nodes))
        return _json({"done": f"{nodes} nodes are wanted, {len(placed(status))} have ranks now"})

    async def stop(self, call: ApiCall) -> web.StreamResponse:
        why = call.words["why"]
        self._steer(call, StopJob(f"stopped by {call.by}" + (f": {why}" if why else "")))
        return _json({"done": "the job is being stopped"})

    def _steer(self, call: ApiCall, wish: OperatorCommand) -> JobStatus:
        """Pass a wish on, or refuse it; rule 2.  The answer is what the job was when it was asked."""
        job, status = self.job, self.job.status()
        why_not = rejection_reason(wish, status)
        job.record(OperatorAction(describe(wish), call.by, f"refused: {why_not}" if why_not else "accepted"))
        if why_not:
            nobody = isinstance(wish, DrainNode) and not is_member(wish.node, status)
            raise RequestRefused(404 if nobody else 409, why_not)
        job.apply_command(wish)
        return status


# requests and answers -------------------------------------------------------------------------------------------------


def application(api: Api) -> web.Application:
    """An application with this API alone."""
    app = web.Application(client_max_size=MAX_BODY)
    api.mount(app)
    return app


def refusal(refused: RequestRefused, *, close: bool = False) -> web.Response:
    answer = _json({"error": str(refused)}, status=refused.status)
    if refused.status == 401:
        answer.headers["WWW-Authenticate"] = "Bearer"
    if close:
        answer.force_close()
    return answer


async def _read(request: web.Request, route: ApiRoute, by: str) -> ApiCall:
    words = routes.read_words(route.path_values, request.match_info.items())
    words |= routes.read_words(route.query, request.query.items())
    if route.method == "POST":
        if request.content_type != "application/json":
            raise RequestRefused(
                415, f"a body is application/json, received {request.content_type[:80]}; send {{}} as JSON"
            )
        words |= routes.read_body(route.body, await request.read())
    return ApiCall(request, by, words)


def _json(content: object, status: int = 200) -> web.Response:
    return web.json_response(content, status=status, headers={"Cache-Control": "no-store"})


def _after(begin: dict[str, Any], piece: dict[str, Any]) -> dict[str, Any]:
    """What comes behind this piece of a log."""
    return {"rank": begin["rank"], "stream": begin["stream"], "round": piece["round"], "offset": piece["next"]}


# the API --------------------------------------------------------------------------------------------------------------

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_RANK = record(
    {"rank": _NUMBER, "node": _TEXT, "local_rank": _NUMBER, "pid": {"type": ["integer", "null"]}, "state": _TEXT}
)
_EVENT = record(
    {"number": _NUMBER, "v": _NUMBER, "seq": _NUMBER, "at": {"type": "number"}, "node": _TEXT, "kind": _TEXT},
    more=True,
)
_EVENTS = record({"events": array(_EVENT), "last": _NUMBER, "more": {"type": "boolean"}})
_LOG = record(
    {
        "rank": _NUMBER,
        "node": _TEXT,
        "stream": _TEXT,
        "round": _NUMBER,
        "offset": _NUMBER,
        "next": _NUMBER,
        "text": _TEXT,
    }
)
_STACK = record(
    {"node": _TEXT, "rank": _NUMBER},
    optional={
        "pid": _NUMBER,
        "stack": _TEXT,
        "wchan": _TEXT,
        "state": _TEXT,
        "source": _TEXT,
        "standings": array(schema_of(CollectiveProgress))
        | {"description": "its process groups, by torch's flight recorder"},
        "recorder": _TEXT | {"description": "instead of them: why they are not known"},
    },
    more=True,
)
_STACKS = record(
    {
        "stacks": array(_STACK),
        "unanswered": array(record({"node": _TEXT, "why": _TEXT})),
    }
)
_DONE = record({"done": _TEXT})

ROUTES = (
    ApiRoute("GET", f"{PREFIX}/openapi.json", Api.description, "This description.", {"type": "object"}),
    ApiRoute("GET", f"{PREFIX}/status", Api.status, "The job as it is.", schema_of(JobStatus)),
    ApiRoute(
        "GET",
        f"{PREFIX}/members",
        Api.members,
        "The nodes of the job, as in status.",
        record({"members": array(schema_of(NodeStatus))}),
    ),
    ApiRoute(
        "GET",
        f"{PREFIX}/ranks",
        Api.ranks,
        "Which worker is where; no ranks between rounds.",
        record({"ranks": array(_RANK)}),
    ),
    ApiRoute(
        "GET",
        f"{PREFIX}/events",
        Api.events,
        "What happened, in order; as text/event-stream, also what will happen.",
        _EVENTS,
        query=(
            Parameter("since", int, "only what came after the event of this number", default=0),
            Parameter("limit", int, "so many at most", least=1, most=MAX_EVENTS, default=MAX_EVENTS),
        ),
        streams="text/event-stream",
    ),
    ApiRoute(
        "GET",
        f"{PREFIX}/logs/{{rank}}",
        Api.logs,
        "What a worker wrote; with follow, as plain text for as long as the job lasts.",
        _LOG,
        path_values=(Parameter("rank", int, "the worker's rank"),),
        query=(
            Parameter("stream", str, "which of the two", choices=("stdout", "stderr"), default="stderr"),
            Parameter("tail", int, "the last lines, so many of them (100)", most=MAX_TAIL),
            Parameter("offset", int, "from this byte on, instead of the last lines"),
            Parameter("follow", bool, "go on with what is written from now on", default=False),
        ),
        refusals=(404, 409),
        streams="text/plain",
    ),
    ApiRoute(
        "GET",
        f"{PREFIX}/stacks",
        Api.stacks,
        "Where workers are in their code; with --hang-timeout, also in which collectives.",
        _STACKS,
        query=(Parameter("rank", int, "of this worker alone"),),
        refusals=(404, 409),
    ),
    ApiRoute("POST", f"{PREFIX}/restart", Api.restart, "A new round with the same nodes.", _DONE, refusals=(409,)),
    ApiRoute(
        "POST",
        f"{PREFIX}/drain",
        Api.drain,
        "A node leaves the job.",
        _DONE,
        body=(Parameter("node", str, "its name, as in status", least=1, most=256, required=True),),
        refusals=(404, 409),
    ),
    ApiRoute(
        "POST",
        f"{PREFIX}/scale",
        Api.scale,
        "The job has so many nodes, as far as they are there.",
        _DONE,
        body=(Parameter("nodes", int, "how many", least=1, required=True),),
        refusals=(409,),
    ),
    ApiRoute(
        "POST",
        f"{PREFIX}/stop",
        Api.stop,
        "The job ends, on all nodes.",
        _DONE,
        body=(Parameter("why", str, "for the report", most=MAX_WHY, default=""),),
        refusals=(409,),
    ),
)
