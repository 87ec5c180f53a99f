"""The log files of a job's workers: `LOG_DIR/RUN_ID/round_N/RANK/{stdout.log,stderr.log,error.json,stacks.txt}`.

A standby that runs the script writes to `round_N/standby_RANK/output.log`, with the rank of the worker that it shadows.

Rules:

1. Workers write their files themselves and append to them, so that output survives the agent.
2. Nothing is overwritten or deleted: logs are appended to, an existing error file is renamed.  Exceptions: a temporary
   LOG_DIR of ours is removed after a success if only standbys have written to it, and at any end if the user wants no
   logs.
3. By default a worker inherits the agent's stdout.  Its stderr goes to a file, as evidence of failures, and is copied
   from there to the console unchanged.  If the console is a terminal, the worker inherits stderr, too.  In a temporary
   LOG_DIR only the end of that file stays on disk.  If the disk is full, there is no such file.
4. A worker that the user does not want to see on the console writes stderr to its file, and stdout to /dev/null.
5. LOG_DIR may belong to anybody and may be a symbolic link.  The directories below it belong to this user, and no
   symbolic link is followed there.
6. Directories that were removed during the run, as cleaners of /tmp do, are made again for the next round, for stacks
   and for the report.
"""

import errno
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from ripstop.logs.console import RESERVED_BYTES, Console, LineFilter
from ripstop.model.config import Logs, OutputStreams
from ripstop.model.errors import StartError, UsageError
from ripstop.model.round import Place
from ripstop.system.disk_space import DISK_FULL_ERRORS, release_reserved_space, reserve_disk_space
from ripstop.system.safe_files import (
    check_own_directory,
    make_own_directory,
    no_follow,
    open_to_append,
    rename_existing,
)
from ripstop.telemetry.event_file import JOB_EVENTS, NODE_EVENTS

log = logging.getLogger("ripstop.workers")

STANDBY_PREFIX = "standby_"
FILES = {OutputStreams.OUT: "stdout.log", OutputStreams.ERR: "stderr.log"}  # in the order of their descriptors


class LogDirectory:
    """The directory of a job's logs on this node: `path` is `LOG_DIR/RUN_ID`.  `made_up`: a temporary LOG_DIR."""

    def __init__(self, logs: Logs, run_id: str, *, made_up: bool = False) -> None:
        self._made_up = made_up or logs.directory is None
        self.kept = logs.kept
        self.has_job_events = False  # this process wrote events of the whole job here
        self._top = logs.directory or _temporary_log_directory()
        try:
            self._top = self._top.absolute()
            self.path = self._top / directory_name(run_id)
            _make_job_directory(self.path, temporary=logs.directory is None)
        except OSError as error:
            raise UsageError(_unusable_log_directory(self._top, error.strerror)) from error
        if not os.access(self.path, os.W_OK | os.X_OK, effective_ids=True):
            raise UsageError(_unusable_log_directory(self._top, f"no right to write in {self.path.name}"))

    def tidy(self, *, succeeded: bool) -> None:
        """At the end of the job: apply rule 2, and rule 6 for the report of a failure."""
        if not self.kept:
            from shutil import rmtree

            rmtree(self._top, ignore_errors=True)
        elif not succeeded:
            with suppress(OSError):  # writing the report fails with the same error
                _make_job_directory(self.path, temporary=self._made_up)
        if not (self._made_up and succeeded):
            return
        tree = list(os.walk(self._top, topdown=False))
        with suppress(OSError):  # another process uses the directory
            files = [Path(directory, name) for directory, _, names in tree for name in names]
            if any(file.lstat().st_size for file in files if not _is_dispensable_in_log_directory(file)):
                return
            for directory, _, names in tree:
                for name in names:
                    Path(directory, name).unlink()
                Path(directory).rmdir()


