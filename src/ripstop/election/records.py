"""Records that ripstop writes where other programs can write too, such as the value of the leader's key.  Pure."""

import json
from typing import Any

from ripstop.election.election import Leader
from ripstop.model.errors import ProtocolError
from ripstop.model.round import Address

VERSION = 1
MAX_VALUE_CHARS = 4096


def write_leader_record(run_id: str, address: Address, node: str) -> str:
    return json.dumps(
        {"ripstop": VERSION, "run_id": run_id, "host": address.host, "port": address.port, "node": node},
        ensure_ascii=False,
    )


def read_leader_record(text: str, run_id: str, revision: int) -> Leader:
    """The leader that `write_leader_record` wrote; a `ProtocolError` for any other value (rule 4 of `election.py`)."""
    match parse_record(text, run_id, version=VERSION, max_size=MAX_VALUE_CHARS):
        case {"host": str(host), "port": int(port), "node": str(node)} if host and 0 < port < 65536:
            return Leader(Address(host, port), node, revision)
    raise _foreign_record_error(text)


def parse_record(text: str | bytes, run_id: str, *, version: int, max_size: int) -> dict[str, Any]:
    """A JSON object with `ripstop`, the version that wrote it, and `run_id`, its job.

    A record of another program, version or job is a `ProtocolError`; the reader leaves it unchanged.
    """
    try:
        value: Any = json.loads(text) if len(text) <= max_size else None
    except (ValueError, RecursionError):
        value = None
    match value:
        case {"ripstop": int(other)} if other != version:
            raise ProtocolError(f"it was written by another version of ripstop ({other}, this one writes {version})")
        case {"ripstop": int(), "run_id": str(other)} if other != run_id:
            raise ProtocolError(f"it was written for job {other[:80]!r}, not for {run_id!r}")
        case {"ripstop": int(), "run_id": str()}:
            return dict(value)
    raise _foreign_record_error(text)


def _foreign_record_error(text: str | bytes) -> ProtocolError:
    """The error for a value that ripstop did not write."""
    return ProtocolError(f"it was not written by ripstop: found {text[:80]!r}")
