"""The plan of `ripstop chaos`, a TOML file, and the schedule that a seed makes of it.  Pure.

The same plan and seed make the same schedule.  A fault without a rank or node has a random one: the schedule holds a
number from 0 to 1, and `find_planned_target` chooses by it from the ranks and nodes that the job has then.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

from msgspec import Struct, field

from ripstop.model.errors import UsageError
from ripstop.model.fault_injection import LASTING, MAX_BYTES, MAX_PERCENT, MAX_SECONDS, FaultKind
from ripstop.model.parsers import byte_size, duration

MAX_FAULTS = 10_000
MAX_TIME_S = 86_400.0
ANY, COORDINATOR = "any", "coordinator"


class PlannedFault(Struct, frozen=True):
    """One kind of fault of a plan.  `rank` None and `node` "any": a random one; "coordinator": the coordinator's."""

    kind: FaultKind
    rank: int | None = None
    node: str = ANY
    options: Mapping[str, int] = field(default_factory=dict)  # of the API: seconds, percent, bytes

    @property
    def seconds(self) -> int:
        """How long the fault lasts until the agent undoes it."""
        return self.options.get("seconds", 10) if self.kind.is_lasting else 0


class Plan(Struct, frozen=True):
    """`every` is the mean time between two faults in seconds; `heal_within` is how long a fault may take to heal."""

    faults: tuple[PlannedFault, ...]
    count: int
    every: float = 30.0
    heal_within: float = 120.0


class ScheduledFault(Struct, frozen=True):
    """A fault of a schedule: its time in seconds after the start, and the number that chooses its target."""

    number: int
    at: float
    spec: PlannedFault
    draw: float


class Target(Struct, frozen=True):
    """The worker or the node of a fault; `why_none` if the job has none that fits."""

    node: str = ""
    rank: int = -1
    why_none: str = ""


# the schedule ---------------------------------------------------------------------------------------------------------


def make_fault_schedule(plan: Plan, seed: int) -> tuple[ScheduledFault, ...]:
    """Every fault of the plan equally often, in random order; times between faults vary by half."""
    random = Random(seed)
    scheduled: list[ScheduledFault] = []
    order: list[PlannedFault] = []
    at = 0.0
    for number in range(1, plan.count + 1):
        order = order or sorted(plan.faults, key=lambda _: random.random())
        at += plan.every * (0.5 + random.random())
        scheduled.append(ScheduledFault(number, at, order.pop(), random.random()))
    return tuple(scheduled)


def find_planned_target(fault: ScheduledFault, nodes: list[Mapping[str, Any]], coordinator: str) -> Target:
    """The target among the nodes of the round, as in the job's status.

    A random node is never the coordinator's: a job without etcd does not survive its loss.
    """
    spec, in_round = fault.spec, sorted((n for n in nodes if n["first_rank"] >= 0), key=lambda n: n["first_rank"])
    world = sum(node["slots"] for node in in_round)
    if not world:
        return Target(why_none="the job has no round now")
    if spec.kind.has_rank:
        rank = int(fault.draw * world) if spec.rank is None else spec.rank
        owner = next((n["name"] for n in in_round if n["first_rank"] <= rank < n["first_rank"] + n["slots"]), "")
        return Target(owner, rank) if owner else Target(why_none=f"the job has no rank {rank}")
    names = [node["name"] for node in in_round]
    if spec.node == ANY:
        names = [name for name in names if name != coordinator]
        if not names:
            return Target(why_none='only the coordinator\'s node is in the round; node = "coordinator" chooses it')
        return Target(names[int(fault.draw * len(names))])
    wanted = coordinator if spec.node == COORDINATOR else spec.node
    matching = [name for name in names if wanted and name.startswith(wanted)]
    return Target(matching[0]) if len(matching) == 1 else Target(why_none=f"the round has no single node {spec.node}")


# the file -------------------------------------------------------------------------------------------------------------

_PLAN_KEYS = ("every", "count", "heal_within", "fault")
_OPTIONS = {  # by key of the file: the key of the API
    "duration": "seconds",
    "percent": "percent",
    "size": "bytes",
}


def parse_plan(name: str, text: str) -> Plan:
    """Parse a plan; `name` is the file, for errors."""
    import tomllib

    try:
        found = tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"{name}: not TOML: {error}; see ripstop chaos --help for an example") from None
    _check_plan_keys(name, found, _PLAN_KEYS)
    entries = found.get("fault")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f'{name}: a plan needs faults, and has none; add [[fault]] with kind = "worker-kill"')
    faults = tuple(_planned_fault(f"{name} fault {number}", entry) for number, entry in enumerate(entries, 1))
    return Plan(
        faults,
        count=_plan_number(f"{name} count", found.get("count", len(faults)), 1, MAX_FAULTS),
        every=_plan_seconds(f"{name} every", found.get("every", 30)),
        heal_within=_plan_seconds(f"{name} heal_within", found.get("heal_within", 120)),
    )


def _planned_fault(label: str, entry: dict[str, Any]) -> PlannedFault:
    if "kind" not in entry:
        raise UsageError(f"{label}: kind is missing; write one of {', '.join(FaultKind)}")
    if entry["kind"] not in set(FaultKind):
        raise UsageError(f"{label} kind={entry['kind']}: unknown kind; write one of {', '.join(FaultKind)}")
    kind = FaultKind(entry["kind"])
    keys = ["kind", "rank" if kind.has_rank else "node"]
    keys += ["duration"] if kind in LASTING else []
    keys += ["percent"] if kind is FaultKind.WORKER_SLOW else []
    keys += ["size"] if kind is FaultKind.DISK_FILL else []
    _check_plan_keys(f"{label} ({kind})", entry, keys)
    options = {
        _OPTIONS[key]: _planned_fault_option(f"{label} {key}", key, value)
        for key, value in entry.items()
        if key in _OPTIONS
    }
    rank, node = entry.get("rank", ANY), entry.get("node", ANY)
    if not isinstance(node, str) or not node:
        raise UsageError(f'{label} node={node}: not a name; write "any", "coordinator" or a node\'s name')
    return PlannedFault(kind, None if rank == ANY else _plan_number(f"{label} rank", rank, 0, 2**31 - 1), node, options)


def _planned_fault_option(label: str, key: str, value: Any) -> int:
    if key == "percent":
        return _plan_number(label, value, 1, MAX_PERCENT)
    if key == "duration":
        return _plan_number(label, _plan_seconds(label, value), 1, MAX_SECONDS)
    return _plan_number(label, byte_size(label, str(value)), 1, MAX_BYTES)


def _plan_seconds(label: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UsageError(f'{label}={value}: not a time; write seconds, or "90s", "10m", "1h"')
    seconds = duration(label, str(value), positive=True)
    if seconds > MAX_TIME_S:
        raise UsageError(f"{label}={value}: above the maximum ({MAX_TIME_S:g} s); write a shorter time")
    return seconds


def _plan_number(label: str, value: Any, minimum: int, maximum: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise UsageError(f"{label}={value}: not a whole number from {minimum} to {maximum}; write one")
    return value


def _check_plan_keys(label: str, table: Mapping[str, Any], known: "list[str] | tuple[str, ...]") -> None:
    for key in table:
        if key not in known:
            raise UsageError(f"{label} {key}: unknown key; the keys are {', '.join(known)}")