class OutputRoute(Enum):
    """The destination of one stream of one worker."""

    CONSOLE = auto()  # inherited from the agent
    FILE = auto()
    TEE = auto()  # the file, and whole lines with a prefix to the console
    COPY = auto()  # the file, and bytes without a prefix to the console
    NOWHERE = auto()


class RoundLogs:
    """The files of one round's workers on this node.

    `prepare` makes the files.  `follow` must be called before the workers start; it copies output to the console.
    `stdout` and `stderr` are None for a stream that the worker inherits.
    """

    def __init__(self, job: Path, logs: Logs, place: Place, role: str, *, terminal: bool) -> None:
        self._job = job
        self._round = _round_directory(job, place.round)
        self._logs = logs
        self._place = place
        self._role = role
        self._terminal = terminal  # the agent's stderr is a terminal
        self._disk_full = False
        self.started: Sequence[int] = range(place.slots)  # the local ranks that `prepare` and `follow` are for

    def environment(self, local_rank: int) -> Mapping[str, str]:
        """Additional environment variables of the worker."""
        return {}

    def directory(self, local_rank: int) -> Path:
        return self._round / str(self._place.first_rank + local_rank)

    def error_file(self, local_rank: int) -> Path:
        return self.directory(local_rank) / "error.json"

    def stdout(self, local_rank: int) -> Path | None:
        return self._file(local_rank, OutputStreams.OUT)

    def stderr(self, local_rank: int) -> Path | None:
        return self._file(local_rank, OutputStreams.ERR)

    def stack_file(self, local_rank: int) -> Path:
        """The file that faulthandler writes to."""
        return self.directory(local_rank) / "stacks.txt"

    def hang_directory(self) -> Path:
        """For stacks and recorder dumps of workers that hang."""
        return self._round / "hang"

    def earlier(self, round: int, rank: int, stream: OutputStreams) -> Path | None:
        """The log file of a worker of an earlier round; None if it does not exist or is unknown."""
        path = _round_directory(self._job, round) / str(rank) / FILES[stream]
        return path if path.is_file() else None

    def is_inherited(self) -> bool:
        """Whether a worker writes to the agent's own stdout or stderr."""
        return any(None in (self.stdout(rank), self.stderr(rank)) for rank in range(self._place.slots))

    def files(self, local_rank: int) -> tuple[Path, ...]:
        """The log files of this worker, for `Console.finish`."""
        return tuple(path for path in (self.stdout(local_rank), self.stderr(local_rank)) if path)

    def make_round_directory(self) -> None:
        """Make the round's directory, and those above it (rule 6).  Raises OSError."""
        _make_job_directory(self._job, temporary=self._logs.directory is None)
        make_own_directory(self._round)

    def make_standby_directory(self, local_rank: int) -> Path:
        """For the output of a standby that runs the script in this round.  Raises OSError."""
        self.make_round_directory()
        path = self._round / f"{STANDBY_PREFIX}{self._place.first_rank + local_rank}"
        make_own_directory(path)
        return path

    def prepare(self) -> None:
        """Make the directories and files of all local ranks."""
        full = False
        for local_rank in self.started:
            try:
                self._prepare(local_rank)
            except OSError as error:
                if error.errno not in DISK_FULL_ERRORS or self._has_requested_files():
                    self._release_space()
                    raise StartError(_unusable_log_directory(self._round, error.strerror)) from error
                full = True
        if full:
            self._release_space()
            self._disk_full = True
            effect = "workers write stderr to the console only, and failure reports will not quote it"
            log.warning("the disk of %s is full: %s; free space, or use another --log-dir", self._job, effect)

    def _prepare(self, local_rank: int) -> None:
        self.make_round_directory()
        make_own_directory(self.directory(local_rank))
        rename_existing(self.error_file(local_rank))
        for stream in FILES:
            if path := self._file(local_rank, stream):
                fd = open_to_append(path)
                try:
                    size, is_reserved = os.fstat(fd).st_size, self._is_evidence_only(local_rank, stream)
                    if is_reserved and not reserve_disk_space(fd, size, size + RESERVED_BYTES):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                finally:
                    os.close(fd)

    def _release_space(self) -> None:
        """Free the disk space that `prepare` reserved: nobody will follow the files, and free it then."""
        for local_rank in self.started:
            path = self._file(local_rank, OutputStreams.ERR)
            if path is None or not self._is_evidence_only(local_rank, OutputStreams.ERR):
                continue
            with suppress(OSError):  # the file that could not be made
                fd = os.open(path, os.O_WRONLY | no_follow(path) | os.O_CLOEXEC)
                try:
                    release_reserved_space(fd, RESERVED_BYTES)
                finally:
                    os.close(fd)

    def _has_requested_files(self) -> bool:
        """Whether the user asked for any file."""
        routes = {self._route(local_rank, stream) for local_rank in range(self._place.slots) for stream in FILES}
        return bool(routes & {OutputRoute.FILE, OutputRoute.TEE})

    def _is_evidence_only(self, local_rank: int, stream: OutputStreams) -> bool:
        """Whether the user did not ask for this file (rule 3)."""
        return self._route(local_rank, stream) is OutputRoute.COPY

    def follow(self, console: Console) -> None:
        """Copy the output of these workers to the console, as their routes require."""
        try:
            for local_rank in self.started:
                for fd, stream in enumerate(FILES, start=1):
                    self._follow(console, local_rank, stream, fd)
        except StartError:
            self._release_space()
            raise
        except OSError as error:
            self._release_space()
            raise StartError(_unusable_log_directory(self._round, error.strerror)) from error

    def _follow(self, console: Console, local_rank: int, stream: OutputStreams, fd: int) -> None:
        path = self._file(local_rank, stream)
        match self._route(local_rank, stream):
            case OutputRoute.TEE if path:
                console.follow(path, fd, self._prefix(local_rank), self._line_filter(stream))
            case OutputRoute.COPY if path:
                end_only = self._logs.directory is None
                console.follow(path, fd, keep_end_only=end_only, reserve_space=True, ignore_objects=True)

    def _prefix(self, local_rank: int) -> bytes:
        from string import Template  # only needed for --tee

        names = {"role_name": self._role, "rank": self._place.first_rank + local_rank, "local_rank": local_rank}
        return os.fsencode(Template(self._logs.prefix).safe_substitute(names))

    def _line_filter(self, stream: OutputStreams) -> LineFilter | None:
        """The filter of this stream, which collects lines of all workers of the round in one file."""
        words = self._logs.stdout_filters if stream is OutputStreams.OUT else self._logs.stderr_filters
        path = self._round / f"filtered_{FILES[stream]}"
        return LineFilter(path, tuple(map(os.fsencode, words))) if words else None

    def _file(self, local_rank: int, stream: OutputStreams) -> Path | None:
        match self._route(local_rank, stream):
            case OutputRoute.CONSOLE:
                return None
            case OutputRoute.NOWHERE:
                return Path(os.devnull)
        return self.directory(local_rank) / FILES[stream]

    def _route(self, local_rank: int, stream: OutputStreams) -> OutputRoute:
        teed = stream in self._logs.tee.of(local_rank)
        to_file = teed or stream in self._logs.redirects.of(local_rank)
        if self._logs.shown is not None and local_rank not in self._logs.shown:
            return OutputRoute.FILE if to_file or stream is OutputStreams.ERR else OutputRoute.NOWHERE
        if to_file:
            return OutputRoute.TEE if teed else OutputRoute.FILE
        needs_evidence = stream is OutputStreams.ERR and not self._terminal and not self._disk_full
        return OutputRoute.COPY if needs_evidence else OutputRoute.CONSOLE


