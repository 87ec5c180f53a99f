"""The agent's side of standby workers: makes them, hands over a round's request, and replaces them.

`standby_policy.py` decides; `zygote/standby_process.py` is the process's side and has the rules for it.  `Standbys`
starts workers in place of the spawner: it takes those that fit, and has the spawner fork the others.  A standby that is
dead, does not answer or does not fit any more is discarded, and its worker is forked without delay.  A standby is
claimed and watched like a worker, but belongs to no group: no signal for workers reaches it.  One that runs the script
may have child processes: they end with it.
"""

import asyncio
import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ripstop.model import events
from ripstop.model.config import Binding, Standby, StandbyUntil, StartMethod
from ripstop.model.errors import StartError
from ripstop.model.text_formatting import format_bytes
from ripstop.model.usage import StandbySample
from ripstop.system.blocking_calls import run_in_daemon_thread
from ripstop.system.gpus import free_gpu_memory
from ripstop.workers import standby_policy as policy
from ripstop.workers.processes import Children, ProcessExit
from ripstop.workers.spawner import (
    PreloadResult,
    ProcessSpec,
    Spawner,
    WaitAsStandby,
    receive_from_spawned,
    send_to_spawned,
    wait_for_spawned_pids,
)
from ripstop.workers.zygote.channel import CHECK, encode_channel_message

log = logging.getLogger("ripstop.workers")

TAKE_TIMEOUT_S = 2.0  # a standby that waits answers in milliseconds
END_TIMEOUT_S = 5.0  # after SIGKILL
LAST_MESSAGE_TIMEOUT_S = 1.0  # of a standby that has ended
GPU_TIMEOUT_S = 4.0
MIN_FREE_GPU_MEMORY = 2 << 30  # for `auto`: a standby takes about a third of it

_NAME = r"""\s*["']((?:CUDA|CUBLAS|CUDNN|NCCL|PYTORCH|TORCH_NCCL|TORCH_CUDNN)_\w+)["']"""
SETS_GPU_VARIABLE = re.compile(rf"environ\[{_NAME}\s*\]\s*=(?!=)|(?:environ\.setdefault|putenv)\({_NAME}")
CONSEQUENCES = {  # of a failure, and of a final one
    (StandbyUntil.SCRIPT, False): "workers start without it",
    (StandbyUntil.SCRIPT, True): "ripstop does not try again",
    (StandbyUntil.ELASTIC, False): "ripstop replaces this standby with one that waits before the script",
    (StandbyUntil.ELASTIC, True): "from now on, standbys wait before the script",
}


class Place(Struct, frozen=True):
    """What is known of a local rank before a round."""

    env: Mapping[str, str]
    binding: Binding | None


class _Process(Struct, eq=False):
    """One standby."""

    local_rank: int
    place: Place
    pid: int
    control: socket.socket
    generation: int  # of its zygote
    reader: asyncio.Task[Any] | None  # waits for its report
    until: StandbyUntil
    output: Path | None  # of the script
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)  # and was reaped
    was_ready: bool = False  # it has reported ready, with the memory that it uses
    memory: int = 0
    gpu_memory: int = 0


