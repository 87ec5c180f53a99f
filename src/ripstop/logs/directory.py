"""The files of a job's workers: `LOG_DIR/RUN_ID/round_N/RANK/{stdout.log,stderr.log,error.json,stacks.txt}`.

Rules: (1) workers write their files themselves, appending, so that what they wrote survives the agent; (2) nothing is
ever overwritten or deleted: logs that are there already are appended to, an error file is moved aside; only a
directory that we made up ourselves goes again after a success, and only if it holds no byte, or where the user wants
nothing to be kept; (3) without a word from
the user stdout is the console's, untouched, and stderr goes to a file for the evidence's sake and from there to the
console as it is, unless the console is a terminal: that is the worker's own then, too; where nobody named a directory,
only the end of such a file stays on disk, and where the disk is full there is no such file; (4) a worker that is not to
be shown writes what it would have written to the console to its stderr's file, and to nowhere for stdout; (5) LOG_DIR
may be anybody's, and a link; what is below is this user's own, and no link is followed there.
"""

import errno
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from ripstop.logs.console import AHEAD, Console, Kept
from ripstop.model.config import Logs, OutputStreams
from ripstop.model.errors import StartError, UsageError
from ripstop.model.round import Place
from ripstop.system.linux import DISK_FULL_ERRORS, reserve_range
from ripstop.system.own_directory import make_own_directory, no_follow
from ripstop.telemetry.event_file import OF_JOB, OF_NODE

log = logging.getLogger("ripstop.workers")

FILES = {OutputStreams.OUT: "stdout.log", OutputStreams.ERR: "stderr.log"}


class LogDirectory:
    """Where a job's logs are on this node: `path` is `LOG_DIR/RUN_ID`.  `made_up`: nobody asked for this LOG_DIR."""

    def __init__(self, logs: Logs, run_id: str, *, made_up: bool = False) -> None:
        self._made_up = made_up or logs.directory is None
        self.kept = logs.kept
        self._top = logs.directory or _temporary_directory()
        try:
            self._top = self._top.absolute()
            self.path = self._top / file_name(run_id)
            self._top.mkdir(parents=True, exist_ok=True)
            make_own_directory(self.path)
        except OSError as error:
            raise UsageError(_unusable(self._top, error.strerror)) from error
        if not os.access(self.path, os.W_OK | os.X_OK, effective_ids=True):
            raise UsageError(_unusable(self._top, f"no right to write in {self.path.name}"))

    def tidy(self, *, succeeded: bool) -> None:
        """At the end: remove what is not to be kept, and after a success a directory that is ours and still empty."""
        if not self.kept:
            from shutil import rmtree

            rmtree(self._top, ignore_errors=True)
        if not (self._made_up and succeeded):
            return
        tree = list(os.walk(self._top, topdown=False))
        with suppress(OSError):  # someone else is at work in there: it is theirs now
            files = [
                Path(directory, name) for directory, _, names in tree for name in names if name not in (OF_NODE, OF_JOB)
            ]
            if any(file.lstat().st_size for file in files):
                return
            for directory, _, names in tree:
                for name in names:
                    Path(directory, name).unlink()
                Path(directory).rmdir()


class OutputRoute(Enum):
    """Where one stream of one worker goes."""

    CONSOLE = auto()  # the worker has the agent's own
    FILE = auto()
    TEE = auto()  # the file, and line by line with a prefix to the console
    COPY = auto()  # the file, and byte by byte to the console
    NOWHERE = auto()


