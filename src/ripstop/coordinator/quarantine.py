"""Which nodes are in quarantine after repeated faults, and until when.  Pure.

Rules: (1) a fault is a charged failure that the node's workers caused, or a change to unhealthy during a round; (2) a
node with `failures` faults within `window` seconds is in quarantine for `cooldown` seconds, then its record is deleted;
(3) a record belongs to a node id; an agent that is restarted on the same host has a new id and takes over the record of
the old one, unless several agents share the host; (4) other modules decide whether the job can run without the node.
"""

from collections.abc import Iterable

from msgspec import Struct, field

from ripstop.model import config
from ripstop.model.round import Node


class FaultRecord(Struct):
    host: str
    faults: list[float] = field(default_factory=list)  # of one node
    until: float | None = None  # the end of its quarantine
    why: str = ""


class Quarantine:
    """The fault records of one job.  Nodes keep them for the next coordinator (`job_memory.py`)."""

    def __init__(self, limits: config.QuarantineLimits) -> None:
        self._limits = limits
        self.records: dict[str, FaultRecord] = {}
        self.changes = 0  # of the records

    def record_fault(self, node: Node, what: str, now: float) -> str:
        """Record a fault; the result is the reason for a new quarantine, or empty."""
        if not self._limits.failures:
            return ""
        self._drop_old_faults(now)
        record = self.records.setdefault(node.id, FaultRecord(node.host))
        if record.until is not None:
            return ""
        record.faults.append(now)
        self.changes += 1
        if len(record.faults) < self._limits.failures:
            return ""
        record.until = now + self._limits.cooldown
        times = "once" if len(record.faults) == 1 else f"{len(record.faults)} times"
        record.why = f"at fault {times} in {now - record.faults[0]:.0f} s, last: {what}"
        return record.why

    def isolate(self, node: Node, why: str, now: float) -> None:
        """Put a node that the job can replace into quarantine, whatever its record."""
        record = self.records.setdefault(node.id, FaultRecord(node.host))
        record.until, record.why = now + self._limits.cooldown, why
        self.changes += 1

    def reason(self, node: str) -> str:
        """Why a node is in quarantine; empty when it is not."""
        record = self.records.get(node)
        return record.why if record is not None and record.until is not None else ""

    def inherit_record(self, node: Node, members: Iterable[Node], now: float) -> None:
        """Give a new node the record of the former node on its host (rule 3)."""
        self._drop_old_faults(now)
        if not self.records:
            return
        hosts = {other.id: other.host for other in members if other.id != node.id}
        former = [name for name, record in self.records.items() if record.host == node.host and name not in hosts]
        if former and node.id not in former and node.host not in hosts.values():
            self.records[node.id] = self.records.pop(former[-1])
            self.changes += 1

    def next_release(self) -> float | None:
        """The time of the next release, if there is one."""
        return min((record.until for record in self.records.values() if record.until is not None), default=None)

    def release(self, now: float) -> list[str]:
        """Release the nodes whose quarantine is over."""
        over = [name for name, record in self.records.items() if record.until is not None and record.until <= now]
        for name in over:
            del self.records[name]
            self.changes += 1
        return over

    def restore(self, node: str, record: FaultRecord) -> None:
        """Take over a record of another coordinator, unless this one has its own."""
        if self._limits.failures and node not in self.records:
            self.records[node] = record
            self.changes += 1

    def _drop_old_faults(self, now: float) -> None:
        for name, record in list(self.records.items()):
            record.faults = [at for at in record.faults if at > now - self._limits.window]
            if not record.faults and record.until is None:
                del self.records[name]
