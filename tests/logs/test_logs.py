"""Log files of workers, and copying them to the console."""

import asyncio
import fcntl
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ripstop.logs.console import MAX_READ_BYTES, RESERVED_BYTES, Console, Prefixer, _ConsoleCopier, _ConsoleLogFile
from ripstop.logs.directory import KeptLogDirectories, LogDirectory, RoundLogs, directory_name
from ripstop.model.config import Logs, OutputStreams, StreamMap
from ripstop.model.errors import StartError, UsageError
from ripstop.model.round import Address, Place
from ripstop.system.disk_space import reserve_disk_space
from ripstop.system.safe_files import replace_file

PLACE = Place(2, 1, 2, 4, 8, 2, 4, 8, Address("localhost", 29500), 1)


def round_logs(job: Path, logs: Logs | None = None, *, terminal: bool = False) -> RoundLogs:
    return RoundLogs(job, logs or Logs(), PLACE, "default", terminal=terminal)


# files


def test_each_worker_has_a_directory_by_round_and_rank(tmp_path: Path) -> None:
    directory = LogDirectory(Logs(directory=tmp_path), "job7")
    logs = round_logs(directory.path, Logs(redirects=StreamMap(OutputStreams.ALL)))
    logs.prepare()
    assert logs.stdout(1) == tmp_path / "job7" / "round_2" / "5" / "stdout.log"
    assert logs.stderr(1) == tmp_path / "job7" / "round_2" / "5" / "stderr.log"
    assert logs.error_file(1) == tmp_path / "job7" / "round_2" / "5" / "error.json"
    assert all(path.exists() for rank in range(2) for path in logs.files(rank))


def test_a_worker_that_goes_on_in_place_keeps_its_files_until_it_is_replaced(tmp_path: Path) -> None:
    old, middle, new = (
        RoundLogs(tmp_path, Logs(), replace(PLACE, round=round), "default", terminal=False) for round in (2, 3, 4)
    )
    logs = KeptLogDirectories(
        new, {0: KeptLogDirectories(middle, {0: old})}
    )  # local rank 0 goes on for the second time
    logs.prepare()
    assert [logs.stderr(0), logs.stderr(1)] == [old.stderr(0), new.stderr(1)]
    assert logs.error_file(0) == old.error_file(0)
    assert [path.exists() for path in (logs.directory(0), logs.directory(1))] == [False, True]  # only new ones are made
    logs.start([0])
    logs.prepare()
    assert logs.stderr(0) == new.stderr(0)
    assert logs.directory(0).exists()


def test_redirects_and_tee_select_the_streams_with_files(tmp_path: Path) -> None:
    logs = round_logs(tmp_path, Logs(redirects=StreamMap(OutputStreams.NONE, ((1, OutputStreams.OUT),))))
    assert logs.stdout(0) is None
    assert logs.stdout(1) is not None
    tee = round_logs(tmp_path, Logs(tee=StreamMap(OutputStreams.OUT)), terminal=True)
    assert tee.stdout(0) is not None
    assert tee.stderr(0) is None


def test_stderr_has_a_file_as_evidence_unless_it_is_a_terminal(tmp_path: Path) -> None:
    assert round_logs(tmp_path, terminal=False).stderr(0) is not None
    assert round_logs(tmp_path, terminal=True).stderr(0) is None


def test_an_earlier_runs_logs_and_errors_are_kept(tmp_path: Path) -> None:
    logs = round_logs(tmp_path)
    for text in ("first", "second"):
        logs.prepare()
        logs.error_file(0).write_text(text)
    stderr = logs.stderr(0)
    assert stderr is not None
    stderr.write_text("kept")
    logs.prepare()
    assert stderr.read_text() == "kept"
    assert not logs.error_file(0).exists()
    assert {path.name: path.read_text() for path in logs.directory(0).glob("error.json*")} == {
        "error.json.1": "first",
        "error.json.2": "second",
    }


@pytest.mark.parametrize("run_id", ["../../etc", "a/b", "..", "", "x" * 300, "naïve id", "a\x00b", "\udcff"])
def test_any_run_id_becomes_one_safe_file_name(run_id: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}", directory_name(run_id))


