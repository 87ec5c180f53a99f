"""The timers that workers set for themselves (`diagnostics/timer_pipe.py`), and what happens when one expires."""

import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ripstop.agent.event_recorder import EventRecorder
from ripstop.agent.round_state import Round
from ripstop.agent.worker_exits import TimerAction
from ripstop.diagnostics.evidence import TimerKill
from ripstop.diagnostics.stack_dump import dump_stack
from ripstop.diagnostics.timer_pipe import TimerPipeWatchdog
from ripstop.model import events
from ripstop.workers.group import Group


class WorkerTimers:
    def __init__(
        self,
        path: Path,
        current_round: Callable[[], Round | None],
        recorder: EventRecorder,
        run_task: Callable[[Coroutine[None, None, None]], Any],
    ) -> None:
        self._current_round = current_round
        self._recorder = recorder
        self._run_task = run_task
        self._watchdog = TimerPipeWatchdog(path, self._on_expired)

    def new_round(self) -> None:
        self._watchdog.new_round()

    def close(self) -> None:
        self._watchdog.close()

    def _on_expired(self, pid: int, why: str, signum: int) -> None:
        round = self._current_round()
        if round is None or round.group is None:
            return
        rank = round.group.rank_of(pid)
        action = round.exits.on_timer_expired(rank, signum)
        if rank is None or action is TimerAction.IGNORE:
            return
        missed = events.TimersMissed(round.place.round, round.place.first_rank + rank, pid, why)
        self._recorder.record(missed, level=logging.WARNING)
        if action is TimerAction.KILL:
            self._run_task(_kill(round, round.group, rank, pid, why, signum))


async def _kill(round: Round, group: Group, rank: int, pid: int, why: str, signum: int) -> None:
    """Save the worker's stack as evidence, then send the signal, unless the workers are stopped meanwhile."""
    if pid in group.pids:
        found = await dump_stack(pid, round.logs.stack_file(rank))
        round.timer_kills[rank] = TimerKill(why, found.stack)
    if not round.exits.is_stopping:
        group.send(pid, signum)
