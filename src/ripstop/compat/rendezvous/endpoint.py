"""`torch.distributed.elastic.rendezvous.utils`: parses the endpoint `HOST[:PORT]`."""

from ripstop.model.errors import UsageError
from ripstop.model.parsers import key_values, parse_address

__all__ = ["parse_rendezvous_endpoint"]


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Host and port; an empty endpoint is localhost.  Pass -1 as `default_port` to detect a missing port."""
    text = (endpoint or "").strip()
    if not text:
        return "localhost", default_port
    try:
        found = parse_address("endpoint", text, default_port=default_port)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return found.host, found.port


def _parse_rendezvous_config(config_str: str) -> dict[str, str]:  # torch.distributed.run imports it
    try:
        return key_values("rdzv_conf", config_str)
    except UsageError as error:
        raise ValueError(str(error)) from None
