"""`train.elastic`: a training function that is entered again in the same process when its round is replaced.

After a fault elsewhere, the agent sends this worker its place in the next round.  A thread aborts the process groups,
so that the function ends with an exception; then the groups are forgotten, the environment is changed, and the function
is called again.  Rules
1.  The thread only aborts groups, which wakes the main thread.  It aborts again and again until the main thread has
    left the function, because the function may be about to make another group of the old round.  Only the main thread
    forgets groups.  It hands groups that nothing refers to any more over to another thread, which destroys them.
2.  The main thread and the thread exclude each other, so that no connection of the new round is shut down.
3.  Any exception after the agent's message is a consequence of it.  One before is the script's own, unless it is a
    broken connection: then the message is awaited for `VERDICT_TIMEOUT_S`.
4.  A worker that cannot roll back its state (`interruption.oppose_interruption`) leaves, so that the agent replaces it.
5.  Without an agent, the function is just called.
"""

import functools
import gc
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from ripstop.train import interruption, reports, standby_gate
from ripstop.train.agent_memory import AgentError, connect_agent_memory

log = logging.getLogger("ripstop.train")

VERDICT_TIMEOUT_S = 10.0  # after a broken connection; a lost node is noticed within a lease, 3 s by default
ABORT_INTERVAL_S = 0.05
GROUPS_END_TIMEOUT_S = 5.0
MAX_MESSAGE_BYTES = 1 << 16
NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

P = ParamSpec("P")
R = TypeVar("R")


def elastic(function: Callable[P, R]) -> Callable[P, R]:
    """Enter this training function again, in the same process, when a fault elsewhere ends the round.

    The function makes the process groups and whatever holds one, such as DDP wrappers; it begins with
    `State.restore()`.  What is made outside of it stays.
    """

    standby_gate.forbid_process_groups_before_gate()

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        standby_gate.wait_at_standby_gate()
        if interruption.is_elastic:
            raise RuntimeError("a function with @train.elastic cannot call another one: decorate the outer one only")
        with _ElasticSession() as session:
            while True:
                session.enter()
                try:
                    result = function(*args, **kwargs)
                except (Exception, interruption.Interrupted) as error:
                    if not session.is_round_over(error):
                        raise
                else:
                    if session.leave_unless_round_over():
                        return result

    return run


class _ElasticSession:
    """This process's part in the job's rounds, while it is in the training function."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # rule 2
        self._has_news = threading.Condition(self._lock)
        self._next: dict[str, Any] | None = None  # the agent's newest message
        self._has_left = False
        self._round = 0
        self._socket: socket.socket | None = None
        self._abort: Any = None
        self._thread: threading.Thread | None = None
        self._group_destroyer: threading.Thread | None = None  # of the last round's groups

    def __enter__(self) -> "_ElasticSession":
        if (registered := _connect_session()) is not None:
            self._round, self._socket = registered
            gc.freeze()  # what is there now stays: later collections look only at what the rounds have made
            self._thread = threading.Thread(target=self._listen, name="ripstop-elastic", daemon=True)
            self._thread.start()
            interruption.on_opposed = self._on_opposed
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        interruption.leave_interruptible()
        # wait for it: a thread in a C++ destructor while the interpreter shuts down can crash the process
        if self._group_destroyer is not None:
            self._group_destroyer.join(GROUPS_END_TIMEOUT_S)

    def enter(self) -> None:
        """Prepare the process for the round, its first one or the next."""
        from ripstop.train.group_abort import GroupAbort, forget_groups

        groups: list[Any] = []
        with self._lock:
            message, self._next = self._next, None
            self._has_news.notify_all()
            interruption.enter_interruptible()
            if message is not None:
                groups = forget_groups()
                gc.collect()  # a DDP wrapper has hooks on the parameters until it is collected
                os.environ.update(message["env"])
                reports.reset_reports_for_round()
                self._round = message["reform"]
            if self._socket is not None:
                os.environ[NCCL_ERROR_HANDLING] = "0"  # NCCL's watchdog must not end this process: the agent decides
                self._abort = self._abort or GroupAbort()
                self._abort.start_round()
        if message is not None:
            self._send({"reformed": self._round})
            self._group_destroyer = threading.Thread(target=groups.clear, name="ripstop-groups", daemon=True)
            self._group_destroyer.start()

    def is_round_over(self, error: BaseException) -> bool:
        """Whether to enter the function again after this exception (rule 3)."""
        if self._socket is None:
            return False
        with self._lock:
            if self._next is None and not self._has_left and _is_peer_lost_in_session(error):
                self._send({"peer_lost": self._round})  # so that a node that is lost is found at once
                self._has_news.wait_for(lambda: self._next is not None or self._has_left, VERDICT_TIMEOUT_S)
            return self._next is not None

    def leave_unless_round_over(self) -> bool:
        """Whether the function has ended for good, and not just as the round did."""
        with self._lock:
            if self._next is not None:
                return False
            self._has_left = True
        return True

    def _on_opposed(self, why: str) -> None:
        if not self._has_left:
            log.warning("after a fault elsewhere, this worker is replaced: %s", why)
            self._leave()

    def _leave(self) -> None:
        """The agent does not keep this worker any more."""
        with self._lock:
            self._next, self._has_left = None, True
            self._has_news.notify_all()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, message: dict[str, object]) -> None:
        assert self._socket is not None
        with suppress(OSError):  # the agent has ended, and so does this process
            self._socket.send(json.dumps(message).encode())

    def _listen(self) -> None:
        assert self._socket is not None
        with suppress(OSError, ValueError):
            while data := self._socket.recv(MAX_MESSAGE_BYTES):
                message = json.loads(data)
                with self._lock:
                    if self._has_left:
                        return
                    self._next = message
                    interruption.interrupt()
                    self._has_news.notify_all()
                    while self._next is message:  # the main thread is still in the old round (rule 1)
                        self._abort_groups()
                        self._has_news.wait(ABORT_INTERVAL_S)

    def _abort_groups(self) -> None:
        try:
            if self._abort is not None:
                self._abort.abort()
        except Exception as error:  # this thread must live on: the agent replaces a worker that does not come back
            log.warning("the process groups could not be aborted: %r", error)


def _connect_session() -> tuple[int, socket.socket] | None:
    """The round and a connection on which the agent can send messages; None: this process will not be kept."""
    try:
        memory = connect_agent_memory()
        return memory.register() if memory is not None else None
    except AgentError as error:
        log.warning("train.elastic has no effect: %s", error)
        return None


def _is_peer_lost_in_session(error: BaseException | None) -> bool:
    """Whether the loss of a peer may have caused this exception.  gloo has no class for its exceptions.

    A `ConnectionError` of Python is not a peer's: collectives and stores do not raise it.
    """
    from torch import distributed

    from ripstop.train.transfer import TransferError

    while error is not None:
        if isinstance(error, distributed.DistError | TransferError | interruption.Interrupted):
            return True
        if isinstance(error, RuntimeError) and "gloo" in str(error):
            return True
        error = error.__cause__
    return False