def test_different_run_ids_have_different_names() -> None:
    assert directory_name("job-7.a") == "job-7.a"
    assert len({directory_name(run_id) for run_id in ("a/b", "a_b", "a b", "a\\b")}) == 4


def test_an_unusable_log_directory_is_rejected_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^workers' logs need .*file.* cannot be used \(.*\); .*--log-dir\.$"):
        LogDirectory(Logs(directory=tmp_path / "file"), "job7")


def test_a_round_whose_files_cannot_be_created_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "round_2").touch()
    with pytest.raises(StartError, match=r"round_2 cannot be used"):
        round_logs(tmp_path).prepare()
    with pytest.raises(StartError, match="cannot be used"):
        round_logs(tmp_path).follow(Console())


def test_an_empty_temporary_directory_is_removed_after_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    empty, written = LogDirectory(Logs(), "job7"), LogDirectory(Logs(), "job7")
    for directory in (empty, written):
        round_logs(directory.path).prepare()
    stderr = round_logs(written.path).stderr(1)
    assert stderr is not None
    stderr.write_text("a warning")
    empty.tidy(succeeded=True)
    written.tidy(succeeded=True)
    assert list(tmp_path.iterdir()) == [written.path.parent]
    assert stderr.read_text() == "a warning"


def test_the_output_of_standbys_does_not_keep_a_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    directory = LogDirectory(Logs(), "job7")
    (round_logs(directory.path).make_standby_directory(0) / "output.log").write_text("the start-up")
    directory.tidy(succeeded=True)
    assert list(tmp_path.iterdir()) == []


def test_standbys_of_different_nodes_have_different_directories(tmp_path: Path) -> None:
    logs = round_logs(tmp_path)
    assert logs.make_standby_directory(1).name == f"standby_{logs.directory(1).name}" != "standby_1"


def test_a_temporary_directory_that_cannot_be_created_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with pytest.raises(UsageError, match=r"missing cannot be used \(No such file or directory\)"):
        LogDirectory(Logs(), "job7")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory to another user")
def test_a_temporary_directory_that_another_user_made_in_place_of_ours_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    directory = LogDirectory(Logs(), "job7")
    directory.path.rmdir()
    os.chown(directory.path.parent, OTHER, OTHER)
    with pytest.raises(StartError, match="belongs to user 4242"):
        round_logs(directory.path).prepare()
    assert not directory.path.exists()


def test_a_temporary_directory_that_is_made_again_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    directory = LogDirectory(Logs(), "job7")
    directory.path.rmdir()
    directory.path.parent.rmdir()
    round_logs(directory.path).prepare()
    assert directory.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_directory_of_the_user_is_never_removed(tmp_path: Path) -> None:
    directory = LogDirectory(Logs(directory=tmp_path), "job7")
    directory.tidy(succeeded=True)
    assert directory.path.exists()


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    replace_file(tmp_path / "report.json", "{}")
    replace_file(tmp_path / "report.json", '{"a": "ä"}')
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == '{"a": "ä"}'
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "directory", "{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "report.json"]


# files of other users

OTHER = 4242  # a user id that does not exist


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory to another user")
def test_a_run_directory_of_another_user_is_rejected_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "job7").mkdir()
    os.chown(tmp_path / "job7", OTHER, OTHER)
    with pytest.raises(UsageError, match=r"cannot be used \(job7 belongs to user 4242\); name another with --log-dir"):
        LogDirectory(Logs(directory=tmp_path), "job7")


def test_a_run_directory_must_not_be_a_link_but_the_log_directory_may_be_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "logs").symlink_to("real")
    (tmp_path / "real" / "evil").symlink_to(tmp_path)
    assert LogDirectory(Logs(directory=tmp_path / "logs"), "job7").path.is_dir()
    with pytest.raises(UsageError, match=r"evil is a symbolic link"):
        LogDirectory(Logs(directory=tmp_path / "logs"), "evil")


