"""Records in a store that other programs share, such as etcd.  Pure.

A record is a JSON object with `ripstop`, the version that wrote it, and `run_id`, its job.  A record of another
program, version or job is a `ProtocolError`; the reader leaves it unchanged.
"""

import json
from typing import Any

from ripstop.model.errors import ProtocolError


def parse_record(text: str | bytes, run_id: str, *, version: int, max_size: int) -> dict[str, Any]:
    """The JSON object, if this version wrote it for this job."""
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
    raise foreign_record(text)


def foreign_record(text: str | bytes) -> ProtocolError:
    """The error for a value that ripstop did not write."""
    return ProtocolError(f"it was not written by ripstop: found {text[:80]!r}")
