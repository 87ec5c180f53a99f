"""Which node holds copies of which node's training state, and of which commit.  Pure.

A *set* is one commit of all ranks of a round.  The nodes copy the same sets: a restore needs the same commit from every
rank.  Rules
1.  A node's partner is a rotation of the ranks away, so every node holds the copies of exactly one other.  With labels,
    it is the rotation that takes the most nodes to another label.
2.  The coordinator chooses a set in the near future, and the workers keep that commit when they reach it.  If some have
    passed it, the next choice is further ahead.
3.  A set is complete when every node keeps its own part and its partner has a copy.  Then any one node can be lost: the
    part of the lost node is at its partner, and every other node has its own.
4.  A set is freed only after a newer one is complete.  So once one is complete, there always is one.
5.  A node reports again after every reconnect, so that a new coordinator learns the sets.  Until it knows a complete
    one, it lets nodes free none.
6.  The number of States is bounded.  If there is no room for a new one, those without a report in this round or in the
    last one are forgotten.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeVar

from msgspec import Struct, field

from ripstop.model.round import Address, CommitId
from ripstop.model.status import ReplicationStatus
from ripstop.protocol.messages import Replicate, Replicated

MAX_STATES = 16
MAX_NAME_CHARS = 64  # of a State
MAX_COMMITS_AHEAD = 4096
MAX_NUMBER = 1 << 48  # of a commit, or of bytes

T = TypeVar("T")


def partners(labels: Sequence[str], listening: Sequence[Address | None]) -> list[Address | None]:
    """The address of each node's partner, by group rank; none if a node takes no copies, or if there is one node only.

    `labels` are the nodes' failure domains ("" if unknown), `listening` where each takes copies.
    """
    nodes = len(labels)
    if nodes < 2 or None in listening:
        return [None] * nodes
    return _rotated_by_replication_plan(listening, _plan_replication_rotation(labels))


def _plan_replication_rotation(labels: Sequence[str]) -> int:
    """By how many ranks; the smallest of the rotations that take the most nodes to another label."""
    domains = Counter(labels)
    if len(domains) == 1:
        return 1
    best, most = 1, -1
    for n in range(1, min(max(domains.values()), len(labels) - 1) + 1):  # if labels are sorted, the last one is best
        apart = sum(a != b for a, b in zip(labels, _rotated_by_replication_plan(labels, n), strict=True))
        if apart > most:
            best, most = n, apart
        if apart == len(labels):
            break
    return best


def _rotated_by_replication_plan(items: Sequence[T], by: int) -> list[T]:
    return [*items[by:], *items[:by]]


class _PlannedReplicationSets(Struct):
    """The sets of one `train.State`."""

    round: int = 0
    reports: dict[str, Replicated] = field(default_factory=dict)  # by node, of this round
    target: int = 0  # the set that is being copied; 0: none
    ahead: int = 1  # how many commits after the newest one the next set is
    complete: CommitId | None = None
    complete_since: float = 0.0
    bytes: int = 0  # that all nodes have copied, of complete sets

    def status(self, name: str, now: float) -> ReplicationStatus:
        complete, commits, seconds = self.complete or CommitId(0, 0), None, None
        if self.complete is not None and complete.round == self.round:
            commits = max(report.newest for report in self.reports.values()) - complete.number
            seconds = max(0.0, now - self.complete_since)
        return ReplicationStatus(name, complete.round, complete.number, commits, seconds, self.bytes)


class ReplicationPlan:
    """The sets of a job."""

    def __init__(self) -> None:
        self._states: dict[str, _PlannedReplicationSets] = {}
        self._rounds = (0, 0)  # the newest two with reports or requests

    def complete(self, state: str) -> CommitId | None:
        """The newest complete set."""
        return self._states[state].complete if state in self._states else None

    def set_bytes(self, state: str) -> int:
        """The size of the sets that the nodes have copied last."""
        return sum(report.size for report in self._states[state].reports.values())

    def status(self, now: float) -> tuple[ReplicationStatus, ...]:
        return tuple(sets.status(name, now) for name, sets in self._states.items())

    def on_report(
        self, node: str, report: Replicated, nodes: Collection[str], now: float
    ) -> list[tuple[str | None, Replicate]]:
        """Messages to send, each to one node or to all (None).  `nodes` are those of the round that have a partner."""
        is_valid = all(0 <= n <= MAX_NUMBER for n in (report.newest, report.copied, report.missed, report.size))
        if node not in nodes or len(report.state) > MAX_NAME_CHARS or not is_valid:
            return []
        sets = self._sets(report.state, report.round)
        if sets is None:
            return []
        sets.reports[node] = report
        if len(sets.reports) < len(nodes):
            return []
        reports = sets.reports.values()
        copied = {each.copied for each in reports}
        if copied == {report.copied} - {0} and sets.complete != CommitId(report.round, report.copied):
            sets.complete, sets.complete_since = CommitId(report.round, report.copied), now
            sets.bytes += sum(each.size for each in reports)
        elif sets.target and not any(each.missed == sets.target for each in reports):
            is_informed = sets.target in (report.copied, report.missed)
            return [] if is_informed else [(node, self._request(report.state))]  # a connection lost the first one
        elif sets.target:
            sets.ahead = min(2 * sets.ahead, MAX_COMMITS_AHEAD)
        sets.target = max(each.newest for each in reports) + sets.ahead
        return [(None, self._request(report.state))]

    def request(self, round: int, state: str, number: int) -> Replicate | None:
        """Copy this commit of the round now; None if there are too many States."""
        sets = self._sets(state, round)
        if sets is None:
            return None
        sets.target = number
        return self._request(state)

    def _sets(self, state: str, round: int) -> _PlannedReplicationSets | None:
        """Those of the State in this round; None if there is no room for another State (rule 6)."""
        if round != self._rounds[1]:
            self._rounds = self._rounds[1], round
        if state not in self._states and len(self._states) >= MAX_STATES:
            self._states = {name: sets for name, sets in self._states.items() if self._is_recent(sets)}
            if len(self._states) >= MAX_STATES:
                return None
        sets = self._states.setdefault(state, _PlannedReplicationSets(round))
        if sets.round != round:
            sets = self._states[state] = _PlannedReplicationSets(round, complete=sets.complete, bytes=sets.bytes)
        return sets

    def _is_recent(self, sets: _PlannedReplicationSets) -> bool:
        last, current = self._rounds
        return sets.round == current or (sets.round == last and bool(sets.reports))

    def _request(self, state: str) -> Replicate:
        sets = self._states[state]
        return Replicate(sets.round, state, sets.target, sets.complete)
