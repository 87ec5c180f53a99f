"""The agent's side of replication: it starts the replicator (`replicator.py`) and passes it what it needs.

The replicator starts when a worker first hands over a State buffer in a round with a partner.  If it dies, training
goes on, and it is started again after a pause.  Copies stay: the agent holds their descriptors.
"""

import array
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from ripstop.commit_memory import CommitId
from ripstop.model.config import Backend, RunConfig
from ripstop.model.errors import StartError
from ripstop.model.round import Place
from ripstop.protocol.messages import Replicate, Replicated
from ripstop.replication import MAX_CONTROL_BYTES
from ripstop.system.network import bind_local
from ripstop.workers.processes import Children, ProcessExit
from ripstop.workers.state_memory import StateMemory

log = logging.getLogger("ripstop.agent")

MIN_INTERVAL_S = 1.0  # between two sets
INTERVAL_PER_NODE_S = 0.005  # the coordinator receives and sends one message per node and set
FIRST_RESTART_S, LAST_RESTART_S = 0.5, 60.0
MAX_HELD = 4  # commits of a State; two, unless coordinators change


class Supervisor:
    """`send` sends to the coordinator if it is reachable."""

    def __init__(
        self,
        config: RunConfig,
        node: str,
        memory: StateMemory,
        children: Children,
        send: Callable[[Replicated], None],
    ) -> None:
        self._config = config
        self._node = node
        self._memory = memory
        self._children = children
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._listening: socket.socket | None = None
        self._problem = ""  # why this node takes no copies
        self._has_warned = False
        self._place: Place | None = None
        self._reports: dict[str, Replicated] = {}  # the last one of each State
        self._requests: dict[str, Replicate] = {}
        self._channel: socket.socket | None = None
        self._queue: deque[tuple[bytes, list[int]]] = deque()  # messages and descriptors for the replicator
        self._pid: int | None = None
        self._ended = asyncio.Event()
        self._restart: asyncio.TimerHandle | None = None
        self._deaths = 0
        self._is_closed = False
        memory.on_kept = self._on_buffer

    def port(self, host: str) -> int:
        """The port that takes copies, bound once; 0 if this node takes none."""
        config = self._config
        if self._listening is None and not self._problem and config.replicates and config.max_nodes > 1:
            if config.backend is Backend.HANDLER:
                self._problem = "a job with another package's rendezvous handler makes none"
            elif not config.token and (config.tls is None or config.tls.ca is None):
                self._problem = "the job has no secret; set RIPSTOP_TOKEN to the same value on all nodes"
            elif config.tls is not None and config.tls.cert is None:
                self._problem = "this node has no certificate; give it tls_cert and tls_key"
            else:
                try:
                    self._listening = bind_local(host)
                except StartError as error:
                    self._problem = str(error)
        return int(self._listening.getsockname()[1]) if self._listening is not None else 0

    # rounds and messages ----------------------------------------------------------------------------------------------

    def start_round(self, place: Place) -> None:
        self._place = place
        self._reports.clear()
        self._requests.clear()
        if place.partner is None:
            self._memory.forget_sets()
        if self._channel is not None:
            self._tell_round(place)
        elif place.partner is not None and self._restart is None:
            ranks = range(place.first_rank, place.first_rank + place.slots)
            if self._memory.buffers(ranks):  # made while this node had no partner
                self._start()

    def send_again(self) -> None:
        """The coordinator is reachable again, or is another one."""
        for report in self._reports.values():
            self._send(report)

    def on_request(self, request: Replicate) -> None:
        """Keep these commits, and copy the newer one."""
        complete = CommitId(request.complete.round, request.complete.number) if request.complete else None
        before = self._memory.held(request.state) if complete is None else [complete]
        held = dict.fromkeys([*before, CommitId(request.round, request.number)])
        self._memory.hold(request.state, list(held)[-MAX_HELD:], complete)
        if self._place is not None and request.round == self._place.round:
            self._requests[request.state] = request
            self._tell({"replicate": [request.state, request.round, request.number]})

    def _on_buffer(self, rank: int, name: str, slot: int, fd: int) -> None:
        if self._channel is not None:
            self._tell({"buffer": [rank, name, slot]}, fd)
        elif self._place is None or self._restart is not None:
            return
        elif self._place.partner is not None:
            self._start()
        elif self._place.group_size > 1 and self._config.replicates and not self._has_warned:
            self._has_warned = True
            why = self._problem or "another node makes no copies, and its log says why"
            log.warning("state %r has no copies on other nodes: %s; it may be lost with a node", name, why)

    # the process ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._restart = None
        if self._is_closed or self._listening is None or self._place is None:
            return
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with theirs:
            theirs.set_inheritable(True)
            argv = [sys.executable, "-P", "-m", "ripstop.replication.replicator", str(theirs.fileno())]
            try:
                self._pid = os.posix_spawn(sys.executable, argv, os.environ, setsid=True)
                self._children.watch(self._pid, self._on_end)
            except (OSError, StartError) as error:
                self._pid = None
                self._fail(f"cannot be started: {error}")
                return
        self._ended.clear()
        self._loop.add_reader(self._channel, self._on_readable, self._channel)
        config, tls = self._config, self._config.tls
        files = {name: str(getattr(tls, name) or "") for name in ("cert", "key", "ca")} if tls else {}
        secrets = {"run_id": config.run_id, "node": self._node, "token": config.token, **files}
        limits = {"bandwidth": config.replication_bandwidth, "has_tls": tls is not None}
        self._tell({"setup": {**secrets, **limits}}, self._listening.fileno())
        self._tell_round(self._place)

    def _tell_round(self, place: Place) -> None:
        partner = [place.partner.host, place.partner.port] if place.partner else None
        interval = max(MIN_INTERVAL_S, INTERVAL_PER_NODE_S * place.group_size)
        ranks = {"number": place.round, "first_rank": place.first_rank, "ranks": place.slots}
        ranks["world_size"] = place.world_size
        self._tell({"round": {**ranks, "interval": interval, "partner": partner}})
        for rank, name, slot, fd in self._memory.buffers(range(place.first_rank, place.first_rank + place.slots)):
            self._tell({"buffer": [rank, name, slot]}, fd)
        for request in self._requests.values():
            self._tell({"replicate": [request.state, request.round, request.number]})

    def _tell(self, message: dict[str, Any], *fds: int) -> None:
        if self._channel is not None:
            self._queue.append((json.dumps(message).encode(), [os.dup(fd) for fd in fds]))
            self._send_queued(self._channel)

    def _send_queued(self, channel: socket.socket) -> None:
        """Send what the socket takes; the replicator may still be starting."""
        while self._queue:
            data, fds = self._queue[0]
            try:
                channel.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
            except BlockingIOError:
                self._loop.add_writer(channel, self._send_queued, channel)
                return
            except OSError:  # it has ended
                return
            self._drop_first()
        self._loop.remove_writer(channel)

    def _drop_first(self) -> None:
        for fd in self._queue.popleft()[1]:
            os.close(fd)

    def _on_readable(self, channel: socket.socket) -> None:
        fds = array.array("i")
        try:
            data, ancillary, _, _ = channel.recvmsg(MAX_CONTROL_BYTES, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
        except OSError:
            data, ancillary = b"", []
        for _, _, value in ancillary:
            fds.frombytes(value)
        match json.loads(data) if data else None:
            case {"report": report}:
                message = self._reports[report["state"]] = Replicated(**report)
                self._send(message)
            case {"copy": {"rank": rank, "state": name, "round": round, "number": number}}:
                is_kept = bool(fds) and self._keep_copy(rank, name, CommitId(round, number), fds[0])
                self._tell({"kept": is_kept})  # without a descriptor: this process has too many
            case {"warning": text}:
                log.warning("%s", text)
            case None:
                self._loop.remove_reader(channel)

    def _keep_copy(self, rank: int, name: str, id: CommitId, fd: int) -> bool:
        place = self._place
        is_own = place is not None and rank in range(place.first_rank, place.first_rank + place.slots)
        if place is None or place.round != id.round or is_own:
            os.close(fd)
            return False
        return self._memory.keep_copy(rank, name, id, fd)

    def _kill(self) -> None:
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)

    def _on_end(self, end: ProcessExit) -> None:
        self._pid = None
        self._ended.set()
        self._fail(f"has ended (signal {end.signal})" if end.signal else f"has ended (exit code {end.exitcode})")

    def _fail(self, why: str) -> None:
        while self._queue:
            self._drop_first()
        if self._channel is not None:
            self._loop.remove_reader(self._channel)
            self._loop.remove_writer(self._channel)
            self._channel.close()
            self._channel = None
        if self._is_closed:
            return
        self._deaths += 1
        pause = min(FIRST_RESTART_S * 2 ** (self._deaths - 1), LAST_RESTART_S)
        log.warning("the replicator %s; training goes on, it is started again in %g s", why, pause)
        self._restart = self._loop.call_later(pause, self._start)

    async def close(self) -> None:
        """End the process and free the port."""
        self._is_closed = True
        self._memory.on_kept = None
        if self._restart is not None:
            self._restart.cancel()
        if self._pid is not None:
            self._kill()
            await self._ended.wait()
        if self._listening is not None:
            self._listening.close()
