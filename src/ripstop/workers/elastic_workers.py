"""The connections of workers that can go on in place (`ripstop.train.elastic`), and the messages on them.

A worker registers when it enters its training function, over the socket of `state_memory.py`, and closes the connection
when it leaves the function.  The agent sends it a new place; the worker answers when it has come out of the old round.
A worker whose connection to another one breaks says so, and waits for a new place.
"""

import json
import socket
from collections.abc import Callable, Mapping

from msgspec import Struct


class ElasticWorkers(Struct):
    """The callbacks get the worker's pid; `on_peer_lost` gets the round.

    `on_registered` also gets whether the worker itself has registered, and not a process below it.

    `on_left` also tells that a message cannot be sent.

    `find_worker`: the pid of the live worker that this process is or belongs to; a worker may be a shell script.
    """

    find_worker: Callable[[int], int | None]
    on_registered: Callable[[int, bool], None]
    on_left: Callable[[int], None]
    on_reformed: Callable[[int, int], None]  # and the round
    on_peer_lost: Callable[[int], None]  # the round; called once for each
    _connections: dict[int, socket.socket] = {}  # by pid; msgspec copies the default
    _newest_loss: int = 0  # the last round in which a worker lost a peer

    def has_workers(self) -> bool:
        return bool(self._connections)

    def register(self, pid: int, connection: socket.socket) -> None:
        if (worker := self.find_worker(pid)) is not None:
            self._connections[worker] = connection
            self.on_registered(worker, worker == pid)

    def lost_peer(self, round: int) -> None:
        if round > self._newest_loss:
            self._newest_loss = round
            self.on_peer_lost(round)

    def closed(self, connection: socket.socket) -> None:
        for pid in [pid for pid, found in self._connections.items() if found is connection]:
            del self._connections[pid]
            self.on_left(pid)

    def tell(self, pid: int, round: int, env: Mapping[str, str]) -> None:
        """Send the worker the variables of its place in this round."""
        message = json.dumps({"reform": round, "env": dict(env)}).encode()
        try:
            self._connections[pid].send(message)
        except (KeyError, OSError):  # it has left, or reads nothing
            self.on_left(pid)
