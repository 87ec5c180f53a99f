"""What `train.State` keeps and restores, in one process with the agent's memory; and what it says to bad input."""

import gc
import logging
import os
import random
import resource
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ripstop import commit_memory, train
from ripstop.train import content, reports
from ripstop.train import state as state_module
from ripstop.train.commit_buffer import CommitBuffer
from ripstop.workers.report_socket import CommitReport, RestoreReport, parse_report_datagram
from tests.train.conftest import Agent


@pytest.fixture(autouse=True)
def _no_state_of_the_last_test() -> Iterator[None]:
    """An exception that a test caught keeps the State that raised it."""
    yield
    state_module._names.clear()


def equal(a: Any, b: Any) -> bool:
    """To the last bit."""
    if isinstance(a, torch.Tensor):
        same = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        return same and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()


def commit_once(**values: Any) -> None:
    """Commit these values as a worker that then ends."""
    state = train.State(**values)
    state.restore()
    assert state.commit()
    del state
    gc.collect()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_new_model_and_a_new_optimizer_continue_with_every_bit(agent: Agent, make: Any) -> None:
    model = network()
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step(model, optimizer)
    schedule.step()
    commit_once(model=model, optimizer=optimizer, schedule=schedule, scaler=scaler, step=1)
    new = network()
    new_optimizer = make(new.parameters())
    new_schedule = torch.optim.lr_scheduler.StepLR(new_optimizer, 1)
    new_scaler = torch.amp.GradScaler("cpu")
    state = train.State(model=new, optimizer=new_optimizer, schedule=new_schedule, scaler=new_scaler, step=0)
    assert state.restore()
    assert (state.step, state.commits, state.restored_from) == (1, 1, "memory")
    for old, made in ((model, new), (optimizer, new_optimizer), (schedule, new_schedule), (scaler, new_scaler)):
        assert equal(dict(old.state_dict()), dict(made.state_dict()))
    step(new, new_optimizer)  # it trains on


def test_the_first_start_restores_nothing_and_changes_nothing(agent: Agent) -> None:
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = train.State(model=model, step=7)
    assert not state.restore()
    assert (state.step, state.commits, state.restored_from) == (7, 0, None)
    assert equal(dict(model.state_dict()), before)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5, dtype=torch.bfloat16),
        torch.randn(4, 6)[:, ::2],
        torch.randn(4, 6).t(),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.tensor(True),
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 3),
        torch.arange(7, dtype=torch.uint8),
        torch.randn(8).to(torch.float8_e4m3fn),
        torch.tensor([float("nan"), -0.0, float("inf")]),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_tensors_of_every_kind_come_back(agent: Agent, tensor: torch.Tensor) -> None:
    commit_once(value=tensor, nested={"list": [1, tensor, ("x", tensor)]})
    state = train.State(value=None, nested=None)
    assert state.restore()
    assert equal(state.value, tensor)
    assert equal(state.nested["list"][2][1], tensor)


