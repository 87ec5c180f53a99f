"""Rendezvous handlers: ours on torch's real stores, and another package's with our agent."""

import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as torch_c10d
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torch_dynamic
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as torch_static
from torch.distributed.elastic.rendezvous import utils as torch_utils

from ripstop.compat import rendezvous
from ripstop.compat.agent import LocalElasticAgent, WorkerSpec
from ripstop.compat.launcher import LaunchConfig, elastic_launch, handler_link
from ripstop.compat.multiprocessing import DefaultLogsSpecs
from ripstop.compat.multiprocessing.errors import ChildFailedError
from ripstop.compat.rendezvous import RendezvousParameters, RendezvousStoreInfo, c10d, dynamic, endpoint, static
from ripstop.compat.rendezvous.c10d import C10dRendezvousBackend
from ripstop.compat.rendezvous.dynamic import DynamicRendezvousHandler, RendezvousTimeout
from ripstop.compat.rendezvous.handler import is_rendezvous_handler_error
from ripstop.model.config import RunConfig, Script
from ripstop.protocol.messages import Events, Failed, Heartbeat, Inspected, Problems, Reply
from tests.compat.processes import eventually, nothing_left  # noqa: F401
from tests.compat.signatures import taken_by_both

torch_rendezvous = import_module("torch.distributed.elastic.rendezvous")

DEADLINE = 120.0
CLASSES = ("Handler", "HandlerRegistry", "Info", "Parameters", "StoreInfo")


# the names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *((getattr(torch_rendezvous, name), getattr(rendezvous, name)) for name in map("Rendezvous{}".format, CLASSES)),
        *((getattr(torch_dynamic, name), getattr(dynamic, name)) for name in torch_dynamic.__all__),
        (torch_c10d.C10dRendezvousBackend, c10d.C10dRendezvousBackend),
        (torch_c10d.create_backend, c10d.create_backend),
        (torch_static.StaticTCPRendezvous, static.StaticTCPRendezvous),
        (torch_static.create_rdzv_handler, static.create_rdzv_handler),
        (torch_utils.parse_rendezvous_endpoint, endpoint.parse_rendezvous_endpoint),
        (torch_dynamic.DynamicRendezvousHandler.from_backend, DynamicRendezvousHandler.from_backend),
    ],
    ids=lambda thing: thing.__name__,
)
def test_calls_of_torchs_are_calls_of_ours(theirs: Any, ours: Any) -> None:
    taken_by_both(theirs, ours)


@pytest.mark.parametrize("name", [name for name in torch_rendezvous.__all__ if name.endswith("Error")])
def test_errors_are_of_torchs_kinds(name: str) -> None:
    theirs, ours = getattr(torch_rendezvous, name), getattr(rendezvous, name)
    assert [kind.__name__ for kind in ours.__mro__] == [kind.__name__ for kind in theirs.__mro__]


@pytest.mark.parametrize("value", [None, True, 0, 1, 2, "1", "yes", "T", "0", "No", "maybe", "", 1.5])
@pytest.mark.parametrize("method", ["get", "get_as_bool", "get_as_int"])
def test_settings_are_read_as_torch_reads_them(value: Any, method: str) -> None:
    def read(kind: Any) -> Any:
        given = kind("b", "e", "r", 1, 2, "here", key=value)
        try:
            return getattr(given, method)("key"), getattr(given, method)("other", 7) if method != "get_as_bool" else 7
        except ValueError:
            return ValueError

    assert read(RendezvousParameters) == read(torch_rendezvous.RendezvousParameters)


@pytest.mark.parametrize("wrong", [("", 1, 1), ("b", 0, 1), ("b", 2, 1)])
def test_invalid_parameters_are_rejected(wrong: tuple[str, int, int]) -> None:
    for kind in (RendezvousParameters, torch_rendezvous.RendezvousParameters):
        with pytest.raises(ValueError):
            kind(wrong[0], "e", "r", wrong[1], wrong[2])


