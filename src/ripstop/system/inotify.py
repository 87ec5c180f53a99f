"""Notifications of writes to open files: Linux's inotify, through ctypes.

Watches are one-shot: after an event, a file is not watched until it is armed again.  So a worker that writes a million
lines costs one event for each read, and its writes in between cost nothing.  Arm first, then read to the end: a write
after the arming causes the next event.  Files are armed by descriptor, so that a renamed or deleted file is still
watched.
"""

import ctypes
import os
import struct

_IN_MODIFY = 0x00000002
_IN_Q_OVERFLOW = 0x00004000
_IN_ONESHOT = 0x80000000
_EVENT = struct.Struct("iIII")


class InotifyWatch:
    """The files of one reader; `fileno()` is readable when an armed file was written to.

    Raises OSError if the kernel has no inotify, or if this user has no instance left.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "inotify_init1"):
            raise OSError("this system has no inotify")
        self._add, self._remove = libc.inotify_add_watch, libc.inotify_rm_watch
        self._add.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
        self._files: dict[int, int] = {}  # watch → descriptor of the file
        self._watches: dict[int, int] = {}  # descriptor of the file → watch
        self._fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise _error()

    def fileno(self) -> int:
        return self._fd

    def arm(self, fd: int) -> None:
        """Watch this file for its next change; OSError if this user has no watch left."""
        watch = self._add(self._fd, b"/proc/self/fd/%d" % fd, _IN_MODIFY | _IN_ONESHOT)
        if watch < 0:
            raise _error()
        self._files[watch] = fd
        self._watches[fd] = watch

    def disarm(self, fd: int) -> None:
        """Stop watching this file."""
        watch = self._watches.pop(fd, None)
        if watch is not None:
            del self._files[watch]
            self._remove(self._fd, watch)

    def changed(self) -> set[int]:
        """The descriptors whose files were written to since they were armed; does not wait."""
        fds: set[int] = set()
        try:
            events = os.read(self._fd, 65536)
        except BlockingIOError:
            return fds
        at = 0
        while at < len(events):
            watch, mask, _, name = _EVENT.unpack_from(events, at)
            at += _EVENT.size + name
            if mask & _IN_Q_OVERFLOW:
                fds.update(self._watches)
            elif mask & _IN_MODIFY and watch in self._files:
                fd = self._files.pop(watch)
                del self._watches[fd]
                fds.add(fd)
        return fds

    def close(self) -> None:
        os.close(self._fd)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
