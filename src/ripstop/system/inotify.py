"""Notifications of writes to open files: Linux's inotify, through ctypes; files that it cannot watch are polled.

Watches are one-shot: after an event, a file is not watched until it is armed again.  So a worker that writes a million
lines costs one event for each read, and its writes in between cost nothing.  Files are armed by descriptor, so that a
renamed or deleted file is still watched.

How to follow a file: (1) `arm` it; (2) read to the end; (3) wait until `grown` returns it; start again.  Data written
after (1) is reported by (3), so none is missed.

The kernel reports a write first and removes the one-shot watch afterwards.  A file that is armed in between gets the
old watch back, and loses it at once.  The kernel reports this removal too (`IN_IGNORED`), and `grown` returns the file.
"""

import os
import struct

_IN_MODIFY = 0x00000002
_IN_Q_OVERFLOW = 0x00004000
_IN_IGNORED = 0x00008000  # the watch was removed
_IN_ONESHOT = 0x80000000
_EVENT = struct.Struct("iIII")


class GrowthWatch:
    """Reports which open files were written to.

    `fileno()` is readable when an armed file was written to; None without inotify.  While `needs_polling` is true, the
    caller must call `grown()` at an interval of its choice.
    """

    def __init__(self) -> None:
        import ctypes  # agents without followers do not need it

        self._libc = ctypes.CDLL(None)
        self._files: dict[int, int] = {}  # watch → descriptor of the file
        self._watches: dict[int, int] = {}  # descriptor of the file → watch
        self._polled: set[int] = set()
        self._fd = -1  # the system has no inotify, or the user's limit of instances is reached
        if hasattr(self._libc, "inotify_init1"):
            self._libc.inotify_add_watch.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
            self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int | None:
        return self._fd if self._fd >= 0 else None

    @property
    def needs_polling(self) -> bool:
        return bool(self._polled)

    def arm(self, fd: int) -> None:
        """Report the next write to this file."""
        watch = -1
        if self._fd >= 0:
            watch = self._libc.inotify_add_watch(self._fd, b"/proc/self/fd/%d" % fd, _IN_MODIFY | _IN_ONESHOT)
        if watch < 0:  # the user's limit of watches may be reached
            self._polled.add(fd)
            return
        self._polled.discard(fd)
        self._forget(fd)
        self._files[watch] = fd
        self._watches[fd] = watch

    def disarm(self, fd: int) -> None:
        """Stop watching this file."""
        self._polled.discard(fd)
        watch = self._forget(fd)
        if watch is not None:
            self._libc.inotify_rm_watch(self._fd, watch)

    def grown(self) -> set[int]:
        """The files that were written to since `arm`, and all polled files.  Does not wait."""
        fds = set(self._polled)
        try:
            events = os.read(self._fd, 65536) if self._fd >= 0 else b""
        except BlockingIOError:
            return fds
        at = 0
        while at < len(events):
            watch, mask, _, name = _EVENT.unpack_from(events, at)
            at += _EVENT.size + name
            if mask & _IN_Q_OVERFLOW:
                fds.update(self._watches)
            elif mask & (_IN_MODIFY | _IN_IGNORED) and watch in self._files:
                fds.add(fd := self._files[watch])
                self._forget(fd)
        return fds

    def _forget(self, fd: int) -> int | None:
        watch = self._watches.pop(fd, None)
        if watch is not None:
            self._files.pop(watch, None)
        return watch

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
