"""`torch.distributed.elastic.rendezvous.utils`: parses the endpoint `HOST[:PORT]`."""

import socket

from ripstop.model.errors import UsageError
from ripstop.model.parsers import address, key_values

__all__ = ["is_this_machine", "parse_rendezvous_endpoint"]


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Host and port; an empty endpoint is localhost.  Pass -1 as `default_port` to detect a missing port."""
    text = (endpoint or "").strip()
    if not text:
        return "localhost", default_port
    try:
        found = address("endpoint", text, default_port=default_port)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return found.host, found.port


def _parse_rendezvous_config(config_str: str) -> dict[str, str]:  # torch.distributed.run imports it
    try:
        return key_values("rdzv_conf", config_str)
    except UsageError as error:
        raise ValueError(str(error)) from None


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
