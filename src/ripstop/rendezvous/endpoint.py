"""Who hosts the coordinator: decided by binding the endpoint, never by guessing at host names.

The agent on whose machine the endpoint's address is, and whose bind comes first, is the host; for all others the
address is not theirs or is in use.  Exactly the endpoint's address is bound, nothing wider.
"""

import errno
import socket
from dataclasses import dataclass
from ipaddress import ip_address

from ripstop.errors import UsageError
from ripstop.round import Address

BACKLOG = 4096  # connections the kernel keeps for us while we are busy


@dataclass(frozen=True, slots=True)
class Bound:
    """The endpoint is ours: its listening socket, and what the user should know about it."""

    listening: socket.socket
    note: str = ""

    @property
    def address(self) -> Address:
        host, port = self.listening.getsockname()[:2]
        return Address(host, port)


def bind(
    endpoint: Address, *, demanded: bool = False, shared: bool = True, flag: str = "--rdzv-endpoint"
) -> Bound | None:
    """Listen at the endpoint, or None when another agent is to.

    `demanded`: the user said that this node is the host, so not being able to is an error.  `shared`: other machines
    are to come, so a loopback address deserves a word.  `flag` is what the user calls the endpoint.
    """
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        if demanded:
            raise UsageError(
                f"this node is to listen at {endpoint}, but {endpoint.host} has no address here "
                f"({error.strerror}); mend the name in {flag} or give an IP address"
            ) from error
        return None  # the name may come to life later; the client keeps asking
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
    if demanded or trouble.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
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
