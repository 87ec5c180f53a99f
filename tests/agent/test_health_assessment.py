"""What is wrong with a node: facts go in, words come out."""

import pytest

from ripstop.agent.health.assessment import Disk, Facts, GpuHealth, HealthProblem, Ran, problems
from ripstop.model.config import HealthLimits

LIMITS = HealthLimits(command=("check.sh",), interval=30.0, min_disk=1 << 30, max_skew=60.0)


def words(facts: Facts, limits: HealthLimits = LIMITS, *, joining: bool = True) -> list[str]:
    return [problem.words for problem in problems(facts, limits, joining=joining)]


def test_a_good_node_has_no_problem() -> None:
    good = Facts(
        disks=(Disk("/logs", "logs", 1 << 30),),
        gpus=(GpuHealth(0, "GPU-a"), GpuHealth(1, "GPU-b")),
        known=("GPU-a", "GPU-b"),
        skew=-59.9,
        ran=Ran(0, "all is well"),
    )
    assert problems(good, LIMITS, joining=True) == ()
    assert problems(Facts(), LIMITS, joining=True) == ()


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (
            Facts(disks=(Disk("/logs", "logs", 5 << 20),)),
            "/logs (logs) needs 1.0 GiB free and has 5.0 MiB; make room, or lower min_disk",
        ),
        (
            Facts(skew=3600.0),
            "the clock is 3.6e+03 s ahead of the coordinator's, more than 60 s; synchronize both (chrony, ntpd), "
            "or raise max_clock_skew",
        ),
        (Facts(ran=Ran(3, "no route to storage")), "--health-check check.sh exited with code 3: no route to storage"),
        (Facts(ran=Ran(-11)), "--health-check check.sh was ended by signal 11"),
        (
            Facts(ran=Ran(None, "probing nvlink")),
            "--health-check check.sh did not end in 30 s (--health-interval) and was killed: probing nvlink",
        ),
        (
            Facts(ran=Ran(None, error="Permission denied")),
            "--health-check check.sh cannot be started: Permission denied",
        ),
        (Facts(silent=("GPUs",)), "a look at the GPUs does not come back: a driver or a file server hangs"),
        (
            Facts(
                gpus=(GpuHealth(2, "GPU-c", "a bad row of its memory is to be replaced; reset the GPU"),),
                known=("GPU-c",),
            ),
            "GPU 2 GPU-c: a bad row of its memory is to be replaced; reset the GPU",
        ),
        (
            Facts(gpus=(GpuHealth(0, "GPU-a"),), known=("GPU-a", "GPU-b")),
            "GPU GPU-b was here and is gone; see the kernel's log for Xid errors",
        ),
    ],
)
def test_a_problem_is_said_with_what_was_seen(facts: Facts, line: str) -> None:
    assert words(facts) == [line]


def test_a_gpu_that_cannot_be_named_any_more_is_one_problem_and_not_two() -> None:
    facts = Facts(gpus=(GpuHealth(0, "GPU-a"), GpuHealth(1, "", "NVML says: GPU is lost")), known=("GPU-a", "GPU-b"))
    assert words(facts) == ["GPU 1: NVML says: GPU is lost"]


def test_clocks_count_only_for_who_joins() -> None:
    assert words(Facts(skew=3600.0), joining=False) == []


def test_limits_of_zero_are_no_limits() -> None:
    off = HealthLimits(min_disk=0, max_skew=0.0)
    assert words(Facts(disks=(Disk("/logs", "logs", 0),), skew=1e6), off) == []


def test_a_problem_keeps_its_name_while_its_words_change() -> None:
    first, second = (problems(Facts(disks=(Disk("/logs", "logs", n),)), LIMITS, joining=False) for n in (1, 50 << 20))
    assert first != second
    assert [p.what for p in first] == [p.what for p in second] == ["disk logs"]
    assert isinstance(first[0], HealthProblem)
