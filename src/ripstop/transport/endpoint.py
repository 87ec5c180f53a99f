"""Who hosts the coordinator: decided by binding the endpoint, never by guessing at host names.

The agent on whose machine the endpoint's address is, and whose bind comes first, is the host; for all others the
address is not theirs or is in use.  Exactly the endpoint's address is bound, nothing wider.

A container's name may be known to itself before the network knows it, or while the network still knows its predecessor:
then the container binds its own address, if its full name begins with the endpoint's; or the one that it was given, if
it was told to be the host.
"""

import errno
import socket
from ipaddress import ip_address

from msgspec import Struct

from ripstop.model.errors import UsageError
from ripstop.model.round import Address

BACKLOG = 4096  # connections the kernel keeps for us while we are busy


class Bound(Struct, frozen=True):
    """The endpoint is ours: its listening socket, and what the user should know about it."""

    listening: socket.socket
    note: str = ""

    @property
    def address(self) -> Address:
        host, port = self.listening.getsockname()[:2]
        return Address(host, port)


def bind(
    endpoint: Address,
    *,
    demanded: bool = False,
    shared: bool = True,
    own: str | None = None,
    flag: str = "--rdzv-endpoint",
) -> Bound | None:
    """Listen at the endpoint, or None when another agent is to.

    `demanded`: the user said that this node is the host, so not being able to is an error.  `shared`: other machines
    are to come, so a loopback address deserves a word.  `own`: what the user calls this node's address.  `flag` is what
    the user calls the endpoint.
    """
    try:
        return _bind(endpoint, demanded=demanded, shared=shared, flag=flag)
    except _NotHere as error:
        here = own if demanded and own else _known_to_itself(endpoint.host)
        if here is None or here == endpoint.host:
            if demanded:
                raise UsageError(str(error)) from error
            return None  # the name may come to life later; the client keeps asking
        bound = _bind(Address(here, endpoint.port), demanded=True, shared=False, flag=flag)
        assert bound is not None, "a demanded endpoint is bound, or an error"
        return Bound(bound.listening, f"{endpoint.host} is not known as this node yet; listening at {bound.address}")


class _NotHere(UsageError):
    """The endpoint has no address, or none of this machine's."""


def _known_to_itself(name: str) -> str | None:
    """This machine's address, if the name is its own."""
    host = socket.gethostname()
    if name.partition(".")[0].lower() != host.partition(".")[0].lower():
        return None
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME)
    except OSError:
        return None
    full, address = found[0][3].lower(), str(found[0][4][0])
    known = full == name.lower() or full.startswith(f"{name.lower()}.")
    return address if known and not ip_address(address.partition("%")[0]).is_loopback else None


def _bind(endpoint: Address, *, demanded: bool, shared: bool, flag: str) -> Bound | None:
    """The same, or `_NotHere`."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _NotHere(
            f"this node is to listen at {endpoint}, but {endpoint.host} has no address here "
            f"({error.strerror}); mend the name in {flag} or give an IP address"
        ) from error
    trouble: OSError | None = None
    for family, kind, protocol, _, address in sorted(found, key=lambda info: info[0] != socket.AF_INET):
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            trouble = error
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            break  # in use: another of the name's addresses would be a second coordinator
        return Bound(listening, _note(endpoint, str(address[0])) if shared else "")
    assert trouble is not None, "a name has at least one address"
    if trouble.errno == errno.EADDRNOTAVAIL:
        raise _NotHere(_explain(endpoint, trouble, flag)) from trouble
    if demanded or trouble.errno != errno.EADDRINUSE:
        raise UsageError(_explain(endpoint, trouble, flag)) from trouble
    return None


def _explain(endpoint: Address, error: OSError, flag: str) -> str:
    start = f"this node is to listen at {endpoint}, but "
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"{start}that port is taken; choose another in {flag}, "
                f"or stop what listens there (ss -ltnp 'sport = :{endpoint.port}')"
            )
        case errno.EADDRNOTAVAIL:
            remedy = "set is_host=1 only on the node that has it" if flag == "--rdzv-endpoint" else f"mend {flag}"
            return f"{start}that is no address of this machine; {remedy}"
        case errno.EACCES:
            return f"{start}port {endpoint.port} is privileged; choose one above 1023"
        case _:
            return f"{start}the system says: {error.strerror}; choose another address in {flag}"


def _note(endpoint: Address, bound: str) -> str:
    name = endpoint.host.lower()
    if not ip_address(bound.partition("%")[0]).is_loopback or name == bound or name.startswith(("localhost", "ip6-")):
        return ""
    return (
        f"{endpoint.host} is {bound} on this machine, where no other node can reach it; "
        "give --rdzv-endpoint as the address the other nodes know, or mend /etc/hosts"
    )
