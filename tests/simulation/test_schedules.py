"""Tens of thousands of random schedules, and no violation.

`RIPSTOP_SCHEDULES=1000000 pytest tests/simulation` runs more of them, from `RIPSTOP_SCHEDULES_FROM` on.
"""

import os

import pytest

from tests.simulation.world import MIXES, World, check

SCHEDULES = int(os.environ.get("RIPSTOP_SCHEDULES", "21000"))
FIRST = int(os.environ.get("RIPSTOP_SCHEDULES_FROM", "0"))
PARTS = 14
LONG = 280_000
FIXED = (8_735, 20_595, 1_006_495, 1_147_335)  # schedules that once did not come to rest


@pytest.mark.timeout(0 if SCHEDULES > 100_000 else 300)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_schedule_comes_to_rest_after_its_faults(part: int) -> None:
    size = SCHEDULES // PARTS
    for seed in range(FIRST + part * size, FIRST + (part + 1) * size):
        check(seed)


@pytest.mark.parametrize("seed", FIXED)
def test_schedules_of_fixed_defects_come_to_rest(seed: int) -> None:
    check(seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_more_schedules_come_to_rest() -> None:
    for seed in range(1_000_000, 1_000_000 + LONG):
        check(seed)


def test_a_seed_is_a_schedule() -> None:
    transcripts: list[list[str]] = [[], []]
    for lines in transcripts:
        World(5, lines.append).run()
    assert transcripts[0] == transcripts[1]
    assert len(transcripts[0]) > 50


@pytest.mark.parametrize("mix", range(len(MIXES)), ids=[mix.name for mix in MIXES])
def test_schedules_of_every_mix_commit_rounds_and_reach_both_kinds_of_rest(mix: int) -> None:
    rounds = running = ended = 0
    for seed in range(mix, 40 * len(MIXES), len(MIXES)):
        world = World(seed)
        world.run()
        rounds += len(world.rules.committed)
        running += world.job is not None and world.job.report is None
        ended += world.over
    assert rounds >= 40
    assert running >= 3
    assert ended >= 3
