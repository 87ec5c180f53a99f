"""Queries workers for torch's flight recorder: which collectives they have entered, and which they have not left.

A worker that the zygote forked has a thread for this (`workers/zygote/process.py`).  The thread sends the recorder's
dump to each client of the worker's own socket.  It needs Python's lock, which a worker that waits in a collective does
not hold.  Rules:

1. ripstop enables no recording; it reads only what torch records anyway, and only when queried.
2. The socket is beside the agent's (`workers/report_socket.py`), in a directory that only this user can access.
3. A reply is bounded in time and size.  If there is none, the result has the reason.
4. NCCL's recorder queries the GPU, which would break a CUDA graph that is being captured.  So it is read only from
   workers that hang.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from ripstop.diagnostics.flight_recorder import flight_recorder_progress, flight_recorder_text, parse_flight_recorder
from ripstop.model.failure import CollectiveProgress
from ripstop.system.blocking_calls import run_in_daemon_thread

REPLY_TIMEOUT_S = 2.0
PARSE_TIMEOUT_S = 1.5  # the whole diagnosis has five seconds
HANGING, HEALTHY = b"!", b"?"  # the query; `workers/zygote/process.py` reads NCCL's recorder only for the first
MAX_DUMP_BYTES = 16 << 20  # 2000 operations, torch's default, are less than one MiB


class FlightDump(Struct, frozen=True):
    """The dump of one worker's recorder, or `why` there is none; `raw` is torch's own JSON."""

    collectives: tuple[CollectiveProgress, ...] | None = None
    text: str = ""
    raw: bytes = b""
    why: str = ""


async def query_ranks(sockets: Sequence[str], ranks: Sequence[int], kind: bytes) -> list[FlightDump | None]:
    """Query the workers of these local ranks concurrently; None for each if workers have no sockets."""
    if not sockets:
        return [None] * len(ranks)
    return list(await asyncio.gather(*(_query_flight_recorder(sockets[rank], kind) for rank in ranks)))


async def _query_flight_recorder(path: str, kind: bytes) -> FlightDump:
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            raw = await _flight_recorder_query_reply(path, kind)
        if len(raw) > MAX_DUMP_BYTES:
            return FlightDump(
                why=f"the dump has more than {MAX_DUMP_BYTES >> 20} MiB; set a smaller TORCH_FR_BUFFER_SIZE"
            )
    except TimeoutError:
        return FlightDump(why=f"the worker did not reply within {REPLY_TIMEOUT_S:g} s")
    except FileNotFoundError:
        return FlightDump(
            why="the worker has no socket: it was not forked with torch loaded (--start-method, --preload)"
        )
    except OSError as error:
        return FlightDump(why=f"the worker cannot be queried: {error}")
    try:
        return await run_in_daemon_thread(partial(_parse_query_reply, raw), PARSE_TIMEOUT_S)
    except (TimeoutError, RuntimeError) as error:
        return FlightDump(raw=raw, why=f"this node is too busy to parse the worker's reply: {error}".rstrip(": "))
    except Exception as error:  # a defect in the parser must not prevent the report of a hang
        return FlightDump(raw=raw, why=f"the worker's reply cannot be parsed: {error!r}")


async def _flight_recorder_query_reply(path: str, kind: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(kind)
        raw = bytearray()
        while len(raw) <= MAX_DUMP_BYTES and (part := await reader.read(1 << 20)):
            raw += part
        return bytes(raw)
    finally:
        writer.transport.abort()


def _parse_query_reply(raw: bytes) -> FlightDump:
    recording = parse_flight_recorder(raw)
    if recording is None:
        return FlightDump(why="the worker's reply is not a dump of torch's flight recorder")
    return FlightDump(flight_recorder_progress(recording), flight_recorder_text(recording), raw)
