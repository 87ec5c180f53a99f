"""`ripstop logs`: what workers wrote."""

import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from ripstop.cli.flags import Flag
from ripstop.cli.steering import ABOUT_JOBS, COMMON, Objection, Target, complain, find, get, lines, show_json, words
from ripstop.config import whole
from ripstop.errors import RipstopError, UsageError
from ripstop.observe.openapi import MAX_TAIL

HELP = f"""\
usage: ripstop logs [RANK] [-f] [--tail N] [--stream stdout|stderr] [FLAGS]

Shows the end of what workers wrote: of one, or of all with [RANK] before each line.  Output that goes to a node's
console alone, as stdout does without --tee or --redirects, is only there.

  -f, --follow                go on with what is written from now on, through restarts, until the job is over
  --tail N                    so many lines of each (100)
  --stream NAME               stdout or stderr alone (those that go to a file)
{ABOUT_JOBS}"""
FLAGS = (
    *COMMON,
    Flag("--follow", short="-f", from_environment=False),
    Flag("--tail", "N", from_environment=False),
    Flag("--stream", "NAME", choices=("stdout", "stderr"), from_environment=False),
)
STREAMS = ("stdout", "stderr")


def main(argv: Sequence[str]) -> int:
    if (asked := words("logs", argv, HELP, FLAGS, most=1)) is None:
        return 0
    given = asked.given
    rank = whole("RANK", asked.words[0], least=0, most=2**31) if asked.words else None
    tail = whole("--tail", given.text("--tail", "100"), least=0, most=MAX_TAIL)
    stream = given.text("--stream", "")
    if stream not in ("", *STREAMS):
        raise UsageError(f"--stream={stream}: there is no such stream; write stdout or stderr")
    if asked.as_json and "--follow" in given:
        raise UsageError("--json is for what was written, --follow goes on for ever; leave out one of the two")
    target = find(given)
    ranks = [rank] if rank is not None else [found["rank"] for found in get(target, "/ranks")["ranks"]]
    if not ranks:
        raise Objection("no workers run now; ripstop status says what the job waits for")
    wanted = [stream] if stream else list(STREAMS)
    pieces, objections = _ends(target, ranks, wanted, 0 if "--follow" in given else tail)
    if objections and not pieces:
        raise objections[0]
    if asked.as_json:
        show_json(pieces)
    elif "--follow" in given:
        _follow(target, pieces, tail, prefixed=rank is None)
    else:
        for piece in pieces:
            for line in piece["text"].splitlines():
                print(_line(piece["rank"], line, prefixed=rank is None))
    return 0


def _ends(
    target: Target, ranks: list[int], streams: list[str], tail: int
) -> tuple[list[dict[str, Any]], list[Objection]]:
    """What can be had, and why the rest cannot."""
    pieces: list[dict[str, Any]] = []
    objections: list[Objection] = []
    for rank in ranks:
        for stream in streams:
            try:
                pieces.append(get(target, f"/logs/{rank}", stream=stream, tail=tail))
            except Objection as objection:
                objections.append(objection)
    return pieces, objections


def _follow(target: Target, pieces: list[dict[str, Any]], tail: int, *, prefixed: bool) -> None:
    """One connection each; a line is one write, so that none is torn by another's."""

    def follow(rank: int, stream: str) -> None:
        try:
            for line in lines(target, f"/logs/{rank}", "text/plain", None, stream=stream, tail=tail, follow="true"):
                os.write(1, f"{_line(rank, line, prefixed=prefixed)}\n".encode())
        except BrokenPipeError:
            os._exit(0)  # nobody reads any more
        except RipstopError as error:
            complain("logs", error)

    sys.stdout.flush()
    threads = [threading.Thread(target=follow, args=(piece["rank"], piece["stream"]), daemon=True) for piece in pieces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _line(rank: int, line: str, *, prefixed: bool) -> str:
    return f"[{rank}] {line}" if prefixed else line
