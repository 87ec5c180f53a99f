"""`ripstop logs`: what workers wrote."""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from ripstop.api.routes import MAX_TAIL
from ripstop.cli.commands.events import follow
from ripstop.cli.job_client import (
    ABOUT_JOBS,
    COMMON,
    RequestRejected,
    Target,
    complain,
    find,
    get,
    lines,
    read_command,
    show_json,
)
from ripstop.cli.options.flags import Flag
from ripstop.model.errors import RipstopError, UsageError
from ripstop.model.parsers import integer

HELP = f"""\
usage: ripstop logs [RANK] [-f] [--tail N] [--stream stdout|stderr] [FLAGS]

Shows the end of what workers wrote: of one, or of all with [RANK] before each line.  Output that goes to a node's
console alone, as stdout does without --tee or --redirects, is only there.

  -f, --follow                go on with what is written from now on, through restarts and by ranks that are added,
                              until the job is over
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
    if (asked := read_command("logs", argv, HELP, FLAGS, most=1)) is None:
        return 0
    given = asked.given
    rank = integer("RANK", asked.words[0], minimum=0, maximum=2**31) if asked.words else None
    tail = integer("--tail", given.text("--tail", "100"), minimum=0, maximum=MAX_TAIL)
    stream = given.text("--stream", "")
    if stream not in ("", *STREAMS):
        raise UsageError(f"--stream={stream}: there is no such stream; write stdout or stderr")
    if asked.as_json and "--follow" in given:
        raise UsageError("--json is for what was written, --follow goes on for ever; leave out one of the two")
    target = find(given)
    now = get(target, "/events", since=2**53)["last"]
    ranks = [rank] if rank is not None else [found["rank"] for found in get(target, "/ranks")["ranks"]]
    if not ranks:
        raise RequestRejected("no workers run now; ripstop status says what the job waits for")
    wanted = [stream] if stream else list(STREAMS)
    pieces, objections = _ends(target, ranks, wanted, 0 if "--follow" in given else tail)
    if objections and not pieces:
        raise objections[0]
    if asked.as_json:
        show_json(pieces)
    elif "--follow" in given:
        return _follow(target, pieces, wanted, tail, now if rank is None else None)
    else:
        for piece in pieces:
            for line in piece["text"].splitlines():
                print(_line(piece["rank"], line, prefixed=rank is None))
    return 0


def _ends(
    target: Target, ranks: list[int], streams: list[str], tail: int
) -> tuple[list[dict[str, Any]], list[RequestRejected]]:
    """What can be had, and why the rest cannot."""
    pieces: list[dict[str, Any]] = []
    objections: list[RequestRejected] = []
    for rank in ranks:
        for stream in streams:
            try:
                pieces.append(get(target, f"/logs/{rank}", stream=stream, tail=tail))
            except RequestRejected as objection:
                objections.append(objection)
    return pieces, objections


def _follow(target: Target, pieces: list[dict[str, Any]], streams: list[str], tail: int, since: int | None) -> int:
    """Of these logs, and, with `since`, of ranks that were added after that event."""
    followers = _Followers(target, prefixed=since is not None)
    sys.stdout.flush()
    for piece in pieces:
        followers.add(piece["rank"], piece["stream"], tail=tail)
    try:
        for rank in _newcomers(target, since, {piece["rank"] for piece in pieces}) if since is not None else ():
            for piece in _ends(target, [rank], streams, 0)[0]:
                followers.add(rank, piece["stream"], offset=0)
    except RipstopError as error:
        followers.complain(error)
    return followers.wait()


def _newcomers(target: Target, since: int, known: set[int]) -> Iterator[int]:
    for event in follow(target, since):
        if event["kind"] == "workers_started":
            ranks = range(event["first_rank"], event["first_rank"] + len(event["pids"]))
            yield from (rank for rank in ranks if rank not in known)
            known.update(ranks)


class _Followers:
    """One connection for each log; a line is one write, so that none is torn by another's."""

    def __init__(self, target: Target, *, prefixed: bool) -> None:
        self._target = target
        self._prefixed = prefixed
        self._threads: list[threading.Thread] = []
        self._complaints: set[str] = set()

    def add(self, rank: int, stream: str, **begin: int) -> None:
        thread = threading.Thread(target=self._follow, args=(rank, stream, begin), daemon=True)
        self._threads.append(thread)
        thread.start()

    def complain(self, error: RipstopError) -> None:
        """Once, though many logs may have the same trouble."""
        if str(error) not in self._complaints:
            self._complaints.add(str(error))
            complain("logs", error)

    def wait(self) -> int:
        """Until all have ended; the exit code."""
        for thread in self._threads:
            thread.join()
        return 1 if self._complaints else 0

    def _follow(self, rank: int, stream: str, begin: dict[str, int]) -> None:
        try:
            for line in lines(self._target, f"/logs/{rank}", "text/plain", None, stream=stream, follow="true", **begin):
                os.write(1, f"{_line(rank, line, prefixed=self._prefixed)}\n".encode())
        except BrokenPipeError:
            os._exit(0)  # nobody reads any more
        except RipstopError as error:
            self.complain(error)


def _line(rank: int, line: str, *, prefixed: bool) -> str:
    return f"[{rank}] {line}" if prefixed else line