def test_restored_tensors_are_not_in_the_buffer_that_later_commits_overwrite(agent: Agent) -> None:
    class Assigns(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict(state_dict, strict, assign=True)

        def get_extra_state(self) -> Any:
            return {"history": torch.ones(3)}

        def set_extra_state(self, state: Any) -> None:
            self.history = state["history"]

    model = Assigns(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    commit_once(model=model, optimizer=optimizer, plain=torch.ones(2))
    new = Assigns(4, 4)
    state = train.State(model=new, optimizer=torch.optim.Adam(new.parameters()), plain=None)
    assert state.restore()
    tensors = [*content.snapshot(state._values).tensors, new.history]
    assert len(tensors) > 8
    assert not any(buffer.contains(tensor) for buffer in state._buffers.values() for tensor in tensors)


def test_tied_weights_are_stored_once_and_stay_tied(agent: Agent) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
        model[1].weight = model[0].weight
        return model

    model = tied()
    assert sum(tensor.numel() for tensor in content.snapshot({"model": model}).tensors) == 100 * 100 + 200
    commit_once(model=model)
    new = tied()
    assert train.State(model=new).restore()
    assert new[1].weight is new[0].weight
    assert equal(dict(new.state_dict()), dict(model.state_dict()))


def test_random_states_continue(agent: Agent) -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), float(numpy.random.rand()), torch.randn(3).tolist()

    commit_once(step=1)
    right = draw()
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    assert train.State(step=0).restore()
    assert draw() == right


def test_a_process_rolls_back_to_its_newest_commit(agent: Agent) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    state = train.State(model=model, optimizer=optimizer, step=1)
    state.restore()
    state.commit()
    right = content.snapshot({"model": model, "optimizer": optimizer})
    right = [tensor.clone() for tensor in right.tensors]
    moments = optimizer.state[model[0].weight]["exp_avg"].data_ptr()
    step(model, optimizer)
    state.step = 2
    assert state.restore()
    assert state.step == 1
    assert equal(content.snapshot({"model": model, "optimizer": optimizer}).tensors, right)
    assert optimizer.state[model[0].weight]["exp_avg"].data_ptr() == moments  # no second copy of the state in memory


def test_many_commits_use_two_buffers(agent: Agent) -> None:
    state = train.State(value=torch.zeros(1000), step=0)
    state.restore()
    for number in range(1, 8):
        state.step = number
        assert state.commit()
    assert state.commits == 7
    assert sorted(agent.memory._buffers[0, "state"]) == [0, 1]


@pytest.mark.parametrize("value", [torch.zeros(5000), torch.zeros(10, dtype=torch.float64), "x" * 100_000])
def test_a_value_may_change_its_size_between_commits(agent: Agent, value: Any) -> None:
    state = train.State(value=torch.zeros(10))
    state.restore()
    state.commit()
    state.value = value
    for _ in range(3):
        assert state.commit()
    del state
    gc.collect()
    new = train.State(value=None)
    assert new.restore()
    assert equal(new.value, value)


def test_several_states_are_kept_apart(agent: Agent) -> None:
    for name, value in (("a", 1), ("b", 2)):
        state = train.State(name, value=value)
        state.restore()
        state.commit()
    del state
    gc.collect()
    found = [train.State(name, value=0) for name in "ab"]
    assert all(state.restore() for state in found)
    assert [state.value for state in found] == [1, 2]


def test_a_commit_every_few_steps(agent: Agent) -> None:
    state = train.State(step=0)
    state.restore()
    assert [state.commit(every=3) for _ in range(7)] == [False, False, True, False, False, True, False]
    assert state.commits == 2


def test_a_commit_every_few_seconds(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("ripstop.train.state.time.monotonic", lambda: now)
    state = train.State(step=0)
    state.restore()
    committed = []
    for call in range(1, 200):
        now += 0.5
        if state.commit(every="10s"):
            committed.append(call)
    assert committed[:2] == [1, 2]  # the first ones show how long a step takes
    assert [b - a for a, b in pairwise(committed[4:])] == [20] * (len(committed) - 5)


@pytest.mark.parametrize(("values", "steps"), [({"step": 40}, (41, 42, 41)), ({"other": "x"}, (1, 1, 1))])
def test_commits_and_restores_are_reported_with_the_states_step_or_the_number_of_commits(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], steps: tuple[int, int, int]
) -> None:
    for name, fresh in {"_commits": 0, "_stall": 0.0, "_sizes": {}, "SEND_INTERVAL_S": 0.0}.items():
        monkeypatch.setattr(reports, name, fresh)
    monkeypatch.setattr(reports, "_next_commit_send", 0.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(os.environ["RIPSTOP_SOCKET"])
        listening.settimeout(120)
        state = train.State(**values)
        assert not state.restore()  # not reported
        for every, is_kept in ((None, True), (3, False)):
            if "step" in values:
                state.step += 1
            assert state.commit(every=every) is is_kept
        del state
        gc.collect()
        assert train.State(**values).restore()
        found = [parse_report_datagram(listening.recv(4096)) for _ in range(3)]
    first, second, restored = found
    assert isinstance(first, CommitReport) and isinstance(second, CommitReport) and isinstance(restored, RestoreReport)
    assert (first.step, first.commits) == (steps[0], 1)
    assert first.size > 4096 and first.stall > 0
    assert (second.step, second.commits, second.stall) == (steps[1], 1, first.stall)
    assert (restored.source, restored.step) == ("memory", steps[2])


# bad input ------------------------------------------------------------------------------------------------------------


def test_outside_a_job_a_script_runs_and_the_log_says_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RIPSTOP_SOCKET", raising=False)
    caplog.set_level(logging.INFO)
    state = train.State(step=0)
    assert not state.restore()
    assert [state.commit(), state.commit(every=1), state.commit(every="1s")] == [False] * 3
    assert len(caplog.messages) == 1
    assert "no worker of `ripstop run`" in caplog.text


def test_an_agent_without_memory_is_named_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RIPSTOP_SOCKET", str(tmp_path / "none"))
    state = train.State(step=0)
    assert not state.restore()
    assert not state.commit()
    assert len(caplog.messages) == 1
    assert "No such file" in caplog.text


def test_commit_before_restore_is_an_error(agent: Agent) -> None:
    with pytest.raises(RuntimeError, match=r"call state.restore\(\) in every round"):
        train.State(step=0).commit()


@pytest.mark.parametrize("value", [threading.Lock(), lambda: 0, (n for n in ())])
def test_a_value_that_cannot_be_stored_is_named_when_the_state_is_made(value: Any) -> None:
    with pytest.raises(TypeError, match=r"State\(loader=…\) needs an object with state_dict\(\)"):
        train.State(loader=value)


def test_a_sparse_tensor_is_named_when_the_state_is_made() -> None:
    with pytest.raises(TypeError, match=r"State\(value=…\): a State keeps dense torch.Tensors.*sparse_coo"):
        train.State(value=torch.eye(2).to_sparse())


@pytest.mark.parametrize("name", ["commit", "restore", "commits", "_private"])
def test_names_of_the_state_itself_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="used by State itself"):
        train.State(**{name: 1})


def test_two_states_with_one_name_are_rejected() -> None:
    first = train.State(step=0)
    with pytest.raises(ValueError, match="has a State of this name"):
        train.State(step=0)
    del first
    gc.collect()
    train.State(step=0)


def test_an_attribute_that_is_not_part_of_the_state_is_an_error() -> None:
    state = train.State(step=0)
    with pytest.raises(AttributeError, match=r"State\(stpe=…\)"):
        state.stpe = 1
    with pytest.raises(AttributeError, match="it has step"):
        _ = state.stpe


@pytest.mark.parametrize("every", [0, -1, True, "", "30", "-1s", "1 day", 1.5])
def test_an_invalid_interval_is_an_error(agent: Agent, every: Any) -> None:
    state = train.State(step=0)
    state.restore()
    with pytest.raises(ValueError, match="write a number of steps"):
        state.commit(every=every)


def test_another_model_is_an_error_that_names_the_difference(agent: Agent) -> None:
    commit_once(model=nn.Linear(4, 4), step=1)
    with pytest.raises(RuntimeError, match=r"does not fit model.*size mismatch for weight"):
        train.State(model=nn.Linear(4, 5), step=0).restore()


def test_another_dtype_is_an_error_that_names_it(agent: Agent) -> None:
    commit_once(model=nn.Linear(4, 4), step=1)
    state = train.State(model=nn.Linear(4, 4).bfloat16(), step=0)
    with pytest.raises(RuntimeError, match=r"does not fit model.*weight is torch.bfloat16, and torch.float32 in the"):
        state.restore()
    assert state.step == 0


@pytest.mark.parametrize("kinds", [("sgd", "adamw"), ("adamw", "sgd"), ("adagrad", "rmsprop")], ids="-".join)
def test_another_optimizer_is_an_error_that_names_the_difference(agent: Agent, kinds: tuple[str, str]) -> None:
    model = network()
    optimizer = OPTIMIZERS[kinds[0]](model.parameters())
    step(model, optimizer)
    commit_once(model=model, optimizer=optimizer)
    state = train.State(model=model, optimizer=OPTIMIZERS[kinds[1]](model.parameters()))
    with pytest.raises(RuntimeError, match=r"does not fit optimizer.*has .*, and the commit's optimizer has not"):
        state.restore()


def test_a_schedule_that_is_made_after_the_restore_is_no_other_optimizer(agent: Agent) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # adds to the optimizer's groups
    commit_once(optimizer=optimizer)
    assert train.State(optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).restore()


def test_other_values_are_an_error_that_names_them(agent: Agent) -> None:
    commit_once(model=nn.Linear(4, 4), step=1)
    with pytest.raises(ValueError, match="has model, epoch, its commit has model, step"):
        train.State(model=nn.Linear(4, 4), epoch=0).restore()


def test_too_little_memory_is_named_once_and_training_goes_on(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(commit_memory, "available_memory", lambda: 1_000_000)
    state = train.State(value=torch.zeros(1_000_000))
    state.restore()
    assert [state.commit() for _ in range(3)] == [False] * 3
    assert len(caplog.messages) == 1
    assert "needs 2 buffers of 0.00402 GB" in caplog.text


def test_a_limit_of_the_kernel_is_named_and_training_goes_on(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    state = train.State(value=torch.zeros(1_000_000))
    state.restore()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        assert [state.commit() for _ in range(3)] == [False] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caplog.messages) == 1
    assert "GB: File too large; it needs 2 buffers of 0.00402 GB" in caplog.text


def corrupt(agent: Agent, slot: int, offset: int) -> None:
    fd = agent.memory._buffers[0, "state"][slot]
    byte = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte[0] ^ 1]), offset)


