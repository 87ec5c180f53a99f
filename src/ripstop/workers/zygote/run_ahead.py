"""A standby that runs the script, up to its function with `train.elastic`; there it waits to become a worker.

Rules
1.  The script runs as in a worker of the round in which the standby was made: with the variables of that place, with
    `RIPSTOP_STANDBY=1`, with low priority, and with its output in a file of its own.  It has no store and no identity.
2.  A worker has no module of the zygote in `sys.modules` (`process.py`, rule 5), so `ripstop.train` cannot import this
    one.  It finds the gate there under `_ripstop_standby` instead, until the standby becomes a worker.  Forks of the
    standby ignore it.
3.  What only a worker may do (join a process group, restore a State, report a step) ends the standby; so does an
    exception.  The agent logs why.
4.  The worker differs from one that ran the script itself in nothing but the time: the variables that differ between
    the two rounds are changed, and no others, because the script may have set some.  Streams keep their objects, and
    only their descriptors lead to other files, because log handlers hold the objects.  A descriptor that the script has
    redirected stays as it is.
"""

# Pathlib is slow to import, and every worker would import it.
# ruff: noqa: PTH116

from __future__ import annotations

import os
import sys
import time

from ripstop.workers.zygote import title, warmups, worker_hooks
from ripstop.workers.zygote.preload import preloaded_file_identity
from ripstop.workers.zygote.standby_process import (
    WarmStandby,
    describe_standby_process_error,
    give_up_standby_process,
    standby_process_private_memory,
    wait_for_standby_process_request,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from ripstop.workers.zygote.worker_setup import WorkerSetup

GATE_MODULE = "_ripstop_standby"  # `train/standby_gate.py` has it too
TITLE = title.STANDBY + b" elastic"


def prepare_run_ahead(worker: WorkerSetup, warm: WarmStandby) -> dict[str, Any]:
    """Prepare to run the script as a standby; return the request of the worker that it shadows."""
    gate = RunAheadGate(worker, warm)
    request: dict[str, Any] = worker.request["shadowed"]
    try:
        worker.open_streams(request)
    except OSError as error:
        give_up_standby_process(warm.control, "failed", f"{error.strerror}: {error.filename}")
    gate.outputs = {number: run_ahead_output_identity(fd) for number, fd in worker.streams.items()}
    sys.modules[GATE_MODULE] = gate  # type: ignore[assignment]
    worker_hooks.on_exception = gate.on_exception
    gate.forbid_process_groups()
    return request


class RunAheadGate:
    def __init__(self, worker: WorkerSetup, warm: WarmStandby) -> None:
        self.worker = worker
        self.warm = warm
        self.pid = os.getpid()
        self.began_ns = time.time_ns()
        self.agent_streams = {number: os.dup(number) for number in (1, 2)}
        self.outputs: dict[int, tuple[int, int] | None] = {}  # the standby's own files
        self.torch_handlers: dict[str, Any] = {}  # by URL scheme, while groups are forbidden

    def wait(self) -> None:
        """Wait for a round, and become a worker of it."""
        identities = {path: preloaded_file_identity(path) for path in self.files()}
        if changed := next((path for path in identities if self.has_changed(path)), ""):
            self.refuse(f"{changed} has changed since the script was started")
        gpu_memory = self.warm.gpu_memory + run_ahead_gpu_memory()
        self.warm.control.send({"ready": {"memory": standby_process_private_memory(), "gpu_memory": gpu_memory}})
        request = wait_for_standby_process_request(self.worker, self.warm.control, identities)
        del sys.modules[GATE_MODULE]
        worker_hooks.on_exception = None
        self.allow_process_groups()
        self.warm.priority.restore()
        self.flush()
        for number, fd in self.agent_streams.items():
            if run_ahead_output_identity(number) == self.outputs[number]:
                os.dup2(fd, number)
            elif number in self.worker.streams:
                os.close(self.worker.streams.pop(number))
            os.close(fd)
        self.worker.become_worker(request)

    def refuse(self, why: str) -> NoReturn:
        """End this standby."""
        try:
            os.write(2, f"ripstop: this standby ends: {why}\n".encode())
        finally:  # also if the disk is full, or the script has closed stderr
            give_up_standby_process(self.warm.control, "failed", why)

    def on_exception(self, error: BaseException) -> None:
        if os.getpid() == self.pid:
            self.refuse(f"the script failed: {describe_standby_process_error(error)}")

    def forbid_process_groups(self) -> None:
        """Until `allow_process_groups`: a group would wait for the other ranks, or disturb theirs."""
        rendezvous = sys.modules.get("torch.distributed.rendezvous")
        handlers = getattr(rendezvous, "_rendezvous_handlers", None)
        if isinstance(handlers, dict) and not self.torch_handlers:
            self.torch_handlers = dict(handlers)
            handlers.update(dict.fromkeys(handlers, self.on_rendezvous))

    def allow_process_groups(self) -> None:
        if self.torch_handlers:
            handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
            # schemes that the script has registered meanwhile stay
            handlers.update({scheme: self.torch_handlers.get(scheme, handler) for scheme, handler in handlers.items()})

    def on_rendezvous(self, url: str, **more: Any) -> Any:
        if os.getpid() == self.pid:
            self.refuse(
                "the script makes a process group before it calls a function with @train.elastic; "
                "make it in the function"
            )
        return self.torch_handlers[url.partition(":")[0]](url, **more)

    def files(self) -> set[str]:
        """The script, and the modules that it has imported."""
        script = getattr(sys.modules["__main__"], "__file__", None)
        return self.warm.before.new_files() | ({script} if isinstance(script, str) else set())

    def has_changed(self, path: str) -> bool:
        """Whether this file may have changed after it was read."""
        try:
            return os.stat(path).st_ctime_ns > self.began_ns
        except OSError:
            return True

    def flush(self) -> None:
        """Write what belongs to the standby's own output."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the script has closed or replaced it
                continue


def run_ahead_output_identity(fd: int) -> tuple[int, int] | None:
    """The file that is open there; None if none is."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def run_ahead_gpu_memory() -> int:
    """The bytes of GPU memory that torch holds for the script."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved(warmups.visible_warm_up_device(torch)))
