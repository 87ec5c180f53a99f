"""What a coordinator hands to its successor: budgets, quarantines, the operator's size, permission for chaos.  Pure.

Rules: (1) after every change, the coordinator sends its memory to the first `KEEPERS` nodes of the round, the lowest
ranks of a round that it has formed; a node that becomes one of them, or connects again, gets it then; (2) an agent
sends what it keeps before its `Join`, and the newest memory wins; (3) what this coordinator has charged itself stays
charged; (4) a coordinator that has nothing to remember sends nothing.
"""

from itertools import islice
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ripstop.coordinator.restart_budget import Cause
from ripstop.model.job_memory import MAX_CHARGES, MAX_FAULTS, MAX_RECORDS, MAX_WHY, FaultMemory, Memory
from ripstop.model.text_formatting import truncate
from ripstop.protocol.limits import is_name_within_limits
from ripstop.protocol.messages import Remember

if TYPE_CHECKING:
    from ripstop.coordinator.job import Job

KEEPERS = 16
EMPTY = Memory()


class JobMemory:
    """The newest memory of one job."""

    def __init__(self) -> None:
        self.allow_chaos = False  # an earlier coordinator had the permission
        self._serial = 0
        self._state: tuple[object, ...] = ()  # what the newest memory was made of
        self._nodes: tuple[int, ...] = ()  # changes with the nodes that may keep it
        self._had: set[str] = set()  # nodes to which the newest memory was sent

    def on_join(self, node: str) -> None:
        """This node has a new connection: the old one may have lost what was sent."""
        self._had.discard(node)
        self._nodes = ()

    def send_if_changed(self, job: "Job", now: float) -> None:
        restarts, faults = (job.restarts.used, job.restarts.changes), job.membership.quarantine.changes
        state = (restarts, faults, job.formation.operator_target, self.allow_chaos)
        nodes = (job.round, len(job.places), len(job.members))
        if state == self._state and nodes == self._nodes:
            return
        if state != self._state:
            self._had = set()
        self._state, self._nodes = state, nodes
        present = (n for n in job.places or job.members if n in job.members and n not in job.liveness.disconnected)
        missing = [node for node in islice(present, KEEPERS) if node not in self._had]
        memory = self._memory(job, now) if missing else EMPTY
        if memory == EMPTY:
            return
        if not self._had:
            self._serial += 1
        self._had = {*missing, *(self._had & job.members.keys())}
        message = Remember(replace(memory, serial=self._serial))
        for node in missing:
            job.send(node, message)

    def restore(self, job: "Job", message: Remember, now: float) -> None:
        memory = message.memory
        if memory.serial <= self._serial:
            return
        self._serial = memory.serial
        self.allow_chaos |= memory.allow_chaos
        sent_at = now - max(0.0, message.age)
        charges = {Cause.APPLICATION: memory.application, Cause.INFRASTRUCTURE: memory.infrastructure}
        times = {cause: [sent_at - age for age in ages[:MAX_CHARGES]] for cause, ages in charges.items()}
        job.restarts.inherit(times, memory.used, memory.early_failures)
        if memory.target is not None and job.formation.operator_target is None:
            low, high = job.settings.min_nodes, job.settings.max_nodes
            job.formation.scale(min(max(memory.target, low), high))
        for record in memory.quarantine[:MAX_RECORDS]:
            if is_name_within_limits(record.node) and is_name_within_limits(record.host):
                faults = [sent_at - age for age in record.faults[:MAX_FAULTS]]
                until = None if record.remaining is None else sent_at + record.remaining
                job.membership.restore_faults(record.node, record.host, faults, until, record.why[:MAX_WHY], now)

    def _memory(self, job: "Job", now: float) -> Memory:
        restarts, quarantine = job.restarts, job.membership.quarantine
        return Memory(
            used=restarts.used,
            application=tuple(now - at for at in restarts.charges(Cause.APPLICATION)[-MAX_CHARGES:]),
            infrastructure=tuple(now - at for at in restarts.charges(Cause.INFRASTRUCTURE)[-MAX_CHARGES:]),
            early_failures=restarts.early_failures,
            quarantine=tuple(
                FaultMemory(
                    node,
                    record.host,
                    tuple(now - at for at in record.faults[-MAX_FAULTS:]),
                    None if record.until is None else record.until - now,
                    truncate(record.why, MAX_WHY),
                )
                for node, record in list(quarantine.records.items())[-MAX_RECORDS:]
            ),
            target=job.formation.operator_target,
            allow_chaos=job.settings.allow_chaos or self.allow_chaos,
        )
