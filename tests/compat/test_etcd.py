"""`EtcdServer`, `EtcdStore`, `EtcdRendezvousBackend`, and launches that etcd brings together, with a real etcd."""

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ripstop.compat.rendezvous.etcd_server import EtcdServer, find_free_port, stop_etcd
from ripstop.compat.rendezvous.sync_etcd_client import SyncEtcdClient
from ripstop.election.etcd_client import Denied, Unavailable
from ripstop.model.config import Etcd
from ripstop.model.round import Address
from tests.compat.signatures import taken_by_both
from tests.e2e.etcd import needs_etcd
from tests.e2e.harness import wait_until

pytest.importorskip("torch")
from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import etcd_rendezvous as their_rendezvous
from torch.distributed.elastic.rendezvous import etcd_rendezvous_backend as their_backend
from torch.distributed.elastic.rendezvous import etcd_server as their_server
from torch.distributed.elastic.rendezvous import etcd_store as their_store
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from ripstop.compat.rendezvous import RendezvousConnectionError, RendezvousStateError, etcd_rendezvous
from ripstop.compat.rendezvous import RendezvousParameters as OurParameters
from ripstop.compat.rendezvous.etcd_rendezvous import (
    EtcdRendezvousBackend,
    EtcdRendezvousHandler,
    create_backend,
    create_rdzv_handler,
)
from ripstop.compat.rendezvous.etcd_store import EtcdStore

pytestmark = needs_etcd

DEADLINE = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    server = EtcdServer()
    server.start(stderr=subprocess.DEVNULL)
    yield server
    server.stop()


