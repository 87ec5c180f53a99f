"""What the agent knows of the round that runs on its node, or ran last."""

import asyncio
from pathlib import Path

from msgspec import Struct, field

from ripstop.agent.query_handler import QueriedWorkers
from ripstop.agent.worker_exits import WorkerExits
from ripstop.diagnostics.evidence import MemoryEvidence, TimerKill, evidence_of_failed_start, gather_evidence
from ripstop.diagnostics.hang_monitor import HangMonitor
from ripstop.logs.directory import RoundLogs
from ripstop.model.errors import UnkillableError
from ripstop.model.failure import Failure
from ripstop.model.round import Place
from ripstop.model.text_formatting import rank_list
from ripstop.workers.group import Exit, Group
from ripstop.workers.state_memory import WorkerIdentity


class AgentRound(Struct):
    """The workers of one round; `group` is set when they start, `monitor` when all have started."""

    place: Place
    host: str
    requested_at: float  # when the machine asked for the round
    logs: RoundLogs
    memory_at_start: MemoryEvidence
    exits: WorkerExits
    group: Group | None = None
    monitor: HangMonitor | None = None
    recorder_sockets: tuple[str, ...] = ()  # by local rank
    recorded_evidence: int = 0  # events
    timer_kills: dict[int, TimerKill] = field(default_factory=dict)  # workers that the agent killed, by local rank
    reforming: set[int] = field(default_factory=set)  # workers that go on, and have not left their last round yet
    starting: set[int] = field(default_factory=set)  # local ranks whose workers are being started beside others
    old_files: list[tuple[Path, ...]] = field(default_factory=list)  # log files of workers that are being replaced
    kept: int = 0  # workers that went on in place
    started_at: float | None = None  # when the workers ran
    stopped: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def require_current(self, current: "AgentRound | None") -> None:
        """Raise CancelledError if this round was replaced or stopped meanwhile."""
        if current is not self or self.exits.is_stopping:
            raise asyncio.CancelledError

    def close_monitor(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None

    async def stop_workers(self, grace: float, signum: int) -> str:
        """End the workers, if any have started.  If SIGKILL does not end one: why not."""
        try:
            if self.group is not None:
                await self.group.stop(grace, signum)
        except UnkillableError as error:
            return str(error)
        return ""

    def identity(self, local_rank: int, key: str) -> WorkerIdentity:
        place = self.place
        local_ranks = range(place.first_rank, place.first_rank + place.slots)
        return WorkerIdentity(place.round, local_ranks[local_rank], place.world_size, local_ranks, key)

    def workers(self) -> QueriedWorkers | None:
        """For queries; None while they start."""
        if self.group is None or (self.monitor is None and not self.stopped.done()):
            return None
        progress = self.monitor.worker_progress() if self.monitor is not None else {}
        exited = frozenset(self.exits.exited)
        return QueriedWorkers(
            self.place, self.group.pids, self.logs, progress, exited, self.recorder_sockets, self.stopped
        )

    def still_running_text(self) -> str:
        """Which workers have not stopped yet."""
        ranks = [self.place.first_rank + rank for rank in range(self.place.slots) if rank not in self.exits.exited]
        if not ranks:
            return "the workers have exited, their child processes have not"
        return f"{rank_list(ranks)} still {'run' if ranks[1:] else 'runs'}"

    def start_failure(self, why: str, at: float) -> Failure:
        """The evidence that the workers could not be started."""
        return evidence_of_failed_start(self.place, 0, host=self.host, at=at, why=why, logs=self.logs.directory(0))

    def failure(self, exit: Exit) -> Failure:
        """The evidence of a worker that failed."""
        rank = exit.local_rank
        return gather_evidence(
            self.place,
            rank,
            host=self.host,
            at=exit.at,
            pid=exit.pid,
            returncode=exit.returncode,
            logs=self.logs.directory(rank),
            error_file=self.logs.error_file(rank),
            stderr=self.logs.stderr(rank),
            before=self.memory_at_start,
            timer_kill=self.timer_kills.get(rank),
        )
