"""Restores when shards are on other nodes, or of another number of ranks."""

import logging
import os
import pickle
import random
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from ripstop import train
from ripstop.commit_memory import CONTENT_OFFSET, CommitHeader, CommitId
from ripstop.train import rank_store, replication
from ripstop.train.commit_buffer import CommitBuffer
from ripstop.train.rank_store import RankStore
from ripstop.train.transfer import TransferGiver
from tests.train.cluster import KEY, Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


def rank() -> int:
    return int(os.environ["RANK"])


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        logging.getLogger("ripstop.train").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def replicated(steps: int, own: bool = False, portion: int = 2_000_000) -> dict[str, Any]:
    """Steps whose tensors are equal on all ranks; with `own`, one value is not."""
    replication.PORTION_BYTES = portion
    messages = Messages()
    random.seed(rank())
    weights = torch.full((300_000,), -1.0)
    state = train.State(weights=weights, step=0, **({"best": rank()} if own else {}))
    state.restore()
    found = {"restored": state.step, "from": state.restored_from, "weight": float(state.weights[-1])}
    store = RankStore("steps", rank(), int(os.environ["WORLD_SIZE"]), bytes.fromhex(KEY))
    draws = []
    for _ in range(steps):
        store.wait_for_all(f"collective {state.step}")
        draws.append(random.random())
        state.step += 1
        state.weights.fill_(state.step)
        if own:
            state.best = rank()
        state.commit()
        if thread := state._comparison._thread:  # the digest is ready at the next commit
            thread.join()
    store.wait_for_all("end")
    return {**found, "step": state.step, "draws": draws, "messages": messages.found}


def column(results: list[Any], key: str) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result[key] for result in results]


def test_ranks_that_change_nodes_receive_their_own_shards(cluster: Cluster) -> None:
    right = column(cluster.run(replicated, "cc", 8, True), "draws")
    first = cluster.run(replicated, "ab", 5, True)
    second = cluster.run(replicated, "ba", 3, True)
    assert column(second, "restored") == [5, 5]
    assert column(second, "from") == ["peer", "peer"]
    draws = [[*a, *b] for a, b in zip(column(first, "draws"), column(second, "draws"), strict=True)]
    assert draws == right


def test_a_node_that_comes_back_empty_receives_replicated_state(cluster: Cluster) -> None:
    cluster.run(replicated, "aab", 5)
    cluster.lose("b")
    found = cluster.run(replicated, "aab", 5)
    assert column(found, "restored") == [5, 5, 5]
    assert column(found, "weight") == [5.0, 5.0, 5.0]
    assert column(found, "from") == ["memory", "memory", "peer"]
    cluster.lose("a")
    found = cluster.run(replicated, "ccb", 1)
    assert column(found, "restored") == [10, 10, 10]
    assert column(found, "from") == ["peer", "memory", "memory"]  # once to node c


def test_replicated_state_continues_with_fewer_and_more_ranks(cluster: Cluster) -> None:
    cluster.run(replicated, "ab", 4)
    assert column(cluster.run(replicated, "b", 4), "restored") == [4]
    assert column(cluster.run(replicated, "bac", 4), "restored") == [8, 8, 8]


def test_ranks_that_differ_start_from_the_beginning_without_a_shard(cluster: Cluster) -> None:
    cluster.run(replicated, "ab", 4, True)
    cluster.lose("b")
    found = cluster.run(replicated, "ab", 4, True)
    assert column(found, "restored") == [0, 0]
    problem = "commit 4 lacks the shards of ranks 1, and the state is not known to be equal on all ranks"
    assert column(found, "messages") == [[f"state 'state' starts from the beginning: {problem}"], []]


@pytest.mark.long
def test_ranks_that_differ_start_from_the_beginning_if_their_number_changes(cluster: Cluster) -> None:
    cluster.run(replicated, "aa", 4, True)
    found = cluster.run(replicated, "aaa", 4, True)
    assert column(found, "restored") == [0, 0, 0]
    assert "these values differ between ranks: best" in column(found, "messages")[0][0]


