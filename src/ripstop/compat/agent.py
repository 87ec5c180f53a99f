"""`torch.distributed.elastic.agent.server`: an agent as an object to extend, with any torch-style rendezvous handler.

This is the synchronous agent of torch's documentation: a rendezvous, workers, a look at them every `monitor_interval`,
a restart of all when one fails or a node waits.  It is here for programs that bring a `RendezvousHandler` or override
the documented hooks; `elastic_launch` and `ripstop run` use our own engine instead.

Rules: (1) every step is a hook (`_rendezvous`, `_assign_worker_ranks`, `_start_workers`, `_monitor_workers`, …) that is
called through `self`, so that a subclass may replace any of them; (2) the keys in the handler's store are torch's, so
that an agent of torch's and one of ours can meet; (3) a worker's end wakes the local agent at once, the interval is
only the pace at which newcomers are looked for; (4) events and metrics are torch's, and whoever takes them cannot
disturb the agent.
"""

from __future__ import annotations

import abc
import json
import logging
import os
import signal
import socket
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from string import Template
from typing import Any

from ripstop.compat import events, health_check, watchdog
from ripstop.compat.event_thread import Teller
from ripstop.compat.file_timer import FileTimerRequest
from ripstop.compat.health_check import TORCHELASTIC_HEALTH_CHECK_PORT, HealthCheckServer, create_healthcheck_server
from ripstop.compat.metrics import prof, put_metric, put_run_metrics
from ripstop.compat.multiprocessing import LogsSpecs, PContext, ProcessFailure, SignalException, start_processes
from ripstop.compat.rendezvous.handler import RendezvousGracefulExitError, is_a
from ripstop.compat.store import barrier
from ripstop.compat.utils import is_uninterruptible_state, macros, read_proc_state
from ripstop.compat.watchdog import TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE

__all__ = [
    "DEFAULT_ROLE",
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "ElasticAgent",
    "HealthCheckServer",
    "LocalElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "create_healthcheck_server",
]

log = logging.getLogger("ripstop.compat")

DEFAULT_ROLE = "default"
TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"

# keys in the handler's store, shared with torch's agents
_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
_TERMINAL_STATE = "torchelastic/agent/terminal_state"


@dataclass
class WorkerSpec:
    """What the workers of one role are; the names, their order and their defaults are torch's."""

    role: str
    local_world_size: int
    rdzv_handler: Any
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        if self.local_world_size <= 0:
            raise AssertionError(f"local_world_size={self.local_world_size}: a node has workers; give 1 or more")
        if self.monitor_interval <= 0:
            raise AssertionError(f"monitor_interval={self.monitor_interval}: a time is above 0; give seconds")
        if self.fn:
            warnings.warn("WorkerSpec.fn is deprecated; give the function as entrypoint", DeprecationWarning, 2)
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise AssertionError("a WorkerSpec has no entrypoint; give a function, or a command's name")

    def get_entrypoint_name(self) -> str:
        """The function's qualified name, or the command's file name."""
        if isinstance(self.entrypoint, str):
            return Path(self.entrypoint).name
        return str(getattr(self.entrypoint, "__qualname__", self.entrypoint))


class Worker:
    """One worker; `id` is what the agent that started it calls it, for a local agent the pid."""

    __slots__ = ("global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size")

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __repr__(self) -> str:
        names = ("local_rank", "global_rank", "role_rank", "world_size", "role_world_size")
        return ",".join(f"{name}={getattr(self, name)}" for name in names)


