"""Many recoveries in a row, and what they leave behind in the agent: nothing."""

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from tests.e2e.harness import SCRIPTS, Job, wait_until

LONGEST = 20.0  # seconds from a death to the next step: what takes longer hangs


@dataclass(frozen=True)
class AgentResources:
    """What the agent uses at one time."""

    fds: int
    children: int
    threads: int
    memory: int

    @classmethod
    def by(cls, pid: int) -> "AgentResources":
        proc = Path(f"/proc/{pid}")
        children = sum(len(task.read_text().split()) for task in proc.glob("task/*/children"))
        resident = int((proc / "statm").read_text().split()[1]) * 4096
        return cls(len(list((proc / "fd").iterdir())), children, len(list((proc / "task").iterdir())), resident)

    def wait_for_no_more(self, pid: int) -> "AgentResources":
        """What the agent uses when its counts are not above these: it may still be busy with the end of a round."""

        def find() -> AgentResources | None:
            now = self.by(pid)
            is_more = now.fds > self.fds or now.children > self.children or now.threads > self.threads
            return None if is_more else now

        return wait_until(find, why=lambda: f"{self}, then {self.by(pid)}")


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(25),
        pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
def test_recovery_after_recovery_none_hangs_and_nothing_piles_up(tmp_path: Path, times: int) -> None:
    go = tmp_path / "go"
    with Job(tmp_path, SOAK_GO=str(go)) as job:
        agent = job.run(
            "--standalone",
            "--nproc-per-node=2",
            f"--max-restarts={times}",
            "--restart-backoff=0",
            "--tee=3",
            str(SCRIPTS / "soak.py"),
        )

        def met(restart: int) -> bool | None:
            return True if agent.out.count(f"restart {restart} rank ") == 2 else None

        wait_until(lambda: met(0), why=job.describe)
        before = AgentResources.by(agent.pid)
        Path(f"{go}-0").touch()
        wait_until(lambda: met(times), times * LONGEST, why=job.describe)
        after = before.wait_for_no_more(agent.pid)
        Path(f"{go}-{times}").touch()
        assert agent.wait() == 0
        logs = {
            (path.parent.parent.name, path.parent.name): path.read_text() for path in job.logs.glob("*/*/*/stdout.log")
        }
        errors = [path.read_text() for path in job.logs.glob("*/*/*/stderr.log")]

    assert after.memory - before.memory < 8 << 20

    story = _story("".join(logs.values()))
    assert [(kind, rank) for kind, rank, _ in story.deaths] == [
        (("kill", "segv", "exit", "raise")[restart % 4], restart % 2) for restart in range(times)
    ]
    pauses = [story.met[restart + 1] - at for restart, (_, _, at) in enumerate(story.deaths)]
    print(f"{times} recoveries: median {median(pauses):.3f} s, longest {max(pauses):.3f} s")
    assert max(pauses) < LONGEST

    for (_, rank), text in logs.items():
        assert all(f"[default{rank}]:{line}" in agent.out for line in text.splitlines())
    console = [line.split(":", 1)[1] for line in agent.err.splitlines() if line.startswith("[default")]
    assert sorted(console) == sorted(line for text in errors for line in text.splitlines())


@dataclass(frozen=True)
class Story:
    """What the workers wrote: who died how and when, and when each incarnation had met."""

    deaths: list[tuple[str, int, float]]
    met: dict[int, float]


def _story(text: str) -> Story:
    deaths: dict[int, tuple[str, int, float]] = {}
    met: dict[int, float] = {}
    for restart, rank, what, at in re.findall(r"restart (\d+) rank (\d) (\w+) ([\d.]+)", text):
        if what == "met":
            met[int(restart)] = max(met.get(int(restart), 0.0), float(at))
        else:
            deaths[int(restart)] = (what, int(rank), float(at))
    return Story([deaths[restart] for restart in sorted(deaths)], met)