@pytest.mark.parametrize(("steps", "restored"), [(3, 0), (6, 6)])
def test_a_large_state_is_compared_over_several_commits(cluster: Cluster, steps: int, restored: int) -> None:
    cluster.run(replicated, "ab", steps, False, 400_000)  # 1.2 MB: portions of commits 1 to 3
    cluster.lose("b")
    assert column(cluster.run(replicated, "ab", 1), "restored") == [restored, restored]


@pytest.mark.long
def test_state_that_was_equal_before_a_restore_is_known_to_be_equal_after_it(cluster: Cluster) -> None:
    cluster.run(replicated, "ab", 4)
    cluster.run(replicated, "ab", 1)
    cluster.lose("a")
    assert column(cluster.run(replicated, "ab", 1), "restored") == [5, 5]


@pytest.mark.long
def test_shards_of_other_nodes_are_freed_after_newer_commits(cluster: Cluster) -> None:
    cluster.run(replicated, "aa", 3)
    cluster.run(replicated, "ab", 1)
    assert {rank for rank, _ in cluster.nodes["a"].memory._buffers} == {0, 1}
    cluster.run(replicated, "ab", 3)
    assert {rank for rank, _ in cluster.nodes["a"].memory._buffers} == {0}


def killed_giver(mode: str) -> Any:
    """Rank 0 is killed when it has sent a part of its shard."""
    from ripstop.train import transfer

    if mode == "kill" and rank() == 0:
        right = transfer._send_transferred_part

        def send(connection: Any, buffer: Any, offset: int, size: int, **more: Any) -> bytes:
            digest = right(connection, buffer, offset, min(size, 500_000), **more)
            if size > 500_000:
                os.kill(os.getpid(), signal.SIGKILL)
            return digest

        transfer._send_transferred_part = send
    return replicated(4)


@pytest.mark.long
def test_a_giver_that_is_killed_leaves_no_partial_restore(cluster: Cluster) -> None:
    cluster.run(replicated, "ab", 4)
    cluster.lose("b")
    killed, failed = cluster.run(killed_giver, "ab", "kill")
    assert killed == "killed"
    assert isinstance(failed, RuntimeError)
    assert "the shard of rank 0 does not arrive" in str(failed)
    assert not cluster.nodes["b"].memory._buffers
    assert column(cluster.run(killed_giver, "ab", ""), "restored") == [4, 4]


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def attacked(key: str, mark: str) -> str:
    """Rank 0 plays someone who reaches the round's store; rank 1 restores what it decides.  Rank 1's error."""
    if rank() == 1:
        state = train.State(step=0)
        try:
            state.restore()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            RankStore("end", 1, 2, b"").publish("end", None)
    data = pickle.dumps(Evil(mark))
    buffer = CommitBuffer.create(CONTENT_OFFSET + len(data))
    buffer.write_pickle(CONTENT_OFFSET, data)
    buffer.complete(CommitHeader(crc32(b"test"), CommitId(1, 1), 1, 2, CONTENT_OFFSET, len(data), crc32(data)))
    store = RankStore("state", 0, 2, bytes.fromhex(key))
    with TransferGiver(store.transfer_key("restore 1"), {1: buffer}, 2) as giver:
        transfer = {"shards": [0, 1], "transfers": [[0, 1, 1]], "holders": [], "skipped": "", "disk": [[], 0, 0.0]}
        store.publish("restore 1 giver 0", [giver.host, giver.port])
        store.publish("restore 1 received", "")
        store.publish("restore 1 0", {"commit": [1, 1, 2], **transfer})
        RankStore("end", 0, 2, b"").get("end")
    return ""


@pytest.mark.parametrize("key", ["", "00" * 32])
def test_access_to_the_store_alone_cannot_make_a_worker_unpickle(cluster: Cluster, tmp_path: Path, key: str) -> None:
    mark = tmp_path / "unpickled"
    _, error = cluster.run(attacked, "ab", key, str(mark))
    assert error.startswith("RuntimeError: train.State accepts only values of this round's workers: 'restore 1 0'")
    assert not mark.exists()


