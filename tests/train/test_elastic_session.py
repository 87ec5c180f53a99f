"""`train.elastic` without an agent, and what a State does in a function that is entered again.

`tests/e2e/test_elastic.py` has real jobs.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import distributed

from ripstop import train
from ripstop.train import interruption
from ripstop.train.elastic_session import _is_peer_lost_in_session
from ripstop.train.group_abort import forget_groups
from ripstop.train.transfer import TransferError


@pytest.fixture(autouse=True)
def no_round_is_over() -> Iterator[None]:
    yield
    interruption.enter_interruptible()
    interruption.leave_interruptible()
    interruption.entries = 0


def test_the_exception_hooks_of_torch_do_not_pile_up_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin_and_end_round(hook: Callable[..., None] | None = None) -> None:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        sys.excepthook = hook or sys.excepthook
        forget_groups().clear()

    monkeypatch.setattr(sys, "excepthook", before := sys.excepthook)
    begin_and_end_round()
    assert sys.excepthook is before
    begin_and_end_round(own := lambda *_: None)
    begin_and_end_round()
    assert sys.excepthook is own


def test_without_an_agent_the_function_is_called_once() -> None:
    @train.elastic
    def double(value: int, *, add: int) -> int:
        assert interruption.is_elastic
        return 2 * value + add

    assert double(3, add=1) == 7
    assert double.__name__ == "double"
    assert not interruption.is_elastic


def test_its_exceptions_are_the_scripts() -> None:
    @train.elastic
    def fails() -> None:
        raise distributed.DistNetworkError("a peer is lost")

    with pytest.raises(distributed.DistNetworkError):
        fails()
    assert not interruption.is_elastic


def test_an_elastic_function_cannot_be_inside_another() -> None:
    inner = train.elastic(lambda: None)
    with pytest.raises(RuntimeError, match="decorate the outer one only"):
        train.elastic(inner)()


def test_a_safe_point_raises_when_the_round_is_over_and_a_script_that_catches_exceptions_does_not_stop_it() -> None:
    state = train.State("interrupted", step=0)
    interruption.enter_interruptible()
    interruption.interrupt()
    for call in (lambda: train.heartbeat(1), state.restore, state.commit):
        with pytest.raises(interruption.Interrupted):
            try:
                call()
            except Exception:
                pytest.fail("it was caught")


def test_only_the_thread_of_the_function_is_interrupted() -> None:
    interruption.enter_interruptible()
    interruption.interrupt()
    with ThreadPoolExecutor(1) as other:
        other.submit(train.heartbeat, 1).result()


def test_in_every_round_restore_comes_before_commit() -> None:
    state = train.State("rounds", step=0)
    interruption.enter_interruptible()
    state.restore()
    state.commit()
    interruption.enter_interruptible()
    with pytest.raises(RuntimeError, match="after restore"):
        state.commit()


def test_a_state_made_inside_the_function_replaces_that_of_the_last_round() -> None:
    interruption.enter_interruptible()
    kept = train.State("inside", step=1)
    with pytest.raises(ValueError, match="has a State of this name"):
        train.State("inside", step=2)
    interruption.enter_interruptible()
    assert train.State("inside", step=2).step == 2
    assert kept.step == 1


def test_a_broken_connection_differs_from_errors_of_the_script() -> None:
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert all(map(_is_peer_lost_in_session, (gloo, distributed.DistBackendError("x"), TransferError("x"))))
    chained = RuntimeError("train.State needs every rank")
    chained.__cause__ = distributed.DistStoreError("x")
    assert _is_peer_lost_in_session(chained)
    with pytest.raises(RuntimeError) as shapes:
        torch.ones(2) @ torch.ones(3)
    own_client = ConnectionResetError("api.example.org")
    others = (shapes.value, ValueError("x"), torch.OutOfMemoryError("x"), own_client)
    assert not any(map(_is_peer_lost_in_session, others))


def test_groups_are_forgotten_at_once_and_end_when_the_caller_lets_go_of_them() -> None:
    """In a recovery the caller does that in another thread, because gloo's threads need some time to end."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = weakref.ref(distributed.group.WORLD)
    groups = forget_groups()
    assert not distributed.is_initialized()
    assert group() is not None
    thread = threading.Thread(target=groups.clear)
    thread.start()
    thread.join()
    assert group() is None
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)  # its numbers begin anew
    assert distributed.group.WORLD.group_name == "0"
    distributed.destroy_process_group()
