"""`torch.distributed.elastic.agent.server.local_elastic_agent`: an agent whose workers are processes of this machine.

A worker's exit wakes the agent at once; `monitor_interval` is only the interval of checks for waiting nodes.  The agent
has its own timer server; `ripstop run` and `elastic_launch` use the engine's timers (`diagnostics/timer_pipe.py`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import time
import uuid
from pathlib import Path
from string import Template
from typing import Any

from ripstop.cli.options.monitoring import ENABLE_TIMERS
from ripstop.compat import events
from ripstop.compat.agent.group import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from ripstop.compat.agent.health_check import HealthCheckServer, health_check_from_environment
from ripstop.compat.agent.simple import SimpleElasticAgent
from ripstop.compat.metrics import prof
from ripstop.compat.multiprocessing import LogsSpecs, PContext, start_processes
from ripstop.compat.timer import FileTimerRequest, FileTimerServer
from ripstop.compat.utils import is_uninterruptible_state, macros, read_proc_state
from ripstop.workers.environment import TIMER_FILE

log = logging.getLogger("ripstop.compat")

TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
WATCHDOG_INTERVAL_S = 0.1  # torch's


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
        self._log_line_prefix_template = log_line_prefix_template
        self._logs_specs = logs_specs
        self._health_check_server = health_check_server
        self._uninterruptible_state_timeout = _local_agent_uninterruptible_timeout(uninterruptible_state_timeout)
        self._worker_watchdog: FileTimerServer | None = None
        self._uninterruptible_since: dict[int, float] = {}  # by pid

    # start and stop ---------------------------------------------------------------------------------------------------

    @prof
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        assert spec.entrypoint is not None, "WorkerSpec checks it"
        envs = {worker.local_rank: self._environment(worker_group, worker) for worker in worker_group.workers}
        self._start_watchdog(envs)
        if self._health_check_server is None:
            self._health_check_server = health_check_from_environment(self._get_alive_time)
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

    def _start_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        """Start the timer server if a variable enables it, and tell the workers its path."""
        path = os.environ.get(TIMER_FILE)
        if os.environ.get(ENABLE_TIMERS) == "1":
            path = path or str(Path(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}"))
            run_id = self._worker_group.spec.rdzv_handler.get_run_id()
            self._worker_watchdog = FileTimerServer(
                path, run_id, max_interval=WATCHDOG_INTERVAL_S, daemon=True, log_event=self._log_watchdog_event
            )
            self._worker_watchdog.start()
        if path:
            for env in envs.values():
                env[TIMER_FILE] = path

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
        """The local rank; in virtual mode it is 0, and the worker sees only its own GPU."""
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

    # monitor ----------------------------------------------------------------------------------------------------------

    def _wait(self, seconds: float) -> None:
        """Return when all workers have exited, one has failed, or the interval is over."""
        if self._pcontext is None:  # a subclass starts other workers
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
        """UNHEALTHY if a worker is in uninterruptible sleep for too long.

        There is no restart then: the worker holds a device that a new worker would need.
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
        """Time of the last activity: the timer server's if there is one and workers run, otherwise now."""
        if self._worker_watchdog is None or self._in_exit_barrier:
            return time.time()
        return float(self._worker_watchdog.get_last_progress_time())

    def _log_watchdog_event(self, name: str, request: FileTimerRequest | None) -> None:
        """Called in the timer server's thread."""
        log.info("timers: %s %s", name, request or "")
        details = {"watchdog_event": name}
        if request is not None:
            facts = ("worker_pid", "scope_id", "expiration_time", "signal")
            details |= {fact: str(getattr(request, fact)) for fact in facts}

        def event() -> events.Event:
            created = self._construct_event("RUNNING", events.EventSource.AGENT)
            del created.metadata["duration_ms"]
            created.name, created.metadata["metadata"] = name, json.dumps(details)
            return created

        self._send_event(event)


def _local_agent_uninterruptible_timeout(given: float | None) -> float:
    """Seconds that a worker may be in uninterruptible sleep; 0 for no limit."""
    text = os.environ.get(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, "0") if given is None else given
    try:
        return max(0.0, float(text))
    except ValueError:
        log.warning("%s=%s: not seconds; no effect", TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, text)
        return 0.0
