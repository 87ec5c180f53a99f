import socket

import pytest

from ripstop.model.errors import UsageError
from ripstop.model.round import Address
from ripstop.transport.endpoint import bind_endpoint

ELSEWHERE = "192.0.2.1"  # an address for documentation: no machine has it
NOWHERE = "no-such-host.invalid"


def test_the_first_node_to_bind_is_the_host() -> None:
    first = bind_endpoint(Address("127.0.0.1", 0))
    assert first is not None
    with first.listening:
        assert first.address.port > 0
        assert bind_endpoint(first.address) is None


def test_only_the_requested_address_is_bound() -> None:
    bound = bind_endpoint(Address("127.0.0.1", 0))
    assert bound is not None
    with bound.listening:
        assert bound.listening.getsockname()[0] == "127.0.0.1"


def test_a_node_without_the_address_is_a_client() -> None:
    assert bind_endpoint(Address(ELSEWHERE, 29400)) is None


def test_a_node_that_cannot_resolve_the_name_is_a_client() -> None:
    assert bind_endpoint(Address(NOWHERE, 29400)) is None


def test_a_port_in_time_wait_can_be_bound_again() -> None:
    first = bind_endpoint(Address("127.0.0.1", 0))
    assert first is not None
    address = first.address
    with first.listening, socket.create_connection((address.host, address.port)):
        accepted, _ = first.listening.accept()
        accepted.close()  # this side closes first: its port stays in TIME_WAIT
    again = bind_endpoint(address)
    assert again is not None
    again.listening.close()


def test_an_ipv6_address_can_be_bound() -> None:
    try:
        bound = bind_endpoint(Address("::1", 0), required=True)
    except UsageError:
        pytest.skip("this machine has no IPv6")
    assert bound is not None
    with bound.listening:
        assert str(bound.address).startswith("[::1]:")


def test_a_required_host_fails_if_the_port_is_in_use() -> None:
    first = bind_endpoint(Address("127.0.0.1", 0))
    assert first is not None
    with first.listening, pytest.raises(UsageError, match=r"127\.0\.0\.1:\d+, but the port is in use; choose another"):
        bind_endpoint(first.address, required=True)


def test_a_required_host_fails_without_the_address() -> None:
    with pytest.raises(UsageError, match="not an address of this machine"):
        bind_endpoint(Address(ELSEWHERE, 29400), required=True)


def test_a_required_host_fails_with_an_unknown_name() -> None:
    with pytest.raises(UsageError, match=f"{NOWHERE} has no address here"):
        bind_endpoint(Address(NOWHERE, 29400), required=True)


def names(monkeypatch: pytest.MonkeyPatch, **hosts: str) -> None:
    """Make names resolve as with /etc/hosts."""
    resolve = socket.getaddrinfo

    def getaddrinfo(host: str, *args: object, **options: object) -> object:
        return resolve(hosts.get(host, host), *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_host_name_that_resolves_to_loopback_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, node0="127.0.1.1")
    bound = bind_endpoint(Address("node0", 0))
    assert bound is not None
    bound.listening.close()
    assert "node0 is 127.0.1.1 on this machine" in bound.note
    alone = bind_endpoint(Address("node0", 0), multi_node=False)
    assert alone is not None
    alone.listening.close()
    assert alone.note == ""


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_an_explicit_loopback_address_is_no_warning(host: str) -> None:
    bound = bind_endpoint(Address(host, 0))
    assert bound is not None
    bound.listening.close()
    assert bound.note == ""


# containers: names that resolve here before they resolve on the network -----------------------------------------------

POD, SERVICE = "train-0", "train-0.train.ml.svc"


def in_a_pod(monkeypatch: pytest.MonkeyPatch, *, name: str = POD, network_address: str = "") -> str:
    """A container with an address of this machine and a kubelet's /etc/hosts; returns the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((ELSEWHERE, 9))  # sends no packet; the kernel chooses the address
        address = str(s.getsockname()[0])
    resolve = socket.getaddrinfo

    def getaddrinfo(host: str, port: object, *args: object, **options: object) -> object:
        if host == name and options.get("flags") == socket.AI_CANONNAME:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, f"{name}.train.ml.svc.cluster.local", (address, 0))]
        if host == SERVICE:
            if not network_address:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            host = network_address
        return resolve(host, port, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    return address


@pytest.mark.parametrize("network_address", ["", ELSEWHERE])
@pytest.mark.parametrize("required", [False, True])
def test_a_container_of_that_name_listens_before_the_network_resolves_it(
    monkeypatch: pytest.MonkeyPatch, network_address: str, required: bool
) -> None:
    address = in_a_pod(monkeypatch, network_address=network_address)
    bound = bind_endpoint(Address(SERVICE, 0), required=required)
    assert bound is not None
    with bound.listening:
        assert bound.address.host == address
    assert f"{SERVICE} does not resolve to this node yet; listening at {address}:" in bound.note


@pytest.mark.parametrize("network_address", ["", ELSEWHERE])
def test_a_container_of_another_name_is_a_client(monkeypatch: pytest.MonkeyPatch, network_address: str) -> None:
    in_a_pod(monkeypatch, name="train-1", network_address=network_address)
    assert bind_endpoint(Address(SERVICE, 29400)) is None


def test_a_host_of_the_same_short_name_in_another_domain_is_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_pod(monkeypatch)
    assert bind_endpoint(Address("train-0.other.invalid", 29400)) is None


def test_a_required_host_listens_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_pod(monkeypatch, name="a-node", network_address=ELSEWHERE)
    bound = bind_endpoint(Address(SERVICE, 0), required=True, own_address="127.0.0.3")
    assert bound is not None
    with bound.listening:
        assert bound.address.host == "127.0.0.3"