class RoundLogs:
    """The files of one round's workers on this node.

    `prepare` makes them; `follow`, called before the workers start, copies to the console what belongs there.
    `stdout` and `stderr` are None for a stream that the worker inherits.
    """

    def __init__(self, job: Path, logs: Logs, place: Place, role: str, *, terminal: bool) -> None:
        self._job = job
        self._round = _of_round(job, place.round)
        self._logs = logs
        self._place = place
        self._role = role
        self._terminal = terminal  # whether the agent's stderr is one
        self._disk_full = False

    def environment(self, local_rank: int) -> Mapping[str, str]:
        """What the worker's environment is to have besides."""
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
        """Where faulthandler writes."""
        return self.directory(local_rank) / "stacks.txt"

    def hang_directory(self) -> Path:
        """For what is found out when workers hang."""
        return self._round / "hang"

    def earlier(self, round: int, rank: int, stream: OutputStreams) -> Path | None:
        """The file of a worker of an earlier round; None where there is none, or nobody knows."""
        path = _of_round(self._job, round) / str(rank) / FILES[stream]
        return path if path.is_file() else None

    def files(self, local_rank: int) -> tuple[Path, ...]:
        """The log files that this worker has: what `Console.finish` wants to know at its end."""
        return tuple(path for path in (self.stdout(local_rank), self.stderr(local_rank)) if path)

    def prepare(self) -> None:
        """Make the directories and files of all local ranks."""
        full = False
        for local_rank in range(self._place.slots):
            try:
                self._prepare(local_rank)
            except OSError as error:
                if error.errno not in DISK_FULL_ERRORS or self._has_files_to_keep():
                    raise StartError(_unusable(self._round, error.strerror)) from error
                full = True
        if full:
            self._disk_full = True
            word = "workers write stderr to the console alone, and reports do not have the end of it"
            log.warning("the disk of %s is full: %s; make room, or name another with --log-dir", self._job, word)

    def _prepare(self, local_rank: int) -> None:
        make_own_directory(self._round)
        make_own_directory(self.directory(local_rank))
        move_aside(self.error_file(local_rank))
        for stream in (OutputStreams.OUT, OutputStreams.ERR):
            if path := self._file(local_rank, stream):
                fd = open_log(path)
                try:
                    size = os.fstat(fd).st_size
                    if self._is_by_the_way(local_rank, stream) and not reserve_range(fd, size, size + AHEAD):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                finally:
                    os.close(fd)

    def _has_files_to_keep(self) -> bool:
        """Whether the user asked for a file."""
        return any(
            self._file(local_rank, stream) not in (None, Path(os.devnull))
            and not self._is_by_the_way(local_rank, stream)
            for local_rank in range(self._place.slots)
            for stream in (OutputStreams.OUT, OutputStreams.ERR)
        )

    def _is_by_the_way(self, local_rank: int, stream: OutputStreams) -> bool:
        """Whether there is a file for the evidence's sake alone."""
        return self._route(local_rank, stream) is OutputRoute.COPY

    def follow(self, console: Console) -> None:
        """Copy to the console what these workers are going to write."""
        try:
            for local_rank in range(self._place.slots):
                for stream, fd in ((OutputStreams.OUT, 1), (OutputStreams.ERR, 2)):
                    self._follow(console, local_rank, stream, fd)
        except OSError as error:
            raise StartError(_unusable(self._round, error.strerror)) from error

    def _follow(self, console: Console, local_rank: int, stream: OutputStreams, fd: int) -> None:
        path = self._file(local_rank, stream)
        match self._route(local_rank, stream):
            case OutputRoute.TEE if path:
                console.follow(path, fd, self._prefix(local_rank), self._kept(stream))
            case OutputRoute.COPY if path:
                console.follow(path, fd, fleeting=self._logs.directory is None, reserved=True, raw=True)

    def _prefix(self, local_rank: int) -> bytes:
        from string import Template  # not needed where nothing is teed

        names = {"role_name": self._role, "rank": self._place.first_rank + local_rank, "local_rank": local_rank}
        return os.fsencode(Template(self._logs.prefix).safe_substitute(names))

    def _kept(self, stream: OutputStreams) -> Kept | None:
        """The file of the round for lines of this stream that the user wants to have together."""
        name, words = (
            ("stdout", self._logs.stdout_filters)
            if stream is OutputStreams.OUT
            else ("stderr", self._logs.stderr_filters)
        )
        return Kept(self._round / f"filtered_{name}.log", tuple(map(os.fsencode, words))) if words else None

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
        copied = stream is OutputStreams.ERR and not self._terminal and not self._disk_full
        return OutputRoute.COPY if copied else OutputRoute.CONSOLE


class LogsSource(Protocol):
    """Who says where the output of a round's workers goes, in our place."""

    async def round_logs(self, job: Path, place: Place, envs: Mapping[int, Mapping[str, str]]) -> RoundLogs: ...

    def close(self) -> None: ...


def _of_round(job: Path, round: int) -> Path:
    return job / f"round_{round}"


def file_name(run_id: str) -> str:
    """The run id as a file name; different ids have different names."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", run_id)[:100]
    if safe == run_id and safe.strip("."):
        return safe
    from zlib import crc32

    return f"{safe.strip('.')}_{crc32(run_id.encode('utf-8', 'surrogateescape')):08x}"


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half written; OSError is the caller's to explain."""
    draft = path.with_name(f".{path.name}.{os.urandom(6).hex()}")  # other nodes may share the directory
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _temporary_directory() -> Path:
    """What `tempfile.mkdtemp` would make, without the price of importing it at every start."""
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
    raise UsageError(_unusable(top, why.strerror)) from why


def open_log(path: Path) -> int:
    """The file, made if it was not there, to be appended to."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | no_follow(path) | os.O_CLOEXEC, 0o666)


def _unusable(directory: Path, why: str | None) -> str:
    return f"workers' logs need a directory: {directory} cannot be used ({why}); name another with --log-dir."


def move_aside(path: Path) -> None:
    """Give the file another name, if it is there."""
    if not os.path.lexists(path):
        return
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{number}")):
        number += 1
    path.rename(aside)
