"""Commits on disk: what the saver writes, what plain DCP reads, what `restore` does with damaged or foreign files."""

import asyncio
import errno
import gc
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ripstop import commit_memory, train
from ripstop.commit_memory import ROUNDS_OF_A_JOB, STAMP_OFFSET, CommitId, commit_id_round
from ripstop.model.config import Checkpoints
from ripstop.train import checkpoint_files, intervals, saver
from ripstop.train import state as state_module
from ripstop.train.agent_memory import AgentMemory
from ripstop.workers.saver_process import SaverProcess, SaverProcesses
from tests.train.conftest import RUN_ID, Agent, SaverInAThread
from tests.train.test_state import equal, network, step

NEXT_JOB = 9 * ROUNDS_OF_A_JOB + 9  # a round of a later job


@pytest.fixture(autouse=True)
def _run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", RUN_ID)
    yield
    state_module._names.clear()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def saving(agent: Agent, directory: Path) -> SaverInAThread:
    found = SaverInAThread(directory)
    agent.memory._saver = found
    return found


def forget_memory(agent: Agent) -> None:
    """A new job: the agent's memory is lost."""
    for slots in agent.memory._buffers.values():
        for fd in slots.values():
            os.close(fd)
    agent.memory._buffers.clear()
    gc.collect()


def commit(saving: SaverInAThread, *, count: int = 1, **values: Any) -> None:
    """Restore, then commit until `count` checkpoints are saved, and end."""
    state = train.State(**values)
    state.restore()
    wanted = len(saving.results) + count
    for _ in range(1000):
        assert state.commit()
        while saving._saves:
            time.sleep(0.001)
        if len(saving.results) >= wanted:
            break
        if "step" in values:
            state.step += 1
    assert len(saving.results) == wanted
    del state
    gc.collect()


def saved(directory: Path, name: str = "state") -> list[Path]:
    folder = checkpoint_files.checkpoint_folder(str(directory), name)
    return [each.path for each in checkpoint_files.checkpoints(folder)]


def test_a_new_job_continues_from_disk_with_every_bit(agent: Agent, saving: SaverInAThread, directory: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    torch.manual_seed(7)
    commit(saving, model=model, optimizer=optimizer, nested={"a": [1, (torch.ones(2), {3: "x"})], "empty": {}}, step=1)
    expected = torch.rand(4)
    assert "path" in saving.results[0], saving.results
    forget_memory(agent)
    new = network()
    new_optimizer = torch.optim.AdamW(new.parameters())
    torch.manual_seed(8)
    state = train.State(model=new, optimizer=new_optimizer, nested=None, step=0)
    assert state.restore()
    assert (state.restored_from, state.step) == ("disk", state.commits)
    assert equal(dict(model.state_dict()), dict(new.state_dict()))
    assert equal(optimizer.state_dict(), new_optimizer.state_dict())
    assert equal(state.nested, {"a": [1, (torch.ones(2), {3: "x"})], "empty": {}})
    assert equal(torch.rand(4), expected)


PLAIN = """
import sys
sys.modules["ripstop"] = None  # an import of it fails
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
path, expected, out = sys.argv[1:]
expected = torch.load(expected, weights_only=False)
model = {key: torch.zeros_like(value) for key, value in expected["model"].items()}
loaded = {"model": model, "step": 0}
dcp.load(loaded, storage_reader=dcp.FileSystemReader(path), no_dist=True)
assert loaded["step"] == expected["step"], loaded["step"]
for key, value in expected["model"].items():
    assert torch.equal(loaded["model"][key], value), key
dcp_to_torch_save(path, out)
found = torch.load(out, weights_only=False)
for number, moments in expected["optimizer"]["state"].items():
    for key, value in moments.items():
        assert torch.equal(found["optimizer"]["state"][str(number)][key], value), key
assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
assert found["tied"][0].equal(found["tied"][1])
print("equal")
"""


def test_plain_dcp_reads_a_checkpoint_without_ripstop(
    agent: Agent, saving: SaverInAThread, directory: Path, tmp_path: Path
) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    tied = torch.randn(5)
    commit(saving, model=model, optimizer=optimizer, tied=[tied, tied], step=1)
    (path,) = saved(directory)
    number = json.loads((path / "ripstop.json").read_text().split("\n")[0])["number"]
    expected = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}
    torch.save(expected, tmp_path / "expected.pt")
    args = [str(path), str(tmp_path / "expected.pt"), str(tmp_path / "out.pt")]
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, *args], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "equal\n", done.stderr


