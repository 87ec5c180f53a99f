"""Random schedules of faults and resizes of real jobs with `train.State`: no committed step and no bit is lost.

The seed of a schedule is the test's parameter, so `pytest -k 'name and seed'` runs it again; the schedule is printed.
The moment of a fault is exact where a worker kills itself, and otherwise up to the machine.
"""

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Agent, Job, WorkerEvent, wait_until
from tests.e2e.test_nodes import tree

SCRIPT = SCRIPTS / "random_faults.py"
STEPS = 32
FIRST_FAULT = 8  # by then the ranks have found that their state is equal, so that a lost shard is not missed
LENGTH, BATCH = 40, 6  # of the script's data set, of a step


pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Fault:
    """What happens after the commit of a step.  `delay`: seconds for which training goes on before it happens."""

    step: int
    what: str
    rank: int = 0
    delay: float | None = None  # None: while all ranks wait

    @property
    def is_exact(self) -> bool:
        """Whether a worker kills itself, at this place of the step."""
        return self.what in ("before", "during", "after")


@dataclass(frozen=True)
class Round:
    """The workers that met at one store, in the order of starts."""

    restored: int  # the step
    world: int
    events: list[WorkerEvent]

    def of(self, event: str, step: int) -> dict[int, WorkerEvent]:
        """By rank."""
        return {each["rank"]: each for each in self.events if (each["event"], each["step"]) == (event, step)}

    @property
    def agreed(self) -> int:
        """The newest commit that all ranks have reported; the restored one if there is none."""
        steps = {each["step"] for each in self.events if each["event"] == "commit"}
        return max((step for step in steps if len(self.of("commit", step)) == self.world), default=self.restored)


class FaultJob(Job):
    """A job that is held after some steps, where faults happen."""

    def __init__(self, folder: Path, faults: list[Fault], **env: str) -> None:
        kills = ",".join(f"{fault.rank}:{fault.step}:{fault.what}" for fault in faults if fault.is_exact)
        holds = ",".join(str(fault.step) for fault in faults if not fault.is_exact)
        super().__init__(folder, TMPDIR=str(folder), **env, STEPS=str(STEPS), KILLS=kills, HOLDS=holds)

    def rounds(self) -> list[Round]:
        by_store: dict[str, list[WorkerEvent]] = {}
        for event in self.worker_events():
            by_store.setdefault(event["round"], []).append(event)
        found = []
        for events in by_store.values():
            starts = [event["step"] for event in events if event["event"] == "start"]
            assert len(set(starts)) <= 1, f"the ranks of a round restored different commits: {starts}"
            if starts:  # of a round that ended earlier, no rank restored anything
                found.append(Round(starts[0], events[0]["world"], events))
        return found

    def wait_for_hold(self, step: int) -> Round:
        """Until all ranks of a round wait after this step."""

        def find() -> Round | None:
            last = self.rounds()[-1:]
            return last[0] if last and len(last[0].of("hold", step)) == last[0].world else None

        return wait_until(find, why=self.describe)

    def go(self, step: int) -> None:
        Path(f"{self.log}.go-{step}").touch()

    def wait_for_round(self, count: int, world: int) -> None:
        """Until all ranks of a round after the first `count` have restored, in a world of this size."""

        def find() -> bool | None:
            found = self.rounds()[count:]
            return True if found and (len(found[-1].of("start", found[-1].restored)), found[-1].world) == (
                world, world,
            ) else None  # fmt: skip

        wait_until(find, why=self.describe)

    def lose(self, agent: Agent, fault: Fault) -> None:
        """Kill a node: its agent alone, or with all its processes at once."""
        for pid in tree(agent.pid) if fault.rank else [agent.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def kill_worker(self, round: Round, rank: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(round.of("start", round.restored)[rank]["pid"], signal.SIGKILL)


def schedule(seed: int, kinds: dict[str, bool], ranks: int, count: int = 4) -> list[Fault]:
    """`kinds`: what may happen, and whether it may happen while training goes on."""
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(FIRST_FAULT, STEPS - 2, 2), count))
    found = []
    for step in steps:
        what = rng.choice(list(kinds))
        delay = rng.uniform(0, 0.02) if kinds[what] and rng.random() < 0.6 else None
        found.append(Fault(step, what, rng.randrange(ranks), delay))
    print(f"seed {seed}:", *found, sep="\n  ")
    return found