@pytest.mark.parametrize("text", [None, "", " node0 ", "node0:1", "[::1]", "[fd00::7]:29", "10.0.0.1:65535"])
def test_endpoints_are_read_as_torch_reads_them(text: str | None) -> None:
    assert endpoint.parse_rendezvous_endpoint(text, 5) == torch_utils.parse_rendezvous_endpoint(text, 5)


@pytest.mark.parametrize("text", ["node0:", "node0:x", "node0:65536", "no/de", "node 0:1"])
def test_invalid_endpoints_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        endpoint.parse_rendezvous_endpoint(text, 5)


def test_rendezvous_imports_no_torch_before_there_is_a_store() -> None:
    source = """
    import sys
    from ripstop.compat.rendezvous import *
    import ripstop.compat.rendezvous.c10d, ripstop.compat.rendezvous.static, ripstop.compat.launcher.handler_link
    class Store(dict):
        set, get = dict.__setitem__, dict.__getitem__
    info = RendezvousStoreInfo.build(0, Store(), "here", 29)
    assert info == RendezvousStoreInfo("here", 29) and "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=True, timeout=DEADLINE)


def test_torchs_errors_are_recognised_as_ripstops() -> None:
    for module in (rendezvous, torch_rendezvous):
        assert is_rendezvous_handler_error(module.RendezvousClosedError(), rendezvous.RendezvousClosedError)
        assert is_rendezvous_handler_error(module.RendezvousClosedError(), rendezvous.RendezvousError)
        assert not is_rendezvous_handler_error(module.RendezvousTimeoutError(), rendezvous.RendezvousClosedError)


def test_a_backend_is_registered_once_and_its_handlers_return_its_name() -> None:
    registry = rendezvous.RendezvousHandlerRegistry()
    with pytest.raises(ValueError, match="not registered, there are none"):
        registry.create_handler(RendezvousParameters("mine", "", "r", 1, 1))
    registry.register("mine", static.create_rdzv_handler)
    registry.register("mine", static.create_rdzv_handler)
    with pytest.raises(ValueError, match="registered with"):
        registry.register("mine", print)
    with pytest.raises(ValueError, match="empty"):
        registry.register("", print)
    with pytest.raises(RuntimeError, match="for the backend 'mine' returns 'static' as its backend"):
        registry.create_handler(RendezvousParameters("mine", "h:1", "r", 1, 1, rank=0))


# rounds of nodes -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["tcp", "file", "hash"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    match request.param:
        case "tcp":
            return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        case "file":
            return dist.FileStore(str(tmp_path / "store"))
        case _:
            return dist.HashStore()


@pytest.fixture
def node() -> Iterator[Callable[..., DynamicRendezvousHandler]]:
    """Makes handlers on a store."""
    made: list[DynamicRendezvousHandler] = []

    def make(store: Any, nodes: str = "2:3", backend: Any = None, **settings: Any) -> DynamicRendezvousHandler:
        least, _, most = nodes.partition(":")
        timeout = RendezvousTimeout(**{"last_call": timedelta(seconds=0.2)} | settings.pop("timeout", {}))
        backend = backend or C10dRendezvousBackend(store, "job")
        one = DynamicRendezvousHandler.from_backend(
            "job", store, backend, int(least), int(most or least), "localhost", timeout, **settings
        )
        made.append(one)
        return one

    yield make
    for one in made:
        one._stop_heartbeats()


def go(handler: DynamicRendezvousHandler) -> "Future[Any]":
    """Its next rendezvous, in a thread."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(handler.next_rendezvous())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def next_round(*handlers: DynamicRendezvousHandler) -> list[Any]:
    return [one.result(DEADLINE) for one in [go(handler) for handler in handlers]]


def ranks(infos: list[Any]) -> list[tuple[int, int]]:
    return [(info.rank, info.world_size) for info in infos]


Node = Callable[..., DynamicRendezvousHandler]


