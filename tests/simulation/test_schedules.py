"""Thousands of random schedules of all simulators, and no violation.

`make simulate` runs a hundred thousand others; `make simulate SCHEDULES=1000000 FROM=5000000` any number of any seeds.
A violation names its seed and the command that replays it.
"""

import os
from collections.abc import Callable

import pytest

from tests.simulation import (
    adversary_world,
    compare_and_set_world,
    handover_world,
    partition_world,
    state_world,
    succession_job_world,
    succession_world,
    world,
)
from tests.simulation.state_world import StateWorld
from tests.simulation.world import MIXES, World

SCHEDULES = int(os.environ.get("RIPSTOP_SCHEDULES", "10000"))
FIRST = int(os.environ.get("RIPSTOP_SCHEDULES_FROM", "0"))
WORLDS: dict[str, tuple[Callable[[int], None], float, int]] = {  # share of the schedules, number of parts
    "job and agents": (world.check, 0.65, 20),
    "training state": (state_world.check, 0.10, 4),
    "succession": (succession_world.check, 0.08, 3),
    "succession with the job": (succession_job_world.check, 0.03, 3),
    "adversary": (adversary_world.check, 0.10, 4),
    "partial partition": (partition_world.check, 0.015, 1),
    "handover": (handover_world.check, 0.015, 1),
    "compare and set": (compare_and_set_world.check, 0.01, 2),
}
PARTS = [(name, part) for name, (_, _, parts) in WORLDS.items() for part in range(parts)]
FIXED = (8_735, 20_595, 1_006_495, 1_147_335)  # schedules that once did not come to rest


@pytest.mark.timeout(0 if SCHEDULES > 50_000 else 300)
@pytest.mark.parametrize(("name", "part"), PARTS)
def test_every_schedule_keeps_the_rules_and_comes_to_rest(name: str, part: int) -> None:
    check, share, parts = WORLDS[name]
    count = round(SCHEDULES * share)
    for seed in range(FIRST + count * part // parts, FIRST + count * (part + 1) // parts):
        check(seed)


@pytest.mark.parametrize("seed", FIXED)
def test_schedules_of_fixed_defects_come_to_rest(seed: int) -> None:
    world.check(seed)


def test_a_coordinator_keeps_the_voters_that_have_just_elected_it() -> None:
    """In this schedule, a voter's wait at the candidate ends between its promise and the election."""
    succession_world.check(1_006_994)


@pytest.mark.parametrize("kind", [World, StateWorld])
def test_a_seed_is_a_schedule(kind: type[World]) -> None:
    transcripts: list[list[str]] = [[], []]
    for lines in transcripts:
        kind(5, lines.append).run()
    assert transcripts[0] == transcripts[1]
    assert len(transcripts[0]) > 50


@pytest.mark.parametrize("mix", range(len(MIXES)), ids=[mix.name for mix in MIXES])
def test_schedules_of_every_mix_commit_rounds_and_reach_both_kinds_of_rest(mix: int) -> None:
    rounds = running = ended = 0
    for seed in range(mix, 40 * len(MIXES), len(MIXES)):
        schedule = World(seed)
        schedule.run()
        rounds += len(schedule.rules.committed)
        running += schedule.job is not None and schedule.job.report is None
        ended += schedule.over
    assert rounds >= 40
    assert running >= 3
    assert ended >= 3
