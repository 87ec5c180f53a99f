"""All exceptions that ripstop raises on purpose.  A message has three parts: the rule, the value seen, the remedy."""


class RipstopError(Exception):
    """A message for the user, printed without a traceback; `exit_code` is the exit code of the process."""

    exit_code = 1


class UsageError(RipstopError):
    """Wrong input, found before anything was started."""

    exit_code = 2


class ProtocolError(RipstopError):
    """A message violates the protocol."""


class StartError(RipstopError):
    """Workers could not be started on this node."""


class UnkillableError(StartError):
    """SIGKILL does not end workers, so no others can be started."""

    def __init__(self, pids: tuple[int, ...], timeout: float) -> None:
        names = ", ".join(f"pid={pid}" for pid in pids)
        super().__init__(
            f"workers still exist {timeout:g} s after SIGKILL: {names}; they hang in the kernel (see /proc/PID/stack); "
            "restart this machine"
        )


class QueryFailed(RipstopError):
    """A node could not answer an operator's query."""


class HelpRequested(Exception):
    """The command line asks for help; the argument is the text to print."""
