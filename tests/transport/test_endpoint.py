import socket

import pytest

from ripstop.model.errors import UsageError
from ripstop.model.round import Address
from ripstop.transport.endpoint import bind

ELSEWHERE = "192.0.2.1"  # an address for documentation: nobody has it
NOWHERE = "no-such-host.invalid"


def test_the_first_to_bind_is_the_host_and_the_second_is_not() -> None:
    first = bind(Address("127.0.0.1", 0))
    assert first is not None
    with first.listening:
        assert first.address.port > 0
        assert bind(first.address) is None


def test_exactly_the_asked_address_is_bound() -> None:
    bound = bind(Address("127.0.0.1", 0))
    assert bound is not None
    with bound.listening:
        assert bound.listening.getsockname()[0] == "127.0.0.1"


def test_an_address_of_another_machine_makes_a_client() -> None:
    assert bind(Address(ELSEWHERE, 29400)) is None


def test_a_name_without_an_address_makes_a_client() -> None:
    assert bind(Address(NOWHERE, 29400)) is None


def test_a_port_left_a_moment_ago_can_be_bound_again() -> None:
    first = bind(Address("127.0.0.1", 0))
    assert first is not None
    address = first.address
    with first.listening, socket.create_connection((address.host, address.port)):
        accepted, _ = first.listening.accept()
        accepted.close()  # this side closes first: its port stays in TIME_WAIT
    again = bind(address)
    assert again is not None
    again.listening.close()


def test_ipv6_works_too() -> None:
    try:
        bound = bind(Address("::1", 0), demanded=True)
    except UsageError:
        pytest.skip("no IPv6 here")
    assert bound is not None
    with bound.listening:
        assert str(bound.address).startswith("[::1]:")


def test_a_demanded_host_whose_port_is_taken_is_told_so() -> None:
    first = bind(Address("127.0.0.1", 0))
    assert first is not None
    with first.listening, pytest.raises(UsageError, match=r"127\.0\.0\.1:\d+, but that port is taken; choose another"):
        bind(first.address, demanded=True)


def test_a_demanded_host_without_the_address_is_told_so() -> None:
    with pytest.raises(UsageError, match="no address of this machine"):
        bind(Address(ELSEWHERE, 29400), demanded=True)


def test_a_demanded_host_with_an_unknown_name_is_told_so() -> None:
    with pytest.raises(UsageError, match=f"{NOWHERE} has no address here"):
        bind(Address(NOWHERE, 29400), demanded=True)


def names(monkeypatch: pytest.MonkeyPatch, **hosts: str) -> None:
    """Give the resolver the names that /etc/hosts would."""
    resolve = socket.getaddrinfo

    def getaddrinfo(host: str, *args: object, **options: object) -> object:
        return resolve(hosts.get(host, host), *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_host_name_that_is_loopback_deserves_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, node0="127.0.1.1")
    bound = bind(Address("node0", 0))
    assert bound is not None
    bound.listening.close()
    assert "node0 is 127.0.1.1 on this machine" in bound.note
    alone = bind(Address("node0", 0), shared=False)
    assert alone is not None
    alone.listening.close()
    assert alone.note == ""


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_loopback_on_purpose_needs_no_word(host: str) -> None:
    bound = bind(Address(host, 0))
    assert bound is not None
    bound.listening.close()
    assert bound.note == ""


# containers: names that are known here before they are known elsewhere ------------------------------------------------

POD, SERVICE = "train-0", "train-0.train.ml.svc"


def in_a_pod(monkeypatch: pytest.MonkeyPatch, *, name: str = POD, network_says: str = "") -> str:
    """A container with an address of this machine, whose /etc/hosts a kubelet has written; returns that address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((ELSEWHERE, 9))  # sends nothing; the kernel chooses the address
        address = str(s.getsockname()[0])
    resolve = socket.getaddrinfo

    def getaddrinfo(host: str, port: object, *args: object, **options: object) -> object:
        if host == name and options.get("flags") == socket.AI_CANONNAME:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, f"{name}.train.ml.svc.cluster.local", (address, 0))]
        if host == SERVICE:
            if not network_says:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            host = network_says
        return resolve(host, port, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    return address


@pytest.mark.parametrize("network_says", ["", ELSEWHERE])
@pytest.mark.parametrize("demanded", [False, True])
def test_a_container_of_that_name_listens_before_the_network_knows(
    monkeypatch: pytest.MonkeyPatch, network_says: str, demanded: bool
) -> None:
    address = in_a_pod(monkeypatch, network_says=network_says)
    bound = bind(Address(SERVICE, 0), demanded=demanded)
    assert bound is not None
    with bound.listening:
        assert bound.address.host == address
    assert f"{SERVICE} is not known as this node yet; listening at {address}:" in bound.note


@pytest.mark.parametrize("network_says", ["", ELSEWHERE])
def test_a_container_of_another_name_is_a_client(monkeypatch: pytest.MonkeyPatch, network_says: str) -> None:
    in_a_pod(monkeypatch, name="train-1", network_says=network_says)
    assert bind(Address(SERVICE, 29400)) is None


def test_a_host_of_the_same_short_name_elsewhere_is_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_pod(monkeypatch)
    assert bind(Address("train-0.other.invalid", 29400)) is None


def test_a_demanded_host_listens_at_the_address_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_pod(monkeypatch, name="a-node", network_says=ELSEWHERE)
    bound = bind(Address(SERVICE, 0), demanded=True, own="127.0.0.3")
    assert bound is not None
    with bound.listening:
        assert bound.address.host == "127.0.0.3"
