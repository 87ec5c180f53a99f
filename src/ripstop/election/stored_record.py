"""What ripstop leaves in a store that others use too, and how it knows its own again.  Pure.

A JSON object with `ripstop`, the version that wrote it, and `run_id`, the job it is for.  What another program, version
or job wrote is a `ProtocolError`, and is left as it is by whoever reads it.
"""

import json
from typing import Any

from ripstop.model.errors import ProtocolError


def opened(text: str | bytes, run_id: str, *, version: int, most: int) -> dict[str, Any]:
    """The object, if this version wrote it for this job; `most` is the longest that it can be."""
    try:
        value: Any = json.loads(text) if len(text) <= most else None
    except (ValueError, RecursionError):
        value = None
    match value:
        case {"ripstop": int(other)} if other != version:
            raise ProtocolError(f"it was written by another version of ripstop ({other}, this one writes {version})")
        case {"ripstop": int(), "run_id": str(other)} if other != run_id:
            raise ProtocolError(f"it was written for job {other[:80]!r}, not for {run_id!r}")
        case {"ripstop": int(), "run_id": str()}:
            return dict(value)
    raise foreign(text)


def foreign(text: str | bytes) -> ProtocolError:
    """The error for what is none of ours."""
    return ProtocolError(f"it was not written by ripstop: found {text[:80]!r}")
