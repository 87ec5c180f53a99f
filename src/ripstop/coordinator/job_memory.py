"""What a coordinator hands to its successor: budgets, quarantines, the operator's size, permission for chaos.  Pure.

Rules: (1) after every change, the coordinator sends its memory to the `KEEPERS` lowest ranks; (2) an agent sends what
it keeps before its `Join`, and the newest memory wins; (3) what this coordinator has charged itself stays charged; (4)
a coordinator that has nothing to remember sends nothing.
"""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from ripstop.coordinator.restart_budget import Cause
from ripstop.model.job_memory import MAX_CHARGES, MAX_FAULTS, MAX_RECORDS, MAX_WHY, FaultMemory, Memory
from ripstop.model.text_formatting import truncate
from ripstop.protocol.limits import is_valid_name
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
        self._sent: tuple[object, ...] = ()  # the state that the keepers have

    def send_if_changed(self, job: "Job", now: float) -> None:
        state = (job.restarts.changes, job.membership.quarantine.changes, job.formation.operator_target, job.round)
        if state == self._sent:
            return
        self._sent = state
        memory = self._memory(job, now)
        if memory == EMPTY:
            return
        self._serial += 1
        message = Remember(replace(memory, serial=self._serial))
        keepers = [node for node in (job.places or job.members) if node in job.members][:KEEPERS]
        for node in keepers:
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
            if is_valid_name(record.node) and is_valid_name(record.host):
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