class KeptLogDirectories(RoundLogs):
    """The files of a round in which some workers go on in place: these write to the files that they have opened."""

    def __init__(self, new: RoundLogs, kept: Mapping[int, RoundLogs]) -> None:
        self._new = new
        self._place = new._place
        self._kept = {
            rank: logs._of(rank) if isinstance(logs, KeptLogDirectories) else logs for rank, logs in kept.items()
        }
        new.started = [rank for rank in range(new._place.slots) if rank not in kept]

    def use(self, new: RoundLogs) -> None:
        """The files of the workers that start, if they are not the default."""
        self._new = new

    def start(self, local_ranks: Sequence[int]) -> None:
        """New workers with these local ranks are about to start; `prepare` and `follow` are for them."""
        for local_rank in local_ranks:
            self._kept.pop(local_rank, None)
        self._new.started = local_ranks

    def _of(self, local_rank: int) -> RoundLogs:
        return self._kept.get(local_rank, self._new)

    def environment(self, local_rank: int) -> Mapping[str, str]:
        return self._of(local_rank).environment(local_rank)

    def directory(self, local_rank: int) -> Path:
        return self._of(local_rank).directory(local_rank)

    def error_file(self, local_rank: int) -> Path:
        return self._of(local_rank).error_file(local_rank)

    def stdout(self, local_rank: int) -> Path | None:
        return self._of(local_rank).stdout(local_rank)

    def stderr(self, local_rank: int) -> Path | None:
        return self._of(local_rank).stderr(local_rank)

    def stack_file(self, local_rank: int) -> Path:
        return self._of(local_rank).stack_file(local_rank)

    def hang_directory(self) -> Path:
        return self._new.hang_directory()

    def earlier(self, round: int, rank: int, stream: OutputStreams) -> Path | None:
        return self._new.earlier(round, rank, stream)

    def make_round_directory(self) -> None:
        self._new.make_round_directory()

    def prepare(self) -> None:
        self._new.prepare()

    def follow(self, console: Console) -> None:
        self._new.follow(console)