def test_nodes_form_the_next_round_with_the_same_ranks_and_a_new_store(store: Any, node: Node) -> None:
    nodes = [node(store) for _ in range(3)]
    first = next_round(*nodes)
    assert sorted(ranks(first)) == [(0, 3), (1, 3), (2, 3)]
    first[0].store.set("key", "old")
    assert first[1].store.get("key") == b"old"
    again = next_round(*nodes)
    assert ranks(again) == ranks(first)
    assert not again[1].store.check(["key"])
    where = again[0].bootstrap_store_info
    assert all(info.bootstrap_store_info == where for info in again) and where != first[0].bootstrap_store_info
    clients = [dist.TCPStore(where.master_addr, where.master_port, is_master=False) for _ in range(2)]
    clients[0].set("a", "b")
    assert clients[1].get("a") == b"b"


def test_a_latecomer_waits_is_counted_and_let_in(node: Node) -> None:
    store = dist.HashStore()
    nodes = [node(store) for _ in range(3)]
    before = ranks(next_round(*nodes[:2]))
    late = go(nodes[2])
    eventually(lambda: nodes[0].num_nodes_waiting() == 1, "the latecomer waits")
    assert ranks([*next_round(*nodes[:2]), late.result(DEADLINE)]) == [*((rank, 3) for rank, _ in before), (2, 3)]
    assert nodes[0].num_nodes_waiting() == 0


def test_a_node_beyond_the_maximum_is_a_spare_until_one_is_lost(node: Node) -> None:
    store = dist.HashStore()
    join = {"join": timedelta(seconds=0.5)}
    nodes = [node(store, "1:2", timeout=join, keep_alive_interval=0.2) for _ in range(3)]
    before = next_round(*nodes[:2])
    spare = go(nodes[2])
    with pytest.raises(TimeoutError):
        spare.result(1.0)  # longer than its time to join: a spare's has not begun
    assert nodes[0].num_nodes_waiting() == 0
    nodes[1]._stop_heartbeats()
    eventually(lambda: nodes[0].num_nodes_waiting() > 0, "the spare is waited for")
    (stayed,) = next_round(nodes[0])
    assert stayed.rank == before[0].rank and spare.result(DEADLINE).rank == before[1].rank


def test_a_spare_of_a_closed_job_exits_gracefully_and_no_node_joins(node: Node) -> None:
    store = dist.HashStore()
    nodes = [node(store, "1:1") for _ in range(3)]
    next_round(nodes[0])
    spare = go(nodes[1])
    eventually(lambda: b'coming":[[' in C10dRendezvousBackend(store, "job").get_state()[0], "the spare is there")
    assert not nodes[2].is_closed()
    assert nodes[0].shutdown()
    assert nodes[2].is_closed()
    with pytest.raises(rendezvous.RendezvousGracefulExitError):
        spare.result(DEADLINE)
    with pytest.raises(rendezvous.RendezvousClosedError, match="'job' is closed"):
        nodes[2].next_rendezvous()


def test_too_few_nodes_are_an_error_that_leaves_no_candidate(node: Node) -> None:
    store = dist.HashStore()
    alone = node(store, "2:3", timeout={"join": timedelta(seconds=0.2)})
    with pytest.raises(rendezvous.RendezvousTimeoutError, match="1 of at least 2 nodes have joined"):
        alone.next_rendezvous()
    assert b'"coming":[]' in C10dRendezvousBackend(store, "job").get_state()[0]


@pytest.mark.parametrize("value", [b64encode(b'{"ripstop":1,"run_id":"x"}'), b64encode(pickle.dumps({})), b"%"])
def test_the_state_of_another_program_is_rejected_and_not_changed(value: bytes, node: Node) -> None:
    store = dist.HashStore()
    store.set("torch.rendezvous.job", value)
    one = node(store)
    for call in (one.next_rendezvous, one.is_closed, one.num_nodes_waiting, one.set_closed):
        with pytest.raises(rendezvous.RendezvousStateError, match="left as it is: use another run id"):
            call()
    assert not one.shutdown()
    assert store.get("torch.rendezvous.job") == value


