"""All exceptions that ripstop raises on purpose.

    RipstopError                 a message for the user, without a traceback
    ├── UsageError               a wrong flag, variable or file                       exit 2
    ├── ProtocolError            a peer sent an invalid message
    ├── StartError               workers could not be started                         exit 1
    └── QueryFailed              a node could not answer an operator's query

A message has three parts: the rule, the value seen, the remedy.
"""


class RipstopError(Exception):
    """Base of all deliberate errors; `exit_code` is the exit code of the process."""

    exit_code = 1


class UsageError(RipstopError):
    """Wrong input, found before anything was started."""

    exit_code = 2


class ProtocolError(RipstopError):
    """A message violates the protocol."""


class StartError(RipstopError):
    """Workers could not be started on this node."""


class QueryFailed(RipstopError):
    """A node could not answer an operator's query."""


class HelpRequested(Exception):
    """The command line asks for help; the argument is the text to print."""