@pytest.fixture
def client(server: EtcdServer) -> Iterator[SyncEtcdClient]:
    with closing(server.get_client()) as client:
        yield client


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A prefix that no other test uses."""
    return f"/{request.node.name}"


class Forgetful:
    """Stands before etcd; `forgets` so many answers to writes: they are carried out, and the connection closed."""

    def __init__(self, server: EtcdServer) -> None:
        self._etcd = ("127.0.0.1", server.get_port())
        self._listening = find_free_port()
        self.address = Address(*self._listening.getsockname()[:2])
        self.forgets = 0
        self.forgotten = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listening.accept()[0]
                threading.Thread(target=self._pass_on, args=(near,), daemon=True).start()

    def _pass_on(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._etcd) as far, suppress(OSError):
            while request := near.recv(65536):
                far.sendall(request)
                answer = far.recv(65536)
                if b"compare" in request and self.forgotten < self.forgets:
                    self.forgotten += 1
                    return
                near.sendall(answer)


@pytest.fixture
def forgetful(server: EtcdServer) -> Iterator[Forgetful]:
    with closing(Forgetful(server)) as proxy:
        yield proxy


@pytest.fixture
def forgotten(forgetful: Forgetful) -> Iterator[SyncEtcdClient]:
    """A client whose first write is carried out, and not answered."""
    forgetful.forgets = 1
    with closing(SyncEtcdClient(Etcd((forgetful.address,), "/"))) as client:
        yield client
    assert forgetful.forgotten == 1


def test_torchs_arguments_are_accepted() -> None:
    taken_by_both(their_server.EtcdServer, EtcdServer)
    taken_by_both(their_server.find_free_port, find_free_port)
    taken_by_both(their_server.stop_etcd, stop_etcd)
    taken_by_both(their_store.EtcdStore, EtcdStore)
    taken_by_both(their_backend.EtcdRendezvousBackend, EtcdRendezvousBackend)
    taken_by_both(their_backend.create_backend, create_backend)
    taken_by_both(their_rendezvous.EtcdRendezvousHandler, etcd_rendezvous.EtcdRendezvousHandler)
    taken_by_both(their_rendezvous.EtcdRendezvous.__init__, etcd_rendezvous.EtcdRendezvous.__init__)
    taken_by_both(their_rendezvous.create_rdzv_handler, etcd_rendezvous.create_rdzv_handler)


# the server -----------------------------------------------------------------------------------------------------------


def test_a_data_directory_of_the_users_is_used_and_kept(tmp_path: Path) -> None:
    for value in (None, b"here"):
        server = EtcdServer(str(tmp_path / "data"))
        server.start(stderr=subprocess.DEVNULL)
        try:
            with closing(server.get_client()) as client:
                (found,) = client.read([b"was"], 5)[1]
                assert (found and found.value) == value
                client.write({b"was": b"here"}, 5)
        finally:
            server.stop()


def test_the_end_of_the_program_ends_its_server_and_the_end_of_a_fork_does_not() -> None:
    source = """
    import os, subprocess
    from ripstop.compat.rendezvous.etcd_server import EtcdServer
    server = EtcdServer()
    server.start(stderr=subprocess.DEVNULL)
    if os.fork() == 0:
        raise SystemExit
    os.wait()
    server.get_client().write({b"still": b"here"}, 5)
    assert os.path.isdir(server._temporary_dir)
    print(server.get_port(), server._temporary_dir)
    """
    done = run(source)
    port, made = done.stdout.split()
    assert not Path(made).exists(), done.stderr
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("localhost", int(port)))


@pytest.mark.parametrize(
    ("program", "error", "word"),
    [
        ("#!/bin/sh\nexit 3\n", RuntimeError, "exited with code 3 before it answered"),
        ("#!/bin/sh\nexec sleep 60\n", TimeoutError, "did not answer at localhost:.* in 0.5 s"),
    ],
)
def test_a_server_that_does_not_start_is_an_error_and_leaves_nothing(
    program: str, error: type[Exception], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "etcd"
    path.write_text(program)
    path.chmod(0o755)
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = EtcdServer()
    with pytest.raises(error, match=word):
        server.start(timeout=0.5, num_retries=2)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [path]
    assert server._process is not None and server._process.poll() is not None


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match=r"no etcd on the PATH .* install etcd-server"):
        EtcdServer().start()


# the store ------------------------------------------------------------------------------------------------------------


def calls(store: Any) -> Iterator[Any]:
    """What a store answers."""
    yield store.set("a", "1"), store.get("a"), store.set("b", b"\x00\xff"), store.get("b")
    yield store.add("n", 3), store.add("n", -1), store.get("n")
    yield store.check(["a", "b"]), store.check(["a", "zz"])
    yield store.compare_set("x", "", "1"), store.compare_set("x", "2", "3"), store.compare_set("x", "1", "3")
    yield store.compare_set("y", "7", "8"), store.check(["y"])
    yield store.append("q", "ab"), store.append("q", "cd"), store.get("q")
    yield store.multi_set(["m", "l"], ["1", "2"]), store.multi_get(["m", "l"])
    yield store.wait(["m", "l"]), store.wait(["m"], timedelta(seconds=1))
    yield store.delete_key("a"), store.delete_key("a"), store.num_keys()
    yield store.has_extended_api()


def test_the_store_answers_as_torchs_own_do(client: SyncEtcdClient, prefix: str) -> None:
    expected = list(calls(HashStore()))
    assert list(calls(EtcdStore(client, prefix))) == expected
    store = EtcdStore(client, prefix)
    assert store.list_keys() == ["b", "l", "m", "n", "q", "x"]
    assert store.clone().get("q") == b"abcd"
    seen = list(calls(PrefixStore("p", store)))
    assert (seen[:-2], seen[-2][:2]) == (expected[:-2], (True, False)), "all but the number of keys, which are all keys"


def test_more_keys_than_one_etcd_transaction_allows(client: SyncEtcdClient, prefix: str) -> None:
    store = EtcdStore(client, prefix)
    keys = [str(number) for number in range(300)]
    store.multi_set(keys, keys)
    assert store.multi_get(keys) == [key.encode() for key in keys]
    assert store.check(keys) and not store.check([*keys, "no"]) and store.num_keys() == 300


def test_a_get_waits_until_the_key_exists(client: SyncEtcdClient, prefix: str) -> None:
    store = EtcdStore(client, prefix)
    with ThreadPoolExecutor() as threads:
        got = threads.submit(store.multi_get, ["late", "later"])
        for key in ("other", "late", "later"):
            assert not got.done()
            store.set(key, key)
        assert got.result(DEADLINE) == [b"late", b"later"]


def test_a_wait_that_times_out_names_the_key(client: SyncEtcdClient, prefix: str) -> None:
    store = EtcdStore(client, prefix, timedelta(seconds=0.3))
    store.set("there", "1")
    with pytest.raises(LookupError, match=f"no key 'gone' below {prefix}/ after 0.3 s"):
        store.get("gone")
    before = time.monotonic()
    with pytest.raises(LookupError, match=r"'gone' .* after 0\.1 s"):
        store.wait(["there", "gone"], timedelta(seconds=0.1))
    assert time.monotonic() - before < DEADLINE / 2
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(LookupError, match=r"after 0\.2 s"):
        store.get("gone")


def test_additions_of_many_are_all_counted(server: EtcdServer, client: SyncEtcdClient, prefix: str) -> None:
    def add(own: SyncEtcdClient) -> list[int]:
        store = EtcdStore(own, prefix)
        return [store.add("n", 1) for _ in range(20)]

    with closing(server.get_client()) as other, ThreadPoolExecutor() as threads:
        seen = [number for added in threads.map(add, [client, client, other, other]) for number in added]
    assert sorted(seen) == list(range(1, 81))


def test_a_text_is_no_number_to_add_to(client: SyncEtcdClient, prefix: str) -> None:
    store = EtcdStore(client, prefix)
    store.set("t", "text")
    with pytest.raises(ValueError, match="add to 't': it holds b'text', which is not a number"):
        store.add("t", 1)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda store: store.add("n", 2), b"7"),
        (lambda store: store.append("n", "!"), b"5!"),
        (lambda store: store.compare_set("n", "5", "6"), b"6"),
        (lambda store: store.set("n", "8"), b"8"),
    ],
    ids=["add", "append", "compare_set", "set"],
)
def test_a_change_whose_reply_is_lost_is_made_once(
    change: Callable[[EtcdStore], Any], value: bytes, client: SyncEtcdClient, forgetful: Forgetful, prefix: str
) -> None:
    EtcdStore(client, prefix).set("n", "5")
    forgetful.forgets = 1
    with closing(SyncEtcdClient(Etcd((forgetful.address,), "/"))) as forgotten:
        answer = change(EtcdStore(forgotten, prefix))
    assert answer in (None, int(value) if value.isdigit() else None, value)
    assert EtcdStore(client, prefix).get("n") == value


def test_a_store_waits_for_an_etcd_that_is_away_as_long_as_its_timeout(tmp_path: Path) -> None:
    with closing(SyncEtcdClient(Etcd((Address("127.0.0.1", 1),), "/"))) as nobody:
        store = EtcdStore(nobody, "/x", timedelta(seconds=0.3))
        with pytest.raises(Exception, match=r"127\.0\.0\.1:1: connection refused"):
            store.set("a", "1")


def test_a_process_group_uses_a_store_in_etcd(server: EtcdServer, prefix: str) -> None:
    source = f"""
    import os, sys, torch, torch.distributed as dist
    from ripstop.compat import install
    install()
    from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore
    from ripstop.compat.rendezvous.sync_etcd_client import SyncEtcdClient
    from ripstop.model.config import Etcd
    from ripstop.model.round import Address
    store = EtcdStore(SyncEtcdClient(Etcd((Address("localhost", {server.get_port()}),), "/")), "{prefix}")
    rank = 1 if os.fork() == 0 else 0
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    sum = torch.ones(3)
    dist.all_reduce(sum)
    dist.barrier()
    dist.destroy_process_group()
    os.write(1, f"{{rank}} {{int(sum[0])}}\\n".encode())
    if rank == 0:
        assert os.wait()[1] == 0
    """
    done = run(source)
    assert sorted(done.stdout.splitlines()) == ["0 2", "1 2"], done.stderr
    assert done.stderr == ""


# the rendezvous backend -----------------------------------------------------------------------------------------------


def test_a_state_is_written_if_it_has_not_changed_since_the_read(client: SyncEtcdClient, prefix: str) -> None:
    one, other = (EtcdRendezvousBackend(client, "run", prefix) for _ in range(2))
    assert one.name == "etcd-v2" and one.get_state() is None
    first = one.set_state(b"one")
    assert first is not None and (first[0], first[2]) == (b"one", True)
    assert other.get_state() == first[:2]
    assert other.set_state(b"other") == (b"one", first[1], False)
    second = other.set_state(b"other", first[1])
    assert second is not None and (second[0], second[2]) == (b"other", True)
    assert one.set_state(b"late", first[1]) == (*second[:2], False)
    assert one.set_state(b"what", "no token of ours") == (*second[:2], False)


@pytest.mark.long
def test_a_deleted_state_is_not_recreated_with_an_old_token(client: SyncEtcdClient, prefix: str) -> None:
    backend = EtcdRendezvousBackend(client, "run", prefix, ttl=1)
    first = backend.set_state(b"one")
    assert first is not None
    wait_until(lambda: backend.get_state() is None or None)
    assert backend.set_state(b"two", first[1]) is None
    assert backend.set_state(b"two") is not None


def test_a_write_whose_reply_is_lost_is_recognised(
    client: SyncEtcdClient, forgotten: SyncEtcdClient, prefix: str
) -> None:
    told = EtcdRendezvousBackend(forgotten, "run", prefix).set_state(b"mine")
    held = EtcdRendezvousBackend(client, "run", prefix).get_state()
    assert held is not None and told == (*held, True)


def test_the_keys_of_a_job_expire_with_its_nodes_lease(server: EtcdServer, client: SyncEtcdClient) -> None:
    backend, store = create_backend(RendezvousParameters("etcd-v2", server.get_endpoint(), "leased", 1, 1))
    backend.set_state(b"state")
    store.set("leased", "1")
    store.clone().add("leased", 1)
    store.append("leased", "0")
    store.compare_set("leased", "20", "21")
    names = client.names(b"/torch/elastic/", b"/torch/elastic0", 5)
    assert len(names) == 4, "the state, the key, and a note of each of the two that have changed it"
    leases = {found.lease for found in client.read(names, 5)[1] if found is not None}
    assert leases == {backend.lease(5)}
    client._call("lease/revoke", {"ID": str(backend.lease(5))}, 5)
    assert client.names(b"/torch/elastic/", b"/torch/elastic0", 5) == []
    store.set("leased", "2")  # a lease that has ended is followed by another
    assert store.get("leased") == b"2"
    client._call("lease/revoke", {"ID": str(backend.lease(5))}, 5)


def test_an_etcd_that_does_not_answer_is_a_connection_error() -> None:
    with closing(SyncEtcdClient(Etcd((Address("127.0.0.1", 1),), "/"))) as client:
        store = EtcdStore(client, "/torch/elastic/store", timedelta(seconds=0.3))
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1: connection refused"):
            store.set("a", "1")
        with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1: connection refused"):
            EtcdRendezvousBackend(client, "run", read_timeout=1).get_state()
        assert store.prefix == "/torch/elastic/store/"


@pytest.mark.parametrize("make", [create_backend, create_rdzv_handler])
def test_an_etcd_that_does_not_answer_is_known_when_the_backend_is_made(make: Callable[[Any], Any]) -> None:
    params = RendezvousParameters("etcd", "127.0.0.1:1", "run", 1, 1, read_timeout=10 * DEADLINE)
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1: connection refused"):
        make(params)


@pytest.mark.parametrize(
    ("make", "key"), [(create_backend, b"/torch/elastic/rendezvous/run"), (create_rdzv_handler, b"/mine/rdzv/run")]
)
def test_the_backend_cannot_be_made_by_a_user_without_read_permission(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], Any], key: bytes
) -> None:
    closed: list[SyncEtcdClient] = []

    def read(_: SyncEtcdClient, keys: list[bytes], timeout: float) -> tuple[int, list[None]]:
        if key in keys:
            raise Denied("permission denied")
        return 1, [None]

    def close(client: SyncEtcdClient) -> None:
        closed.append(client)

    monkeypatch.setattr(SyncEtcdClient, "read", read)
    monkeypatch.setattr(SyncEtcdClient, "close", close)
    with pytest.raises(RendezvousConnectionError, match="permission denied"):
        make(OurParameters("etcd", "127.0.0.1:1", "run", 1, 1, etcd_prefix="/mine"))
    assert len(closed) == 1


def test_a_value_that_is_no_state_is_a_state_error(client: SyncEtcdClient, prefix: str) -> None:
    backend = EtcdRendezvousBackend(client, "run", prefix)
    client.write({f"{prefix}/run".encode(): b"non_base64"}, 5)
    for ask in (backend.get_state, lambda: backend.set_state(b"mine")):
        with pytest.raises(RendezvousStateError, match="is not the state of a rendezvous: found b'non_base64'"):
            ask()


def test_handlers_of_the_first_etcd_rendezvous_form_a_round(server: EtcdServer, prefix: str) -> None:
    def join(_: int) -> tuple[int, int, str]:
        endpoint = f"127.0.0.1:{server.get_port()}"
        params = OurParameters("etcd", endpoint, "run", 2, 2, "127.0.0.1", etcd_prefix=prefix, timeout=60)
        handler = create_rdzv_handler(params)
        assert isinstance(handler, EtcdRendezvousHandler) and handler.get_run_id() == "run"
        info = handler.next_rendezvous()
        info.store.set(f"here{info.rank}", "1")
        info.store.wait(["here0", "here1"])
        handler.shutdown()
        return info.rank, info.world_size, handler.get_backend()

    with ThreadPoolExecutor() as threads:
        assert sorted(threads.map(join, range(2))) == [(0, 2, "etcd"), (1, 2, "etcd")]


@pytest.mark.parametrize(
    ("config", "word"),
    [({"protocol": "ftp"}, "etcd uses http or https"), ({"read_timeout": "0"}, "read_timeout=0"),
     ({"ca_cert": "/no/such/file"}, "cannot be read")],
)  # fmt: skip
def test_parameters_that_cannot_be_right_are_a_value_error(config: dict[str, str], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        create_backend(RendezvousParameters("etcd-v2", "localhost", "run", 1, 1, **config))
    with pytest.raises(ValueError, match="run_id=''"):
        create_backend(SimpleNamespace(endpoint="localhost", run_id="", config={}))


def test_torchs_dynamic_rendezvous_runs_on_it(server: EtcdServer, prefix: str) -> None:
    def join(_: int) -> tuple[int, int]:
        with closing(server.get_client()) as client:
            backend = EtcdRendezvousBackend(client, "run", prefix)
            store = EtcdStore(client, f"{prefix}-store")
            handler = DynamicRendezvousHandler.from_backend("run", store, backend, 2, 2)
            info = handler.next_rendezvous()
            info.store.set(f"here{info.rank}", "1")
            info.store.wait(["here0", "here1"])
            handler.shutdown()
            return info.rank, info.world_size

    with ThreadPoolExecutor() as threads:
        assert sorted(threads.map(join, range(2))) == [(0, 2), (1, 2)]


# launches -------------------------------------------------------------------------------------------------------------


def test_launches_form_a_job_through_both_names_of_etcd(server: EtcdServer) -> None:
    source = f"""
    import os
    from ripstop.compat.launcher import LaunchConfig, elastic_launch

    def place():
        return os.environ["RANK"], os.environ["WORLD_SIZE"]

    config = LaunchConfig(
        2, 2, 1, run_id="run", rdzv_backend="BACKEND", rdzv_endpoint="{server.get_endpoint()}",
        start_method="fork",
    )
    print(elastic_launch(config, place)())
    """
    with ThreadPoolExecutor() as threads:
        ends = list(threads.map(run, (source.replace("BACKEND", name) for name in ("etcd", "etcd-v2"))))
    assert sorted(end.stdout for end in ends) == ["{0: ('0', '2')}\n", "{1: ('1', '2')}\n"], ends


def run(source: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