class Lossy(C10dRendezvousBackend):
    """Loses every second answer; what was asked for is done."""

    lost = 0

    def set_state(self, state: bytes, token: Any = None) -> Any:
        answer = super().set_state(state, token)
        Lossy.lost += 1
        if Lossy.lost % 2:
            raise rendezvous.RendezvousConnectionError("the answer was lost")
        return answer


def test_a_write_whose_reply_is_lost_is_found_and_not_repeated(node: Node) -> None:
    store = dist.HashStore()
    nodes = [node(store, "3", backend=Lossy(store, "job")) for _ in range(3)]
    assert sorted(ranks(next_round(*nodes))) == [(0, 3), (1, 3), (2, 3)]
    assert Lossy.lost > 2


class FailingBackend(C10dRendezvousBackend):
    """Raises these errors when a member reads the state."""

    errors: tuple[Exception, ...] = ()

    def get_state(self) -> Any:
        if self.errors:
            error, *self.errors = self.errors  # type: ignore[assignment]
            raise error
        return super().get_state()


@pytest.mark.parametrize("error", [OSError("no route"), torch_rendezvous.RendezvousConnectionError("away")], ids=repr)
def test_heartbeats_continue_after_any_error_of_the_backend(
    error: Exception, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()
    backend = FailingBackend(store, "job")
    one = node(store, "1", backend=backend, keep_alive_interval=0.2)
    next_round(one)
    for _ in range(2):
        backend.errors = (error, error)
        eventually(lambda: not backend.errors, "the member reads the state")
        (before, _), plain = backend.get_state(), C10dRendezvousBackend(store, "job")
        eventually(lambda: plain.get_state()[0] != before, "a heartbeat is written")  # noqa: B023 - called here
    assert caplog.text.count(f"could not write a heartbeat: {type(error).__name__}: {error}") == 2


def test_torchs_connection_error_is_handled_as_a_lost_reply(node: Node) -> None:
    class Away(C10dRendezvousBackend):
        def set_state(self, state: bytes, token: Any = None) -> Any:
            super().set_state(state, token)
            raise torch_rendezvous.RendezvousConnectionError("the answer was lost")

    store = dist.HashStore()
    one = node(store, "1", backend=Away(store, "job"))
    assert ranks(next_round(one)) == [(0, 1)] and one.shutdown()


def test_a_job_with_a_reused_name_does_not_see_the_earlier_jobs_keys(node: Node) -> None:
    store = dist.HashStore()
    (old,) = next_round(node(store, "1"))
    old.store.set("key", "old")
    store.delete_key("torch.rendezvous.job")  # as a state that etcd keeps for a while
    (new,) = next_round(node(store, "1"))
    assert not new.store.check(["key"])


def test_nodes_with_fixed_ranks_form_a_round() -> None:
    port = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False).port  # free again at once
    made = [RendezvousParameters("static", f"localhost:{port}", "job", 2, 2, rank=rank) for rank in range(2)]
    infos = next_round(*(rendezvous.get_rendezvous_handler(one) for one in made))  # type: ignore[arg-type]
    assert ranks(infos) == [(0, 2), (1, 2)] and infos[1].bootstrap_store_info == RendezvousStoreInfo("localhost", port)
    infos[0].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"


