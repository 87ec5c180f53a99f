"""The facts of a coordinator that no agent reports.  It sends them to some nodes, which pass them to its successor.

Pure data.  Times are seconds before the moment at which the memory was sent, because clocks differ.  The number of
records and the length of texts are bounded, so a memory always fits into one message.
"""

from msgspec import Struct

from ripstop.model.field_types import Int64, Items

MAX_CHARGES = 256  # the newest of each budget
MAX_RECORDS = 24  # nodes with faults
MAX_FAULTS = 16  # of one node
MAX_WHY = 200  # characters


class FaultMemory(Struct, frozen=True, forbid_unknown_fields=True):
    """The faults of one node; `remaining` is the rest of its quarantine."""

    node: str
    host: str
    faults: Items[float] = ()
    remaining: float | None = None
    why: str = ""


class Memory(Struct, frozen=True, forbid_unknown_fields=True):
    """A higher `serial` is newer.  `target` is the size that an operator set; None: no operator has."""

    serial: Int64 = 0
    used: Int64 = 0  # restarts
    application: Items[float] = ()  # charges to the budgets
    infrastructure: Items[float] = ()
    early_failures: Int64 = 0
    quarantine: Items[FaultMemory] = ()
    target: Int64 | None = None
    allow_chaos: bool = False