def test_the_attack_works_with_the_key(cluster: Cluster, tmp_path: Path) -> None:
    """So the test above tests what it says."""
    mark = tmp_path / "unpickled"
    _, error = cluster.run(attacked, "ab", KEY, str(mark))
    assert mark.exists(), error


def opened(key: str) -> list[Any]:
    """Values that others have put into the store: what a rank makes of them."""
    own, other = RankStore("state", 0, 2, bytes.fromhex(KEY)), RankStore("state", 0, 2, bytes.fromhex(key))
    other.publish("a", {"x": 1})
    raw = own._connected()
    raw.set("ripstop/state/b", raw.get("ripstop/state/a"))  # a value for another topic
    raw.set("ripstop/state/c", b"{}")
    RankStore("ema", 0, 2, bytes.fromhex(KEY)).publish("d", 1)
    raw.set("ripstop/state/d", raw.get("ripstop/ema/d"))  # of another State
    found = []
    for topic in "abcd":
        try:
            found.append(own.get(topic))
        except RuntimeError as error:
            found.append(str(error).split(":")[0])
    other.propose("p", 5)
    try:
        found.append(own.propose("p", 6))
    except RuntimeError as error:
        found.append(str(error).split(":")[0])
    return found


def test_a_value_is_accepted_with_the_mac_of_its_topic_only(cluster: Cluster) -> None:
    no = "train.State accepts only values of this round's workers"
    assert cluster.run(opened, "a", KEY) == [[{"x": 1}, no, no, no, 5]]
    assert cluster.run(opened, "a", "") == [[no, no, no, no, no]]


def waiting_in_vain() -> str:
    """Rank 2 of three gives no value."""
    rank_store.TIMEOUT = timedelta(seconds=1)
    RankStore("state", 1, 3, b"").publish("topic/1", None)
    try:
        RankStore("state", 0, 3, b"").decide("topic", None, lambda _: None)
    except RuntimeError as error:
        return str(error).split(" (")[0]
    return ""


def test_the_error_names_the_rank_that_gave_no_value(cluster: Cluster) -> None:
    assert cluster.run(waiting_in_vain, "a") == [
        "train.State needs every rank of the round: topic/2 did not arrive at rank 0"
    ]


# ranks without an agent -----------------------------------------------------------------------------------------------


def without_agent(absent: int, variable: str | None) -> dict[str, Any]:
    """One rank does not reach the memory of its agent."""
    if rank() == absent and variable is None:
        del os.environ["RIPSTOP_SOCKET"]
    elif rank() == absent:
        os.environ["RIPSTOP_SOCKET"] = variable
    messages = Messages()
    state = train.State(step=0)
    restored = state.restore()
    store = RankStore("steps", rank(), int(os.environ["WORLD_SIZE"]), bytes.fromhex(KEY))
    store.wait_for_all("restored")
    return {"restored": restored, "commit": state.commit(), "timed": state.commit("10s"), "messages": messages.found}


@pytest.mark.parametrize("variable", [None, "/nowhere/agent"])
@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_rank_without_memory_is_known_to_all_at_once(cluster: Cluster, absent: int, variable: str | None) -> None:
    found = cluster.run(without_agent, "abc", absent, variable)
    assert column(found, "restored") == column(found, "commit") == column(found, "timed") == [False] * 3
    for number, messages in enumerate(column(found, "messages")):
        if number != absent:
            assert messages[0].startswith(f"state 'state' is not kept: rank {absent}: "), messages


@pytest.mark.long
@pytest.mark.parametrize("absent", [0, 1])
def test_commits_are_not_lost_because_a_rank_has_no_memory(cluster: Cluster, absent: int) -> None:
    cluster.run(replicated, "ab", 4)
    found = cluster.start(without_agent, "ab", absent, None)
    other = found.workers[1 - absent]
    assert other[1].poll(100)
    error = other[1].recv()[1]
    assert isinstance(error, RuntimeError)
    assert f"has commits, and all ranks must be able to restore them; rank {absent}: its agent has" in str(error)
    assert column(cluster.run(replicated, "ab", 1), "restored") == [4, 4]
