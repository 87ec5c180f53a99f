"""The plan of `ripstop chaos`: its file, its schedule, its targets."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripstop.cli.chaos.plan import (
    Plan,
    PlannedFault,
    ScheduledFault,
    Target,
    find_planned_target,
    make_fault_schedule,
    parse_plan,
)
from ripstop.model.errors import UsageError
from ripstop.model.fault_injection import FaultKind

PLAN = """
every = "20s"
count = 4
heal_within = 60

[[fault]]
kind = "worker-kill"

[[fault]]
kind = "worker-slow"
rank = 3
duration = "1m"
percent = 80

[[fault]]
kind = "disk-fill"
node = "gpu2"
size = "1G"
"""


def test_a_plan_is_read() -> None:
    assert parse_plan("p.toml", PLAN) == Plan(
        (
            PlannedFault(FaultKind.WORKER_KILL),
            PlannedFault(FaultKind.WORKER_SLOW, 3, options={"seconds": 60, "percent": 80}),
            PlannedFault(FaultKind.DISK_FILL, None, "gpu2", {"bytes": 1 << 30}),
        ),
        count=4,
        every=20.0,
        heal_within=60.0,
    )


def test_without_a_count_every_fault_is_injected_once() -> None:
    plan = parse_plan("p.toml", '[[fault]]\nkind = "agent-kill"\n[[fault]]\nkind = "agent-stop"')
    assert (plan.count, plan.every, plan.heal_within) == (2, 30.0, 120.0)


KILL = '[[fault]]\nkind = "worker-kill"\n'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("every = ", "p.toml: not TOML: Invalid value (at end of document); see ripstop chaos --help for an example"),
        ("", 'p.toml: a plan needs faults, and has none; add [[fault]] with kind = "worker-kill"'),
        ("fault = 3", 'p.toml: a plan needs faults, and has none; add [[fault]] with kind = "worker-kill"'),
        ("evry = 3\n" + KILL, "p.toml evry: unknown key; the keys are every, count, heal_within, fault"),
        ("count = 0\n" + KILL, "p.toml count=0: not a whole number from 1 to 10000; write one"),
        ("count = true\n" + KILL, "p.toml count=True: not a whole number from 1 to 10000; write one"),
        (
            'every = "soon"\n' + KILL,
            "p.toml every=soon: not a time; give seconds, or a number with a unit",
        ),
        ("every = 0\n" + KILL, "p.toml every=0: a time is above 0 and finite; give seconds, or 90s, 10m, 1h"),
        ("every = [1]\n" + KILL, 'p.toml every=[1]: not a time; write seconds, or "90s", "10m", "1h"'),
        ('every = "48h"\n' + KILL, "p.toml every=48h: above the maximum (86400 s); write a shorter time"),
        ("[[fault]]\nrank = 1", f"p.toml fault 1: kind is missing; write one of {', '.join(FaultKind)}"),
        (
            KILL + '[[fault]]\nkind = "meteor"',
            f"p.toml fault 2 kind=meteor: unknown kind; write one of {', '.join(FaultKind)}",
        ),
        (KILL + 'node = "a"', "p.toml fault 1 (worker-kill) node: unknown key; the keys are kind, rank"),
        (KILL + "duration = 3", "p.toml fault 1 (worker-kill) duration: unknown key; the keys are kind, rank"),
        (KILL + "rank = -1", "p.toml fault 1 rank=-1: not a whole number from 0 to 2147483647; write one"),
        (
            '[[fault]]\nkind = "worker-stop"\nduration = "1h"',
            "p.toml fault 1 duration=3600: not a whole number from 1 to 600; write one",
        ),
        (
            '[[fault]]\nkind = "worker-slow"\npercent = 100',
            "p.toml fault 1 percent=100: not a whole number from 1 to 95; write one",
        ),
        ('[[fault]]\nkind = "disk-fill"\nsize = "lots"', "p.toml fault 1 size=lots: not a size; "),
        (
            '[[fault]]\nkind = "agent-kill"\nnode = 3',
            'p.toml fault 1 node=3: not a name; write "any", "coordinator" or a node\'s name',
        ),
    ],
)
def test_a_bad_plan_is_one_line_with_the_value_and_the_remedy(text: str, error: str) -> None:
    with pytest.raises(UsageError) as found:
        parse_plan("p.toml", text)
    assert str(found.value).startswith(error)
    assert "\n" not in str(found.value)


@given(st.integers(0, 2**31 - 1), st.integers(1, 40))
def test_a_schedule_depends_on_its_seed_alone_and_has_every_fault_equally_often(seed: int, count: int) -> None:
    specs = tuple(PlannedFault(kind) for kind in FaultKind)
    plan = Plan(specs, count, every=20.0)
    schedule = make_fault_schedule(plan, seed)
    assert schedule == make_fault_schedule(plan, seed)
    assert [fault.number for fault in schedule] == list(range(1, count + 1))
    gaps = [later.at - fault.at for fault, later in pairwise(schedule)]
    assert all(10.0 <= gap <= 30.0 for gap in (schedule[0].at, *gaps))
    times = Counter(fault.spec.kind for fault in schedule)
    assert max(times.values()) - min(times.get(kind, 0) for kind in FaultKind) <= 1


def test_another_seed_makes_another_schedule() -> None:
    plan = Plan(tuple(PlannedFault(kind) for kind in FaultKind), 10)
    assert make_fault_schedule(plan, 7) != make_fault_schedule(plan, 8)


def test_a_schedule_is_the_same_in_every_version() -> None:
    """Reports name a seed, which must mean the same later."""
    plan = Plan((PlannedFault(FaultKind.WORKER_KILL), PlannedFault(FaultKind.AGENT_STOP)), 3, every=10.0)
    assert [(f.spec.kind.value, round(f.at, 3), round(f.draw, 3)) for f in make_fault_schedule(plan, 7)] == [
        ("worker-kill", 11.509, 0.072),
        ("agent-stop", 21.868, 0.366),
        ("agent-stop", 27.243, 0.434),
    ]


def node(name: str, first_rank: int, slots: int = 2) -> dict[str, Any]:
    return {"name": name, "first_rank": first_rank, "slots": slots}


NODES = [node("b", 2), node("a", 0), node("spare", -1)]


def target(kind: FaultKind, draw: float = 0.0, nodes: list[Any] = NODES, **where: Any) -> Target:
    return find_planned_target(ScheduledFault(1, 1.0, PlannedFault(kind, **where), draw), nodes, coordinator="a")


@pytest.mark.parametrize(("draw", "expected"), [(0.0, Target("a", 0)), (0.5, Target("b", 2)), (0.999, Target("b", 3))])
def test_a_random_rank_is_one_of_the_round(draw: float, expected: Target) -> None:
    assert target(FaultKind.WORKER_KILL, draw) == expected


def test_a_random_node_is_never_the_coordinators() -> None:
    assert {target(FaultKind.AGENT_KILL, draw).node for draw in (0.0, 0.3, 0.6, 0.99)} == {"b"}
    alone = target(FaultKind.AGENT_KILL, nodes=[node("a", 0)])
    assert alone.why_none.startswith("only the coordinator's node is in the round")
    assert target(FaultKind.AGENT_KILL, node="coordinator") == Target("a")


def test_a_target_that_the_job_does_not_have_is_none() -> None:
    assert target(FaultKind.WORKER_KILL, rank=4).why_none == "the job has no rank 4"
    assert target(FaultKind.AGENT_KILL, node="spare").why_none == "the round has no single node spare"
    assert target(FaultKind.WORKER_KILL, nodes=[node("a", -1)]).why_none == "the job has no round now"
