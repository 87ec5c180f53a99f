"""Ends the process groups of a round from another thread, so that collectives that wait for a lost rank raise.

torch has `abort` for NCCL.  For gloo it does nothing, so the connections of gloo are shut down: gloo's own threads then
fail every operation that waits.  How they are found: gloo's device has a thread with an epoll, in which its listening
socket and its connections are.  An entry's data is a pointer; Python and libuv put the descriptor there.  So the
sockets to shut down are those of an epoll that has been opened since the function was first entered, with a listening
socket, and with pointers.  The kernel names the inode of each, so that a descriptor that was closed and opened again
meanwhile is left alone.  Connections to the round's store are found by their peer.  Nothing here closes a descriptor of
others.

The destructor of a gloo group takes 10 to 30 ms, in which it only waits for gloo's threads, and no code needs the
group any more.  So `forget_groups` returns the groups, and the session lets go of them in another thread.
"""

# A recovery waits for this, and a process may have hundreds of descriptors: pathlib is too slow.
# ruff: noqa: PTH115, PTH123, PTH208

import logging
import os
import re
import socket
import stat
import sys
from contextlib import suppress
from typing import Any

import torch
from torch import distributed

log = logging.getLogger("ripstop.train")

_ENTRY = re.compile(r"^tfd:\s*(\d+) .*?data:\s*([0-9a-f]+) .*?ino:\s*([0-9a-f]+)", re.MULTILINE)
_EPOLL = "anon_inode:[eventpoll]"
_SOCKET = "socket:["


class GroupAbort:
    """The process groups that are made from now on, and the round's store; `abort` may be called again."""

    def __init__(self) -> None:
        self._earlier_epolls = set(_descriptors_for_group_abort(_EPOLL))
        self._store: set[tuple[str, int]] = set()
        self._aborted: set[int] = set()  # ids of groups, which torch's tables keep alive until `forget_groups`

    def start_round(self) -> None:
        """Prepare for the round's groups and store.  The environment already has the store's address."""
        # forget closed ones: gloo's next epoll may get the same descriptor number
        self._earlier_epolls &= set(_descriptors_for_group_abort(_EPOLL))
        self._store = _store_addresses_to_abort()
        self._aborted.clear()

    def abort(self) -> None:
        for epoll in _descriptors_for_group_abort(_EPOLL):
            if epoll not in self._earlier_epolls:
                _shut_down_gloo(epoll)
        try:
            self._abort_backends()
        except Exception as error:  # the agent replaces a worker that does not come back
            log.warning("the process groups could not be aborted: %s", error)
        for fd in _descriptors_for_group_abort(_SOCKET):
            _shut_down(fd, None, self._store)

    def _abort_backends(self) -> None:
        """As torch does: all in one group call of NCCL, because aborts of several communicators can deadlock."""
        c10d: Any = distributed.distributed_c10d
        names = dict(c10d._world.pg_names)
        groups = [
            group for group in sorted(names, key=names.__getitem__, reverse=True) if id(group) not in self._aborted
        ]
        nccl = next((found for group in groups if (found := _nccl_backend(group)) is not None), None)
        if nccl is not None:
            nccl._group_start()
        try:
            for group in groups:
                self._aborted.add(id(group))
                group.abort()
        finally:
            if nccl is not None:
                nccl._group_end()


def forget_groups() -> list[Any]:
    """Clear torch's tables of process groups.  Called in the main thread, when no code of the old round runs.

    Returns what was in the tables: the groups end when the caller lets go of them.
    """
    c10d: Any = distributed.distributed_c10d
    world = c10d._world
    groups = [*world.pg_map.items(), *world.pg_names]
    if distributed.is_initialized():
        c10d._abort_process_group()
    for table in (
        world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag,
        world.tags_to_pg, world.pg_coalesce_state,
    ):  # fmt: skip
        table.clear()  # of an `init_process_group` that has failed half-way, too
    c10d._unregister_all_process_groups()
    world.group_count = 0  # groups have numbers, which must be the same on new workers
    while (hook := _excepthook_before_process_group(sys.excepthook)) is not None:
        sys.excepthook = hook
    return groups


def _excepthook_before_process_group(hook: Any) -> Any:
    """The hook that was there before `init_process_group` put its own around it; None if this is not torch's."""
    if getattr(hook, "__module__", "") != distributed.distributed_c10d.__name__ or hook.__closure__ is None:
        return None
    cell = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True)).get("old_hook")
    return cell.cell_contents if cell is not None else None


def _nccl_backend(group: Any) -> Any:
    if not torch.cuda.is_available() or not distributed.is_nccl_available():
        return None
    with suppress(RuntimeError):  # none for this device
        backend = group._get_backend(torch.device("cuda"))
        if isinstance(backend, distributed.ProcessGroupNCCL):
            return backend
    return None


def _shut_down_gloo(epoll: int) -> None:
    try:
        with open(f"/proc/self/fdinfo/{epoll}") as file:
            text = file.read()
    except OSError:  # closed meanwhile
        return
    entries = [(int(fd), int(ino, 16)) for fd, data, ino in _ENTRY.findall(text) if int(fd) != int(data, 16)]
    listening = [entry for entry in entries if _is_listening_gloo_socket(*entry)]
    if listening:
        for entry in set(entries) - set(listening):  # gloo ends the process if its listening socket is shut down
            _shut_down(*entry, None)


def _is_listening_gloo_socket(fd: int, inode: int) -> bool:
    with suppress(OSError):
        opened = _duplicated_socket_to_abort(fd, inode)
        if opened is not None:
            with opened:
                return bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _shut_down(fd: int, inode: int | None, peers: set[tuple[str, int]] | None) -> None:
    """Shut down this connection, if it is that inode, and a connection to one of these peers; None: any."""
    with suppress(OSError):  # closed meanwhile, or not connected
        opened = _duplicated_socket_to_abort(fd, inode)
        if opened is None:
            return
        with opened:
            if peers is None or _peer_of_connection_to_abort(opened) in peers:
                opened.shutdown(socket.SHUT_RDWR)


def _peer_of_connection_to_abort(connection: socket.socket) -> tuple[str, int] | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host, port, *_ = connection.getpeername()
    return host.removeprefix("::ffff:"), port  # torch's sockets use IPv6 for IPv4 too


def _duplicated_socket_to_abort(fd: int, inode: int | None) -> socket.socket | None:
    """A copy of the descriptor, so that its number cannot become another file's meanwhile."""
    copied = os.dup(fd)
    status = os.fstat(copied)
    if not stat.S_ISSOCK(status.st_mode) or inode not in (None, status.st_ino):
        os.close(copied)
        return None
    return socket.socket(fileno=copied)


def _descriptors_for_group_abort(kind: str) -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith(kind):
                found.append(int(name))
    return found


def _store_addresses_to_abort() -> set[tuple[str, int]]:
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return {(str(found[4][0]), port) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (KeyError, ValueError, OSError):
        return set()
