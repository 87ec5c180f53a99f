"""Where workers' output goes: the part of torch.distributed.elastic.multiprocessing.api about streams and files.

The directory layout and file names are torch's.  ripstop adds: logs of an earlier attempt are renamed, never deleted;
and the error for an unusable directory names it.
"""

from __future__ import annotations

import abc
import errno
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path
from typing import Any

from ripstop.system.safe_files import rename_existing

CONSOLE = ""  # instead of a log file's name
_TEMPORARY_PREFIX = "torchelastic_"

log = logging.getLogger(__name__)


class Std(IntFlag):
    """Which of a worker's output streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """`3` for every worker; `0:1,1:2` for some, by local rank."""
        if vm in ("0", "1", "2", "3"):
            return cls(int(vm))
        by_rank: dict[int, Std] = {}
        for part in vm.split(","):
            rank, colon, choice = part.partition(":")
            if not (colon and rank.isascii() and rank.isdigit() and choice in ("0", "1", "2", "3")):
                raise ValueError(
                    f"{vm!r} is not a choice of streams; write 0 none, 1 stdout, 2 stderr, 3 both, "
                    "or LOCAL_RANK:CHOICE pairs such as 0:3,1:2"
                )
            by_rank[int(rank)] = cls(int(choice))
        return by_rank


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """A choice for every local rank, from one for all or from a map; missing ranks get `Std.NONE`."""
    if isinstance(val_or_map, int):
        return dict.fromkeys(range(local_world_size), Std(val_or_map))
    return {rank: Std(val_or_map.get(rank, Std.NONE)) for rank in range(local_world_size)}


@dataclass
class LogsDest:
    """File names by local rank; an empty one means the parent's own stream."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsSpecs(abc.ABC):
    """Decides where workers' output goes; `redirects` to files, `tee` to files and the console."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abc.abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The log files of workers with these environments, by local rank; may add variables."""

    @property
    @abc.abstractmethod
    def root_log_dir(self) -> str:
        """The directory of all log files."""


class DefaultLogsSpecs(LogsSpecs):
    """`LOG_DIR/RUN_ID_xxxx/attempt_N/LOCAL_RANK/{stdout.log,stderr.log,error.json}`.

    Without `log_dir`, a temporary directory is created; `/dev/null` keeps nothing.  With `local_ranks_filter`, the
    console shows only these ranks.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        if log_dir and log_dir != os.devnull and Path(log_dir).is_file():
            raise NotADirectoryError(errno.ENOTDIR, f"workers' logs need a directory, and log_dir={log_dir} is a file")
        if not log_dir:
            log_dir = tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX)
        elif log_dir != os.devnull:
            _make_log_dir(log_dir)
        super().__init__(log_dir, redirects, tee, local_ranks_filter)
        self._run_log_dir: str | None = None

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of one attempt; run id and attempt come from the environment of local rank 0."""
        if self._root_log_dir == os.devnull:
            return self._dev_null(envs)
        attempt = self._attempt_dir(envs.get(0, {}))
        redirects, tee = to_map(self._redirects, len(envs)), to_map(self._tee, len(envs))
        dest = LogsDest(
            filtered_stdout=str(attempt / "filtered_stdout.log"), filtered_stderr=str(attempt / "filtered_stderr.log")
        )
        for rank in range(len(envs)):
            home = attempt / str(rank)
            _make_log_dir(home)
            shown = not self._local_ranks_filter or rank in self._local_ranks_filter
            for stream, name, files, tees in (
                (Std.OUT, "stdout.log", dest.stdouts, dest.tee_stdouts),
                (Std.ERR, "stderr.log", dest.stderrs, dest.tee_stderrs),
            ):
                if stream in redirects[rank] | tee[rank]:
                    files[rank] = str(home / name)
                else:
                    files[rank] = CONSOLE if shown else os.devnull
                if stream in tee[rank] and shown:
                    tees[rank] = files[rank]
            dest.error_files[rank] = str(home / "error.json")
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = dest.error_files[rank]
        return dest

    def _attempt_dir(self, env: Mapping[str, str]) -> Path:
        if self._run_log_dir is None:
            run_id = env.get("TORCHELASTIC_RUN_ID", "test_run_id")
            with _logs_specs_directory_errors(self.root_log_dir):
                self._run_log_dir = tempfile.mkdtemp(prefix=f"{run_id}_", dir=self._root_log_dir)
            log.info("workers' logs: %s", self._run_log_dir)
        attempt = Path(self._run_log_dir, f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}")
        rename_existing(attempt)
        _make_log_dir(attempt)
        return attempt

    def _dev_null(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        dest = LogsDest(filtered_stdout=os.devnull, filtered_stderr=os.devnull)
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = ""
            dest.stdouts[rank] = dest.stderrs[rank] = CONSOLE
            dest.tee_stdouts[rank] = dest.tee_stderrs[rank] = dest.error_files[rank] = os.devnull
        return dest

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, "
            f"tee={self._tee}, local_ranks_filter={self._local_ranks_filter})"
        )

    def _settings(self) -> tuple[object, ...]:
        return self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DefaultLogsSpecs) and self._settings() == other._settings()

    __hash__ = None  # type: ignore[assignment]


@contextmanager
def _logs_specs_directory_errors(directory: str | Path) -> Iterator[None]:
    """Name the directory in an error.  Its class stays, because Python chooses an OSError's class by its number."""
    try:
        yield
    except OSError as error:
        why = f"workers' logs need a directory, and {directory} cannot be used ({error.strerror}); give another log_dir"
        raise OSError(error.errno, why) from error


def _make_log_dir(directory: str | Path) -> None:
    with _logs_specs_directory_errors(directory):
        Path(directory).mkdir(parents=True, exist_ok=True)


def is_created_by_logs_specs(directory: Path | None) -> bool:
    """Whether `DefaultLogsSpecs` created this directory because the program named none."""
    return (
        directory is not None
        and directory.name.startswith(_TEMPORARY_PREFIX)
        and directory.parent == Path(tempfile.gettempdir())
    )


def get_std_cm(std_rd: str, redirect_fn: Callable[[str], Any]) -> AbstractContextManager[Any]:
    """A context that redirects a stream to this file; without effect for an empty name."""
    return redirect_fn(std_rd) if std_rd else nullcontext()
