"""Which nodes were at fault too often, and until when others take their place.  Pure.

Rules: (1) a fault is the failure of a node's workers that started the trouble and was charged, or its turning unhealthy
in the midst of a round; (2) `failures` faults within `window` seconds, and the node is in quarantine for `cooldown`,
after which it begins anew; (3) a node is known by its id; an agent that was started again on its host has a new one,
and takes over what is held against the one before, unless several agents share that host; (4) whether the job can do
without the node is not decided here.
"""

from collections.abc import Iterable

from msgspec import Struct, field

from ripstop.model import config
from ripstop.model.round import Node


class FaultRecord(Struct):
    """What is held against one node."""

    host: str
    faults: list[float] = field(default_factory=list)
    until: float | None = None  # the end of its quarantine
    why: str = ""


class Quarantine:
    """The records of one job; a coordinator that is started again knows none of them."""

    def __init__(self, limits: config.QuarantineLimits) -> None:
        self._limits = limits
        self._records: dict[str, FaultRecord] = {}
        self._soonest: float | None = None  # when the next one is to be released

    def fault(self, node: Node, what: str, now: float) -> str:
        """The node was at fault; the result says why it is in quarantine now, and is empty when it is not."""
        if not self._limits.failures:
            return ""
        self._forget(now)
        record = self._records.setdefault(node.id, FaultRecord(node.host))
        if record.until is not None:
            return ""
        record.faults.append(now)
        if len(record.faults) < self._limits.failures:
            return ""
        record.until = now + self._limits.cooldown
        self._soonest = record.until if self._soonest is None else min(self._soonest, record.until)
        times = "once" if len(record.faults) == 1 else f"{len(record.faults)} times"
        record.why = f"at fault {times} in {now - record.faults[0]:.0f} s, last: {what}"
        return record.why

    def reason(self, node: str) -> str:
        """Why a node is in quarantine; empty when it is not."""
        record = self._records.get(node)
        return record.why if record is not None and record.until is not None else ""

    def welcome(self, node: Node, present: Iterable[Node], now: float) -> bool:
        """A new node, beside those that are here: whether it takes over what is held against another."""
        self._forget(now)
        if not self._records:
            return False
        here = {other.id: other.host for other in present if other.id != node.id}
        if node.host in here.values():
            return False
        former = [name for name, record in self._records.items() if record.host == node.host and name not in here]
        if not former or node.id in former:
            return False
        self._records[node.id] = self._records.pop(former[-1])
        return True

    def release(self, now: float) -> list[str]:
        """Those whose time is over."""
        if self._soonest is None or now < self._soonest:
            return []
        over = [name for name, record in self._records.items() if record.until is not None and record.until <= now]
        for name in over:
            del self._records[name]
        self._soonest = min(
            (record.until for record in self._records.values() if record.until is not None), default=None
        )
        return over

    def deadline(self) -> float | None:
        """When the next one is to be released."""
        return self._soonest

    def _forget(self, now: float) -> None:
        for name, record in list(self._records.items()):
            record.faults = [at for at in record.faults if at > now - self._limits.window]
            if not record.faults and record.until is None:
                del self._records[name]
