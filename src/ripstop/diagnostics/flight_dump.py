"""torch's flight recorder, asked of workers: which collectives they have entered, and which they have not left.

A worker that the zygote forked has a thread (`worker_hooks.py`), which writes what torch remembers to whoever connects
to the worker's own socket.  It needs Python's lock for that, which a worker that waits in a collective does not hold.
Rules: (1) nothing is recorded for it that torch would not record anyway, and nothing is done before somebody asks;
(2) the socket lies beside the agent's (`reports.py`), in a directory of this user's alone; (3) an answer is bounded in
time and size, and one that does not come is said in words; (4) NCCL's recorder asks the GPU, which would spoil a CUDA
graph that is being captured: it is asked only of workers that hang.
"""

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from msgspec import Struct

from ripstop.diagnostics.flight_recorder import as_text, from_torch, standings
from ripstop.model.failure import CollectiveProgress
from ripstop.system.blocking_calls import run_in_daemon_thread

PATIENCE = 2.0  # seconds for an answer
READING = 1.5  # and to understand it; all nodes together have five
HANGING, HEALTHY = b"!", b"?"  # what a worker is taken for by who asks it; `worker_hooks.py` knows the first
LARGEST = 16 << 20  # bytes of one; torch remembers 2000 operations unless told otherwise, which is less than one MiB


class Flight(Struct, frozen=True):
    """What one worker's recorder has, or `why` nothing is known; `raw` is torch's own JSON."""

    standings: tuple[CollectiveProgress, ...] | None = None
    text: str = ""
    raw: bytes = b""
    why: str = ""


async def ask_ranks(sockets: Sequence[str], ranks: Sequence[int], taken_for: bytes) -> list[Flight | None]:
    """The workers of these local ranks; None of each where workers have no sockets, since nobody is to ask them."""
    return list(await ask((sockets[rank] for rank in ranks), taken_for)) if sockets else [None] * len(ranks)


async def ask(sockets: Iterable[str], taken_for: bytes = HANGING) -> list[Flight]:
    """Several workers, all at the same time."""
    return list(await asyncio.gather(*(_ask(path, taken_for) for path in sockets)))


async def _ask(path: str, taken_for: bytes) -> Flight:
    try:
        async with asyncio.timeout(PATIENCE):
            raw = await _read(path, taken_for)
        if len(raw) > LARGEST:
            return Flight(why=f"it has more than {LARGEST >> 20} MiB; set a smaller TORCH_FR_BUFFER_SIZE")
    except TimeoutError:
        return Flight(why=f"the worker did not answer within {PATIENCE:g} s")
    except FileNotFoundError:
        return Flight(why="the worker has no socket: it was not forked with torch loaded (--start-method, --preload)")
    except OSError as error:
        return Flight(why=f"the worker cannot be asked: {error}")
    try:
        return await run_in_daemon_thread(partial(_understand, raw), READING)
    except (TimeoutError, RuntimeError) as error:
        return Flight(raw=raw, why=f"this node is too busy to read the worker's answer: {error}".rstrip(": "))
    except Exception as defect:  # of ours: a hang is told all the same
        return Flight(raw=raw, why=f"the worker's answer cannot be understood: {defect!r}")


async def _read(path: str, taken_for: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(taken_for)
        raw = bytearray()
        while len(raw) <= LARGEST and (part := await reader.read(1 << 20)):
            raw += part
        return bytes(raw)
    finally:
        writer.transport.abort()


def _understand(raw: bytes) -> Flight:
    recording = from_torch(raw)
    if recording is None:
        return Flight(why="the worker's answer is not what torch's flight recorder prints")
    return Flight(standings(recording), as_text(recording), raw)