@pytest.mark.parametrize(
    ("backend", "endpoint", "settings", "word"),
    [
        ("static", "h:1", {}, "rank"),
        ("static", "", {"rank": 0}, "endpoint is empty"),
        ("static", "h", {"rank": 0}, "port"),
        ("c10d", "", {"store_type": "cloud"}, "store_type=cloud"),
        ("c10d", "", {"read_timeout": "0"}, "read_timeout=0"),
        ("c10d", "no/de", {}, "endpoint=no/de"),
        ("nobodys", "", {}, "torchrun.handlers"),
    ],
)
def test_invalid_handler_parameters_are_errors_with_a_remedy(
    backend: str, endpoint: str, settings: dict[str, Any], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        rendezvous.get_rendezvous_handler(RendezvousParameters(backend, endpoint, "job", 1, 1, **settings))


def test_an_unreachable_store_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(rendezvous.RendezvousConnectionError, match="name one that can be written"):
        c10d.create_backend(RendezvousParameters("c10d", f"{tmp_path}/no/file", "job", 1, 1, store_type="file"))


NODE = """
import os, sys, time
from ripstop.compat.rendezvous import RendezvousParameters, get_rendezvous_handler

conf = {"last_call_timeout": 60, "keep_alive_interval": 1, "keep_alive_max_attempt": 5}
handler = get_rendezvous_handler(RendezvousParameters("c10d", sys.argv[1], "job", 2, 3, "localhost", **conf))
info = handler.next_rendezvous()
print(info.rank, info.world_size, flush=True)
while handler.num_nodes_waiting() == 0 and not sys.stdin.readline():
    time.sleep(0.01)
info = handler.next_rendezvous()
print(info.rank, info.world_size, flush=True)
sys.stdin.readline()
"""


def test_processes_go_on_without_one_that_was_killed() -> None:
    served = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    words = [sys.executable, "-c", NODE, f"localhost:{served.port}"]
    nodes = [subprocess.Popen(words, stdin=-1, stdout=-1, text=True) for _ in range(3)]
    try:
        first = [node.stdout.readline().split() for node in nodes]  # type: ignore[union-attr]
        assert sorted(first) == [["0", "3"], ["1", "3"], ["2", "3"]]
        last = next(index for index, words in enumerate(first) if words[0] == "2")
        nodes[last].send_signal(signal.SIGKILL)
        survivors = [index for index in range(3) if index != last]
        for index in survivors:
            nodes[index].stdin.write("go\n")  # type: ignore[union-attr]
            nodes[index].stdin.flush()  # type: ignore[union-attr]
        again = [nodes[index].stdout.readline().split() for index in survivors]  # type: ignore[union-attr]
        assert again == [[first[index][0], "2"] for index in survivors]
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


# with our agents ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left")
def test_an_agent_of_torchs_kind_restarts_with_our_handler(node: Node, tmp_path: Path) -> None:
    def work() -> tuple[str, str]:
        dist.init_process_group("gloo")
        dist.barrier()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(1)
        return os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]

    handler = node(dist.HashStore(), "1")
    spec = WorkerSpec("r", 2, handler, entrypoint=work, max_restarts=1, monitor_interval=0.05)
    result = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)), start_method="fork").run()
    assert result.return_values == {0: ("0", "1"), 1: ("1", "1")}


def answer(word: str) -> tuple[str, ...]:
    return word, *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"))


class OneNode(rendezvous.RendezvousHandler):
    """The least there can be."""

    backend = "one-node"
    made: "list[OneNode]"

    def __init__(self, params: RendezvousParameters) -> None:
        self.params = params
        self.rounds = 0
        self.made.append(self)

    def get_backend(self) -> str:
        return self.backend

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        self.rounds += 1
        return rendezvous.RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo("unused", 1))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.params.run_id

    def shutdown(self) -> bool:
        return True


def launch(kind: type[OneNode], function: Callable[..., Any], *args: Any) -> dict[int, Any]:
    """Values by rank; the handler is in `kind.made`."""
    kind.made = []
    rendezvous.rendezvous_handler_registry.register(kind.backend, kind)
    config = LaunchConfig(
        1,
        1,
        2,
        run_id="j",
        rdzv_backend=kind.backend,
        rdzv_endpoint="any where",
        rdzv_configs={"conf": ["any", "thing"]},
        max_restarts=0,
        start_method="fork",
    )
    return elastic_launch(config, function)(*args)