def check_continuity(rounds: list[Round]) -> None:
    """No round goes back behind the last commit that all ranks had."""
    assert rounds[0].restored == 0
    for before, after in pairwise(rounds):
        assert after.restored >= before.agreed, f"step {before.agreed} was agreed; {after.restored} was restored"
    assert rounds[-1].agreed == STEPS


def committed(rounds: list[Round]) -> dict[int, Round]:
    """The round of each step whose result the end of the job has."""
    found: dict[int, Round] = {}
    upper = STEPS
    for round in reversed(rounds):
        found.update(dict.fromkeys(range(round.restored + 1, upper + 1), round))
        upper = min(upper, round.restored)
    return found


# a fixed number of ranks: every loss, of every rank, is that of a run without faults ----------------------------------

WORKER_FAULTS = {"before": False, "during": False, "after": False, "worker": True}


class References:
    """The losses of runs without faults, by rank and step."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._found: dict[tuple[int, bool], list[list[str]]] = {}

    def losses(self, ranks: int, *, dropout: bool) -> list[list[str]]:
        if (ranks, dropout) not in self._found:
            env = {"DROPOUT": "1"} if dropout else {}
            with FaultJob(self._folders.mktemp("reference"), [], **env) as job:
                agent = job.run("--standalone", f"--nproc-per-node={ranks}", str(SCRIPT))
                assert agent.wait() == 0, agent.err
                (round,) = job.rounds()
            of_steps = [round.of("loss", step) for step in range(1, STEPS + 1)]
            self._found[ranks, dropout] = [[losses[rank]["loss"] for losses in of_steps] for rank in range(ranks)]
        return self._found[ranks, dropout]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory)


def check_losses(rounds: list[Round], reference: list[list[str]]) -> None:
    for round in rounds:
        for event in round.events:
            if event["event"] == "loss":
                expected = reference[event["rank"]][event["step"] - 1]
                assert event["loss"] == expected, f"step {event['step']} of rank {event['rank']} is not the same"
    for step, round in committed(rounds).items():
        assert len(round.of("loss", step)) == len(reference), f"step {step} lacks ranks"


@pytest.mark.parametrize("seed", range(30))
def test_killed_workers_and_lost_jobs_change_no_bit(tmp_path: Path, seed: int, references: References) -> None:
    """One agent.  If it is killed, the job is lost as a whole, and the next one continues from disk."""
    ranks = 2 + seed % 2
    faults = schedule(seed, {**WORKER_FAULTS, "job": True}, ranks)
    flags = f"--nproc-per-node={ranks}", "--max-restarts=99", f"--checkpoint-dir={tmp_path / 'disk'}"
    with FaultJob(tmp_path, faults, DROPOUT="1") as job:

        def start() -> Agent:
            return job.run("--standalone", *flags, "--checkpoint-interval=0.001", str(SCRIPT))

        agent = start()
        lost: list[int] = []  # rounds that were the last ones of their job
        for fault in faults:
            if fault.is_exact:
                continue
            round = job.wait_for_hold(fault.step)
            if fault.what == "job":
                wait_until(lambda: True if list((tmp_path / "disk").glob("state/commit-*")) else None)
            if fault.delay is not None:
                job.go(fault.step)
                time.sleep(fault.delay)
            if fault.what == "worker":
                job.kill_worker(round, fault.rank)
            elif fault.what == "job" and agent.process.poll() is None:
                job.lose(agent, fault)
                lost.append(len(job.rounds()) - 1)
                agent = start()
            job.go(fault.step)
        assert agent.wait() == 0, job.describe()
        rounds = job.rounds()
        check_losses(rounds, references.losses(ranks, dropout=True))
        begins = [0, *(number + 1 for number in lost), len(rounds)]
        for first, last in pairwise(begins):
            for before, after in pairwise(rounds[first:last]):
                assert after.restored >= before.agreed
        assert all(rounds[number + 1].restored > 0 for number in lost), "a checkpoint was on disk"
        assert rounds[-1].agreed == STEPS


@pytest.mark.parametrize("seed", range(20))
def test_killed_workers_and_nodes_change_no_bit(tmp_path: Path, seed: int, references: References) -> None:
    """Two agents with one rank each; the one without the coordinator is killed, and another takes its place."""
    faults = schedule(seed, {**WORKER_FAULTS, "node": True}, 2)
    with FaultJob(tmp_path, faults) as job:

        def start() -> Agent:
            return job.node("--max-restarts=99", nnodes="2", script=SCRIPT)

        agents = [start()]
        agents[0].wait_for_log("joined")
        agents.append(start())
        for fault in faults:
            if fault.is_exact:
                continue
            round = job.wait_for_hold(fault.step)
            if fault.delay is not None:
                job.go(fault.step)
                time.sleep(fault.delay)
            if fault.what == "worker":
                job.kill_worker(round, fault.rank)
            elif fault.what == "node" and agents[1].process.poll() is None:
                job.lose(agents[1], fault)
                if agents[0].process.poll() is None:
                    agents[1] = start()
            job.go(fault.step)
        assert agents[0].wait() == 0, job.describe()
        rounds = job.rounds()
        check_continuity(rounds)
        check_losses(rounds, references.losses(2, dropout=False))


# other numbers of ranks: the samples of committed steps of an epoch are the epoch, each once --------------------------


@pytest.mark.parametrize("seed", range(20))
def test_resizes_lose_no_step_and_give_every_sample_once(tmp_path: Path, seed: int) -> None:
    """One to three nodes with one rank each: nodes come, leave and are killed, and workers are killed."""
    kinds = {**WORKER_FAULTS, "join": False, "leave": True, "node": True}
    faults = schedule(seed, kinds, 2, count=5)
    with FaultJob(tmp_path, faults) as job:

        def start() -> Agent:
            return job.node("--max-restarts=99", nnodes="1:3", script=SCRIPT)

        agents = [start()]
        agents[0].wait_for_log("joined")
        agents.append(start())
        for fault in faults:
            if fault.is_exact:
                continue
            round = job.wait_for_hold(fault.step)
            count = len(job.rounds())
            if fault.delay is not None:
                job.go(fault.step)
                time.sleep(fault.delay)
            if fault.what == "worker" and fault.rank < round.world:
                job.kill_worker(round, fault.rank)
            elif fault.what == "join" and len(agents) < 3:
                agents.append(start())
                job.wait_for_round(count, len(agents))
            elif fault.what == "leave" and len(agents) > 1:
                agents[-1].signal(signal.SIGTERM)
                agents.pop().wait()
            elif fault.what == "node" and len(agents) > 1:
                job.lose(agents.pop(), fault)
            job.go(fault.step)
        assert agents[0].wait() == 0, job.describe()
        rounds = job.rounds()
        check_continuity(rounds)
        given: list[int] = []
        for step, round in sorted(committed(rounds).items()):
            batch = round.of("samples", step)
            assert len(batch) == round.world, f"step {step} lacks ranks"
            given += [batch[number % round.world]["samples"][number // round.world] for number in range(BATCH)]
        print("worlds:", [round.world for round in rounds])
        for epoch in range(STEPS * BATCH // LENGTH):
            assert sorted(given[epoch * LENGTH : (epoch + 1) * LENGTH]) == list(range(LENGTH))