class Standbys:
    """A `WorkerSpawner`.  `places` are by local rank; `record` takes events for operators.

    `shadowed_spec` gives the worker that a run-ahead standby of this local rank shadows; it may raise OSError.
    """

    def __init__(
        self,
        spawner: Spawner,
        config: Standby,
        places: Sequence[Place],
        record: Callable[..., None],
        script: Path | None = None,
        shadowed_spec: Callable[[int], ProcessSpec] | None = None,
    ) -> None:
        self._spawner = spawner
        self._config = config
        self._places = places
        self._record = record
        self._script = script
        self._shadowed_spec = shadowed_spec
        self._loop = asyncio.get_running_loop()
        self._policy = policy.StandbyPolicy(config.count, config.until if shadowed_spec else StandbyUntil.SCRIPT)
        self._processes: dict[int, _Process] = {}  # by local rank
        self._ending: set[_Process] = set()  # killed, but not reaped yet
        self._ended_sessions: set[int] = set()  # of run-ahead standbys: their child processes may still live
        self._began: float | None = None  # when the standbys that warm up were made
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._declined: set[int] = set()  # local ranks; said once
        self._is_closed = self._has_said_variable = False
        self.taken: tuple[int, ...] = ()  # pids of the workers of the last start that were standbys
        self.taken_run_ahead = 0  # of these, how many were run-ahead standbys
        self._run(self._begin())

    # as a spawner -----------------------------------------------------------------------------------------------------

    @property
    def children(self) -> Children:
        return self._spawner.children

    async def wait_ready(self) -> PreloadResult:
        return await self._spawner.wait_ready()

    async def spawn(self, specs: Sequence[ProcessSpec]) -> list[int]:
        """Take standbys for these workers, and fork the others."""
        if all(spec.local_rank is None for spec in specs):
            return await self._spawner.spawn(specs)
        await self._spawner.wait_ready()
        return await wait_for_spawned_pids(self.children, self._spawn(specs)) or []

    async def stop(self) -> None:
        """End all standbys, and make none any more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in list(self._processes.values()):
            self._end(process)
        await self._wait_for_ends()
        await self._end_sessions()

    def close(self) -> None:
        self._spawner.close()

    # the round --------------------------------------------------------------------------------------------------------

    def on_round_started(self) -> None:
        self._feed(policy.RoundStarted())

    def on_first_step(self) -> None:
        self._feed(policy.FirstStep())

    def on_function_called(self, local_rank: int) -> None:
        """The worker of this local rank has called its training function."""
        self._feed(policy.FunctionCalled(local_rank))

    def on_round_stopping(self) -> None:
        self._feed(policy.RoundStopping())

    def check_files(self, local_ranks: Collection[int]) -> None:
        """These standbys may be needed soon: let them check now whether their modules have changed on disk."""
        for rank, process in self._processes.items():
            if rank in local_ranks and self._policy.states[rank] is policy.State.READY:
                with suppress(OSError):  # it has ended, and its end is reported
                    process.control.send(encode_channel_message(CHECK))

    def samples(self) -> tuple[StandbySample, ...]:
        """The standbys that are ready now."""
        return tuple(
            StandbySample(rank, process.memory, process.gpu_memory, process.until.value)
            for rank, process in sorted(self._processes.items())
            if self._policy.states[rank] is policy.State.READY
        )

    # making -----------------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        try:
            ready = await self._spawner.wait_ready()
        except StartError:  # the agent reports it
            return
        if ready.start is StartMethod.ZYGOTE:
            self._feed(policy.Idle())
        else:
            self._feed(policy.Unavailable())
            log.warning("--standby has no effect: workers start with exec, because %s", ready.fallback_reason)

    async def _make(self, rank: int, until: StandbyUntil) -> None:
        place = self._places[rank]
        await self._wait_for_ends()  # an earlier one may still hold memory
        if self._config.auto and (why := await _why_standby_lacks_memory(place.env)):
            level = logging.DEBUG if rank in self._declined else logging.INFO
            self._declined.add(rank)
            self._record(events.StandbyDiscarded(rank, f"not made: {why}"), level)
            self._feed(policy.Declined(rank))
            return
        self._began = self._began or self._loop.time()
        try:
            if (await self._spawner.wait_ready()).start is not StartMethod.ZYGOTE:  # a later zygote was unfit
                self._feed(policy.Unavailable())
                return
            runs_ahead = until is StandbyUntil.ELASTIC
            shadowed = self._shadowed_spec(rank) if self._shadowed_spec and runs_ahead else None
            process = await self._spawn_standby(rank, place, shadowed)
        except (StartError, OSError) as error:
            self._feed(policy.StandbyFailed(rank, str(error)))
            return
        if rank in self._processes or self._policy.states[rank] is not policy.State.WARMING:
            self._end(process)  # the zygote was so slow that the policy has given it up
            return
        self._processes[rank] = process
        match await receive_from_spawned(process.control):
            case {"ready": {"memory": memory, "gpu_memory": gpu_memory}}:
                process.was_ready, process.memory, process.gpu_memory = True, memory, gpu_memory
                await self._accept_ready_standby(process)
            case {"failed": why}:
                self._feed(policy.StandbyFailed(rank, _with_standby_output(process, why)))
            case _:
                pass  # `_on_end` follows

    async def _accept_ready_standby(self, process: _Process) -> None:
        """Accept a standby that reports ready.

        With `auto`, check GPU memory again if it has run the script, which may have used some.
        """
        rank = process.local_rank
        is_checked = self._config.auto and process.until is StandbyUntil.ELASTIC
        if is_checked and (why := await _why_standby_lacks_memory(process.place.env)):
            self._feed(policy.StandbyFailed(rank, f"it has run the script, and now {why}"))
        elif self._processes.get(rank) is process:
            self._feed(policy.WarmedUp(rank))
            self._record_ready()

    async def _spawn_standby(self, rank: int, place: Place, shadowed: ProcessSpec | None) -> _Process:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                ours.setblocking(False)
                entry = WaitAsStandby(theirs.fileno(), rank, self._config.warm_up, self._may_use_gpu(), shadowed)
                (pid,) = await self._spawner.spawn([ProcessSpec(place.env, entry, binding=place.binding)])
            until, output = (StandbyUntil.ELASTIC, shadowed.stdout) if shadowed else (StandbyUntil.SCRIPT, None)
            task = asyncio.current_task()
            process = _Process(rank, place, pid, ours, self._spawner.generation, task, until, output)
            self.children.watch(pid, partial(self._on_end, process))
            if shadowed:
                self.children.spared.add(pid)
        except BaseException:
            ours.close()
            raise
        return process

    def _may_use_gpu(self) -> bool:
        """False if the script sets a variable of CUDA or NCCL: they read their variables once, before the script."""
        variable = standby_conflict_in_script(self._script)
        if variable and not self._has_said_variable:
            self._has_said_variable = True
            log.warning(
                "standbys do not use the GPU, because the script sets %s itself; set it for `ripstop run` instead",
                variable,
            )
        return not variable

    def _on_end(self, process: _Process, end: ProcessExit) -> None:
        """It has ended and was reaped."""
        process.has_ended.set()
        self.children.spared.discard(process.pid)
        self._ending.discard(process)
        if process.until is StandbyUntil.ELASTIC:
            self._ended_sessions.add(process.pid)
        if not self._is_closed:
            self._run(self._report_end(process, _how_standby_ended(process, end)))

    async def _report_end(self, process: _Process, how: str) -> None:
        """Its last message says more, if it has sent one."""
        if process.reader is not None:
            await asyncio.wait([process.reader], timeout=LAST_MESSAGE_TIMEOUT_S)
        if self._processes.get(process.local_rank) is process:
            self._feed(policy.StandbyFailed(process.local_rank, _with_standby_output(process, how)))
        await self._end_sessions()

    def _record_ready(self) -> None:
        """One event for all standbys that were made together."""
        if self._began is None or policy.State.WARMING in self._policy.states.values():
            return
        seconds, self._began = self._loop.time() - self._began, None
        if ready := self.samples():
            ranks = tuple(each.local_rank for each in ready)
            memory, gpu_memory = tuple(each.memory for each in ready), tuple(each.gpu_memory for each in ready)
            self._record(events.StandbysReady(ranks, memory, gpu_memory, seconds, tuple(each.until for each in ready)))

    # taking -----------------------------------------------------------------------------------------------------------

    async def _spawn(self, specs: Sequence[ProcessSpec]) -> list[int]:
        pids: dict[int, int] = {}  # by index in `specs`
        for spec in specs:
            if spec.local_rank is not None:
                self._feed(policy.WorkerStarting(spec.local_rank))
        try:
            chosen = {index: process for index, spec in enumerate(specs) if (process := self._fitting(spec))}
            await self._fork(specs, [index for index in range(len(specs)) if index not in chosen], pids)
            handed = (self._hand_over(process, specs[index]) for index, process in chosen.items())
            results = dict(zip(chosen, await asyncio.gather(*handed, return_exceptions=True), strict=True))
            pids |= {index: pid for index, pid in results.items() if isinstance(pid, int)}
            for error in results.values():
                if isinstance(error, BaseException):
                    raise error
            taken = [(index, process) for index, process in chosen.items() if index in pids]
            self.taken = tuple(pids[index] for index, _ in taken)
            self.taken_run_ahead = sum(process.until is StandbyUntil.ELASTIC for _, process in taken)
            await self._fork(specs, [index for index in chosen if index not in pids], pids)
        except BaseException:
            self.children.kill(pids.values())
            raise
        return [pids[index] for index in range(len(specs))]

    async def _fork(self, specs: Sequence[ProcessSpec], indexes: list[int], pids: dict[int, int]) -> None:
        if indexes:
            await self._wait_for_ends()  # the new workers find the discarded standbys' memory free
            pids |= zip(indexes, await self._spawner.spawn([specs[index] for index in indexes]), strict=True)

    def _fitting(self, spec: ProcessSpec) -> _Process | None:
        """The ready standby for this worker.  One of an older zygote, or with other variables, is discarded."""
        rank = spec.local_rank
        process = None if rank is None else self._processes.get(rank)
        if (
            process is None
            or process.has_ended.is_set()
            or self._policy.states[process.local_rank] is not policy.State.READY
        ):
            return None
        place = process.place
        if process.generation != self._spawner.generation:
            why = "its zygote was replaced"
        elif place.binding != spec.binding or not place.env.items() <= spec.env.items():
            why = "the round has other variables"
        elif self._spawner.request(spec)["what"] != "run":
            why = "workers start with exec"
        else:
            return process
        self._discard_unfit(process, why)
        return None

    async def _hand_over(self, process: _Process, spec: ProcessSpec) -> int | None:
        """The pid of the worker that this standby has become; None if it is gone, StartError if no worker can start."""
        if process.has_ended.is_set():
            return None
        self.children.unwatch(process.pid)  # from now on it may run the script, and its end is the group's to report
        reply = None
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(TAKE_TIMEOUT_S):
                await send_to_spawned(process.control, self._spawner.request(spec))
                reply = await receive_from_spawned(process.control)
        if reply == "taken":
            self.children.spared.discard(process.pid)
            self._forget(process)
            self._feed(policy.Taken(process.local_rank))
            return process.pid
        self.children.watch(process.pid, partial(self._on_end, process))
        match reply:
            case {"unfit": why}:
                self._discard_unfit(process, why)
            case {"error": why}:
                self._discard_unfit(process, why)
                raise StartError(f"no worker can be started: {why}; check the limits on processes and files.")
            case _:
                self._discard_unfit(process, "it has died or does not answer")
        return None

    def _discard_unfit(self, process: _Process, why: str) -> None:
        """Discard a standby that was ready."""
        if self._processes.get(process.local_rank) is not process:
            return  # its end was reported meanwhile
        self._end(process)
        self._feed(policy.Taken(process.local_rank))
        self._record(events.StandbyDiscarded(process.local_rank, why))

    # execution --------------------------------------------------------------------------------------------------------

    def _feed(self, event: policy.StandbyEvent) -> None:
        if self._is_closed:
            return
        for command in self._policy.on(event, self._loop.time()):
            match command:
                case policy.Make(rank, until):
                    self._run(self._make(rank, until))
                case policy.Discard(rank):
                    if process := self._processes.get(rank):
                        self._end(process)
                    self._record_ready()
                case policy.ReportFailure(rank, why, is_final, is_news, until):
                    level = logging.WARNING if is_news else logging.DEBUG
                    text = f"{why or _why_standby_timed_out(until)}; {CONSEQUENCES[until, is_final]}"
                    self._record(events.StandbyDiscarded(rank, text), level)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._policy.deadline()
        self._timer = None if deadline is None else self._loop.call_at(deadline, self._feed, policy.Tick())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a standby could not be made: %r", error)

    def _end(self, process: _Process) -> None:
        """Kill a standby, with what its warm-up has left in its process group."""
        self._forget(process)
        if not process.has_ended.is_set():
            self._ending.add(process)
            os.killpg(process.pid, signal.SIGKILL)

    async def _end_sessions(self) -> None:
        if sessions := frozenset(self._ended_sessions):
            await self.children.end_trees(sessions, 0.0, with_adopted=False)
            self._ended_sessions -= sessions

    async def _wait_for_ends(self) -> None:
        """Wait for the standbys that were killed; not for one that hangs in the kernel, as with a lost GPU."""
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                for process in list(self._ending):
                    await process.has_ended.wait()
        except TimeoutError:
            pids = sorted(process.pid for process in self._ending)
            log.warning("standbys still exist %g s after SIGKILL: pids=%s; see /proc/PID/stack", END_TIMEOUT_S, pids)
            self._ending.clear()

    def _forget(self, process: _Process) -> None:
        if self._processes.get(process.local_rank) is process:
            del self._processes[process.local_rank]
        if process.reader not in (None, asyncio.current_task()):
            process.reader.cancel()
        self._loop.call_soon(process.control.close)  # when the reader does not wait on it any more


def standby_conflict_in_script(script: Path | None) -> str:
    """The variable of CUDA or NCCL that this script sets; empty if none."""
    text = ""
    if script is not None:
        with suppress(OSError):  # Python reports a script that cannot be read
            text = script.read_text(encoding="utf-8", errors="replace")
    return next((match[match.lastindex or 0] for match in SETS_GPU_VARIABLE.finditer(text)), "")


def _why_standby_timed_out(until: StandbyUntil) -> str:
    if until is StandbyUntil.SCRIPT:
        return f"the warm-up took longer than {policy.WARM_UP_TIMEOUT_S:g} s"
    return f"the script called no function with @train.elastic within {policy.RUN_AHEAD_TIMEOUT_S:g} s"


def _with_standby_output(process: _Process, why: str) -> str:
    return f"{why} (its output is in {process.output})" if process.output else why


def _how_standby_ended(process: _Process, end: ProcessExit) -> str:
    if end.signal is None:
        if process.until is StandbyUntil.ELASTIC and not process.was_ready:
            return f"the script exited with code {end.exitcode} before it called a function with @train.elastic"
        return f"it exited with code {end.exitcode}"
    hint = " (if memory ran out, the kernel's log says so)" if end.signal == signal.SIGKILL else ""
    return f"it was killed by {signal.Signals(end.signal).name}{hint}"


async def _why_standby_lacks_memory(env: Mapping[str, str]) -> str:
    """Why a standby would take memory that the worker on this GPU may need; "" if there is enough, or no GPU."""
    try:
        read = partial(free_gpu_memory, env.get("CUDA_VISIBLE_DEVICES"), int(env["LOCAL_RANK"]))
        free = await run_in_daemon_thread(read, GPU_TIMEOUT_S)
    except Exception as error:
        return f"the GPU's free memory is unknown: {error}"
    if free is None or free >= MIN_FREE_GPU_MEMORY:
        return ""
    least = format_bytes(MIN_FREE_GPU_MEMORY)
    return f"a standby needs {least} of free GPU memory, and {format_bytes(free)} are free; --standby=N makes it anyway"
