"""The helpers: torch's behaviour compared with ripstop's, and both at one store."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from ripstop.compat import utils as our_utils
from ripstop.compat.utils import data as our_data
from ripstop.compat.utils import store as our_store
from tests.compat.signatures import taken_by_both

pytest.importorskip("torch")
from torch.distributed import DistStoreError, HashStore
from torch.distributed.elastic import utils as their_utils
from torch.distributed.elastic.utils import data as their_data
from torch.distributed.elastic.utils import distributed as their_distributed
from torch.distributed.elastic.utils import store as their_store
from torch.distributed.elastic.utils.logging import get_logger as their_get_logger

both_utils = pytest.mark.parametrize("api", [their_utils, our_utils], ids=["torch", "ripstop"])
both_data = pytest.mark.parametrize("api", [their_data, our_data], ids=["torch", "ripstop"])
both_distributed = pytest.mark.parametrize("api", [their_distributed, our_store], ids=["torch", "ripstop"])
both_stores = pytest.mark.parametrize("api", [their_store, our_store], ids=["torch", "ripstop"])
mixed = pytest.mark.parametrize(
    "apis",
    [(our_store, our_store), (their_store, our_store), (our_store, their_store)],
    ids=["ours", "0 torch", "1 torch"],
)


def test_torchs_arguments_are_accepted() -> None:
    pairs = (
        (their_utils, our_utils, ("get_env_variable_or_raise", "get_socket_with_port", "macros")),
        (their_data, our_data, ("CyclingIterator", "ElasticDistributedSampler")),
        (their_distributed, our_store, their_distributed.__all__),
        (their_store, our_store, their_store.__all__),
    )
    for theirs, ours, names in pairs:
        for name in names:
            taken_by_both(getattr(theirs, name), getattr(ours, name))


# small tools --------------------------------------------------------------------------------------------------------


@both_utils
def test_a_variable_is_there_or_an_error(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THERE", "yes")
    assert api.get_env_variable_or_raise("THERE") == "yes"
    with pytest.raises(ValueError, match="NOT_THERE"):
        api.get_env_variable_or_raise("NOT_THERE")


@both_utils
def test_a_placeholder_is_replaced_in_texts(api: Any) -> None:
    args = ["--rank=${local_rank}", "$local_rank", "${other}", "$", 5, None]
    assert api.macros.substitute(args, "3") == ["--rank=3", "3", "${other}", "$", 5, None]
    assert api.macros.substitute([api.macros.local_rank], "3") == ["3"]


@both_utils
def test_a_port_is_kept_by_its_socket(api: Any) -> None:
    with closing(api.get_socket_with_port()) as taken:
        host, port = taken.getsockname()[:2]
        assert host in ("127.0.0.1", "::1") and port > 0
        with closing(socket.create_connection((host, port), timeout=120)):
            pass


@both_distributed
def test_a_free_port_can_be_taken(api: Any) -> None:
    port = api.get_free_port()
    with closing(socket.socket()) as mine:
        mine.bind(("127.0.0.1", port))


@pytest.mark.parametrize("get_logger", [their_get_logger, our_utils.get_logger], ids=["torch", "ripstop"])
def test_a_logger_has_its_callers_name_and_the_level_of_the_environment(
    get_logger: Callable[..., logging.Logger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOGLEVEL", raising=False)
    assert get_logger("compat.one").level == logging.WARNING
    monkeypatch.setenv("LOGLEVEL", "INFO")
    assert get_logger("compat.two").level == logging.INFO
    assert get_logger().name == __name__


def test_an_unknown_level_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "loud")
    with pytest.raises(ValueError, match="LOGLEVEL=loud is not a level; set it to DEBUG"):
        our_utils.get_logger("compat.three")


def test_a_processes_state_is_read() -> None:
    assert our_utils.read_proc_state(os.getpid()) in ("R", "S")
    assert our_utils.read_proc_state(2**22 + 1) is None
    assert [our_utils.is_uninterruptible_state(state) for state in ("D", "D+", "S", None)] == [True, True, False, False]


def test_the_tools_do_not_import_torch() -> None:
    modules = (
        "multiprocessing",
        "multiprocessing.function_worker",
        "multiprocessing.numa_binding",
        "multiprocessing.redirects",
        "utils",
        "utils.store",
    )
    imports = "; ".join(f"import ripstop.compat.{module}" for module in modules)
    check = f"{imports}; import sys; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", check], text=True) == "False\n"


# data ---------------------------------------------------------------------------------------------------------------


@both_data
@pytest.mark.parametrize(
    ("epochs", "first", "seen"), [(3, 0, [0, 1, 2]), (3, 2, [2]), (1, 0, [0]), (0, 0, [0]), (2, 5, [5])]
)
def test_epochs_follow_each_other(api: Any, epochs: int, first: int, seen: list[int]) -> None:
    items = list(api.CyclingIterator(epochs, lambda epoch: iter([epoch, epoch]), first))
    assert items == [epoch for epoch in seen for _ in range(2)]


@both_data
def test_an_epoch_without_items_is_passed_over(api: Any) -> None:
    assert list(api.CyclingIterator(4, lambda epoch: iter([epoch] * (epoch % 2)))) == [1, 3]


def test_thousands_of_empty_epochs_are_passed_over() -> None:
    assert list(our_data.CyclingIterator(100_000, lambda epoch: iter(()))) == []


@pytest.mark.parametrize(("size", "replicas", "start"), [(10, 3, 0), (10, 3, 4), (10, 1, 9), (100, 8, 37), (7, 7, 1)])
def test_a_sampler_returns_the_same_items_as_torchs(size: int, replicas: int, start: int) -> None:
    for rank in range(replicas):
        samplers = [api.ElasticDistributedSampler(range(size), replicas, rank, start) for api in (our_data, their_data)]
        for epoch in (0, 3):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            assert list(samplers[0]) == list(samplers[1])
        assert len(samplers[0]) == len(samplers[1])


def test_more_replicas_than_items_have_one_each() -> None:
    taken = [list(our_data.ElasticDistributedSampler(range(10), 7, rank, 8)) for rank in range(7)]
    assert all(len(items) == 1 and items[0] in (8, 9) for items in taken)


@both_data
def test_a_start_past_the_end_is_rejected(api: Any) -> None:
    with pytest.raises(ValueError, match="10"):
        api.ElasticDistributedSampler(range(10), 2, 0, start_index=10)


@both_data
def test_a_dataset_without_a_length_is_rejected(api: Any) -> None:
    with pytest.raises(TypeError):
        api.ElasticDistributedSampler(iter(()), 2, 0)


# stores -------------------------------------------------------------------------------------------------------------


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=150) for future in [pool.submit(call) for call in calls]]


@mixed
def test_ranks_exchange_their_data(apis: tuple[Any, Any]) -> None:
    store = HashStore()
    calls = [
        lambda rank=rank, api=api: api.synchronize(store, f"of {rank}".encode(), rank, 2, "here", 120)
        for rank, api in enumerate(apis)
    ]
    assert together(*calls) == [[b"of 0", b"of 1"]] * 2


@mixed
def test_a_barrier_opens_when_all_are_there(apis: tuple[Any, Any]) -> None:
    store = HashStore()
    assert together(*(lambda api=api: api.barrier(store, 2, "gate", 120) for api in apis)) == [None, None]


@both_stores
def test_a_barrier_names_the_missing_ranks(api: Any) -> None:
    store = HashStore()

    def wait(rank: int) -> str:
        with pytest.raises(DistStoreError) as error:
            api.barrier(store, 4, "gate", 1.0, rank, lambda rank: f"host{rank}", trace_timeout=0.1)
        return str(error.value)

    zero, two = together(lambda: wait(0), lambda: wait(2))
    missing = zero.partition("missing_ranks=[")[2].partition("]")[0]
    assert sorted(missing.split(", ")) == ["host1", "host3"]
    assert "check rank 0 (host0)" in two


@both_stores
def test_a_barrier_without_a_rank_just_times_out(api: Any) -> None:
    store = HashStore()
    before = store.timeout
    with pytest.raises(DistStoreError):
        api.barrier(store, 2, "gate", 0.2)
    with pytest.raises(AssertionError):
        api.barrier(store, 2, "gate2", 0.2, rank_tracing_decoder=str)
    if api is our_store:  # torch leaves its own behind
        assert store.timeout == before


@both_stores
def test_a_timeout_is_for_the_time_of_a_block(api: Any) -> None:
    store = HashStore()
    before = store.timeout
    with api.store_timeout(store, 7):
        assert store.timeout == timedelta(seconds=7)
    assert store.timeout == before


@both_distributed
def test_a_store_with_one_member_chooses_a_port(api: Any) -> None:
    store = api.create_c10d_store(is_server=True, server_addr="127.0.0.1", timeout=120)
    store.set("key", "value")
    assert store.get("key") == b"value" and store.port > 0


@pytest.mark.parametrize(
    ("server", "client"),
    [(our_store, our_store), (our_store, their_distributed), (their_distributed, our_store)],
    ids=["ours", "torch's client", "torch's server"],
)
def test_members_connect_to_a_store(server: Any, client: Any) -> None:
    port = our_store.get_free_port()
    stores = together(
        lambda: server.create_c10d_store(True, "127.0.0.1", port, 2, timeout=120),
        lambda: client.create_c10d_store(False, "127.0.0.1", port, 2, timeout=120),
    )
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


@both_distributed
def test_a_store_for_several_needs_a_port(api: Any) -> None:
    with pytest.raises(ValueError, match="server_port must be specified when world_size > 1"):
        api.create_c10d_store(is_server=True, server_addr="127.0.0.1", world_size=2)


def test_a_client_needs_a_port() -> None:
    with pytest.raises(ValueError, match="server_port must be specified for a client"):
        our_store.create_c10d_store(is_server=False, server_addr="127.0.0.1")


@both_distributed
def test_a_store_whose_members_do_not_connect_times_out(api: Any) -> None:
    with pytest.raises((TimeoutError, DistStoreError)):
        api.create_c10d_store(True, "127.0.0.1", our_store.get_free_port(), world_size=2, timeout=1)


@both_distributed
def test_a_port_that_is_taken_is_an_error(api: Any) -> None:
    with closing(our_utils.get_socket_with_port()) as taken, pytest.raises(RuntimeError):
        api.create_c10d_store(True, taken.getsockname()[0], taken.getsockname()[1], timeout=5)
