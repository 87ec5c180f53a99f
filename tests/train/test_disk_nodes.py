"""Checkpoints of several nodes in one directory: sharded state, and state that differs between ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ripstop import train
from ripstop.commit_memory import NotEnoughMemory
from ripstop.train import checkpoint_files, restoring
from ripstop.train.rank_store import RankStore
from tests.e2e.harness import wait_until
from tests.train.cluster import KEY, Cluster
from tests.train.conftest import SaverInAThread
from tests.train.test_restoring import Messages, column, rank, replicated
from tests.train.test_sharding import check, sharded, wait_for_saver


class DiskCluster(Cluster):
    """All nodes have savers for one directory; a checkpoint is due at every second commit or so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.directory = folder / "checkpoints"
        self.savers: dict[str, SaverInAThread] = {}

    def run_on_disk(self, function: Any, nodes: str, *args: Any, lost: str | None = None) -> list[Any]:
        """Run a round, and lose nodes when their savers have ended: all of them, or those in `lost`."""
        for name in dict.fromkeys(nodes):
            node = self.node(name)
            self.savers[name] = SaverInAThread(self.directory)
            node.call(setattr, node.memory, "_saver", self.savers[name])
        results = self.run(function, nodes, *args)
        for name in dict.fromkeys(nodes):
            wait_until(lambda name=name: None if self.savers[name].is_busy() else True)
            if lost is None or name in lost:
                self.lose(name)
        return results

    def problems(self) -> list[str]:
        return [result["problem"] for saver in self.savers.values() for result in saver.results if "problem" in result]

    def saved(self) -> list[Path]:
        folder = checkpoint_files.checkpoint_folder(str(self.directory), "state")
        return [each.path for each in checkpoint_files.checkpoints(folder)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DiskCluster]:
    with DiskCluster(tmp_path) as cluster:
        yield cluster


@pytest.mark.long
def test_sharded_state_of_several_nodes_is_restored_by_other_numbers_of_ranks(cluster: DiskCluster) -> None:
    before = check(cluster.run_on_disk(sharded, "aab", 12))
    ends = {at + 1: end for at, end in enumerate(before[0]["ends"])}
    assert not cluster.problems()
    for nodes, mesh in (("ccd", None), ("ef", None), ("gghh", (2, 2)), ("i", None), ("jk", None)):
        found = check(cluster.run_on_disk(sharded, nodes, 12, mesh))
        assert not cluster.problems()
        for each in found:
            assert each["from"] == "disk"
            assert each["restored"] == ends[each["restored at"]]
        ends = {found[0]["restored at"] + 1 + at: end for at, end in enumerate(found[0]["ends"])}


def test_as_many_ranks_continue_sharded_state_with_every_bit(cluster: DiskCluster) -> None:
    right = check(cluster.run(sharded, "zz", 20))
    before = check(cluster.run_on_disk(sharded, "ab", 12))
    after = check(cluster.run_on_disk(sharded, "cd", 8))
    at = after[0]["restored at"]
    assert at > 0
    for number in range(2):
        losses = before[number]["losses"][:at] + after[number]["losses"]
        assert losses == right[number]["losses"][: at + 8]


PLAIN = """
import json, sys
sys.modules["ripstop"] = None  # an import of it fails
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
path, expected, out = sys.argv[1:]
model, optimizer = json.load(open(expected))
loaded = {"model": {key: torch.zeros(torch.tensor(value).shape) for key, value in model.items()}, "step": 0}
dcp.load(loaded, storage_reader=dcp.FileSystemReader(path), no_dist=True)
assert {key: value.tolist() for key, value in loaded["model"].items()} == model
dcp_to_torch_save(path, out)
found = torch.load(out, weights_only=False)
for number, moments in optimizer["state"].items():
    for key, value in moments.items():
        assert found["optimizer"]["state"][number][key].tolist() == value, key
print(loaded["step"])
"""


@pytest.mark.long
def test_plain_dcp_reads_sharded_state_of_several_nodes(cluster: DiskCluster, tmp_path: Path) -> None:
    before = check(cluster.run_on_disk(sharded, "aab", 12))
    newest = cluster.saved()[0]
    number = int(newest.name.split("-")[2])
    (tmp_path / "expected.json").write_text(json.dumps(before[0]["ends"][number - 1]))
    args = [str(newest), str(tmp_path / "expected.json"), str(tmp_path / "out.pt")]
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, *args], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == f"{number}\n", done.stderr


def unequal(steps: int) -> dict[str, Any]:
    """Every rank has its own tensor, and all have the same weights."""
    messages = Messages()
    state = train.State(own=torch.full((1000,), float(rank())), weights=torch.zeros(1000), step=0)
    state.restore()
    found = {"restored": state.step, "from": state.restored_from, "own": state.own.tolist()[::999]}
    found["weights"] = state.weights.tolist()[::999]
    store = RankStore("steps", rank(), int(os.environ["WORLD_SIZE"]), bytes.fromhex(KEY))
    for _ in range(steps):
        store.wait_for_all(f"collective {state.step}")
        state.step += 1
        state.own += 1
        state.weights += 1
        state.commit()
        wait_for_saver(state)
    store.wait_for_all("end")
    return {**found, "messages": messages.found}