class LogDirectorySource(Protocol):
    """Chooses the log files of a round instead of `RoundLogs`: a plugin, or a program that launches."""

    async def round_logs(self, job: Path, place: Place, envs: Mapping[int, Mapping[str, str]]) -> RoundLogs: ...

    def close(self) -> None: ...


def _make_job_directory(job: Path, *, temporary: bool) -> None:
    """Make `LOG_DIR/RUN_ID`.  A temporary LOG_DIR is private: another user may have made one in place of ours."""
    job.parent.mkdir(mode=0o700 if temporary else 0o777, parents=True, exist_ok=True)
    if temporary:
        check_own_directory(job.parent)
    make_own_directory(job)


def _is_dispensable_in_log_directory(file: Path) -> bool:
    """Whether nobody misses this file after a success."""
    return file.name in (NODE_EVENTS, JOB_EVENTS) or file.parent.name.startswith(STANDBY_PREFIX)


def _round_directory(job: Path, round: int) -> Path:
    return job / f"round_{round}"


def directory_name(run_id: str) -> str:
    """The run id as a file name; different ids have different names."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", run_id)[:100]
    if safe == run_id and safe.strip("."):
        return safe
    from zlib import crc32

    return f"{safe.strip('.')}_{crc32(run_id.encode('utf-8', 'surrogateescape')):08x}"


def _temporary_log_directory() -> Path:
    """Like `tempfile.mkdtemp`, which takes long to import."""
    first = Path(os.environ.get("TMPDIR") or "/tmp").absolute()
    for top in (first, Path("/tmp"), Path("/var/tmp")):
        path = top / f"ripstop_{os.urandom(6).hex()}"
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            why = error
            if error.errno not in DISK_FULL_ERRORS:
                break
        else:
            return path
    raise UsageError(_unusable_log_directory(top, why.strerror)) from why


def _unusable_log_directory(directory: Path, why: str | None) -> str:
    return f"workers' logs need a directory: {directory} cannot be used ({why}); name another with --log-dir."