def test_the_newer_of_memory_and_disk_is_restored(agent: Agent, saving: SaverInAThread, directory: Path) -> None:
    commit(saving, step=1)
    on_disk = saved(directory)[0]
    state = train.State(step=0)
    assert state.restore()
    assert state.restored_from == "memory"  # it is the same commit
    state.step = 50
    agent.memory._saver = None
    assert state.commit()
    del state
    gc.collect()
    agent.memory._saver = saving
    state = train.State(step=0)
    assert state.restore()
    assert (state.restored_from, state.step) == ("memory", 50)
    del state
    gc.collect()
    newer = on_disk.with_name(checkpoint_files.checkpoint_name(NEXT_JOB, 3))
    shutil.copytree(on_disk, newer)
    text = json.loads((newer / "ripstop.json").read_text().split("\n")[0])
    (newer / "ripstop.json").unlink()
    checkpoint_files.write_checkpoint_description(newer, {**text, "round": NEXT_JOB, "number": 3})
    state = train.State(step=0)
    assert state.restore()
    assert (state.restored_from, state.commits) == ("disk", 3)
    state.step = 51
    agent.memory._saver = None
    assert state.commit()
    del state
    gc.collect()
    agent.memory._saver = saving  # what follows a restored checkpoint is newer than it, whatever the job's round is
    state = train.State(step=0)
    assert state.restore()
    assert (state.restored_from, state.step, state.commits) == ("memory", 51, 4)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "rank-0.pickle", "ripstop.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "empty"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_restored(
    agent: Agent, saving: SaverInAThread, directory: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    commit(saving, count=2, value=torch.arange(1000.0), step=1)
    forget_memory(agent)
    newest, before = saved(directory)
    file = newest / name
    data = bytearray(file.read_bytes())
    match damage:
        case "cut":
            file.write_bytes(data[: len(data) * 2 // 3])
        case "flipped":
            data[len(data) // 2] ^= 4
            file.write_bytes(data)
        case "missing":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
    state = train.State(value=None, step=0)
    with caplog.at_level(logging.WARNING, "ripstop.train"):
        assert state.restore()
    assert state.restored_from == "disk"
    assert state.commits == json.loads((before / "ripstop.json").read_text().split("\n")[0])["number"]
    assert equal(state.value, torch.arange(1000.0))
    assert any(newest.name in record.message and name in record.message for record in caplog.records), caplog.text


def test_without_a_usable_checkpoint_training_starts_from_the_beginning(
    agent: Agent, saving: SaverInAThread, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit(saving, step=1)
    forget_memory(agent)
    (path,) = saved(directory)
    (path / "__0_0.distcp").unlink()
    state = train.State(step=0)
    assert not state.restore()
    assert path.name in caplog.text


def test_the_newest_two_stay_and_foreign_files_are_left_alone(
    agent: Agent, saving: SaverInAThread, directory: Path
) -> None:
    folder = checkpoint_files.checkpoint_folder(str(directory), "state")
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    mine = folder / checkpoint_files.checkpoint_name(0, 1)  # looks like ours, and has another file
    mine.mkdir()
    (mine / "weights.pt").write_text("mine")
    link = folder / checkpoint_files.checkpoint_name(0, 2)
    link.symlink_to(mine)
    left = folder / checkpoint_files.unfinished_checkpoint_name(0, 9, is_shared=False)  # of a killed saver
    left.mkdir()
    (left / "__0_0.distcp").write_text("part")
    commit(saving, count=4, step=1)
    numbers = [result["path"] for result in saving.results]
    assert [str(path) for path in saved(directory) if path not in (mine, link)] == numbers[:1:-1]
    assert (mine / "weights.pt").read_text() == "mine"
    assert link.is_symlink()
    assert (folder / "notes.txt").exists()
    assert not left.exists()


def test_a_buffer_that_changes_while_it_is_read_is_not_saved(
    agent: Agent, saving: SaverInAThread, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = checkpoint_files.file_table

    def table_and_change(path: Path, names: set[str]) -> dict[str, list[int]]:
        memory = AgentMemory(f"{agent.path}-state")
        for fd in memory.get("state").values():
            os.pwrite(fd, bytes(8), STAMP_OFFSET)
            os.close(fd)
        return table(path, names)

    monkeypatch.setattr(checkpoint_files, "file_table", table_and_change)
    commit(saving, step=1)
    assert "has changed meanwhile" in saving.results[0]["problem"]
    folder = checkpoint_files.checkpoint_folder(str(directory), "state")
    assert list(folder.iterdir()) == []


def test_buffers_that_are_being_saved_are_not_overwritten(agent: Agent, saving: SaverInAThread) -> None:
    state = train.State(value=torch.zeros(100), step=0)
    state.restore()
    held: list[SaverProcess] = []

    async def hold(save: SaverProcess) -> None:
        held.append(save)

    saving._start = hold  # type: ignore[method-assign]
    while not held:
        state.step += 1
        state.commit()
    (slot, fd), number = held[0].buffers[0], held[0].commit[1]  # later ones may be committed before it starts
    assert saving.slots_in_use(0, "state") == [slot]
    buffer = saver.CommitBuffer(os.dup(fd))
    for _ in range(10):
        state.step += 1
        state.commit()
        header = buffer.header(state._run)
        assert header is not None and header.id.number == number
    saving._forget(held[0])
    for _ in range(3):
        state.step += 1
        state.commit()
    assert buffer.header(state._run) != header


def test_neither_a_saved_commit_nor_one_that_is_copied_is_overwritten(agent: Agent, saving: SaverInAThread) -> None:
    state = train.State(value=torch.zeros(100), step=0)
    state.restore()
    saved: list[int] = []

    async def hold(save: SaverProcess) -> None:
        saved.append(save.commit[1])

    saving._start = hold  # type: ignore[method-assign]
    state.commit()
    agent.call(agent.memory.hold, "state", [CommitId(agent.round, 1)], None)
    for _ in range(20):
        state.commit()
    kept = {header.id.number for buffer in state._buffers.values() if (header := buffer.header(state._run))}
    assert saved and saved[0] != 1
    assert kept == {1, saved[0], 20, 21}


class OfThisModule:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, state: Any) -> None:
        if os.environ.get("IS_SAVER"):
            raise ImportError("no such class here")
        self.__dict__ = state


def test_a_value_that_only_the_script_can_read_is_saved_and_restored(
    agent: Agent, saving: SaverInAThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IS_SAVER", "1")
    commit(saving, mine=OfThisModule(torch.arange(9.0)), step=1)
    assert "no such class here" in saving.results[0]["opaque"][0]
    monkeypatch.delenv("IS_SAVER")
    forget_memory(agent)
    state = train.State(mine=None, step=0)
    assert state.restore()
    assert state.restored_from == "disk"
    assert equal(state.mine.tensor, torch.arange(9.0))


def test_two_states_have_their_own_checkpoints(agent: Agent, saving: SaverInAThread, directory: Path) -> None:
    states = {name: train.State(name, value=name) for name in ("state", "../e m/a")}
    for state in states.values():
        state.restore()
    while len(saving.results) < 4:
        for state in states.values():
            state.commit()
    while saving._saves:
        time.sleep(0.001)
    names = list(states)
    del states, state
    gc.collect()
    forget_memory(agent)
    assert {path.parent.parent for name in names for path in saved(directory, name)} == {directory}
    for name in names:
        found = train.State(name, value=None)
        assert found.restore()
        assert (found.value, found.restored_from) == (name, "disk")


# the disk -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_costs_a_checkpoint_and_no_more(agent: Agent, small_disk: Path) -> None:
    saving = SaverInAThread(small_disk)
    agent.memory._saver = saving
    commit(saving, value=torch.zeros(10_000), step=1)
    assert "path" in saving.results[0]
    (good,) = saved(small_disk)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(320_000))
    commit(saving, value=torch.zeros(10_000), step=1)
    assert "bytes free" in saving.results[1]["problem"], saving.results  # seen before it writes
    filler.write_bytes(bytes(300_000))
    commit(saving, value=torch.zeros(10_000), step=1)
    assert "needs" in saving.results[2]["problem"], saving.results
    assert saved(small_disk) == [good]
    assert {path.name for path in good.parent.iterdir()} == {good.name}
    filler.unlink()
    commit(saving, value=torch.zeros(10_000), step=1)
    assert "path" in saving.results[3], saving.results


def test_a_read_only_disk_is_a_named_problem(agent: Agent, small_disk: Path) -> None:
    saving = SaverInAThread(small_disk)
    agent.memory._saver = saving
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    commit(saving, step=1)
    assert "Read-only file system" in saving.results[0]["problem"]


# too little memory ----------------------------------------------------------------------------------------------------


def test_without_memory_commits_go_to_disk_and_come_back_from_there(
    agent: Agent, saving: SaverInAThread, directory: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(commit_memory, "available_memory", lambda: 0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    commits = []
    state = train.State(model=model, optimizer=optimizer, step=0)
    state.restore()
    for _ in range(100):
        state.step += 1
        torch.manual_seed(state.step)
        commits.append(state.commit())
        while saving._saves:
            time.sleep(0.001)
    assert len(caplog.messages) == 1
    assert "is kept on disk only from now on, about every 1e-09 s: a buffer needs " in caplog.text
    assert "it needs 2 buffers of" in caplog.text
    assert commits.count(True) == len(saving.results) > 2
    assert all("path" in result for result in saving.results)
    assert agent.memory._buffers == {}
    number = max(number for number, is_kept in enumerate(commits, 1) if is_kept)
    del state
    gc.collect()
    new = network()
    new_optimizer = torch.optim.AdamW(new.parameters())
    state = train.State(model=new, optimizer=new_optimizer, step=0)
    assert state.restore()
    assert (state.restored_from, state.step, state.commits) == ("disk", number, number)
    assert equal(dict(model.state_dict()), dict(new.state_dict()))
    assert equal(optimizer.state_dict(), new_optimizer.state_dict())
    torch.rand(1)
    found = torch.get_rng_state()
    torch.manual_seed(number)
    torch.rand(1)
    assert equal(torch.get_rng_state(), found)
    folder = checkpoint_files.checkpoint_folder(str(directory), "state")
    assert {path.name[:7] for path in folder.iterdir()} == {"commit-"}


def test_a_rank_without_memory_keeps_the_pace_of_those_that_have_it(agent: Agent, saving: SaverInAThread) -> None:
    """Its commits have the same numbers, and it is asked for the same checkpoints."""
    state = train.State(value=torch.zeros(1000), step=0)
    state.restore()
    for _ in range(5):
        state.commit()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_memory, "available_memory", lambda: 0)
        state.value = torch.zeros(100_000)  # needs another buffer
        for _ in range(50):
            state.commit()
            while saving._saves:
                time.sleep(0.001)
    assert state.commits == 55
    assert int(saved(saving.config.directory)[0].name.split("-")[2]) > 5


# kills ----------------------------------------------------------------------------------------------------------------

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["ripstop.train.saver"])


def _save(settings: dict[str, Any], buffer: str, pipe: Any) -> None:
    pipe.send("ready")
    pipe.recv()
    pipe.send(saver.save(settings, [os.open(buffer, os.O_RDWR)]))


@pytest.mark.long
def test_a_saver_killed_at_any_moment_leaves_the_last_checkpoint_whole(
    agent: Agent, saving: SaverInAThread, directory: Path
) -> None:
    values: dict[str, Any] = {"value": [torch.full((64, 1024), float(number)) for number in range(64)], "step": 1}
    commit(saving, **values)
    (good,) = saved(directory)
    agent.memory._saver = None
    state = train.State(**values)
    state.restore()
    state.commit()
    assert state._newest is not None
    buffer, header = state._newest
    settings = {
        "directory": str(directory), "keep": 2, "run_id": RUN_ID, "name": "state", "ranks": [0], "world_size": 1,
        "round": header.id.round, "number": header.id.number,
    }  # fmt: skip

    def start() -> tuple[Any, Any]:
        ours, theirs = _processes.Pipe()
        process = _processes.Process(target=_save, args=(settings, f"/proc/{os.getpid()}/fd/{buffer.fd}", theirs))
        process.start()
        theirs.close()
        assert ours.recv() == "ready"
        ours.send("go")
        return process, ours

    process, pipe = start()
    began = time.monotonic()
    assert "path" in pipe.recv()
    took = time.monotonic() - began
    process.join()
    newest = saved(directory)[0]
    kills = 0
    for number in range(12):
        checkpoint_files.remove_checkpoint(newest)
        process, _ = start()
        time.sleep(took * number / 11)  # any moment is right
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        for path in saved(directory):
            checkpoint_files.verify_checkpoint_files(path, checkpoint_files.read_checkpoint_description(path)["files"])
        assert saved(directory)[-1] == good
    assert kills
    checkpoint_files.remove_checkpoint(newest)
    process, pipe = start()
    assert "path" in pipe.recv()
    process.join()
    assert saved(directory) == [newest, good]
    assert {path.name for path in good.parent.iterdir()} == {newest.name, good.name}


@given(st.floats(0.001, 1e4), st.floats(1e-5, 1e3))
def test_a_save_comes_about_once_in_an_interval(interval: float, step: float) -> None:
    now, commits, last, since = 0.0, 1, 0, 0
    due = interval
    for _ in range(10_000):
        steps, is_saved = intervals.next_save_interval(due - now, max(1, commits - last), max(1, commits - last) * step)
        last, commits, now, since = commits, commits + steps, now + steps * step, since + steps
        if is_saved:
            break
    assert is_saved
    assert interval - step * 1.01 <= now + step and now <= max(interval, step) + step * 1.01


@given(st.integers(1, 99), st.integers(0, 10 * ROUNDS_OF_A_JOB))
def test_commits_of_a_job_have_its_round_and_are_newer_than_all_before(job_round: int, newest: int) -> None:
    found = commit_id_round(job_round, newest)
    assert found > newest
    assert CommitId(found, 1).in_job() == CommitId(job_round, 1)
    assert found - ROUNDS_OF_A_JOB <= newest, "the next such round"


class SlowSaver(SaverProcesses):
    """Each save ends when the test lets it."""

    def __init__(self, directory: Path) -> None:
        tasks: set[Any] = set()
        config = Checkpoints(directory, interval=3600.0)
        super().__init__(config, RUN_ID, None, {}, None, lambda task: tasks.add(asyncio.ensure_future(task)))  # type: ignore[arg-type]
        self.saved: list[tuple[int, int]] = []
        self.may_end = asyncio.Semaphore(0)

    async def _start(self, save: SaverProcess) -> None:
        await self.may_end.acquire()
        self.saved.append(save.commit)
        self._forget(save)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_final_commit_of_a_round_is_saved_after_the_one_that_is_being_saved(directory: Path) -> None:
    async def scenario() -> list[tuple[int, int]]:
        saver = SlowSaver(directory)
        fd = os.memfd_create("buffer")
        before = open_files()
        assert saver.request(0, range(1), 1, "state", 0, (1, 5), fd)
        saver.save_last("state", (1, 8), 1, {0: (1, fd)})
        assert saver.slots_in_use(0, "state") == [0, 1]
        saver.save_last("state", (1, 9), 1, {0: (1, fd)})  # of the next round: the newest is what counts
        closing = asyncio.ensure_future(saver.close(60.0))
        saver.may_end.release()
        saver.may_end.release()
        await closing
        assert open_files() == before
        os.close(fd)
        return saver.saved

    assert asyncio.run(scenario()) == [(1, 5), (1, 9)]


def test_the_final_commit_replaces_a_save_for_which_not_all_workers_have_asked(directory: Path) -> None:
    async def scenario() -> list[tuple[int, int]]:
        saver = SlowSaver(directory)
        fd = os.memfd_create("buffer")
        before = open_files()
        assert saver.request(0, range(2), 2, "state", 0, (1, 5), fd)
        saver.save_last("state", (1, 8), 2, {0: (1, fd), 1: (1, fd)})
        saver.may_end.release()
        await saver.close(60.0)
        assert open_files() == before
        os.close(fd)
        return saver.saved

    assert asyncio.run(scenario()) == [(1, 8)]


def test_a_final_commit_that_is_not_saved_is_logged(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dup, left = os.dup, [1]

    def dup_once(fd: int) -> int:
        if not left:
            raise OSError(errno.EMFILE, "Too many open files")
        left.pop()
        return dup(fd)

    async def scenario() -> None:
        saver = SlowSaver(directory)
        fd = os.memfd_create("buffer")
        assert saver.request(0, range(1), 1, "state", 0, (1, 5), fd)
        saver.save_last("state", (1, 6), 1, {0: (1, fd)})
        saver.save_last("state", (1, 7), 1, {0: (1, fd)})
        before = open_files()
        saver.save_last("state", (1, 8), 251, dict.fromkeys(range(251), (1, fd)))
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", dup_once)
            saver.save_last("state", (1, 9), 2, {0: (1, fd), 1: (1, fd)})
        assert open_files() == before
        saver.may_end.release()
        saver.may_end.release()
        await saver.close(60.0)
        saver.save_last("state", (1, 10), 1, {0: (1, fd)})
        os.close(fd)

    asyncio.run(scenario())
    assert [text.partition(" is not saved: ")[::2] for text in caplog.messages] == [
        ("state 'state': commit 6", "commit 7 takes its place"),
        ("state 'state': commit 8", "this node has 251 workers; a saver can take 250"),
        ("state 'state': commit 9", "the agent cannot keep its buffers: Too many open files; raise `ulimit -n`"),
        ("state 'state': commit 10", "the agent is ending"),
    ]


def test_savers_that_end_while_another_is_killed_are_no_problem(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> list[int]:
        saver = SlowSaver(directory)
        fd, killed, loop = os.memfd_create("buffer"), list[int](), asyncio.get_running_loop()
        for name in ("a", "b"):
            saver.request(0, range(1), 1, name, 0, (1, 5), fd)
        saves = [saver._saves[name] for name in ("a", "b")]
        saves[0].pid, saves[1].pid = 2**22 + 1, 2**22 + 2  # above all pids

        def end_all() -> None:
            for save in saves:
                saver._forget(save)

        def kill(pid: int, signum: int) -> None:
            if not saver._saves:
                raise ProcessLookupError
            killed.append(pid)
            loop.call_soon(end_all)

        monkeypatch.setattr(os, "kill", kill)
        await saver.close(0.0)
        os.close(fd)
        return killed

    assert asyncio.run(scenario()) == [2**22 + 1, 2**22 + 2]
