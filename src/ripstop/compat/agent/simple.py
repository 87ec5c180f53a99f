"""`SimpleElasticAgent`, torch's agent class with hooks to override: a loop that starts, monitors and restarts workers.

It runs a rendezvous, starts the workers, checks them every `monitor_interval`, and restarts all of them when one fails
or a node waits.  Rules: (1) every step is a hook (`_rendezvous`, `_assign_worker_ranks`, `_start_workers`,
`_monitor_workers`, …) that is called through `self`, so that a subclass may replace it; (2) the keys in the handler's
store are torch's, so that agents of torch and of ripstop can form one job; (3) events and metrics are torch's, and an
error of their handlers does not reach the agent.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ripstop.compat import events
from ripstop.compat.agent.group import DEFAULT_ROLE, RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from ripstop.compat.launcher.event_thread import EventThread
from ripstop.compat.metrics import prof, put_metric, put_run_metrics
from ripstop.compat.multiprocessing import SignalException
from ripstop.compat.rendezvous.handler import RendezvousGracefulExitError, is_rendezvous_handler_error
from ripstop.compat.utils.store import barrier
from ripstop.coordinator import ranks
from ripstop.model.round import Address, Node

log = logging.getLogger("ripstop.compat")

# keys in the handler's store, shared with torch's agents
_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
_TERMINAL_STATE = "torchelastic/agent/terminal_state"


class ElasticAgent(abc.ABC):
    """Runs and supervises workers."""

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers, with up to `max_restarts` restarts; raises errors that are not a worker's failure."""

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The group, which changes while the agent runs."""


class SimpleElasticAgent(ElasticAgent):
    """An agent for one role; a subclass starts, monitors and stops the workers."""

    def __init__(self, spec: WorkerSpec, exit_barrier_timeout: float = 300, shutdown_timeout: int = 30) -> None:
        self._worker_group = WorkerGroup(spec)
        self._remaining_restarts = spec.max_restarts
        self._store: Any = None
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._total_execution_time = 0
        self._in_exit_barrier = False
        self._event_thread: EventThread | None = None  # created with the first event

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    # for the subclass to implement -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers; returns their ids by local rank."""

    @abc.abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, whatever state they are in."""

    @abc.abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """The present state of the workers."""

    @abc.abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Free what the agent holds; workers have `timeout` seconds from `death_sig` to SIGKILL."""

    def _wait(self, seconds: float) -> None:
        """Wait between two checks of the workers; may return early when their state changes."""
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
            if not is_rendezvous_handler_error(error, RendezvousGracefulExitError):
                raise
            log.info("Rendezvous gracefully exited: %s", error)
            return None  # type: ignore[return-value]  # as torch does
        finally:
            self._shutdown(death_sig, timeout=self._shutdown_timeout)
            if self._event_thread is not None:
                self._event_thread.close()
                self._event_thread = None
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
                        self._restart_workers(group)  # not a failure: it does not count as a restart
                case state:
                    raise RuntimeError(f"[{spec.role}] Worker group in {state.name} state")

    @prof
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Run a rendezvous, then start new workers; the previous ones must have stopped."""
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
        """Wait for the other agents, and set the group's ranks and store."""
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

        Nodes may differ in role and number of workers: node 0 reads each node's and writes each node's first ranks.
        With `TORCH_ELASTIC_WORKER_IDENTICAL=1` all nodes are equal, and each computes its own ranks.
        """
        size = spec.local_world_size
        if os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":
            first, total = group_rank * size, group_world_size * size
            return _simple_agent_workers(size, first, total, first, total)
        mine = {"role": spec.role, "rank": group_rank, "local_world_size": size}
        store.set(f"{_ROLE_INFO}{group_rank}", json.dumps(mine).encode())
        if group_rank == 0:
            infos = store.multi_get([f"{_ROLE_INFO}{rank}" for rank in range(group_world_size)])
            firsts = _simple_agent_first_ranks([json.loads(info) for info in infos])
            keys = [f"{_ASSIGNED_RANKS}{rank}" for rank in range(group_world_size)]
            store.multi_set(keys, [json.dumps(first) for first in firsts])
        return _simple_agent_workers(size, *json.loads(store.get(f"{_ASSIGNED_RANKS}{group_rank}")))

    def _exit_barrier(self) -> None:
        """Wait for the other nodes' workers to finish, so that an early exit is not taken for a lost node."""
        self._in_exit_barrier = True
        began = time.monotonic()
        try:
            barrier(self._store, self._worker_group.group_world_size or 1, _TERMINAL_STATE, self._exit_barrier_timeout)
        except SignalException as error:
            log.warning("Got termination signal: %s", error.sigval)
            raise
        except Exception:  # this node's workers have succeeded, whatever happens on others
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
        self._send_event(lambda: self._construct_event(state, source, worker, **facts))

    def _send_event(self, create: Callable[[], events.Event]) -> None:
        """Send an event, if it has a handler: creating it calls the rendezvous handler and looks up a host name."""
        if (handler := self._worker_group.spec.event_log_handler) == "null":
            return
        if self._event_thread is None:
            self._event_thread = EventThread(handler)
        self._event_thread.put(create().serialize())

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
            return "TERMINATED"  # stopped by the agent because another worker failed
        if failed or worker.global_rank in result.return_values:
            return result.state.value
        raise ValueError(f"rank {worker.global_rank} neither failed nor returned; check the result of _monitor_workers")

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
        """An event in torch's format."""
        group, spec = self._worker_group, self._worker_group.spec
        details: dict[str, Any] = {"group_world_size": group.group_world_size}
        details["entry_point"] = spec.get_entrypoint_name()
        if worker is not None:
            details |= {name: (getattr(worker, name),) for name in ("local_rank", "role_rank", "role_world_size")}
            details |= {"exit_code": (exit_code,), "worker_pid": (worker_pid,)}
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


def _simple_agent_first_ranks(infos: list[dict[str, Any]]) -> list[tuple[int, int, int, int]]:
    """For each node: its first rank and the world size, and the same within its role."""
    nodes = [Node(str(info["rank"]), "", info["local_world_size"], info["role"]) for info in infos]
    places = ranks.places(nodes, round=0, store=Address("", 0), restarts=0)
    return [(place.first_rank, place.world_size, place.role_first_rank, place.role_size) for place in places]


def _simple_agent_workers(size: int, first: int, total: int, first_in_role: int, of_role: int) -> list[Worker]:
    return [Worker(rank, first + rank, first_in_role + rank, total, of_role) for rank in range(size)]