def test_a_launch_uses_a_handler_that_the_program_registered() -> None:
    values = launch(OneNode, answer, "hello")
    assert values == {0: ("hello", "0", "2", "j"), 1: ("hello", "1", "2", "j")}
    params = OneNode.made[0].params
    assert (params.endpoint, params.get("conf")) == ("any where", ["any", "thing"])


class Growing(OneNode):
    backend = "growing"

    def num_nodes_waiting(self) -> int:
        return int(self.rounds == 1)


def test_a_node_that_waits_is_another_round_and_costs_no_restart() -> None:
    def work() -> str:
        if Growing.made[0].rounds == 1:  # as it was when this process was forked
            threading.Event().wait()
        return os.environ["TORCHELASTIC_RESTART_COUNT"]

    assert launch(Growing, work) == {0: "0", 1: "0"}
    assert Growing.made[0].rounds == 2


class Unreachable(OneNode):
    backend = "unreachable"
    asked = multiprocessing.get_context("fork").Event()  # workers are forked
    calls = 0

    def num_nodes_waiting(self) -> int:
        Unreachable.calls += 1
        if Unreachable.calls > 1:  # the first answer has been logged
            self.asked.set()
        raise torch_rendezvous.RendezvousConnectionError("nobody there")


def test_workers_continue_while_the_handler_cannot_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> int:
        Unreachable.asked.wait(DEADLINE)
        return 7

    assert launch(Unreachable, work) == {0: 7, 1: 7}
    assert caplog.text.count("the rendezvous handler cannot be reached, workers continue: nobody there") == 1


class Silent(OneNode):
    """Once a round has begun, an answer takes for ever."""

    backend = "silent"
    asked = multiprocessing.get_context("fork").Event()  # workers are forked

    def num_nodes_waiting(self) -> int:
        self.asked.set()
        threading.Event().wait()
        raise AssertionError("it waits for ever")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler_link, "SHUTDOWN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(handler_link, "EXIT_BARRIER_TIMEOUT_S", 0.3)
    Silent.asked.clear()


@pytest.mark.usefixtures("impatient")
def test_a_failure_is_a_failure_while_the_handler_does_not_answer() -> None:
    def work() -> None:
        Silent.asked.wait(DEADLINE)
        raise KeyError("lost")

    with pytest.raises(ChildFailedError, match="lost"):
        launch(Silent, work)


@pytest.mark.usefixtures("impatient")
def test_a_success_counts_while_the_handler_does_not_answer() -> None:
    assert launch(Silent, Silent.asked.wait, DEADLINE) == {0: True, 1: True}


class NodeDisconnected(OneNode):
    """The store of its rounds goes with the node that held it."""

    backend = "gone"

    class Store(dist.HashStore):
        def add(self, key: str, amount: int) -> int:
            raise dist.DistNetworkError("nobody there")

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        return rendezvous.RendezvousInfo(self.Store(), 0, 1, RendezvousStoreInfo("unused", 1))


def test_a_success_counts_if_it_cannot_be_reported() -> None:
    assert launch(NodeDisconnected, answer, "done")[0][0] == "done"


def test_messages_for_a_coordinator_do_not_reach_the_handler() -> None:
    async def main() -> None:
        link = handler_link.HandlerLink(lambda: None, RunConfig(Script("train.py"), "job"))
        for message in (Events(("{}",)), Reply(1), Heartbeat(), Problems(("sick",)), Inspected(1)):
            link.send(message)
        assert link._inbox.empty()
        link.send(Failed(1, ()))
        assert link._inbox.qsize() == 1

    asyncio.run(main())


