"""TCP sockets, their options, error texts for connections to other machines, and this machine's addresses."""

import os
import socket
import ssl

from ripstop.model.errors import StartError


def enable_keepalive(connection: socket.socket) -> None:
    """Send small messages at once, and let the kernel detect a lost peer within half a minute."""
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # some systems lack some options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def set_acknowledgement_timeout(connection: socket.socket, timeout_s: float) -> None:
    """Let the kernel close the connection if the other machine does not acknowledge sent data for this time.

    The kernel of a suspended process acknowledges data until its buffer is full.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timeout_s))


def is_this_machine(host: str) -> bool:
    """Whether this is a name or an address of this machine, which means that it can be bound."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_be_bound(family, where) for family, _, _, _, where in found)


def _can_be_bound(family: int, where: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind(where)
        except OSError:
            return False
    return True


def describe_network_error(error: BaseException, timeout: float | None = None) -> str:
    """Why a connection or a request failed, in a few words; `timeout` is the time limit of the request."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error  # aiohttp wraps the system's error
    match cause:
        case socket.gaierror():
            return "the name has no address"
        case ssl.SSLError():
            return str(cause)
        case OSError(errno=int(number)) if number > 0:  # asyncio replaces the text of the error, but not its number
            return os.strerror(number).lower()
        case TimeoutError():
            return "no reply in time" if timeout is None else f"no answer in {timeout:g} s"
        case _:
            return str(cause) or type(cause).__name__


def bind_local(host: str) -> socket.socket:
    """A socket on a free port of `host`, which does not listen yet; StartError if `host` is not a local address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return bind_socket(family, address)
    except OSError as error:
        raise StartError(f"no port can be bound on {host}: {error.strerror}; set --local-addr") from error


def bind_socket(family: int, address: tuple[object, ...], backlog: int | None = None) -> socket.socket:
    """A socket that is bound to this address; with a `backlog`, it listens."""
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        if backlog is not None:
            bound.listen(backlog)
    except OSError:
        bound.close()
        raise
    return bound
