"""Which node hosts the coordinator: the node that binds the endpoint's address first.

Rules:

1.  A node whose machine has the endpoint's address, and that binds it first, is the host.  For all others the address
    is not local, or in use.  Host names are not compared.
2.  Exactly the endpoint's address is bound, nothing wider.
3.  Exception: a container may have a name that the network does not resolve yet, or still resolves to the container's
    predecessor.  It then binds its own address if its full name begins with the endpoint's name.  A node that the user
    made the host binds the address that the user gave it.
"""

import errno
import socket
from collections.abc import Sequence
from ipaddress import ip_address

from msgspec import Struct
from msgspec.structs import replace

from ripstop.model.errors import UsageError
from ripstop.model.round import Address

LISTEN_BACKLOG = 4096  # connections that wait in the kernel


class Bound(Struct, frozen=True):
    """A socket that listens at the endpoint."""

    listening: socket.socket
    note: str = ""  # a warning for the user
    listed_address: Address | None = None  # the endpoint's address, if it has several

    @property
    def address(self) -> Address:
        host, port = self.listening.getsockname()[:2]
        return Address(host, port)


def bind_endpoint(
    endpoint: Address,
    *,
    required: bool = False,
    multi_node: bool = True,
    own_address: str | None = None,
    flag: str = "--rdzv-endpoint",
) -> Bound | None:
    """Listen at the endpoint; None if another node is the host.

    `required`: the user made this node the host, so a failure is an error.  `multi_node`: other machines connect, so
    the user is warned of a loopback address.  `own_address`: the node's address, if the user gave one.  `flag`: the
    flag that gives the endpoint.
    """
    try:
        return _bind_local_endpoint(endpoint, required=required, multi_node=multi_node, flag=flag)
    except _NotLocal as error:
        address = own_address if required and own_address else _own_address_of_endpoint(endpoint.host)
        if address is None or address == endpoint.host:
            if required:
                raise UsageError(str(error)) from error
            return None  # the name may resolve later; the client retries
        bound = _bind_local_endpoint(Address(address, endpoint.port), required=True, multi_node=False, flag=flag)
        assert bound is not None, "a required endpoint is bound, or an error"
        note = f"{endpoint.host} does not resolve to this node yet; listening at {bound.address}"
        return Bound(bound.listening, note)


def bind_first_endpoint(
    listed_addresses: Sequence[Address], *, required: bool = False, own_address: str | None = None
) -> Bound | None:
    """Listen at the first of these addresses that this machine has and nobody uses; None if there is none."""
    for listed_address in listed_addresses:
        if (bound := bind_endpoint(listed_address, own_address=own_address)) is not None:
            return replace(bound, listed_address=listed_address)
    if required:
        names = ", ".join(map(str, listed_addresses))
        raise UsageError(f"is_host=1: this node must listen at one of {names}, and cannot; leave is_host out")
    return None


class _NotLocal(UsageError):
    """The endpoint has no address, or no address of this machine."""


def _own_address_of_endpoint(name: str) -> str | None:
    """This machine's address, if `name` is its name."""
    host = socket.gethostname()
    if name.partition(".")[0].lower() != host.partition(".")[0].lower():
        return None
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME)
    except OSError:
        return None
    full, address = found[0][3].lower(), str(found[0][4][0])
    is_own = full == name.lower() or full.startswith(f"{name.lower()}.")
    return address if is_own and not ip_address(address.partition("%")[0]).is_loopback else None


def _bind_local_endpoint(endpoint: Address, *, required: bool, multi_node: bool, flag: str) -> Bound | None:
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _NotLocal(
            f"this node must listen at {endpoint}, but {endpoint.host} has no address here "
            f"({error.strerror}); correct the name in {flag} or give an IP address"
        ) from error
    failure: OSError | None = None
    for family, kind, protocol, _, address in sorted(found, key=lambda info: info[0] != socket.AF_INET):
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)
            listening.listen(LISTEN_BACKLOG)
        except OSError as error:
            listening.close()
            failure = error
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            break  # in use: another address of the name would make a second coordinator
        return Bound(listening, _endpoint_loopback_warning(endpoint, str(address[0])) if multi_node else "")
    assert failure is not None, "a name has at least one address"
    if failure.errno == errno.EADDRNOTAVAIL:
        raise _NotLocal(_explain_endpoint_error(endpoint, failure, flag)) from failure
    if required or failure.errno != errno.EADDRINUSE:
        raise UsageError(_explain_endpoint_error(endpoint, failure, flag)) from failure
    return None


def _explain_endpoint_error(endpoint: Address, error: OSError, flag: str) -> str:
    start = f"this node must listen at {endpoint}, but "
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"{start}the port is in use; choose another in {flag}, "
                f"or stop the process that listens there (ss -ltnp 'sport = :{endpoint.port}')"
            )
        case errno.EADDRNOTAVAIL:
            remedy = "set is_host=1 only on the node that has it" if flag == "--rdzv-endpoint" else f"correct {flag}"
            return f"{start}that is not an address of this machine; {remedy}"
        case errno.EACCES:
            return f"{start}port {endpoint.port} is privileged; choose one above 1023"
        case _:
            return f"{start}the system reports: {error.strerror}; choose another address in {flag}"


def _endpoint_loopback_warning(endpoint: Address, bound: str) -> str:
    name = endpoint.host.lower()
    if not ip_address(bound.partition("%")[0]).is_loopback or name == bound or name.startswith(("localhost", "ip6-")):
        return ""
    return (
        f"{endpoint.host} is {bound} on this machine, where no other node can reach it; "
        "give --rdzv-endpoint the address that the other nodes use, or correct /etc/hosts"
    )
