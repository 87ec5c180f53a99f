"""The job of `world.py` with training state: nodes that leave with notice, state that is lost, slow nodes, and workers
that SIGKILL does not end.

Workers have a `State`.  A node that gets a signal, a notice or a `Drain` asks for a final commit; its workers make it,
or cannot, or never do.  Rules, besides those of `rules.py`:

1.  A node that leaves with notice has left at its deadline.
2.  A node with workers that SIGKILL does not end leaves the job when the agent gives them up, or the job closes.
3.  After a loss of state, no worker of that round goes on in place (in the mix in which no message is lost).
4.  A round whose state is lost ends, also if the first report is lost (`Rules.reason_not_at_rest`).

`python -m tests.simulation.state_world SEED` prints one schedule as a transcript.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection

from ripstop.agent import machine_io as agent_io
from ripstop.coordinator import job_types
from ripstop.model.round import Address, Place
from ripstop.model.status import Phase
from ripstop.protocol.messages import FinalCommit, StateLost
from ripstop.workers.processes import KILL_TIMEOUT_S
from tests.simulation.rules import STOP_TIMEOUT_S, require
from tests.simulation.succession_world import check_world
from tests.simulation.world import EVERYTHING, Group, Mix, SimNode, World

STATE = {"notice": 4, "state_lost": 4, "unkillable": 2, "straggler": 4}


class StateWorld(World):
    """One schedule."""

    mixes = (
        Mix("nodes leave with notice", {"notice": 4, "drain": 4, "signal": 3, "join": 6, "crash": 2}),
        Mix("state is lost", {"state_lost": 8, "crash": 5, "join": 3, "kill": 1, "straggler": 1}),
        Mix("state and connections are lost", {"state_lost": 8, "reset": 6, "blink": 4, "crash": 5, "join": 3}),
        Mix(
            "workers cannot be killed", {"unkillable": 5, "crash": 4, "join": 5, "restart": 3, "drain": 1, "notice": 1}
        ),
        Mix("nodes are slow", {"straggler": 6, "join": 6, "crash": 1, "kill": 1}),
        Mix("everything", EVERYTHING | STATE, max_faults=40),
        Mix("everything, in disorder", EVERYTHING | STATE, max_faults=40, disorder=True),
    )
    drain_timeout = 6.0

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, trace)
        self.elastic |= "state_lost" in self.mix.faults
        self.went_on: set[Group] = set()  # workers that went on in place
        self.leaving: set[str] = set()  # nodes that leave with notice
        self.unkillable: set[str] = set()  # nodes whose agents have given their workers up
        self.lost: set[Address] = set()  # stores of the rounds that lost their state
        self.reached: Counter[str] = Counter()

    def _inject(self, node: SimNode, kind: str) -> None:
        group = node.group
        match kind:
            case "notice":
                if not node.machine.is_leaving():
                    self.note(f"*** … {node.id}")
                    node.leaving = 15
                    self._feed(node, agent_io.PreemptionNoticed("a file"))
            case "state_lost":
                if group and group.state == "running" and group in self.went_on:
                    self.note(f"*** … {node.id}")
                    if "reset" in self.mix.faults and not node.own and self.random.random() < 0.5:
                        self._unlink(node, "connection reset")  # the report follows the next `Join`
                    self._feed(node, agent_io.StateLost(group.place.round, "no commit"))
            case "unkillable":
                if group and group.state == "running":
                    self.note(f"*** … {node.id}")
                    self.stuck.add(group)
            case "straggler":
                if self.job is not None:
                    waiting = bool(self.job.membership.waiting)
                    self._feed_job(job_types.StragglerFound(node.id, self.job.round, "it is slow"))
                    reason = self.job.membership.quarantine.reason(node.id) if self.job is not None else ""
                    self.reached["a spare replaces a slow node"] += waiting and reason == "it is slow"
            case _:
                super()._inject(node, kind)

    # leaving ----------------------------------------------------------------------------------------------------------

    def _feed(self, node: SimNode, event: agent_io.AgentInput) -> None:
        super()._feed(node, event)
        if node.alive and node.machine._leave_at is not None and node.id not in self.leaving:
            self.leaving.add(node.id)
            self.at(self.now + self.drain_timeout + STOP_TIMEOUT_S, self._check_left, node)

    def _check_left(self, node: SimNode) -> None:
        stays = node.alive and node.group not in self.stuck
        require(not stays, f"{node.id} has not left {STOP_TIMEOUT_S:g} s after its deadline")

    def _begin(self, node: SimNode, place: Place, kept: Collection[int]) -> None:
        super()._begin(node, place, kept)
        group = node.group
        assert group is not None
        if kept:
            self.went_on.add(group)
        self.at(group.began + 0.05, self._commit, node, group)

    def _commit(self, node: SimNode, group: Group) -> None:
        if node.group is group and group.state == "running":
            self._feed(node, agent_io.FirstCommit(group.place.round))

    def _make_final_commit(self, node: SimNode, round: int) -> None:
        outcome = self.random.choice(("made", "made", "made", "made", "cannot", "never"))
        if outcome != "never":
            why_not = "" if outcome == "made" else "rank 0 has no State"
            self.soon(0.05, 1.0, self._final_commit, node, node.group, why_not)

    def _final_commit(self, node: SimNode, group: Group, why_not: str) -> None:
        if node.group is group and group.state == "running":
            commits = () if why_not else (FinalCommit("model", 7, needs_copies=False),)
            self.reached["a final commit is made"] += not why_not
            self._feed(node, agent_io.FinalCommitDone(group.place.round, commits, why_not))

    # workers that cannot be killed ------------------------------------------------------------------------------------

    def _stop(self, node: SimNode, round: int, grace: float) -> None:
        group = node.group
        if group is None or group not in self.stuck:
            super()._stop(node, round, grace)
        elif group.state != "stopping":
            self._fail_peers(node)
            group.state = "stopping"
            self.at(max(self.now, group.began) + grace + KILL_TIMEOUT_S, self._give_up, node, group)

    def _give_up(self, node: SimNode, group: Group) -> None:
        if node.alive and node.group is group:
            node.group = None
            self.unkillable.add(node.id)
            self.reached["a worker cannot be killed"] += 1
            self._feed(node, agent_io.WorkersUnkillable(group.place.round, "SIGKILL did not end pid 7"))
            require(not node.alive or node.closing, f"{node.id} stays with a worker that cannot be killed")

    def _is_right_end(self, node: SimNode, end: agent_io.ExitAgent) -> bool:
        if node.id in self.unkillable and end.report is None:
            return end.code == 128 + node.leaving if node.leaving else end.code != 0
        return super()._is_right_end(node, end)

    # lost state -------------------------------------------------------------------------------------------------------

    def _feed_job(self, event: job_types.JobInput) -> None:
        job = self.job
        match event:
            case job_types.NodeMessage(name, StateLost(round)) if job is not None and not self.is_frozen():
                if round == job.round and name in job.places and job.phase in (Phase.RUNNING, Phase.RECOVERING):
                    self.reached["state is lost"] += 1
                    self.lost.add(job.places[name].store)
        super()._feed_job(event)

    def _reform(self, node: SimNode, place: Place, kept: tuple[int, ...]) -> None:
        is_new = node.group is None or node.group.place.store not in self.lost
        require(is_new or self.mix.name != "state is lost", f"{node.id} goes on in place in {place}, without its state")
        super()._reform(node, place, kept)


def check(seed: int) -> None:
    """Run one schedule; a violation has the transcript and the command to print all of it."""
    check_world(StateWorld, seed, __name__)


if __name__ == "__main__":
    StateWorld(int(sys.argv[1]), print).run()
