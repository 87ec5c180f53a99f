"""Health problems of a node, from measurements."""

import pytest

from ripstop.agent.health.assessment import CommandResult, Disk, HealthFacts, HealthProblem, assess_health
from ripstop.model.config import HealthLimits
from ripstop.system.gpus import GpuHealth

LIMITS = HealthLimits(command=("check.sh",), interval=30.0, min_disk=1 << 30, max_skew=60.0)


def texts(facts: HealthFacts, limits: HealthLimits = LIMITS, *, joining: bool = True) -> list[str]:
    return [problem.text for problem in assess_health(facts, limits, joining=joining)]


def test_a_healthy_node_has_no_problem() -> None:
    good = HealthFacts(
        disks=(Disk("/logs", "logs", 1 << 30),),
        gpus=(GpuHealth(0, "GPU-a"), GpuHealth(1, "GPU-b")),
        known_gpus=("GPU-a", "GPU-b"),
        skew=-59.9,
        command=CommandResult(0, "all is well"),
    )
    assert assess_health(good, LIMITS, joining=True) == ()
    assert assess_health(HealthFacts(), LIMITS, joining=True) == ()


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (
            HealthFacts(disks=(Disk("/logs", "logs", 5 << 20),)),
            "/logs (logs) needs 1.0 GiB free and has 5.0 MiB; free some space, or lower min_disk",
        ),
        (
            HealthFacts(skew=3600.0),
            "the clock is 3.6e+03 s ahead of the coordinator's, more than 60 s; synchronize both (chrony, ntpd), "
            "or raise max_clock_skew",
        ),
        (
            HealthFacts(command=CommandResult(3, "no route to storage")),
            "--health-check check.sh exited with code 3: no route to storage",
        ),
        (HealthFacts(command=CommandResult(-11)), "--health-check check.sh was ended by signal 11"),
        (
            HealthFacts(command=CommandResult(None, "probing nvlink")),
            "--health-check check.sh did not end in 30 s (--health-interval) and was killed: probing nvlink",
        ),
        (
            HealthFacts(command=CommandResult(None, error="Permission denied")),
            "--health-check check.sh cannot be started: Permission denied",
        ),
        (HealthFacts(timed_out=("GPUs",)), "the check of the GPUs timed out: a driver or a file server hangs"),
        (
            HealthFacts(
                gpus=(GpuHealth(2, "GPU-c", "a bad memory row is waiting to be replaced; reset the GPU"),),
                known_gpus=("GPU-c",),
            ),
            "GPU 2 GPU-c: a bad memory row is waiting to be replaced; reset the GPU",
        ),
        (
            HealthFacts(gpus=(GpuHealth(0, "GPU-a"),), known_gpus=("GPU-a", "GPU-b")),
            "GPU GPU-b has disappeared; look for Xid errors in the kernel's log",
        ),
    ],
)
def test_a_problem_has_the_value_seen_and_a_remedy(facts: HealthFacts, line: str) -> None:
    assert texts(facts) == [line]


def test_a_lost_gpu_without_a_uuid_is_one_problem_and_not_two() -> None:
    facts = HealthFacts(
        gpus=(GpuHealth(0, "GPU-a"), GpuHealth(1, "", "NVML reports: GPU is lost")), known_gpus=("GPU-a", "GPU-b")
    )
    assert texts(facts) == ["GPU 1: NVML reports: GPU is lost"]


def test_clock_skew_counts_only_before_a_node_joins() -> None:
    assert texts(HealthFacts(skew=3600.0), joining=False) == []


def test_a_limit_of_zero_turns_its_check_off() -> None:
    off = HealthLimits(min_disk=0, max_skew=0.0)
    assert texts(HealthFacts(disks=(Disk("/logs", "logs", 0),), skew=1e6), off) == []


def test_a_problem_keeps_its_key_while_its_text_changes() -> None:
    first, second = (
        assess_health(HealthFacts(disks=(Disk("/logs", "logs", n),)), LIMITS, joining=False) for n in (1, 50 << 20)
    )
    assert first != second
    assert [p.key for p in first] == [p.key for p in second] == ["disk logs"]
    assert isinstance(first[0], HealthProblem)
