"""`ripstop.train` with the packages of `requirements/tools.txt`: Lightning, transformers, torchdata and datasets."""

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from ripstop import train
from tests.e2e.harness import Job

SCRIPTS = Path(__file__).parent / "scripts"
TRAINING_TIMEOUT_S = 110.0


def need(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} not installed: pip install -r requirements/tools.txt")


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "package", "steps"),
    [("lightning_memory.py", "pytorch_lightning", 24), ("transformers_memory.py", "transformers", 12)],
)
@pytest.mark.timeout(240)
def test_a_killed_training_loses_at_most_one_step_and_ends_with_the_same_weights(tmp_path, script, package, steps):
    need(package)

    def run(name: str, kill_at: int) -> list[dict]:
        folder = tmp_path / name
        folder.mkdir()
        env = {"MARKER": str(folder / "killed"), "KILL_AT": str(kill_at), "TMPDIR": str(folder), "HF_HUB_OFFLINE": "1"}
        with Job(folder) as job:
            agent = job.run("--standalone", "--nproc-per-node=2", "--max-restarts=1", str(SCRIPTS / script), env=env)
            assert agent.wait(TRAINING_TIMEOUT_S) == 0, agent.err
        assert not list(folder.glob("ripstop-*"))  # the files for the restart are removed
        return [json.loads(line) for line in agent.out.splitlines() if line.startswith('{"started"')]

    undisturbed = run("undisturbed", kill_at=0)
    assert [(rank["started"], rank["ended"]) for rank in undisturbed] == [(0, steps)] * 2
    killed = run("killed", kill_at=steps - 1)
    assert killed[0]["started"] in (steps - 2, steps - 1) and killed[1]["started"] == killed[0]["started"]
    assert [rank["weights"] for rank in killed] == [rank["weights"] for rank in undisturbed]


def torchdata_nodes() -> Iterable:
    need("torchdata")
    from torchdata import nodes

    return nodes.Loader(nodes.IterableWrapper(range(20)))


def hugging_face(shards: int) -> Iterable:
    need("datasets")
    from datasets import Dataset

    return Dataset.from_dict({"number": list(range(20))}).to_iterable_dataset(num_shards=shards)


@pytest.mark.parametrize(
    ("make", "use_dataset_state"),
    [
        pytest.param(torchdata_nodes, True, id="torchdata"),
        pytest.param(lambda: hugging_face(shards=1), True, id="datasets"),
        pytest.param(lambda: hugging_face(shards=4), True, id="datasets with shards"),
        pytest.param(lambda: hugging_face(4).shuffle(seed=1, buffer_size=5), False, id="datasets with a buffer"),
    ],
)
def test_a_stream_continues_in_a_data_set_with_a_state(make, use_dataset_state):
    items: list[int] = []
    saved = None
    for processes in (0, 1, 2, 0, 2, 1, 2, 0):  # each is a restart after two batches
        stream = train.Stream(make(), 4, collate_fn=list, use_dataset_state=use_dataset_state)
        if saved is not None:
            stream.load_state_dict(saved)
        loader = DataLoader(stream, batch_size=None, num_workers=processes)
        received = 0
        while received < 2:
            for batch in stream.batches(loader):
                items += [item if isinstance(item, int) else item["number"] for item in batch]
                received += 1
                if received == 2:
                    break
        saved = stream.state_dict()
    assert len(items) == 64
    for epoch in range(3):
        assert sorted(items[epoch * 20 : (epoch + 1) * 20]) == list(range(20))
