"""Checkpoints on disk: `DIR/STATE/commit-ROUND-NUMBER/`, in the format of `torch.distributed.checkpoint`.

Beside torch's files there are `ripstop.json`, which describes the commit and has the size and digest of every file, and
one pickle for each rank, with everything but tensors.  Plain DCP ignores both.  Rules
1.  A checkpoint is written below `.saving-ROUND-NUMBER`, synced, and renamed.  So a directory `commit-…` is whole,
    unless its files were changed later; sizes and digests tell.
2.  If several nodes write, they write below `.saving-ROUND-NUMBER-parts`.  Each adds a file `part-RANK.pickle` when its
    files are synced.  The node that finds the parts of all ranks completes the checkpoint; it creates the
    file `completing`, which only one node can create.
3.  Only directories with these names, and only with files that a saver writes, are ever removed.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from zlib import crc32

from ripstop.train.digest import file_digest

FORMAT = 1
DESCRIPTION = "ripstop.json"
OWN = "_ripstop."  # begins the names of tensors that only one rank has, as it has them
_SAVED = re.compile(r"commit-(\d+)-(\d+)")
_UNFINISHED = re.compile(r"\.saving-(\d+)-(\d+)(-parts)?")
_REMOVED = ".removed-"  # begins the names of directories whose files are being removed
COMPLETING = "completing"
_PART = re.compile(r"part-\d+\.pickle")
_OURS = re.compile(
    r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|rank-\d+\.pickle|part-\d+\.pickle(\.tmp)?|completing|ripstop\.json"
)


class Unusable(Exception):
    """A checkpoint that cannot be restored."""


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """Ordered by age, as commits are."""

    round: int
    number: int
    path: Path


def checkpoint_folder(directory: str, state: str) -> Path:
    """Where the checkpoints of one State are."""
    return Path(directory, quote(state, safe=" ").replace(".", "%2E"))


def checkpoint_name(round: int, number: int) -> str:
    return f"commit-{round:06d}-{number:012d}"


def unfinished_checkpoint_name(round: int, number: int, *, is_shared: bool) -> str:
    """Of a directory to which one node writes, or several (`is_shared`)."""
    return f".saving-{round:06d}-{number:012d}{'-parts' if is_shared else ''}"


def pickle_name(rank: int) -> str:
    return f"rank-{rank}.pickle"


def checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a folder, the newest first; other files are ignored."""
    return _checkpoints_named(folder, _SAVED)


def _checkpoints_named(folder: Path, pattern: re.Pattern[str]) -> list[Checkpoint]:
    with suppress(FileNotFoundError, NotADirectoryError):
        matches = [(pattern.fullmatch(path.name), path) for path in folder.iterdir()]
        return sorted((Checkpoint(int(m[1]), int(m[2]), path) for m, path in matches if m), reverse=True)
    return []


def file_table(path: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """The sizes and digests of these files."""
    return {name: [(path / name).stat().st_size, file_digest(path / name)] for name in sorted(names)}


def write_checkpoint_description(path: Path, content: dict[str, Any]) -> None:
    """Write the description; `content["files"]` is a table of all other files."""
    text = json.dumps({**content, "format": FORMAT})
    (path / DESCRIPTION).write_text(f"{text}\n{crc32(text.encode())}\n")


def write_checkpoint_part(path: Path, rank: int, data: bytes) -> None:
    """The files of this rank's node are synced: say so."""
    part = path / f"part-{rank}.pickle"
    unfinished = path / f"{part.name}.tmp"
    unfinished.write_bytes(data)
    sync_checkpoint_files(unfinished)
    unfinished.rename(part)
    sync_checkpoint_files(path)


def read_checkpoint_parts(path: Path) -> list[bytes]:
    """Those that are there, the first ranks first."""
    found = [file for file in path.iterdir() if _PART.fullmatch(file.name)]
    return [file.read_bytes() for file in sorted(found, key=lambda file: int(file.stem.split("-")[1]))]


def is_first_to_complete(path: Path) -> bool:
    try:
        os.close(os.open(path / COMPLETING, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def remove_checkpoint_parts(path: Path) -> None:
    """What only savers need.  COMPLETING stays until the checkpoint has its name: no other node may complete it too."""
    for file in list(path.iterdir()):
        if _PART.fullmatch(file.name):
            file.unlink()


def read_checkpoint_description(path: Path) -> dict[str, Any]:
    """What a checkpoint has; Unusable if this cannot be told."""
    try:
        text, checksum, *_ = (path / DESCRIPTION).read_text().split("\n")
        if int(checksum) != crc32(text.encode()):
            raise ValueError("its checksum does not match")
        found: dict[str, Any] = json.loads(text)
    except (OSError, ValueError) as error:
        raise Unusable(f"{path / DESCRIPTION} cannot be read: {error}") from error
    if found["format"] != FORMAT:
        raise Unusable(f"{path / DESCRIPTION} has format {found['format']}, and this version reads {FORMAT}")
    return found


def verify_checkpoint_files(path: Path, files: Mapping[str, list[int]]) -> None:
    """Unusable names the first file that is not as it was written."""
    for name, (size, expected) in files.items():
        file = path / name
        try:
            found = file.stat().st_size
            if found != size:
                raise Unusable(f"{file} has {found} bytes instead of {size}")
            if file_digest(file) != expected:
                raise Unusable(f"{file} is corrupted: its digest does not match")
        except OSError as error:
            raise Unusable(f"{file} cannot be read: {error.strerror}") from error


def sync_checkpoint_files(*paths: Path) -> None:
    """Have these files, or the names in these directories, on disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def prune(folder: Path, keep: int, round: int, number: int, *, keep_parts: bool = True) -> None:
    """Remove all but the newest checkpoints, and what was not finished before this commit.

    The newest unfinished one of several nodes stays if no later commit is saved: a slow node may be writing to it.
    """
    saved = checkpoints(folder)
    for old in saved[keep:]:
        remove_checkpoint(old.path)
    older = [each for each in _checkpoints_named(folder, _UNFINISHED) if (each.round, each.number) < (round, number)]
    shared = [each for each in older if each.path.name.endswith("-parts")]
    for each in older:
        is_newest = shared[:1] == [each] and each.round == round and not any(each < one for one in saved)
        if not (keep_parts and is_newest):
            remove_checkpoint(each.path)
    for path in list(folder.glob(f"{_REMOVED}*")):  # of a killed saver
        _remove_checkpoint_files(path)


def newest_checkpoint_round(folder: Path) -> int:
    """Of all commits here, unfinished ones too: what a lost job has left must not be taken for a part of a new one."""
    return max((each.round for each in (*checkpoints(folder), *_checkpoints_named(folder, _UNFINISHED))), default=0)


def remove_checkpoint(path: Path) -> None:
    """Remove a directory that has only our files.

    It is renamed first, so that no half checkpoint is ever used, and no other node completes one without these files.
    """
    if path.is_symlink() or not path.is_dir():
        return
    with suppress(FileNotFoundError):  # another node removes it, too
        if _has_only_checkpoint_files(path):
            _remove_checkpoint_files(path.rename(path.with_name(f"{_REMOVED}{os.urandom(8).hex()}")))


def _has_only_checkpoint_files(path: Path) -> bool:
    return all(_OURS.fullmatch(file.name) and file.is_file() for file in path.iterdir())


def _remove_checkpoint_files(path: Path) -> None:
    with suppress(FileNotFoundError):
        if not path.is_symlink() and _has_only_checkpoint_files(path):
            for file in list(path.iterdir()):
                file.unlink(missing_ok=True)
            path.rmdir()
