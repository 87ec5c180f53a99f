"""The disk space of files: reserve it ahead of a writer, free the part that nobody needs, see if a disk is full."""

import errno
import os
import signal

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_APPEND_MARGIN_BYTES = 1 << 16  # after the end of a file, which another process may just fill
_PUNCH_BYTES = 1 << 16  # a multiple of every usual block size
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def free_disk_space(fd: int, start: int, end: int) -> int:
    """Free the disk space of a part of a file, without moving the rest; return up to where it is free now."""
    end -= end % _PUNCH_BYTES
    if end <= start:
        return start
    _fallocate_disk_space(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, start, end - start)
    return end  # on a file system without holes, nothing is freed


def reserve_disk_space(fd: int, start: int, end: int) -> bool:
    """Allocate disk space for a later write; False if the disk is full.

    On a file system without allocation, the free space that it reports decides.
    """
    error = _fallocate_disk_space(fd, _FALLOC_FL_KEEP_SIZE, start, end - start)
    if error in (errno.EOPNOTSUPP, errno.ENOSYS):
        return not is_disk_full(fd)
    return error not in DISK_FULL_ERRORS


def release_reserved_space(fd: int, size: int) -> None:
    """Free the disk space that `reserve_disk_space` allocated in the `size` bytes after the end of the file.

    Only ftruncate frees it on all file systems, but it also removes what another process appends meanwhile.  So it is
    used only with a lease, which the kernel grants if no other process has the file open.  Otherwise a hole is made
    behind the end; ext4 and btrfs ignore it.
    """
    import fcntl

    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # for a process that opens the file; the default ends ours
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        hole = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        _fallocate_disk_space(fd, hole, os.fstat(fd).st_size + _APPEND_MARGIN_BYTES, size)
        return
    try:
        os.ftruncate(fd, os.fstat(fd).st_size)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def is_disk_full(where: "int | str | os.PathLike[str]") -> bool:
    """Whether this file system has less than a page of free space."""
    try:
        found = os.statvfs(where)
    except OSError:
        return False
    return found.f_blocks > 0 and found.f_bavail * found.f_frsize < _PAGE_BYTES


def _fallocate_disk_space(fd: int, mode: int, start: int, size: int) -> int:
    """Return the errno; 0 for success."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return ctypes.get_errno() if libc.fallocate(fd, mode, start, size) else 0
