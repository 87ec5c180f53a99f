"""Which nodes are connected, silent or leaving.  Pure.

Rules: (1) a node that sends nothing for a lease is lost; (2) a node whose connection closed is lost when it does not
reconnect within `RECONNECT_TIMEOUT_S`; (3) when the coordinator itself was stopped or suspended, every lease and every
reconnect timeout starts again, but only once for a node that stays silent or away: otherwise a coordinator with too
little CPU time would never detect a loss; (4) a node whose connection closed is lost at once if a worker of another
node reports a lost peer at about the same time, no other node of the round is disconnected, and the fault cannot be in
the network of the coordinator's own machine.  This is so in two cases: the node itself closed the connection; or the
round has more than two nodes, and the report is not from the coordinator's own node.

This module does not decide what a loss means.  Both dictionaries are ordered by time, so the cost of a heartbeat does
not depend on the number of nodes.
"""

from collections.abc import Collection, Iterator
from itertools import takewhile

LATE_TICK_S = 0.1  # a deadline missed by this much means that this process was stopped or starved
RECONNECT_TIMEOUT_S = 0.5


class Liveness:
    """The connections of one job.  `own` is the node in the coordinator's process.

    `own` needs no lease, unless it is connected through the network (`own_has_lease`).
    """

    def __init__(self, lease: float, own: str, *, own_has_lease: bool = False) -> None:
        self.disconnected: dict[str, float] = {}  # since when, oldest first
        self.leaving: set[str] = set()
        self._lease = lease
        self._own = own
        self._leaseless = "" if own_has_lease else own
        self._last_received: dict[str, float] = {}  # of every node with a lease, oldest first
        self._extended: set[str] = set()  # silent or disconnected since this coordinator was away
        self._closed_by_node: set[str] = set()  # of the disconnected nodes
        self._peer_reports: dict[str, float] = {}  # rule 4: by reporting node, until when its report counts

    def connect(self, node: str, now: float) -> None:
        """The node joined over a new connection."""
        self._forget_disconnect(node)
        self.leaving.discard(node)
        self.forget_peer_reports()  # if it returns, others may return too
        self.renew(node, now)

    def renew(self, node: str, now: float) -> None:
        """The node sent something."""
        self._extended.discard(node)
        if node != self._leaseless:
            self._last_received.pop(node, None)
            self._last_received[node] = now  # at the end: the dictionary stays in the order of time

    def disconnect(self, node: str, closed_by_node: bool, now: float) -> None:
        self._extended.discard(node)
        self._last_received.pop(node, None)
        self.disconnected.setdefault(node, now)
        if closed_by_node:
            self._closed_by_node.add(node)

    def remove(self, node: str) -> None:
        self._last_received.pop(node, None)
        self._forget_disconnect(node)
        self.leaving.discard(node)

    def _forget_disconnect(self, node: str) -> None:
        self.disconnected.pop(node, None)
        self._closed_by_node.discard(node)

    def extend(self, now: float) -> None:
        """This coordinator was away and could receive nothing (rule 3)."""
        self._last_received = self._begun_again(self._last_received, now)
        self.disconnected = self._begun_again(self.disconnected, now)
        self._extended = {*self._last_received, *self.disconnected}

    def _begun_again(self, times: dict[str, float], now: float) -> dict[str, float]:
        """The times, with now for each node that was not extended before; oldest first."""
        silent_again = {n: at for n, at in times.items() if n in self._extended}
        return silent_again | {n: now for n in times if n not in silent_again}

    def expired(self, now: float) -> list[tuple[str, float]]:
        """Nodes that are lost by rule 1, and when each last sent something."""
        return list(takewhile(lambda entry: now >= entry[1] + self._lease + LATE_TICK_S, self._last_received.items()))

    def not_reconnected(self, now: float) -> list[tuple[str, float]]:
        """Nodes that are lost by rule 2, and since when each is disconnected."""
        return list(takewhile(lambda entry: now >= entry[1] + RECONNECT_TIMEOUT_S, self.disconnected.items()))

    def forget_peer_reports(self) -> None:
        self._peer_reports.clear()

    def report_lost_peer(self, node: str, now: float) -> None:
        """A worker of this node has lost its connection to a peer."""
        self._peer_reports[node] = now + RECONNECT_TIMEOUT_S

    def lost_peer(self, round: Collection[str], now: float) -> str | None:
        """The node of the round that is lost by rule 4."""
        reporters = {node for node, until in self._peer_reports.items() if now < until}
        if not reporters:
            return None  # first: this is called for every event, and many nodes may be disconnected
        disconnected = [node for node in self.disconnected if node in round]
        if len(disconnected) != 1:
            return None
        (node,) = disconnected
        reporters.discard(node)
        if node not in self._closed_by_node:
            reporters = reporters - {self._own} if len(round) > 2 else set()
        return node if reporters else None

    def is_departing(self, node: str) -> bool:
        return node in self.disconnected or node in self.leaving

    def deadlines(self) -> Iterator[float]:
        """When the next node may be lost."""
        if self._last_received:
            lease_end = next(iter(self._last_received.values())) + self._lease
            yield lease_end  # wake up first: after a late tick, messages may still be unread
            yield lease_end + LATE_TICK_S
        if self.disconnected:
            yield next(iter(self.disconnected.values())) + RECONNECT_TIMEOUT_S
