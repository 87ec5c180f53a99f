"""`ripstop logs`: show workers' output."""

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ripstop.api.routes import MAX_TAIL_LINES
from ripstop.cli.event_stream import follow_events
from ripstop.cli.job_client import (
    JOB_FLAGS,
    JOB_HELP,
    JobClient,
    JobClientCommandLine,
    JobCommand,
    JobUnreachable,
    RequestRejected,
)
from ripstop.cli.options.flags import Flag
from ripstop.model.errors import RipstopError, UsageError
from ripstop.model.parsers import integer

HELP = f"""\
usage: ripstop logs [RANK] [-f] [--tail N] [--stream stdout|stderr] [FLAGS]

Shows the last lines that one worker wrote, or all workers, with [RANK] before each line.  Only output that goes to a
file is available; stdout needs --tee or --redirects.

examples
  ripstop logs                the last 100 lines of every worker
  ripstop logs 3 -f           follow rank 3, across restarts

which output
  -f, --follow                continue with new output, across restarts and with added ranks, until the job ends
  --tail N                    lines of each worker and stream (100)
  --stream NAME               only stdout or only stderr (both)
{JOB_HELP}"""
STREAMS = ("stdout", "stderr")
FLAGS = (*JOB_FLAGS, Flag("--follow", short="-f"), Flag("--tail", "N"), Flag("--stream", "NAME", choices=STREAMS))


def logs(command: JobClientCommandLine) -> int:
    args, rank = command.args, command.rank()
    tail = integer("--tail", args.text("--tail", "100"), minimum=0, maximum=MAX_TAIL_LINES)
    stream = args.text("--stream")
    if stream not in ("", *STREAMS):
        raise UsageError(f"--stream={stream}: unknown stream; write stdout or stderr")
    if command.as_json and "--follow" in args:
        raise UsageError("--json and --follow cannot be combined; remove one of them")
    job = command.find_job()
    last_event = job.get("/events", since=2**53)["last"]
    ranks = [rank] if rank is not None else [found["rank"] for found in job.get("/ranks")["ranks"]]
    if not ranks:
        raise RequestRejected("no workers are running; ripstop status shows what the job waits for")
    streams = [stream] if stream else list(STREAMS)
    found, errors = _read_tails_for_logs_command(job, ranks, streams, 0 if "--follow" in args else tail)
    if errors and not found:
        raise errors[0]
    if "--follow" in args:
        code = _follow_logs(job, found, streams, tail, last_event if rank is None else None)
        if command.is_job_running():  # the streams have ended with their coordinator
            raise JobUnreachable("the job's coordinator has moved to another node; run the command again")
        return code
    lines = [
        _line_of_logs_command(log["rank"], line, prefixed=rank is None)
        for log in found
        for line in log["text"].splitlines()
    ]
    if lines or command.as_json:
        command.print("\n".join(lines), found)
    return 0


def _read_tails_for_logs_command(
    job: JobClient, ranks: list[int], streams: list[str], tail: int
) -> tuple[list[dict[str, Any]], list[RequestRejected]]:
    """The logs that exist, and the reasons for those that do not."""
    logs: list[dict[str, Any]] = []
    errors: list[RequestRejected] = []
    for rank in ranks:
        for stream in streams:
            try:
                logs.append(job.get(f"/logs/{rank}", stream=stream, tail=tail))
            except RequestRejected as error:
                errors.append(error)
    return logs, errors


def _follow_logs(job: JobClient, logs: list[dict[str, Any]], streams: list[str], tail: int, since: int | None) -> int:
    """Follow these logs and, with `since`, those of ranks that start after that event."""
    followers = _LogsCommandFollowers(job, prefixed=since is not None)
    sys.stdout.flush()
    for log in logs:
        followers.add(log["rank"], log["stream"], tail=tail)
    try:
        for rank in _follow_added_ranks(job, since, {log["rank"] for log in logs}) if since is not None else ():
            for log in _read_tails_for_logs_command(job, [rank], streams, 0)[0]:
                followers.add(rank, log["stream"], offset=0)
    except RipstopError as error:
        followers.report_error(error)
    return followers.wait()


def _follow_added_ranks(job: JobClient, since: int, known: set[int]) -> Iterator[int]:
    for event in follow_events(job, since):
        if event["kind"] == "workers_started":
            ranks = range(event["first_rank"], event["first_rank"] + len(event["pids"]))
            yield from (rank for rank in ranks if rank not in known)
            known.update(ranks)


class _LogsCommandFollowers:
    """One connection and thread for each log.  A line is one write, so lines are not mixed."""

    def __init__(self, job: JobClient, *, prefixed: bool) -> None:
        self._job = job
        self._prefixed = prefixed
        self._threads: list[threading.Thread] = []
        self._errors: set[str] = set()

    def add(self, rank: int, stream: str, **start: int) -> None:
        thread = threading.Thread(target=self._follow, args=(rank, stream, start), daemon=True)
        self._threads.append(thread)
        thread.start()

    def report_error(self, error: RipstopError) -> None:
        """Print it once, even if many logs have the same error."""
        if str(error) not in self._errors:
            self._errors.add(str(error))
            print(f"ripstop logs: error: {error}", file=sys.stderr)

    def wait(self) -> int:
        """Wait until all logs have ended; the exit code."""
        for thread in self._threads:
            thread.join()
        return 1 if self._errors else 0

    def _follow(self, rank: int, stream: str, start: dict[str, int]) -> None:
        query: dict[str, Any] = {"stream": stream, "follow": "true", **start}
        try:
            for line in self._job.stream_lines(f"/logs/{rank}", "text/plain", None, **query):
                os.write(1, f"{_line_of_logs_command(rank, line, prefixed=self._prefixed)}\n".encode())
        except BrokenPipeError:
            os._exit(0)  # the reader of our output has closed it
        except RipstopError as error:
            self.report_error(error)


def _line_of_logs_command(rank: int, line: str, *, prefixed: bool) -> str:
    return f"[{rank}] {line}" if prefixed else line


COMMANDS = {"logs": JobCommand(logs, HELP, FLAGS, max_positional=1)}