def test_other_users_cannot_write_into_a_run_directory(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        directory = LogDirectory(Logs(directory=tmp_path), "job7")
        logs = round_logs(directory.path)
        logs.prepare()
    finally:
        os.umask(before)
    for path in (directory.path, logs.directory(0).parent, logs.directory(0)):
        assert path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", ["round_2", "round_2/4", "round_2/4/stderr.log"])
def test_a_planted_link_is_not_followed(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    target.mkdir()
    planted = tmp_path / "job7" / name
    planted.parent.mkdir(parents=True)
    planted.symlink_to(target if not name.endswith(".log") else target / "file")
    with pytest.raises(StartError, match=r"cannot be used \("):
        round_logs(tmp_path / "job7").prepare()
    assert list(target.iterdir()) == []


def test_a_planted_link_in_place_of_an_error_file_is_renamed(tmp_path: Path) -> None:
    logs = round_logs(tmp_path)
    logs.prepare()
    logs.error_file(0).symlink_to(tmp_path / "target")
    logs.prepare()
    assert not os.path.lexists(logs.error_file(0))


def test_planted_links_in_place_of_copied_and_filtered_files_are_not_followed(tmp_path: Path) -> None:
    logs = round_logs(tmp_path, Logs(tee=StreamMap(OutputStreams.ALL), stdout_filters=("x",)))
    logs.prepare()
    (tmp_path / "round_2" / "filtered_stdout.log").symlink_to(tmp_path / "target")
    console = Console()
    with pytest.raises(StartError, match="cannot be used"):
        logs.follow(console)
    console.close()
    assert not (tmp_path / "target").exists()


# lines


def prefixed(*pieces: bytes) -> bytes:
    prefixer = Prefixer(b"[a0]:")
    return b"".join([*(prefixer.feed(piece) for piece in pieces), prefixer.end()])


def test_every_line_gets_a_prefix() -> None:
    assert prefixed(b"one\ntwo\n") == b"[a0]:one\n[a0]:two\n"
    assert prefixed(b"\n\n") == b"[a0]:\n[a0]:\n"


def test_a_line_that_comes_in_pieces_is_written_whole() -> None:
    assert prefixed(b"o", b"ne\ntw", b"o", b"\n") == b"[a0]:one\n[a0]:two\n"


def test_the_last_line_gets_a_newline() -> None:
    assert prefixed(b"one\ntwo") == b"[a0]:one\n[a0]:two\n"
    assert prefixed(b"") == b""


def test_each_carriage_return_of_a_progress_bar_ends_a_line() -> None:
    assert prefixed(b"\r10%", b"\r20%\r\n") == b"[a0]:\n[a0]:10%\n[a0]:20%\n"


def test_a_line_without_a_newline_uses_bounded_memory() -> None:
    prefixer = Prefixer(b"[a0]:")
    size = sum(len(prefixer.feed(b"x" * 100_000)) for _ in range(50))
    assert size >= 3_000_000


@given(st.lists(st.text("ab\r\n", max_size=6)))
def test_lines_do_not_depend_on_how_the_stream_is_divided(pieces: list[str]) -> None:
    text = "".join(pieces).replace("\r\n", "\n").replace("\r", "\n")
    lines = text.removesuffix("\n").split("\n") if text else []
    assert prefixed(*(piece.encode() for piece in pieces)).decode() == "".join(f"[a0]:{line}\n" for line in lines)


# the console


class Reader:
    """Reads the other end of a console."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._data = b""
        self._arrived = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self._fd, 65536):
            with self._arrived:
                self._data += data
                self._arrived.notify_all()

    def wait_for(self, test: Callable[[bytes], bool]) -> bytes:
        with self._arrived:
            assert self._arrived.wait_for(lambda: test(self._data), timeout=120), self._data[-500:]
            return self._data

    def all(self) -> bytes:
        self._thread.join(timeout=120)
        assert not self._thread.is_alive()
        return self._data


class Terminal:
    """A console for the tests: a pipe."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()
        self._reader: Reader | None = None

    def reader(self) -> Reader:
        self._reader = Reader(self.out)
        return self._reader

    def hang_up(self) -> None:
        os.close(self.into)
        self.into = -1

    def close(self) -> None:
        if self.into >= 0:
            self.hang_up()
        if self._reader is not None:
            self._reader.all()
        if self.out >= 0:
            os.close(self.out)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.fixture
def console() -> Iterator[Console]:
    console = Console()
    yield console
    console.close()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def reserve(path: Path) -> None:
    """As `RoundLogs.prepare` does."""
    with path.open("ab") as file:
        assert reserve_disk_space(file.fileno(), path.stat().st_size, path.stat().st_size + RESERVED_BYTES)
    if disk_bytes(path) < RESERVED_BYTES:
        pytest.skip("the file system cannot reserve space")


def disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def ends_with(last: bytes) -> Callable[[bytes], bool]:
    return lambda seen: seen.endswith(last)


async def finish(console: Console, *paths: Path) -> None:
    async with asyncio.timeout(120):
        await console.finish(paths)


WRITER = """
import os, sys
name, lines = sys.argv[1], int(sys.argv[2])
for number in range(lines):
    os.write(1, f"{name} {number} ".encode())   # each line in three pieces
    os.write(1, b"x" * (number % 200))
    os.write(1, b"\\n")
os.write(1, b"the end of " + name.encode())
"""


def test_lines_of_concurrent_workers_are_complete_and_do_not_mix(
    tmp_path: Path, console: Console, terminal: Terminal
) -> None:
    reader, lines = terminal.reader(), 5000
    paths = [tmp_path / f"{rank}.log" for rank in range(4)]

    async def work(rank: int, path: Path) -> None:
        with path.open("ab") as stdout:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", WRITER, f"w{rank}", str(lines), stdout=stdout
            )
        assert await asyncio.wait_for(process.wait(), timeout=120) == 0
        await finish(console, path)

    async def job() -> None:
        for rank, path in enumerate(paths):
            path.touch()
            console.follow(path, terminal.into, f"[default{rank}]:".encode())
        await asyncio.gather(*(work(rank, path) for rank, path in enumerate(paths)))

    asyncio.run(job())
    terminal.hang_up()
    seen: dict[str, list[str]] = {}
    for line in reader.all().decode().splitlines():
        prefix, _, text = line.partition(":")
        seen.setdefault(prefix, []).append(text)
    for rank in range(4):
        expected = [f"w{rank} {number} {'x' * (number % 200)}" for number in range(lines)]
        assert seen.pop(f"[default{rank}]") == [*expected, f"the end of w{rank}"]
    assert not seen


def test_a_line_appears_while_its_worker_is_running(tmp_path: Path, console: Console, terminal: Terminal) -> None:
    path, reader = tmp_path / "out.log", terminal.reader()
    path.touch()
    console.follow(path, terminal.into, b"[a0]:")
    for number in range(3):  # each after the reader has received the previous one
        append(path, b"line %d\n" % number)
        reader.wait_for(ends_with(b"[a0]:line %d\n" % number))


def test_without_a_prefix_half_a_line_appears_at_once(tmp_path: Path, console: Console, terminal: Terminal) -> None:
    path, reader = tmp_path / "err.log", terminal.reader()
    path.touch()
    console.follow(path, terminal.into)
    append(path, b"\r 10%")
    reader.wait_for(lambda seen: seen == b"\r 10%")
    append(path, b"\r\xff")
    reader.wait_for(lambda seen: seen == b"\r 10%\r\xff")


def test_without_a_prefix_a_long_output_is_divided_between_lines(tmp_path: Path) -> None:
    path = tmp_path / "err.log"
    path.touch()
    file = _ConsoleLogFile(path, None, None, keep_end_only=False, reserve_space=False)
    line = b"x" * 99 + b"\n"
    append(path, line * 10_000 + b"half")
    blocks = []
    while (block := file.next_output())[1]:
        blocks.append(block[0])
    file.close()
    assert b"".join(blocks) == line * 10_000 + b"half"
    assert len(blocks) > 2
    assert all(block.endswith(b"\n") for block in blocks[:-1])


def test_without_a_prefix_a_line_that_is_just_being_written_is_not_divided(tmp_path: Path) -> None:
    path = tmp_path / "err.log"
    path.touch()
    file = _ConsoleLogFile(path, None, None, keep_end_only=False, reserve_space=False)
    append(path, b"line\nhalf")
    assert file.next_output() == (b"line\n", True)
    append(path, b" a line\n")
    assert file.next_output() == (b"half a line\n", True)
    append(path, b"password: ")
    assert file.next_output() == (b"", True)
    assert file.next_output() == (b"password: ", True)  # its end has not come in time
    file.close()


def test_a_partial_line_is_copied_when_its_worker_has_ended(
    tmp_path: Path, console: Console, terminal: Terminal
) -> None:
    path, reader = tmp_path / "err.log", terminal.reader()
    path.touch()
    console.follow(path, terminal.into)
    append(path, b"line\nthe end")
    asyncio.run(finish(console, path))
    terminal.hang_up()
    assert reader.all() == b"line\nthe end"


@pytest.mark.parametrize(
    "output",
    [(b"x" * 140_000 + b"\n") * 20, b"x" * (MAX_READ_BYTES - 44) + b"\n" + b"y" * 43, b"x" * (5 * MAX_READ_BYTES)],
)
def test_all_output_of_a_worker_that_has_ended_is_copied(
    tmp_path: Path, console: Console, terminal: Terminal, output: bytes
) -> None:
    path, reader = tmp_path / "err.log", terminal.reader()
    path.touch()
    console.follow(path, terminal.into)
    append(path, output)
    asyncio.run(finish(console, path))
    terminal.hang_up()
    assert reader.all() == output


def test_earlier_content_of_a_file_is_not_copied(tmp_path: Path, console: Console, terminal: Terminal) -> None:
    path, reader = tmp_path / "out.log", terminal.reader()
    path.write_bytes(b"yesterday\n")
    console.follow(path, terminal.into, b"[a0]:")
    append(path, b"today\n")
    asyncio.run(finish(console, path))
    terminal.hang_up()
    assert reader.all() == b"[a0]:today\n"


def test_a_console_that_is_not_read_blocks_no_other_console(
    tmp_path: Path, console: Console, terminal: Terminal
) -> None:
    stuck, other = tmp_path / "out.log", tmp_path / "err.log"
    elsewhere = Terminal()
    data = b"".join(b"line %d\n" % number for number in range(200_000))

    async def job() -> None:
        for path, console_fd in ((stuck, terminal.into), (other, elsewhere.into)):
            path.touch()
            console.follow(path, console_fd, b"[a0]:")
        append(stuck, data)
        append(other, b"hello\n")
        waiting = asyncio.create_task(finish(console, stuck))
        await finish(console, other)
        reader.wait_for(lambda seen: seen == b"[a0]:hello\n")
        assert not waiting.done()
        late = terminal.reader()
        await waiting
        terminal.hang_up()
        assert late.all() == b"".join(b"[a0]:line %d\n" % number for number in range(200_000))

    reader = elsewhere.reader()
    try:
        asyncio.run(job())
    finally:
        elsewhere.close()


def test_drain_waits_for_files_that_are_being_finished(tmp_path: Path, console: Console, terminal: Terminal) -> None:
    paths = [tmp_path / "1.log", tmp_path / "2.log"]

    async def job() -> None:
        for path in paths:
            path.touch()
            console.follow(path, terminal.into)
            append(path, b"x" * 300_000)
        asyncio.create_task(console.finish(paths[:1])).cancel()
        cancelled = asyncio.create_task(console.finish(paths[1:]))
        await asyncio.sleep(0)
        cancelled.cancel()
        reader = terminal.reader()
        async with asyncio.timeout(120):
            await console.drain()
        terminal.hang_up()
        assert len(reader.all()) == 600_000

    asyncio.run(job())


def test_a_closed_console_is_ignored(tmp_path: Path, console: Console, terminal: Terminal) -> None:
    path = tmp_path / "out.log"
    path.touch()
    console.follow(path, terminal.into, b"[a0]:")
    os.close(terminal.out)
    terminal.out = -1
    append(path, b"hello\n" * 100_000)
    asyncio.run(finish(console, path))
    assert path.stat().st_size == 600_000


def test_a_non_blocking_console_gets_all_output(tmp_path: Path, console: Console, terminal: Terminal) -> None:
    path, reader = tmp_path / "out.log", terminal.reader()
    flags = fcntl.fcntl(terminal.into, fcntl.F_GETFL)
    fcntl.fcntl(terminal.into, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    path.touch()
    console.follow(path, terminal.into)
    append(path, b"hello\n" * 500_000)
    asyncio.run(finish(console, path))
    terminal.hang_up()
    assert reader.all() == b"hello\n" * 500_000


def test_a_truncated_file_is_followed_from_its_start(tmp_path: Path, console: Console, terminal: Terminal) -> None:
    path, reader = tmp_path / "out.log", terminal.reader()
    path.touch()
    console.follow(path, terminal.into, b"[a0]:")
    append(path, b"a long line\n")
    reader.wait_for(lambda seen: seen == b"[a0]:a long line\n")
    os.truncate(path, 0)
    append(path, b"short\n")
    asyncio.run(finish(console, path))
    terminal.hang_up()
    assert reader.all() == b"[a0]:a long line\n[a0]:short\n"


def test_a_deleted_file_is_copied_to_its_end(tmp_path: Path, console: Console, terminal: Terminal) -> None:
    path, reader = tmp_path / "out.log", terminal.reader()
    with path.open("ab", buffering=0) as worker:
        console.follow(path, terminal.into, b"[a0]:")
        path.unlink()
        worker.write(b"still here\n")
        reader.wait_for(lambda seen: seen == b"[a0]:still here\n")
        worker.write(b"to the end\n")
        asyncio.run(finish(console, path))
    terminal.hang_up()
    assert reader.all() == b"[a0]:still here\n[a0]:to the end\n"


def test_space_that_was_reserved_is_released_at_the_end(tmp_path: Path, console: Console, terminal: Terminal) -> None:
    path = tmp_path / "err.log"
    path.write_bytes(b"hello")
    reserve(path)
    console.follow(path, terminal.into, reserve_space=True)
    asyncio.run(finish(console, path))
    assert disk_bytes(path) < RESERVED_BYTES
    assert path.read_bytes() == b"hello"


def test_lines_that_an_orphan_appends_while_space_is_released_are_kept(
    tmp_path: Path, console: Console, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reader = tmp_path / "err.log", terminal.reader()
    path.touch()
    reserve(path)
    inode, fstat, written = path.stat().st_ino, os.fstat, []

    with path.open("ab", buffering=0) as orphan:

        def fstat_before_a_line(fd: int) -> os.stat_result:
            found = fstat(fd)
            if found.st_ino == inode:
                orphan.write(b"late\n")
                written.append(b"late\n")
            return found

        console.follow(path, terminal.into, reserve_space=True)
        append(path, b"up\n")
        reader.wait_for(ends_with(b"up\n"))
        monkeypatch.setattr(os, "fstat", fstat_before_a_line)
        asyncio.run(finish(console, path))
        monkeypatch.undo()
    assert written
    assert path.read_bytes() == b"up\n" + b"".join(written)


def full_after_one_file() -> Callable[[int, int, int], bool]:
    """Replaces `reserve_disk_space`: the disk has space for the first file only."""
    answers = iter([True])

    def reserve_first(fd: int, start: int, end: int) -> bool:
        return next(answers, False) and reserve_disk_space(fd, start, end)

    return reserve_first


@pytest.mark.parametrize("requested", [False, True])
def test_no_space_stays_reserved_if_the_disk_is_too_small_for_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requested: bool
) -> None:
    monkeypatch.setattr("ripstop.logs.directory.reserve_disk_space", full_after_one_file())
    logs = round_logs(tmp_path, Logs(redirects=StreamMap(OutputStreams.OUT if requested else OutputStreams.NONE)))
    if requested:
        with pytest.raises(StartError, match="No space left"):
            logs.prepare()
    else:
        logs.prepare()
    assert disk_bytes(logs.directory(0) / "stderr.log") < RESERVED_BYTES


def test_no_space_stays_reserved_if_the_files_cannot_be_followed(tmp_path: Path, console: Console) -> None:
    logs = round_logs(tmp_path)
    logs.prepare()
    (logs.directory(0) / "stderr.log").unlink()
    with pytest.raises(StartError, match="cannot be used"):
        logs.follow(console)
    assert disk_bytes(logs.directory(1) / "stderr.log") < RESERVED_BYTES


def test_space_is_reserved_again_after_a_truncation(tmp_path: Path, console: Console, terminal: Terminal) -> None:
    path, reader = tmp_path / "err.log", terminal.reader()
    path.touch()
    reserve(path)
    console.follow(path, terminal.into, reserve_space=True)
    append(path, b"a long line\n")
    reader.wait_for(ends_with(b"line\n"))
    os.truncate(path, 0)
    append(path, b"short\n")
    reader.wait_for(ends_with(b"short\n"))
    assert disk_bytes(path) >= RESERVED_BYTES


def test_only_the_end_of_a_file_stays_on_disk_after_a_truncation(
    tmp_path: Path, console: Console, terminal: Terminal
) -> None:
    path, reader = tmp_path / "err.log", terminal.reader()
    path.touch()
    console.follow(path, terminal.into, keep_end_only=True)
    for size, last in ((5 << 20, b"first\n"), (4 << 20, b"second\n")):
        os.truncate(path, 0)
        append(path, b"x" * size + last)
        reader.wait_for(ends_with(last))
    assert disk_bytes(path) < 3 << 20


def test_without_inotify_files_are_polled(tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    no_instance_left = SimpleNamespace(inotify_init1=lambda _: -1, inotify_add_watch=SimpleNamespace())
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: no_instance_left)
    console, path, reader = Console(), tmp_path / "out.log", terminal.reader()
    path.touch()
    console.follow(path, terminal.into, b"[a0]:")
    for number in range(3):
        append(path, b"line %d\n" % number)
        reader.wait_for(ends_with(b"[a0]:line %d\n" % number))
    console.close()


def test_finishing_an_unknown_file_is_no_error(console: Console, tmp_path: Path) -> None:
    asyncio.run(finish(console, tmp_path / "unknown.log"))


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_a_closed_console_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    terminal = Terminal()
    threads, open_before = set(threading.enumerate()), descriptors()  # those of earlier tests may end meanwhile
    console = Console()
    for name in ("1.log", "2.log"):
        (tmp_path / name).touch()
        console.follow(tmp_path / name, terminal.into)
    asyncio.run(finish(console, tmp_path / "1.log"))
    console.close()
    assert set(threading.enumerate()) <= threads and descriptors() <= open_before
    terminal.close()


AGENT = """
import asyncio, subprocess, sys
from pathlib import Path
from ripstop.model.config import Logs, StreamMap, OutputStreams
from ripstop.model.round import Address, Place
from ripstop.logs.console import Console
from ripstop.logs.directory import RoundLogs

place = Place(1, 0, 1, 0, 2, 2, 0, 2, Address("localhost", 1), 0)
wanted = Logs(tee=StreamMap(OutputStreams(int(sys.argv[2]))))
logs = RoundLogs(Path(sys.argv[1]), wanted, place, "default", terminal=False)
logs.prepare()
console = Console()
logs.follow(console)
for rank in range(2):
    out, err = logs.stdout(rank), logs.stderr(rank)
    script = f"import sys; print('out {rank}', flush=True); print('err {rank}', end='', file=sys.stderr)"
    subprocess.run([sys.executable, "-c", script], stdout=out and out.open("ab"), stderr=err and err.open("ab"))
    asyncio.run(console.finish(logs.files(rank)))
console.close()
"""


@pytest.mark.parametrize(
    ("tee", "out", "err"),
    [
        (3, b"[default0]:out 0\n[default1]:out 1\n", b"[default0]:err 0\n[default1]:err 1\n"),
        (1, b"[default0]:out 0\n[default1]:out 1\n", b"err 0err 1"),
        (0, b"out 0\nout 1\n", b"err 0err 1"),
    ],
)
def test_each_stream_reaches_its_own_console(tmp_path: Path, tee: int, out: bytes, err: bytes) -> None:
    agent = subprocess.run(
        [sys.executable, "-c", AGENT, str(tmp_path), str(tee)], capture_output=True, timeout=120, check=True
    )
    assert (agent.stdout, agent.stderr) == (out, err)
    assert (tmp_path / "round_1" / "1" / "stderr.log").read_bytes() == b"err 1"


def test_a_copier_that_ends_before_its_pipe_is_written_to_is_closed_without_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = _ConsoleCopier(os.open(tmp_path / "console", os.O_WRONLY | os.O_CREAT))
    busy, continued = threading.Event(), threading.Event()

    def wait() -> None:
        busy.set()
        continued.wait(120)

    def write_late(fd: int, data: bytes) -> int:
        continued.set()
        copier._thread.join(120)
        return write(fd, data)

    write = os.write
    copier.call(wait)
    assert busy.wait(120)
    monkeypatch.setattr("ripstop.logs.console.os.write", write_late)
    copier.close()
    assert not copier._thread.is_alive()


# inotify
