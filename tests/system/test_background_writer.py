"""Lines are written by one thread, or by the caller if no thread can be started."""

import threading
from contextlib import suppress

import pytest

from ripstop.system.background_writer import BackgroundWriter


def put_in_threads(writer: BackgroundWriter, *lines: str) -> None:
    callers = [threading.Thread(target=writer.put, args=(line,), daemon=True) for line in lines]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=120)
        assert not caller.is_alive(), "put waits for ever"


def test_two_callers_start_the_thread_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    writer = BackgroundWriter("test", written.append)
    both_start, start, starts = threading.Barrier(2), writer._thread.start, []

    def start_when_both_are_here() -> None:
        starts.append(threading.get_ident())
        with suppress(threading.BrokenBarrierError):
            both_start.wait(timeout=0.2)
        start()

    monkeypatch.setattr(writer._thread, "start", start_when_both_are_here)
    put_in_threads(writer, "a", "b")
    assert writer.close()
    assert len(starts) == 1
    assert sorted(written) == [b"a\n", b"b\n"]


def test_without_a_thread_the_caller_writes_all_queued_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    writer = BackgroundWriter("test", written.append)

    def no_thread() -> None:
        if not written:
            writer._lines.put("of another caller")
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(writer._thread, "start", no_thread)
    put_in_threads(writer, "a")
    assert writer.close()
    assert written == [b"a\n", b"of another caller\n"]


def test_without_a_thread_the_caller_does_not_wait_for_a_line_that_another_has_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = BackgroundWriter("test", lambda line: None)

    def no_thread() -> None:
        writer._lines.get()  # as another caller does
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(writer._thread, "start", no_thread)
    put_in_threads(writer, "a")