def test_state_that_differs_between_the_ranks_of_several_nodes_is_restored_by_as_many(cluster: DiskCluster) -> None:
    cluster.run_on_disk(unequal, "aabc", 12)
    assert not cluster.problems()
    found = cluster.run_on_disk(unequal, "deef", 1)
    (at,) = set(column(found, "restored"))
    assert at > 0
    assert column(found, "from") == ["disk"] * 4
    assert column(found, "own") == [[float(number + at)] * 2 for number in range(4)]
    assert column(found, "weights") == [[float(at)] * 2] * 4
    fewer = cluster.run_on_disk(unequal, "gh", 1)
    assert column(fewer, "restored") == [0, 0]
    assert any(
        "was made by 4 ranks, this round has 2, and these values differ" in text
        for text in column(fewer, "messages")[0]
    )


def test_a_checkpoint_without_the_file_of_one_node_is_used_by_no_rank(cluster: DiskCluster) -> None:
    cluster.run_on_disk(unequal, "ab", 12)
    newest, *older = cluster.saved()
    (newest / "rank-1.pickle").unlink()
    found = cluster.run_on_disk(unequal, "cd", 0)
    expected = int(older[0].name.split("-")[2]) if older else 0
    assert column(found, "restored") == [expected, expected]
    assert "rank-1.pickle cannot be read" in column(found, "messages")[0][0]


def test_a_node_that_cannot_write_costs_the_checkpoint_and_leaves_nothing(cluster: DiskCluster) -> None:
    folder = checkpoint_files.checkpoint_folder(str(cluster.directory), "state")
    right = checkpoint_files.write_checkpoint_part

    def write_part(path: Path, first_rank: int, data: bytes) -> None:
        if first_rank:
            raise OSError(28, "No space left on device")
        right(path, first_rank, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "write_checkpoint_part", write_part)
        cluster.run_on_disk(unequal, "ab", 4)
    assert cluster.problems()
    allowed = ("No space left on device", "another node has removed its parts")
    assert all(any(text in problem for text in allowed) for problem in cluster.problems())
    assert not cluster.saved()
    cluster.run_on_disk(unequal, "ab", 12)
    assert cluster.saved()
    assert all(path.name.startswith(("commit-", ".saving-")) for path in folder.iterdir())


def stages(steps: int) -> None:
    """Every rank is a stage of a pipeline, with a device mesh of its own and the same names."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("stage", "data"))["data"]
    state = train.State(weights=distribute_tensor(torch.full((4,), float(rank())), mesh, [Shard(0)]), step=0)
    state.restore()
    for _ in range(steps):
        dist.barrier()
        state.step += 1
        state.commit()
        wait_for_saver(state)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("nodes", ["ab", "aa"])
def test_a_name_with_other_content_on_another_mesh_is_not_saved(cluster: DiskCluster, nodes: str) -> None:
    assert cluster.run_on_disk(stages, nodes, 4) == [None, None]
    assert not cluster.saved()
    assert any("weights is a sharded tensor with different contents" in problem for problem in cluster.problems())


def test_an_unfinished_checkpoint_of_a_lost_job_is_not_part_of_the_next_one(cluster: DiskCluster) -> None:
    folder = checkpoint_files.checkpoint_folder(str(cluster.directory), "state")
    for number in range(1, 13):
        left = folder / checkpoint_files.unfinished_checkpoint_name(1, number, is_shared=True)
        left.mkdir(parents=True)
        (left / "part-0.pickle").write_bytes(b"not a part of this job")
    cluster.run_on_disk(unequal, "ab", 12)
    assert not cluster.problems()
    assert {int(path.name.split("-")[1]) for path in cluster.saved()} == {1_000_001}
    assert not list(folder.glob(".*")), "it is removed"


def poor(steps: int) -> dict[str, Any]:
    """No rank has memory for a shard of another node."""

    def receive(*_: Any) -> None:
        raise NotEnoughMemory("a buffer needs 9 GB and 1 GB are free")

    restoring.Restoring._receive = receive  # type: ignore[method-assign]
    return replicated(steps)


def test_too_little_memory_for_a_shard_of_a_peer_means_the_newest_checkpoint(cluster: DiskCluster) -> None:
    cluster.run_on_disk(replicated, "ab", 12, lost="b")
    at = int(cluster.saved()[0].name.split("-")[2])
    found = cluster.run_on_disk(poor, "ac", 0)
    assert column(found, "restored") == [at, at]
    assert column(found, "from") == ["disk", "disk"]
