"""The examples, with a worker killed on the way; two of them on nodes that come and go."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Agent, Job, wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs/jax.md"
TWO_WORKERS = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def shown(agent: Agent, pattern: str, after: int = 0) -> re.Match[str]:
    """Waits for words on stdout, beyond so many characters."""
    return wait_until(
        lambda: re.compile(pattern).search(agent.out, after),
        why=lambda: f"never showed {pattern!r}:\n{agent.out}\n{agent.err}",
    )


def kill_worker(agent: Agent, rank: int) -> int:
    """SIGKILL; how much had been shown by then."""
    pids = re.findall(rf"worker {rank} is process (\d+)\n", agent.out)
    os.kill(int(pids[-1]), signal.SIGKILL)
    return len(agent.out)


@pytest.mark.parametrize("script", ["ddp_resume.py", pytest.param("fsdp_reshard.py", marks=pytest.mark.long)])
def test_training_goes_on_from_its_checkpoint_when_a_worker_is_killed(job: Job, script: str) -> None:
    checkpoint = f"--checkpoint={job.folder / 'checkpoint'}"
    agent = job.run(*TWO_WORKERS, str(EXAMPLES / script), checkpoint, "--steps=60")
    shown(agent, r"step +20 .* saved\n")
    killed = kill_worker(agent, 1)
    assert int(shown(agent, r"training from step (\d+) to 60, 2 workers", killed)[1]) >= 20
    assert agent.wait() == 0
    assert re.search(r"step +60 .* saved", agent.out)


@pytest.mark.parametrize("script", ["ddp_resume.py", pytest.param("fsdp_reshard.py", marks=pytest.mark.long)])
def test_training_goes_on_from_its_checkpoint_with_more_nodes_and_with_fewer(job: Job, script: str) -> None:
    words = (str(EXAMPLES / script), f"--checkpoint={job.folder / 'checkpoint'}", "--steps=1000000", "--step-time=0.01")
    first, second = node(job, *words), node(job, *words)
    begun = told(job, r"training from step (\d+) to 1000000, 2 workers")
    told(job, r"step .* saved", begun.end())
    third = node(job, *words)
    grown = told(job, r"training from step (\d+) to 1000000, 3 workers")
    told(job, r"step .* saved", grown.end())
    third.signal(signal.SIGTERM)
    assert third.wait() == 143
    shrunk = told(job, r"training from step (\d+) to 1000000, 2 workers", grown.end())
    assert 0 == int(begun[1]) < int(grown[1]) < int(shrunk[1])
    for agent in (second, first):
        agent.signal(signal.SIGTERM)
        assert agent.wait() == 143


def node(job: Job, *words: str) -> Agent:
    return job.run(
        "--nnodes=2:3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{job.port}",
        "--rdzv-id=examples",
        "--rdzv-conf=last_call_timeout=0",
        f"--node-rank={len(job.agents)}",
        *words,
    )


def told(job: Job, pattern: str, after: int = 0) -> re.Match[str]:
    """Waits for words of the node that has rank 0."""
    return shown(job.agents[0], pattern, after)


def test_the_language_model_learns_although_a_worker_is_killed(job: Job) -> None:
    agent = job.run(
        *TWO_WORKERS, str(EXAMPLES / "language_model.py"), f"--checkpoint={job.folder / 'lm.pt'}", "--epochs=20"
    )
    shown(agent, r"sample +512 .* saved\n")
    killed = kill_worker(agent, 0)
    assert int(shown(agent, r"training from sample (\d+), 2 workers", killed)[1]) >= 512
    assert agent.wait() == 0
    assert float(shown(agent, r"finished: loss ([\d.]+)")[1]) < 2.2  # guessing by the letters' frequency is 2.9


def test_a_command_that_is_no_python_does_each_piece_once_although_a_worker_is_killed(job: Job) -> None:
    texts = job.folder / "texts"
    texts.mkdir()
    for number in range(10):
        (texts / f"{number}.txt").write_text("word " * number)
    agent = job.run(
        *TWO_WORKERS,
        "--no-python",
        "sh",
        str(EXAMPLES / "count_words.sh"),
        str(texts),
        str(job.folder / "counts"),
        env={"PAUSE": "0.3"},
    )
    shown(agent, r"worker 1 counted .*\n")
    kill_worker(agent, 1)
    assert agent.wait() == 0
    counts = {path.name: int(path.read_text()) for path in (job.folder / "counts").iterdir()}
    assert counts == {f"{number}.txt.count": number for number in range(10)}
    assert len(re.findall(r"counted", agent.out)) <= 10
    assert "restart 1 of 1" in agent.err


def test_workers_can_build_tensorflows_variable_from_their_own(job: Job) -> None:
    """With the code of docs/jax.md."""
    (code,) = re.findall(r"```python\n(.*?TF_CONFIG.*?)```", PAGE.read_text(), re.DOTALL)
    script = job.folder / "tf.py"
    script.write_text(code + "\nos.write(1, (os.environ['TF_CONFIG'] + '\\n').encode())\n")
    agent = job.run(*TWO_WORKERS, str(script))
    assert agent.wait() == 0, agent.err
    found = [json.loads(line) for line in agent.out.splitlines()]
    assert sorted(each["task"]["index"] for each in found) == [0, 1]
    (addresses,) = {tuple(each["cluster"]["worker"]) for each in found}
    assert len(set(addresses)) == 2 and all(re.fullmatch(r"localhost:\d+", each) for each in addresses)