HANDLER = """
import os, sys, threading
from pathlib import Path
from torch.distributed import FileStore, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


class Handler(RendezvousHandler):
    def __init__(self, params):
        self.params, self.round, self.store = params, 0, FileStore(params.endpoint)
        self.thread = threading.get_ident()
        assert self.thread != threading.main_thread().ident and params.get("color") == "blue"

    def get_backend(self):
        return "shared-folder"

    def get_run_id(self):
        return self.params.run_id

    def next_rendezvous(self):
        assert threading.get_ident() == self.thread
        if self.round:
            self.store.add(f"left{self.round}", 1)
        self.round += 1
        store = PrefixStore(f"round{self.round}", self.store)
        rank = store.add("nodes", 1) - 1
        return RendezvousInfo(store, rank, self.params.min_nodes, RendezvousStoreInfo("unused", 1))

    def num_nodes_waiting(self):
        return int(self.store.add(f"left{self.round}", 0) > 0)

    def is_closed(self):
        return False

    def set_closed(self):
        pass

    def shutdown(self):
        Path(self.params.endpoint + f".shutdown{os.getpid()}").touch()
        return True


def creator():
    return Handler
"""

TRAIN = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
count, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
dist.barrier()
if (count, rank) == ("0", 1):
    raise SystemExit(3)
dist.barrier()
print(f"rank {rank} of {dist.get_world_size()} after {count}\\n", end="", flush=True)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Another's package, installed in a directory."""
    info = tmp_path / "installed" / "shared_folder-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shared-folder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\nshared-folder = shared_folder:creator\n")
    (info.parent / "shared_folder.py").write_text(HANDLER)
    (tmp_path / "train.py").write_text(TRAIN)
    return info.parent


def start(package: Path, *words: str, program: str = "train.py") -> "subprocess.Popen[str]":
    path = f"{os.environ.get('PYTHONPATH', '')}:{package}"
    backend = ["--rdzv-backend=shared-folder", "--rdzv-conf=color=blue", f"--rdzv-endpoint={package.parent}/rendezvous"]
    return subprocess.Popen(
        [sys.executable, "-m", "ripstop", "run", *backend, *words, program],
        cwd=package.parent, env=os.environ | {"PYTHONPATH": path}, stdout=-1, stderr=-1, text=True,
    )  # fmt: skip


def end(agent: "subprocess.Popen[str]") -> tuple[int, str, str]:
    try:
        out, err = agent.communicate(timeout=DEADLINE)
    finally:
        agent.kill()
    return agent.returncode, out, err


def test_nodes_use_another_packages_handler_and_recover_from_a_crash(package: Path) -> None:
    agents = [start(package, "--nnodes=2", "--max-restarts=1") for _ in range(2)]
    ends = [end(agent) for agent in agents]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert sorted(out for _, out, _ in ends) == ["rank 0 of 2 after 1\n", "rank 1 of 2 after 1\n"]
    assert any("exited with code 3; restart 1 of 1" in err for _, _, err in ends)
    assert {path.suffix for path in package.parent.glob("rendezvous.*")} == {
        f".shutdown{agent.pid}" for agent in agents
    }


@pytest.mark.long
def test_a_failure_that_no_budget_covers_is_reported_as_ever(package: Path) -> None:
    code, _, err = end(start(package, "--nproc-per-node=2"))
    assert code == 1 and "rank 1 on 127.0.0.1 exited with code 3; no restart is allowed (--max-restarts=0)" in err


def test_a_signal_ends_an_agent_whose_handler_waits_and_closes_nothing(package: Path) -> None:
    (package.parent / "train.py").write_text("")
    agent = start(package, "--nnodes=2")
    eventually((package.parent / "rendezvous").exists, "the handler is there")
    agent.send_signal(signal.SIGTERM)
    code, _, err = end(agent)
    assert code == 143, err
    assert not list(package.parent.glob("rendezvous.*"))


def test_a_handler_that_cannot_be_created_is_an_error_of_one_line(package: Path) -> None:
    (package / "shared_folder.py").write_text("def creator():\n    raise LookupError('no such place')\n")
    (package.parent / "train.py").write_text("")
    code, _, err = end(start(package))
    assert code == 1 and "--rdzv-backend=shared-folder: LookupError: no such place" in err
    assert "Traceback" not in err