@pytest.mark.parametrize("where", ["header", "stamp", "pickle"])
def test_a_corrupted_buffer_is_not_restored_but_the_commit_before_it_is(agent: Agent, where: str) -> None:
    state = train.State(value=torch.zeros(10), step=0)
    state.restore()
    for number in (1, 2):
        state.step = number
        state.commit()
    offset = {
        "header": 20,
        "stamp": commit_memory.STAMP_OFFSET,
        "pickle": state._buffers[1].header(state._run).pickle_offset + 30,
    }
    del state
    gc.collect()
    corrupt(agent, 1, offset[where])
    new = train.State(value=None, step=0)
    assert new.restore()
    assert (new.step, new.commits) == (1, 1)


def test_a_commit_of_another_run_is_not_restored(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_once(step=1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert not train.State(step=0).restore()


def test_one_mapping_of_a_buffer_in_a_process(agent: Agent) -> None:
    first = CommitBuffer.create(5000)
    assert CommitBuffer.adopt(os.dup(first.fd)) is first


def test_a_copy_from_another_node_is_restored_and_never_overwritten(agent: Agent) -> None:
    state = train.State(value=torch.zeros(10), step=0)
    state.restore()
    state.step = 1
    state.commit()
    buffer, header = state._newest
    copy = commit_memory.create_memory(buffer.size)
    os.pwrite(copy, buffer.memory(0, buffer.size), 0)
    kept = os.dup(copy)
    agent.call(agent.memory.keep_copy, 0, "state", header.id, kept)
    agent.call(agent.memory._free, 0, "state", 0)  # this node had no commit of this rank
    del state, buffer
    gc.collect()
    content = os.pread(copy, os.fstat(copy).st_size, 0)
    new = train.State(value=None, step=0)
    assert new.restore()
    assert new.step == 1
    for _ in range(6):
        new.step += 1
        assert new.commit()
    assert os.pread(copy, os.fstat(copy).st_size, 0) == content
    os.close(copy)
