"""Reading log files while workers write to them."""

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ripstop.logs import log_reader
from ripstop.system.inotify import GrowthWatch

DEADLINE = 120.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stderr.log"


@pytest.mark.parametrize(
    ("text", "lines", "rest"),
    [
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\nb\nc\n", 9, "a\nb\nc\n"),
        ("a\nb\nc\n", 0, ""),
        ("\n\n\n", 1, "\n"),
        ("", 5, ""),
    ],
)
def test_the_last_lines_are_found(path: Path, text: str, lines: int, rest: str) -> None:
    path.write_text(text)
    assert text[log_reader.find_last_lines(path, lines)[0] :] == rest


def test_the_last_lines_are_found_far_from_the_end(path: Path) -> None:
    text = "".join(f"line {number} {'x' * 100}\n" for number in range(10_000))
    path.write_text(text)
    assert text[log_reader.find_last_lines(path, 5000)[0] :].count("\n") == 5000


def test_lines_that_come_after_the_last_lines_were_found_are_left_for_the_next_chunk(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("1\n2\n3\n")
    offset, size = log_reader.find_last_lines(path, 2)
    with path.open("a") as file:
        file.write("4\n")
    chunk = log_reader.read_log_chunk(path, offset, size)
    assert (chunk.text, chunk.next, chunk.size) == ("2\n3\n", 6, 6)
    assert log_reader.read_log_chunk(path, chunk.next).text == "4\n"


def test_chunks_are_contiguous_and_divide_no_character(path: Path) -> None:
    text = "aä€😀" * 20_000
    path.write_text(text, encoding="utf-8")
    found, offset = [], 0
    while (piece := log_reader.read_log_chunk(path, offset)).text:
        assert piece.offset == offset
        found.append(piece.text)
        offset = piece.next
    assert "".join(found) == text
    assert offset == piece.size == path.stat().st_size


def test_invalid_bytes_are_replaced_and_an_incomplete_character_is_left_for_later(path: Path) -> None:
    path.write_bytes(b"\xff\xfeok \xe2\x82")
    piece = log_reader.read_log_chunk(path, 0)
    assert (piece.text, piece.next, piece.size) == ("\ufffd\ufffdok ", 5, 7)


def test_an_incomplete_character_at_the_end_of_a_finished_file_is_replaced(path: Path) -> None:
    path.write_bytes(b"ok \xe2\x82")
    assert log_reader.read_log_chunk(path, 0, finished=True).text == "ok \ufffd"
    path.write_bytes(b"x" * (log_reader.MAX_CHUNK_BYTES - 1) + "\u20ac".encode())
    first = log_reader.read_log_chunk(path, 0, finished=True)
    assert log_reader.read_log_chunk(path, first.next, finished=True).text == "\u20ac"


def test_waiting_ends_when_the_file_is_finished(path: Path) -> None:
    path.write_text("a")

    async def scenario() -> None:
        finished = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(log_reader.wait_for_larger_log(path, 1, DEADLINE, finished))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        finished.set_result(None)
        async with asyncio.timeout(DEADLINE / 2):
            await waiting

    asyncio.run(scenario())


def test_a_hole_at_the_front_of_a_file_is_skipped(path: Path) -> None:
    with path.open("wb") as file:
        os.ftruncate(file.fileno(), 1 << 20)
        file.seek(1 << 20)
        file.write(b"the end")
    piece = log_reader.read_log_chunk(path, 0)
    assert piece.text.lstrip("\0") == "the end"
    assert piece.offset > 0 or len(piece.text) > 7  # a file system without holes returns zeros


def test_a_truncated_file_is_read_from_its_end(path: Path) -> None:
    path.write_text("short")
    assert log_reader.read_log_chunk(path, 100) == log_reader.LogChunk(5, 5, 5, "")


@pytest.mark.parametrize("watched", [True, False])
def test_waiting_ends_when_the_file_grows(path: Path, watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not watched:
        monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())
    path.write_text("a")

    async def scenario() -> None:
        waiting = asyncio.create_task(log_reader.wait_for_larger_log(path, 1, DEADLINE))
        await asyncio.sleep(0)
        with path.open("a") as file:
            file.write("b")
        began = time.monotonic()
        await waiting
        assert time.monotonic() - began < DEADLINE / 2

    asyncio.run(scenario())


def test_a_file_is_opened_once_for_a_hundred_callers(path: Path) -> None:
    path.write_text("a")

    def held() -> int:
        """How often it is open.  Files of earlier tests may still be open."""
        count = 0
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                count += fd.readlink() == path
        return count

    async def scenario() -> int:
        waiting = [asyncio.create_task(log_reader.wait_for_larger_log(path, 1, DEADLINE)) for _ in range(100)]
        await asyncio.sleep(0.2)  # for more descriptors than there should be
        for cancelled in waiting[:50]:
            cancelled.cancel()
        await asyncio.wait(waiting[:50])
        meanwhile = held()
        with path.open("a") as file:
            file.write("b")
        await asyncio.gather(*waiting[50:])
        while held():  # noqa: ASYNC110  # a thread closes it
            await asyncio.sleep(0.01)
        return meanwhile

    async def bounded() -> int:
        async with asyncio.timeout(DEADLINE):
            return await scenario()

    assert asyncio.run(bounded()) == 1


def test_a_missing_file_is_an_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(log_reader.wait_for_larger_log(path, 0, DEADLINE))


def test_a_file_server_that_hangs_blocks_neither_the_loop_nor_its_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("a")
    go = threading.Event()
    monkeypatch.setattr(log_reader, "GrowthWatch", lambda: go.wait(DEADLINE) and GrowthWatch())
    began = time.monotonic()
    try:
        asyncio.run(log_reader.wait_for_larger_log(path, 1, 0.05))
        assert time.monotonic() - began < DEADLINE / 2
    finally:
        go.set()


def test_waiting_ends_with_its_timeout(path: Path) -> None:
    path.write_text("a")
    asyncio.run(log_reader.wait_for_larger_log(path, 1, 0.05))
    assert path.read_text() == "a"
