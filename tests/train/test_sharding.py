"""Sharded state (FSDP2, tensor parallelism) and its restore onto another number of ranks or another mesh."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ripstop import train
from ripstop.commit_memory import HEAD_BYTES, unpack_commit_header
from tests.e2e.harness import wait_until
from tests.train.cluster import Cluster, Node


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


def full(value: Any) -> Any:
    """Whole tensors, as lists."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: full(part) for key, part in value.items()}
    return [full(part) for part in value] if isinstance(value, list) else value


def commits(node: Node) -> list[int]:
    """The numbers of the complete commits in a node's memory."""
    fds = [fd for slots in node.memory._buffers.values() for fd in slots.values()]
    headers = [unpack_commit_header(os.pread(fd, HEAD_BYTES, 0), crc32(b"test")) for fd in fds]
    return sorted(header.id.number for header in headers if header is not None)


def wait_for_saver(state: train.State) -> None:
    """Until this node has saved the commit, if it is saved: then every node saves the same commits."""
    wait_until(lambda: None if state._saves.slots_in_use() else True)


def sharded(steps: int, mesh: tuple[int, int] | None = None) -> dict[str, Any]:
    """FSDP2 over all ranks; with a mesh, FSDP2 and tensor parallelism.  Returns the whole state, as restored and
    after each step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 14), nn.ReLU(), nn.Linear(14, 5, bias=False))  # some ranks have no rows of these
    size = dist.get_world_size()
    if mesh:
        names = init_device_mesh("cpu", mesh, mesh_dim_names=("data", "model"))
        parallelize_module(model, names["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=names["data"])
    elif size > 1:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = train.State(model=model, optimizer=optimizer, step=0)
    found = {"is restored": state.restore(), "restored at": state.step, "from": state.restored_from}
    found["restored"] = [full(model.state_dict()), full(optimizer.state_dict())]
    losses, ends = [], []
    for _ in range(steps):
        torch.manual_seed(state.step)
        loss = model(torch.randn(3, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        state.commit()
        wait_for_saver(state)
        losses.append(loss.item())
        ends.append([full(model.state_dict()), full(optimizer.state_dict())])
    dist.barrier()
    dist.destroy_process_group()
    return {**found, "losses": losses, "ends": ends, "end": ends[-1]}


def check(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_the_same_sharding_is_copied(cluster: Cluster) -> None:
    right = check(cluster.run(sharded, "cc", 6))
    before = check(cluster.run(sharded, "aa", 3))
    after = check(cluster.run(sharded, "aa", 3))
    for rank in range(2):
        assert after[rank]["restored at"] == 3
        assert after[rank]["restored"] == before[rank]["end"]
        assert before[rank]["losses"] + after[rank]["losses"] == right[rank]["losses"]


def test_four_ranks_then_three_then_four_continue_with_the_same_state(cluster: Cluster) -> None:
    four = check(cluster.run(sharded, "aabb", 3))
    three = check(cluster.run(sharded, "abb", 3))
    again = check(cluster.run(sharded, "aabb", 3))
    for found, before, at in ((three, four, 3), (again, three, 6)):
        for each in found:
            assert each["restored at"] == at
            assert each["restored"] == before[0]["end"]
    assert {each["from"] for each in three} == {"peer"}


@pytest.mark.long
def test_another_mesh_of_as_many_ranks_and_no_sharding_continue_with_the_same_state(cluster: Cluster) -> None:
    before = check(cluster.run(sharded, "aaaa", 3))
    for nodes, mesh in (("aaaa", (2, 2)), ("aa", (1, 2)), ("a", None)):
        found = check(cluster.run(sharded, nodes, 1, mesh))
        for each in found:
            assert each["restored"] == before[0]["end"]
        before = found


def test_a_lost_shard_is_a_problem(cluster: Cluster) -> None:
    check(cluster.run(sharded, "ab", 3))
    cluster.lose("b")
    assert [each["is restored"] for each in check(cluster.run(sharded, "ab", 1))] == [False, False]


def test_the_first_commit_after_another_mesh_leaves_the_restored_one(cluster: Cluster) -> None:
    check(cluster.run(sharded, "aa", 3))
    check(cluster.run(sharded, "aa", 1, (1, 2)))
    assert commits(cluster.nodes["a"]) == [3, 3, 4, 4], "if a rank dies in commit 4, the others must have 3"
