"""Everything ripstop raises on purpose.

    RipstopError                 a word to the user; never a traceback
    ├── UsageError               a flag, variable or file that cannot be right        exit 2
    ├── ProtocolError            a peer sent what no version of us sends
    ├── StartError               a worker process could not be started                exit 1
    └── NoAnswer                 a node could not answer an operator's question

A message has three parts: the rule, the value seen, the remedy.
"""


class RipstopError(Exception):
    """Base of all deliberate errors; `exit_code` is what the process ends with."""

    exit_code = 1


class UsageError(RipstopError):
    """Wrong input, found before anything was started."""

    exit_code = 2


class ProtocolError(RipstopError):
    """A message that breaks the protocol."""


class StartError(RipstopError):
    """Workers could not be started on this node."""


class QueryFailed(RipstopError):
    """What an operator asked of a node cannot be had."""