class WorkerState(str, Enum):  # noqa: UP042 - torch's is a str and an Enum, and prints as one
    """The state of a whole `WorkerGroup`; its workers share their fate."""

    UNKNOWN = "UNKNOWN"  # lost track of: cannot be recovered
    INIT = "INIT"  # made, not started
    HEALTHY = "HEALTHY"  # running
    UNHEALTHY = "UNHEALTHY"  # running, and not well
    STOPPED = "STOPPED"  # interrupted by the agent, to be started again
    SUCCEEDED = "SUCCEEDED"  # all exited 0
    FAILED = "FAILED"  # one did not

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether there are processes, well or not."""
        return state in {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


class WorkerGroup:
    """The workers of a spec on this node; what a rendezvous gives is None before the first one."""

    __slots__ = (
        "group_rank", "group_world_size", "master_addr", "master_port", "spec", "state", "store", "workers",
    )  # fmt: skip

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=rank) for rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT


@dataclass
class RunResult:
    """How the workers of this node ended, by global rank: return values if all succeeded, else the failures."""

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        return self.state == WorkerState.FAILED


class ElasticAgent(abc.ABC):
    """Whoever manages workers."""

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers, restarting them up to `max_restarts` times; raises what is not a worker's failure."""
        raise NotImplementedError

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The group, which changes while the agent runs."""
        raise NotImplementedError


class SimpleElasticAgent(ElasticAgent):
    """An agent for one role; a subclass says how workers are started, watched and stopped."""

    def __init__(self, spec: WorkerSpec, exit_barrier_timeout: float = 300, shutdown_timeout: int = 30) -> None:
        self._worker_group = WorkerGroup(spec)
        self._remaining_restarts = spec.max_restarts
        self._store: Any = None
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._total_execution_time = 0
        self._in_exit_barrier = False
        self._teller: Teller | None = None  # of events, once there is one

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    # for the subclass to say ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the spec's number of workers; their ids by local rank."""
        raise NotImplementedError

    @abc.abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, whatever state they are in."""
        raise NotImplementedError

    @abc.abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """How the workers are now."""
        raise NotImplementedError

    @abc.abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Free what the agent holds; workers have `timeout` seconds from `death_sig` to SIGKILL."""
        raise NotImplementedError

    def _wait(self, seconds: float) -> None:
        """Let time pass between two looks at the workers; may return early when there is news of them."""
        time.sleep(seconds)

    # a job, start to end ----------------------------------------------------------------------------------------------

    @prof
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        began = time.monotonic()
        death_sig: signal.Signals = signal.SIGTERM
        try:
            result = self._invoke_run(role)
            self._total_execution_time = int(time.monotonic() - began)
            self._record_metrics(result)
            self._record_worker_events(result)
            return result
        except SignalException as error:
            log.warning("Received %s death signal, shutting down workers", error.sigval)
            death_sig = error.sigval
            raise
        except Exception as error:
            if not is_a(error, RendezvousGracefulExitError):
                raise
            log.info("Rendezvous gracefully exited: %s", error)
            return None  # type: ignore[return-value]  # as torch's does
        finally:
            self._shutdown(death_sig, timeout=self._shutdown_timeout)
            if self._teller is not None:
                self._teller.close()
                self._teller = None
            self._total_execution_time = int(time.monotonic() - began)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        group = self._worker_group
        spec = group.spec
        log.info("[%s] starting workers for entrypoint: %s", spec.role, spec.get_entrypoint_name())
        self._initialize_workers(group)
        while True:
            self._wait(spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            self._put_metric("remaining_restarts", self._remaining_restarts)
            self._put_metric(result.state.name.lower(), 1)
            match result.state:
                case WorkerState.SUCCEEDED:
                    log.info("[%s] worker group successfully finished", spec.role)
                    self._exit_barrier()
                    return result
                case WorkerState.UNHEALTHY | WorkerState.FAILED if self._remaining_restarts > 0:
                    left = f"{self._remaining_restarts}/{spec.max_restarts}"
                    log.info("[%s] Worker group %s. %s attempts left", spec.role, result.state.name, left)
                    self._remaining_restarts -= 1
                    self._restart_workers(group)
                case WorkerState.UNHEALTHY | WorkerState.FAILED:
                    self._stop_workers(group)
                    group.state = WorkerState.FAILED
                    return result
                case WorkerState.HEALTHY:
                    if (waiting := spec.rdzv_handler.num_nodes_waiting()) > 0:
                        log.info("[%s] %s new nodes from group_rank=%s", spec.role, waiting, group.group_rank)
                        self._restart_workers(group)  # not the workers' fault: no restart is charged
                case state:
                    raise RuntimeError(f"[{spec.role}] Worker group in {state.name} state")

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """A rendezvous, then new workers; those before must have been stopped."""
        self._rendezvous(worker_group)
        for local_rank, worker_id in self._start_workers(worker_group).items():
            worker = worker_group.workers[local_rank]
            worker.id = worker_id
            self._record("START", worker=worker)
        worker_group.state = WorkerState.HEALTHY

    @prof
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    @prof
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other agents, and give the group its ranks and its store."""
        spec = worker_group.spec
        with self.record_duration("RENDEZVOUS"):
            info = spec.rdzv_handler.next_rendezvous()
        self._store = info.store
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, spec)
        worker_group.workers = workers
        worker_group.store = info.store
        worker_group.group_rank = info.rank
        worker_group.group_world_size = info.world_size
        worker_group.master_addr = spec.master_addr or info.bootstrap_store_info.master_addr
        worker_group.master_port = spec.master_port or info.bootstrap_store_info.master_port
        log.info(
            "[%s] rendezvous complete: restart=%d group_rank=%d group_world_size=%d master=%s:%s ranks=%s",
            spec.role, spec.max_restarts - self._remaining_restarts, info.rank, info.world_size,
            worker_group.master_addr, worker_group.master_port, [worker.global_rank for worker in workers],
        )  # fmt: skip

    @prof
    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Ranks in the order of the nodes, in the whole job and within the role.

        Nodes may differ in role and number of workers: node 0 reads what each has and tells each its first ranks.
        Where `TORCH_ELASTIC_WORKER_IDENTICAL=1` promises that they do not, nobody needs to ask.
        """
        size = spec.local_world_size
        if os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
            first, total = group_rank * size, group_world_size * size
            return _workers(size, first, total, first, total)
        mine = {"role": spec.role, "rank": group_rank, "local_world_size": size}
        store.set(f"{_ROLE_INFO}{group_rank}", json.dumps(mine).encode())
        if group_rank == 0:
            infos = store.multi_get([f"{_ROLE_INFO}{rank}" for rank in range(group_world_size)])
            ranks = _first_ranks([json.loads(info) for info in infos])
            store.multi_set([f"{_ASSIGNED_RANKS}{rank}" for rank in range(len(ranks))], [json.dumps(r) for r in ranks])
        return _workers(size, *json.loads(store.get(f"{_ASSIGNED_RANKS}{group_rank}")))

    def _exit_barrier(self) -> None:
        """Wait for the other nodes' workers to finish, so that nobody takes an early end for a lost node."""
        self._in_exit_barrier = True
        began = time.monotonic()
        group = self._worker_group
        try:
            barrier(
                store=self._store,
                world_size=group.group_world_size or 1,
                key_prefix=_TERMINAL_STATE,
                barrier_timeout=self._exit_barrier_timeout,
            )
        except SignalException as error:
            log.warning("Got termination signal: %s", error.sigval)
            raise
        except Exception:  # this node's work is done, whatever has become of the others
            log.exception("Error waiting on exit barrier. Elapsed: %.1f seconds", time.monotonic() - began)
        finally:
            self._in_exit_barrier = False

    # events and metrics -----------------------------------------------------------------------------------------------

    def get_event_failed(self) -> events.Event:
        return self._construct_event("FAILED", events.EventSource.AGENT, raw_error=traceback.format_exc())

    def get_event_succeeded(self) -> events.Event:
        return self._construct_event("SUCCEEDED", events.EventSource.AGENT)

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._record(state, duration_ms=(time.perf_counter() - began) * 1000)

    def _record(self, state: str, worker: Worker | None = None, **facts: Any) -> None:
        source = events.EventSource.AGENT if worker is None else events.EventSource.WORKER
        if self._is_heard():
            self._tell(self._construct_event(state, source, worker, **facts))

    def _is_heard(self) -> bool:
        """Whether anybody is to hear of events: to make one takes a look at the handler, and a host name's lookup."""
        return self._worker_group.spec.event_log_handler != "null"

    def _tell(self, event: events.Event) -> None:
        if self._teller is None:
            self._teller = Teller(self._worker_group.spec.event_log_handler)
        self._teller.put(event.serialize())

    def _record_worker_events(self, result: RunResult) -> None:
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            self._record(
                self._get_worker_state(worker, result),
                worker,
                raw_error=json.dumps(failure.error_file_data) if failure else None,
                exit_code=failure.exitcode if failure else None,
                worker_pid=failure.pid if failure else None,
            )

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        failed = worker.global_rank in result.failures
        if result.state in {WorkerState.UNHEALTHY, WorkerState.FAILED} and not failed:
            return "TERMINATED"  # by the agent, for another's failure
        if failed or worker.global_rank in result.return_values:
            return result.state.value
        raise ValueError(f"rank {worker.global_rank} neither failed nor returned; see what _monitor_workers gave")

    def _construct_event(
        self,
        state: str,
        source: events.EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> events.Event:
        """An event as torch's handlers know it."""
        group = self._worker_group
        spec = group.spec
        details: dict[str, Any] = {
            "group_world_size": group.group_world_size,
            "entry_point": spec.get_entrypoint_name(),
        }
        if worker is not None:
            details |= {
                "local_rank": (worker.local_rank,),
                "role_rank": (worker.role_rank,),
                "role_world_size": (worker.role_world_size,),
                "exit_code": (exit_code,),
                "worker_pid": (worker_pid,),
            }
        metadata = {
            "run_id": spec.rdzv_handler.get_run_id(),
            "global_rank": worker.global_rank if worker else None,
            "group_rank": group.group_rank,
            "worker_id": str(worker.id) if worker else None,
            "role": spec.role,
            "hostname": _get_fq_hostname(),
            "state": state,
            "total_run_time": self._total_execution_time,
            "rdzv_backend": spec.rdzv_handler.get_backend(),
            "raw_error": raw_error,
            "metadata": json.dumps(details),
            "agent_restarts": spec.max_restarts - self._remaining_restarts,
            "duration_ms": duration_ms,
        }
        return events.Event(f"torchelastic.worker.status.{state}", source=source, metadata=metadata)

    def _record_metrics(self, group_results: RunResult) -> None:
        spec = self._worker_group.spec
        restarts = spec.max_restarts - self._remaining_restarts
        put_run_metrics(spec.role, failed=group_results.is_failed(), restarts=restarts, max_restarts=spec.max_restarts)

    def _put_metric(self, name: str, value: int) -> None:
        put_metric(f"workers.{self._worker_group.spec.role}.{name}", value)


def _get_fq_hostname() -> str:  # torch.distributed.checkpoint imports it
    return socket.getfqdn(socket.gethostname())


def _first_ranks(infos: list[dict[str, Any]]) -> list[tuple[int, int, int, int]]:
    """For each node: its first rank and the number of all, its first rank and the number of all in its role."""
    of_role: Counter[str] = Counter()
    for info in infos:
        of_role[info["role"]] += info["local_world_size"]
    total = of_role.total()
    ranks = []
    first, first_in_role = 0, Counter[str]()
    for info in infos:
        role, size = info["role"], info["local_world_size"]
        ranks.append((first, total, first_in_role[role], of_role[role]))
        first += size
        first_in_role[role] += size
    return ranks


def _workers(size: int, first: int, total: int, first_in_role: int, of_role: int) -> list[Worker]:
    return [Worker(rank, first + rank, first_in_role + rank, total, of_role) for rank in range(size)]


# processes of this machine --------------------------------------------------------------------------------------------


class LocalElasticAgent(SimpleElasticAgent):
    """An agent whose workers are processes of this machine; a worker's id is its pid."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = 30,
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        self._start_method = start_method
        self._pcontext: PContext | None = None
        self._rdzv_handler = spec.rdzv_handler
        self._log_line_prefix_template = log_line_prefix_template
        self._logs_specs = logs_specs
        self._health_check_server = health_check_server
        self._uninterruptible_state_timeout = _patience(uninterruptible_state_timeout)
        self._worker_watchdog: Any = None
        self._uninterruptible_since: dict[int, float] = {}  # by pid

    # start and stop ---------------------------------------------------------------------------------------------------

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        assert spec.entrypoint is not None, "WorkerSpec has seen to that"
        envs = {worker.local_rank: self._environment(worker_group, worker) for worker in worker_group.workers}
        self._worker_watchdog, variables = watchdog.start(spec.rdzv_handler.get_run_id(), self._log_watchdog_event)
        for env in envs.values():
            env.update(variables)
        if self._health_check_server is None:
            self._health_check_server = health_check.from_environment(self._get_alive_time)
        if self._health_check_server is not None:
            self._health_check_server.ready_callback = lambda: WorkerState.is_running(worker_group.state)
        ranks = [worker.local_rank for worker in worker_group.workers]
        self._pcontext = start_processes(
            name=spec.role,
            entrypoint=spec.entrypoint,
            args={rank: tuple(macros.substitute(list(spec.args), str(rank))) for rank in ranks},
            envs=envs,
            logs_specs=self._logs_specs,
            log_line_prefixes=self._prefixes(worker_group),
            start_method=self._start_method,
            numa_options=spec.numa_options,
            duplicate_stdout_filters=spec.duplicate_stdout_filters,
            duplicate_stderr_filters=spec.duplicate_stderr_filters,
        )
        return self._pcontext.pids()

    def _environment(self, worker_group: WorkerGroup, worker: Worker) -> dict[str, str]:
        spec = worker_group.spec
        env = {
            "RANK": str(worker.global_rank),
            "GROUP_RANK": str(worker_group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "WORLD_SIZE": str(worker.world_size),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(worker_group.master_addr),
            "MASTER_PORT": str(worker_group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
            if name in os.environ:
                env[name] = os.environ[name]
        self._set_local_rank_env(env, worker.local_rank, spec)
        return env

    def _set_local_rank_env(self, worker_env: dict[str, str], local_rank: int, spec: WorkerSpec) -> None:
        """A worker's own number; in virtual mode its own GPU is the only one it sees, and is number 0."""
        if not spec.virtual_local_rank:
            worker_env["LOCAL_RANK"] = str(local_rank)
            return
        worker_env["LOCAL_RANK"] = "0"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible is not None else [str(rank) for rank in range(local_rank + 1)]
        if local_rank >= len(devices):
            raise ValueError(
                f"CUDA_VISIBLE_DEVICES={visible}: local rank {local_rank} has no GPU of its own; start fewer workers"
            )
        worker_env["CUDA_VISIBLE_DEVICES"] = devices[local_rank].strip()

    def _prefixes(self, worker_group: WorkerGroup) -> dict[int, str] | None:
        if not self._log_line_prefix_template:
            return None
        template = Template(self._log_line_prefix_template)
        return {
            worker.local_rank: template.safe_substitute(
                role_name=worker_group.spec.role, rank=worker.global_rank, local_rank=worker.local_rank
            )
            for worker in worker_group.workers
        }

    @prof
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._close_workers(signal.SIGTERM, self._shutdown_timeout)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._health_check_server is not None:
            self._health_check_server.stop()
            self._health_check_server = None
        self._close_workers(death_sig, timeout)

    def _close_workers(self, death_sig: signal.Signals, timeout: int) -> None:
        if self._worker_watchdog is not None:
            self._worker_watchdog.stop()
            self._worker_watchdog = None
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout)

    # watch ------------------------------------------------------------------------------------------------------------

    def _wait(self, seconds: float) -> None:
        """Until all workers have ended or one has failed, or the interval is over; what they return comes in."""
        if self._pcontext is None:  # a subclass has workers of another kind
            super()._wait(seconds)
        else:
            self._pcontext.wait(seconds, period=seconds)

    @prof
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None, "there are workers"
        pids = set(self._pcontext.pids().values())
        if (known := {worker.id for worker in worker_group.workers}) != pids:
            log.error("[%s] workers have pids %s, and not %s", worker_group.spec.role, pids, known)
            return RunResult(WorkerState.UNKNOWN)
        result = self._pcontext.wait(0)
        if result is None:
            return self._check_uninterruptible(pids) or RunResult(WorkerState.HEALTHY)
        rank = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        if result.is_failed():
            return RunResult(WorkerState.FAILED, failures={rank[local]: why for local, why in result.failures.items()})
        values = {rank[local]: value for local, value in result.return_values.items()}
        return RunResult(WorkerState.SUCCEEDED, return_values=values)

    def _check_uninterruptible(self, pids: set[int]) -> RunResult | None:
        """UNHEALTHY when a worker sleeps in the kernel, where no signal reaches it, for too long.

        No restart then: it holds a device that the new worker would want.
        """
        if not self._uninterruptible_state_timeout:
            return None
        now = time.monotonic()
        asleep = {pid for pid in pids if is_uninterruptible_state(read_proc_state(pid))}
        self._uninterruptible_since = {pid: self._uninterruptible_since.get(pid, now) for pid in asleep}
        stuck = {
            pid: now - since
            for pid, since in self._uninterruptible_since.items()
            if now - since >= self._uninterruptible_state_timeout
        }
        for pid, seconds in stuck.items():
            log.error("worker pid=%d is in uninterruptible sleep for %.1f s; it will not be restarted", pid, seconds)
        if not stuck:
            return None
        self._remaining_restarts = 0
        return RunResult(WorkerState.UNHEALTHY)

    def _get_alive_time(self) -> float:
        """The last sign of life: of the timers where there are any and workers run, else of this very moment."""
        if self._worker_watchdog is None or self._in_exit_barrier:
            return time.time()
        return float(self._worker_watchdog.get_last_progress_time())

    def _log_watchdog_event(self, name: str, request: FileTimerRequest | None) -> None:
        """In the timers' thread."""
        log.info("timers: %s %s", name, request or "")
        if not self._is_heard():
            return
        about = {"watchdog_event": name}
        if request is not None:
            about |= {
                "worker_pid": str(request.worker_pid),
                "scope_id": request.scope_id,
                "expiration_time": str(request.expiration_time),
                "signal": str(request.signal),
            }
        event = self._construct_event("RUNNING", events.EventSource.AGENT)
        del event.metadata["duration_ms"]
        event.name, event.metadata["metadata"] = name, json.dumps(about)
        self._tell(event)


def _patience(given: float | None) -> float:
    """Seconds a worker may be in uninterruptible sleep; 0 for as long as it likes."""
    text = os.environ.get(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, "0") if given is None else given
    try:
        return max(0.0, float(text))
    except ValueError:
        log.warning("%s=%s: not seconds; no effect", TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, text)
        return 0.0
