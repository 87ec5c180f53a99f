"""The coordinator's decisions as transcripts: an event and its time in, commands out."""

import time
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from ripstop.coordinator import membership
from ripstop.coordinator.departure import NO_NODE_REMAINS
from ripstop.coordinator.failure_policy import DIAGNOSIS_TIMEOUT_S, PEER_LOSS_TIMEOUT_S
from ripstop.coordinator.formation import SETTLE_TIMEOUT_S
from ripstop.coordinator.job import Job
from ripstop.coordinator.job_end import FINAL_REPORT_TIMEOUT_S
from ripstop.coordinator.job_types import (
    Disconnect,
    JobCommand,
    JobEnded,
    JobInput,
    JobSettings,
    NodeDisconnected,
    NodeMessage,
    Progressed,
    RecordEvent,
    Send,
    StragglerFound,
    Tick,
)
from ripstop.coordinator.liveness import LATE_TICK_S, RECONNECT_TIMEOUT_S
from ripstop.coordinator.membership import MAX_HEALTH_CHECK_S
from ripstop.coordinator.phases import TRANSITIONS
from ripstop.model.config import Budget, QuarantineLimits, Timing
from ripstop.model.events import (
    BudgetCharged,
    HangDiagnosed,
    NodeHealthy,
    NodeQuarantined,
    NodeReleased,
    NodeUnhealthy,
    RankRequestDenied,
    RoundEndCause,
    RoundEnded,
    ScaleRequested,
    UnhealthyNodeRetained,
)
from ripstop.model.events import Event as Recordable
from ripstop.model.failure import CollectiveProgress, Failure, Hang
from ripstop.model.operator_commands import DrainNode, RestartRound, ScaleJob, StopJob, operator_command_rejection
from ripstop.model.round import Address, Node, Outcome, Place, RankBy
from ripstop.model.status import NodeState, Phase
from ripstop.protocol.codec import MAX_FRAME_BYTES, decode, encode
from ripstop.protocol.limits import MAX_ROUND_STEP, message_within_limits
from ripstop.protocol.messages import (
    Assign,
    Closed,
    Closing,
    Drain,
    Failed,
    FinalCommit,
    FinalCommitMade,
    FromAgent,
    Heartbeat,
    Inspect,
    Inspected,
    Join,
    Leaving,
    Left,
    MakeFinalCommit,
    PeerLost,
    Problems,
    Ready,
    Rejected,
    Remember,
    Replicated,
    StandBy,
    StateLost,
    Status,
    Stopped,
    Succeeded,
)
from ripstop.protocol.pacing import LARGE_JOB_NODES
from ripstop.telemetry.log_lines import log_line

RECHECK_S = 30.0  # until every node has checked its health again
TIMING = Timing(last_call=2.0, join=60.0, lease=30.0, coordinator=60.0, shutdown=10.0)
LONG_LEASE = Timing(lease=600.0)  # with the default last call


def new_job(low: int = 1, high: int = 4, *, restarts: int = 3, fixed: bool = False, now: float = 0.0) -> Job:
    settings = JobSettings("job7", low, high, TIMING, Budget(restarts, backoff=0.0), fixed_ranks=fixed)
    return Job(settings, now)


def node(name: str, **more: object) -> Node:
    return Node(name, f"host-{name}", **{"slots": 1, **more})  # type: ignore[arg-type]


def join(job: Job, name: str, **more: object) -> Join:
    """A Join of a node with the job's settings; by default ready, with its own port."""
    state: dict[str, object] = {"ready": Ready(port(name), 0), "health_interval": RECHECK_S / 3, **more}
    return Join(node(name), job.settings.min_nodes, job.settings.max_nodes, **state)  # type: ignore[arg-type]


def port(name: str) -> int:
    return 4000 + ord(name[0])


def on(job: Job, event: JobInput, now: float) -> list[JobCommand]:
    """The commands for an event, without recorded events and copies of the coordinator's memory."""
    return [command for command in job.on(event, now) if not isinstance(command, RecordEvent) and not _is_copy(command)]


def _is_copy(command: JobCommand) -> bool:
    return isinstance(command, Send) and isinstance(command.message, Remember)


def receive(job: Job, name: str, message: FromAgent, now: float) -> list[JobCommand]:
    return on(job, NodeMessage(name, message), now)


def running(*names: str, low: int = 1, high: int | None = None, restarts: int = 3) -> Job:
    """A job whose first round runs since time 2; rank 0 has offered a port again."""
    job = new_job(low, high or len(names), restarts=restarts)
    for name in names:
        job.on(NodeMessage(name, join(job, name)), 0.0)
    job.on(Tick(), 2.0)
    assert job.phase is Phase.RUNNING
    assert list(job.places) == list(names)
    offer_anew(job, names[0], 2.0)
    return job


def offer_anew(job: Job, name: str, now: float) -> None:
    """The node offers a port for the next store."""
    job.on(NodeMessage(name, Ready(port(name) + 100 * job.round, job.round)), now)


def assigned(commands: list[JobCommand]) -> dict[str, int]:
    """The group ranks that the commands assign, by node."""
    return {
        command.node: command.message.place.group_rank
        for command in commands
        if isinstance(command, Send) and isinstance(command.message, Assign)
    }


def held(commands: list[JobCommand]) -> dict[str, int]:
    """The rounds that the commands end by StandBy, by node."""
    return {
        command.node: command.message.round
        for command in commands
        if isinstance(command, Send) and isinstance(command.message, StandBy)
    }


def crash(rank: int = 0, round: int = 1, at: float = 10.0) -> Failure:
    return Failure(rank, 0, round, "host", at, exitcode=1, message="ValueError: no", traceback="ValueError: no")


def victim(rank: int = 0, round: int = 1) -> Failure:
    text = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    return Failure(rank, 0, round, "host", 10.0, exitcode=1, message=text, traceback=text)


def place(round: int, rank: int = 0, size: int = 1, restarts: int = 0) -> Place:
    return Place(round, rank, size, rank, size, 1, rank, size, Address("h", 999), restarts)


# rule 1: rounds and ranks ---------------------------------------------------------------------------------------------


def test_every_node_of_a_round_receives_its_place() -> None:
    job = new_job(2, 2)
    receive(job, "a", join(job, "a"), 0.0)
    store = Address("host-a", port("a"))
    first, second = (Place(1, rank, 2, rank, 2, 1, rank, 2, store, 0) for rank in (0, 1))
    assert receive(job, "b", join(job, "b"), 1.0) == [
        Send("a", Assign(first, "first round")),
        Send("b", Assign(second, "first round")),
    ]


def test_round_numbers_grow_across_coordinator_restarts() -> None:
    job = new_job(1, 1)
    assert receive(job, "a", join(job, "a", newest=7), 0.0)[0].message.place.round == 8  # type: ignore[union-attr]


def test_a_replacement_takes_the_vacated_rank() -> None:
    job = running("a", "b", "c", low=2)
    receive(job, "d", join(job, "d"), 5.0)
    assert assigned(receive(job, "b", Left("bye"), 6.0)) == {"a": 0, "d": 1, "c": 2}


# rule 2: other rounds -------------------------------------------------------------------------------------------------


def test_a_failure_reported_twice_restarts_once() -> None:
    job = running("a", "b")
    assert assigned(receive(job, "b", Failed(1, (crash(1),)), 10.0)) == {"a": 0, "b": 1}
    assert receive(job, "a", Failed(1, (victim(0),)), 10.1) == []
    assert receive(job, "b", Failed(1, (crash(1),)), 10.2) == []
    assert job.restarts.used == 1


def test_success_in_an_older_round_is_ignored() -> None:
    job = running("a")
    receive(job, "a", Failed(1, (crash(),)), 10.0)
    assert receive(job, "a", Succeeded(1), 10.1) == []
    assert job.phase is Phase.RUNNING


def test_a_failure_of_a_node_outside_the_round_changes_nothing() -> None:
    job = running("a", high=1)
    receive(job, "b", join(job, "b"), 3.0)
    assert receive(job, "b", Failed(1, (crash(),)), 4.0) == []


def test_messages_of_an_unknown_node_are_ignored() -> None:
    job = running("a")
    for message in (Ready(1, 0), Failed(1, (crash(),)), Succeeded(1), Leaving("x"), Stopped(), Left("x"), Heartbeat()):
        assert receive(job, "stranger", message, 3.0) == []


# rule 3: when a round forms -------------------------------------------------------------------------------------------


def test_the_first_round_forms_at_once_when_the_maximum_is_ready() -> None:
    job = new_job(1, 2)
    receive(job, "a", join(job, "a"), 0.0)
    assert assigned(receive(job, "b", join(job, "b"), 0.1)) == {"a": 0, "b": 1}


def test_the_first_round_waits_for_more_than_the_minimum_until_the_last_call_is_over() -> None:
    job = new_job(1, 4)
    assert assigned(receive(job, "a", join(job, "a"), 1.0)) == {}
    assert job.deadline() == 3.0
    assert assigned(receive(job, "b", join(job, "b"), 2.9)) == {}
    assert assigned(on(job, Tick(), 3.0)) == {"a": 0, "b": 1}


def test_the_default_last_call_is_as_long_as_in_torch() -> None:
    job = Job(JobSettings("job7", 1, 3, LONG_LEASE))
    receive(job, "a", join(job, "a"), 0.0)
    on(job, Tick(), 29.9)
    assert job.phase is Phase.GATHERING
    assert assigned(receive(job, "b", join(job, "b"), 29.95)) == {}
    assert assigned(on(job, Tick(), 30.0)) == {"a": 0, "b": 1}


def test_every_waiting_node_is_notified_of_the_last_call_once() -> None:
    job = Job(JobSettings("job7", 2, 4, LONG_LEASE))
    assert held(receive(job, "a", join(job, "a"), 0.0)) == {"a": 0}
    sent = receive(job, "b", join(job, "b"), 10.0)
    why = (
        "2 of 4 nodes are ready; the first round waits 30 s for more "
        "(to change that: --rdzv-conf=last_call_timeout=SECONDS on the coordinator's node)"
    )
    assert sent == [Send("a", StandBy(0, why)), Send("b", StandBy(0, why))]
    (third_notice,) = receive(job, "c", join(job, "c"), 12.0)
    assert third_notice == Send("c", StandBy(0, why.replace("2 of", "3 of").replace("30 s", "28 s")))
    assert receive(job, "a", Heartbeat(), 13.0) == []


def test_a_wait_names_who_is_there_who_is_missing_and_what_ends_it() -> None:
    job = Job(JobSettings("job7", 2, 4, LONG_LEASE))
    assert job.wait_text(0.0) == "0 of at least 2 nodes ready, 2 missing; fails in 600 s"
    receive(job, "a", join(job, "a"), 0.0)
    receive(job, "b", join(job, "b", ready=None), 10.0)
    assert job.wait_text(12.0) == "1 of at least 2 nodes ready, 1 not ready; fails in 588 s; ready: a; not ready: b"
    receive(job, "b", Ready(port("b"), 0), 20.0)
    assert job.wait_text(25.0) == "2 of 4 nodes ready, 2 missing; starts in 25 s; ready: a, b"
    on(job, Tick(), 50.0)
    assert (job.phase, job.wait_text(51.0)) == (Phase.RUNNING, "")
    receive(job, "b", Left("bye"), 60.0)
    assert job.wait_text(61.0) == "1 of at least 2 nodes ready, 1 missing; fails in 599 s; ready: a"


def test_with_fixed_ranks_a_wait_names_the_missing_ones() -> None:
    job = new_job(4, 4, fixed=True)
    receive(job, "b", replace(join(job, "b"), node=node("b", requested_rank=1)), 0.0)
    assert job.wait_text(0.0) == "1 of 4 nodes ready, nodes 0,2,3 missing; fails in 60 s; ready: b"


def test_the_last_call_restarts_when_the_minimum_is_ready_again() -> None:
    job = Job(JobSettings("job7", 2, 4, LONG_LEASE))
    receive(job, "a", join(job, "a"), 0.0)
    receive(job, "b", join(job, "b"), 1.0)
    receive(job, "b", Left("bye"), 20.0)
    receive(job, "c", join(job, "c"), 25.0)
    on(job, Tick(), 54.9)
    assert job.phase is Phase.GATHERING
    assert assigned(on(job, Tick(), 55.0)) == {"a": 0, "c": 1}


def test_a_later_round_has_no_last_call() -> None:
    job = Job(JobSettings("job7", 1, 4, LONG_LEASE, budget=Budget(3, backoff=0.0)))
    for name in ("a", "b"):
        receive(job, name, join(job, name), 0.0)
    on(job, Tick(), 30.0)
    offer_anew(job, "a", 30.0)
    assert assigned(receive(job, "b", Left("bye"), 31.0)) == {"a": 0}
    offer_anew(job, "a", 31.0)
    assert assigned(receive(job, "c", join(job, "c"), 32.0)) == {"a": 0, "c": 1}
    offer_anew(job, "a", 32.0)
    assert assigned(receive(job, "a", Failed(3, (crash(round=3),)), 33.0)) == {"a": 0, "c": 1}


def test_a_new_coordinator_of_nodes_between_two_rounds_has_no_last_call() -> None:
    job = Job(JobSettings("job7", 1, 4, LONG_LEASE))
    receive(job, "a", join(job, "a", newest=3), 0.0)
    assert job.deadline() == SETTLE_TIMEOUT_S
    receive(job, "b", join(job, "b", newest=3), 0.5)
    assert assigned(on(job, Tick(), SETTLE_TIMEOUT_S)) == {"a": 0, "b": 1}
    assert job.round == 4


def test_a_node_that_joins_after_a_failed_job_receives_the_report() -> None:
    job = running("a", "b", restarts=0)
    receive(job, "a", Failed(1, (crash(),)), 5.0)
    for name in ("a", "b"):
        receive(job, name, Stopped(), 5.1)
    (sent,) = receive(job, "c", join(job, "c"), 5.2)
    assert isinstance(sent, Send) and isinstance(sent.message, Closed)
    assert sent.message.report.outcome is Outcome.FAILED


def test_below_the_minimum_nothing_forms() -> None:
    job = new_job(2, 4)
    receive(job, "a", join(job, "a"), 0.0)
    assert receive(job, "a", Heartbeat(), 2.5) == []
    assert job.phase is Phase.GATHERING


def test_a_later_round_does_not_wait_for_a_newcomer_that_is_still_warming_up() -> None:
    job = running("a", "b", high=3)
    receive(job, "c", join(job, "c", ready=None), 9.0)
    assert assigned(receive(job, "b", Failed(1, (crash(1),)), 10.0)) == {"a": 0, "b": 1}


def test_a_later_round_waits_for_a_survivor_that_is_not_ready_yet() -> None:
    job = running("a", "b", "c")
    receive(job, "b", join(job, "b", ready=None, held=job.places["b"], status=Status.RUNNING, newest=1), 9.0)
    assert held(receive(job, "c", Failed(1, (crash(2),)), 10.0)) == {"a": 1, "b": 1, "c": 1}
    assert assigned(receive(job, "b", Ready(77, 1), 10.1)) == {"a": 0, "b": 1, "c": 2}


def test_too_few_survivors_wait_for_nodes_that_are_warming_up() -> None:
    job = running("a", "b", low=2, high=4)
    receive(job, "c", join(job, "c", ready=None), 9.0)
    receive(job, "d", join(job, "d", ready=None), 9.0)
    receive(job, "b", Left("bye"), 10.0)
    assert assigned(receive(job, "c", Ready(55, 0), 11.0)) == {}
    assert assigned(receive(job, "d", Ready(56, 0), 11.5)) == {"a": 0, "c": 1, "d": 2}


def test_survivors_are_stopped_during_the_delay_of_a_restart() -> None:
    job = Job(JobSettings("job7", 1, 1, TIMING, Budget(9, backoff=30.0)))
    receive(job, "a", join(job, "a"), 0.0)
    for t in (1.0, 2.0):
        offer_anew(job, "a", t)
        assert assigned(receive(job, "a", Failed(job.round, (crash(round=job.round),)), t)) == {"a": 0}
    offer_anew(job, "a", 3.0)
    assert held(receive(job, "a", Failed(3, (crash(round=3),)), 3.0)) == {"a": 3}
    assert job.deadline() == 4.0
    assert assigned(on(job, Tick(), 4.0)) == {"a": 0}


def test_a_round_that_made_progress_is_restarted_without_delay() -> None:
    job = Job(JobSettings("job7", 1, 1, TIMING, Budget(9, backoff=30.0)))
    receive(job, "a", join(job, "a"), 0.0)
    for t in (1.0, 2.0, 3.0, 4.0):
        on(job, Progressed("a", job.round), t - 0.5)
        offer_anew(job, "a", t)
        assert assigned(receive(job, "a", Failed(job.round, (crash(round=job.round),)), t)) == {"a": 0}


@pytest.mark.parametrize(("node", "round"), [("a", 2), ("b", 3)])
def test_progress_of_another_round_or_of_a_spare_does_not_count(node: str, round: int) -> None:
    job = Job(JobSettings("job7", 1, 1, TIMING, Budget(9, backoff=30.0)))
    receive(job, "a", join(job, "a"), 0.0)
    for t in (1.0, 2.0):
        offer_anew(job, "a", t)
        receive(job, "a", Failed(job.round, (crash(round=job.round),)), t)
    receive(job, "b", join(job, "b"), 2.1)
    on(job, Progressed(node, round), 2.5)
    receive(job, "a", Failed(3, (crash(round=3),)), 3.0)
    assert job.deadline() == 4.0


# rule 4: new nodes and spares -----------------------------------------------------------------------------------------


def test_a_new_node_changes_nothing_before_it_is_ready() -> None:
    job = running("a", high=2)
    assert receive(job, "b", join(job, "b", ready=None), 5.0) == []
    assert assigned(receive(job, "b", Ready(55, 0), 9.0)) == {"a": 0, "b": 1}


def test_nodes_that_join_together_cause_one_new_round() -> None:
    job = running("a", high=3)
    receive(job, "b", join(job, "b", ready=None), 5.0)
    receive(job, "c", join(job, "c", ready=None), 5.0)
    assert receive(job, "b", Ready(55, 0), 6.0) == []
    assert assigned(receive(job, "c", Ready(56, 0), 7.0)) == {"a": 0, "b": 1, "c": 2}


def test_a_new_node_waits_for_another_no_longer_than_the_settle_timeout() -> None:
    job = running("a", high=3)
    receive(job, "b", join(job, "b", ready=None), 5.0)
    receive(job, "c", join(job, "c", ready=None), 5.0)
    receive(job, "b", Ready(55, 0), 5.5)
    receive(job, "a", Heartbeat(), 5.6)
    assert job.deadline() == 5.5 + SETTLE_TIMEOUT_S
    assert assigned(on(job, Tick(), 5.5 + SETTLE_TIMEOUT_S)) == {"a": 0, "b": 1}


def test_a_node_beyond_the_maximum_is_a_spare_and_notified_once() -> None:
    job = running("a", "b")
    (sent,) = receive(job, "c", join(job, "c"), 5.0)
    assert sent == Send("c", StandBy(1, "spare: all 2 places are taken"))
    assert receive(job, "c", Heartbeat(), 5.5) == []


def test_a_spare_is_promoted() -> None:
    job = running("a", "b", low=2)
    receive(job, "c", join(job, "c"), 5.0)
    assert assigned(receive(job, "b", Left("bye"), 6.0)) == {"a": 0, "c": 1}


def test_a_spare_takes_the_place_of_a_straggler_and_nothing_is_charged() -> None:
    job = running("a", "b", high=2)
    slow = StragglerFound("b", 1, "the other ranks wait for rank 1")
    assert on(job, slow, 2.0) == []  # no spare is ready
    receive(job, "c", join(job, "c"), 3.0)
    offer_anew(job, "a", 3.0)
    assert on(job, StragglerFound("b", 7, "of another round"), 4.0) == []
    assert assigned(on(job, slow, 5.0)) == {"a": 0, "c": 1}
    assert (job.restarts.used, job.status(5.0).nodes[1].state) == (0, NodeState.QUARANTINED)


def leave_with_notice(low: int = 1, **more: int) -> tuple[Job, list[JobCommand]]:
    """Node b of three leaves with notice."""
    job = running("a", "b", "c", low=low, **more)
    offer_anew(job, "a", 2.0)
    return job, receive(job, "b", Leaving("SIGTERM", is_planned=True), 3.0)


def test_a_round_ends_when_all_nodes_have_made_its_final_commit_and_nothing_is_charged() -> None:
    job, commands = leave_with_notice()
    asked = [command.node for command in commands if command == Send(getattr(command, "node", ""), MakeFinalCommit(1))]
    assert asked == ["a", "b", "c"]
    made = FinalCommitMade(1, (FinalCommit("state", 7, needs_copies=False),))
    assert receive(job, "a", made, 4.0) == receive(job, "b", made, 4.1) == []
    assert receive(job, "c", FinalCommitMade(3, made.commits), 4.2) == []  # of another round
    commands = receive(job, "c", made, 4.3)
    assert job.why == "node b leaves: SIGTERM; all ranks have commit 7"
    assert assigned(commands) == {"a": 0, "c": 1} and "b" in held(commands)
    assert job.restarts.used == 0


def test_the_others_keep_the_final_commit_while_the_job_waits_for_a_node() -> None:
    job, commands = leave_with_notice(low=3)
    assert held(commands) == {} and Send("b", MakeFinalCommit(1)) in commands
    made = FinalCommitMade(1, (FinalCommit("state", 7, needs_copies=False),))
    assert held([command for node in "abc" for command in receive(job, node, made, 4.0)]) == {"a": 1, "b": 1, "c": 1}
    receive(job, "b", Left("SIGTERM"), 5.0)
    for node in "ac":
        offer_anew(job, node, 6.0)
    assert assigned(receive(job, "d", join(job, "d"), 7.0)) == {"a": 0, "d": 1, "c": 2}
    assert job.restarts.used == 0


def test_a_spare_does_not_keep_the_final_commit_of_nodes_that_all_leave() -> None:
    job, leaving = running("a", "b", low=2), Leaving("SIGTERM", is_planned=True)
    receive(job, "c", join(job, "c"), 2.0)  # the memory of a spare has no part of the state
    assert Send("a", MakeFinalCommit(1)) in receive(job, "b", leaving, 3.0)
    offer_anew(job, "a", 3.0)
    assert held(receive(job, "a", leaving, 3.1)) == {"a": 1, "b": 1}


def test_the_only_node_makes_no_final_commit_that_would_be_lost_and_says_so() -> None:
    job = running("a")
    commands = receive(job, "a", Leaving("SIGTERM", is_planned=True), 3.0)
    assert commands == [Send("a", StandBy(1, f"SIGTERM; {NO_NODE_REMAINS}"))]


def test_the_final_commit_of_a_job_that_cannot_go_on_is_made_if_it_is_written_to_disk() -> None:
    job = running("a", "b", low=2)
    commands = receive(job, "b", Leaving("SIGTERM", is_planned=True, is_saved_to_disk=True), 3.0)
    assert commands[-2:] == [Send("a", MakeFinalCommit(1)), Send("b", MakeFinalCommit(1))]
    assert held(receive(job, "a", Leaving("SIGTERM", is_planned=True, is_saved_to_disk=True), 3.1)) == {}
    made = FinalCommitMade(1, (FinalCommit("state", 7),))  # nobody is left who needs a copy
    receive(job, "a", made, 4.0)
    assert held(receive(job, "b", made, 4.1)) == {"a": 1, "b": 1}
    assert job.why == "node b leaves: SIGTERM; all ranks have commit 7" and job.restarts.used == 0


def test_workers_that_cannot_restore_a_commit_in_place_are_replaced_without_a_charge() -> None:
    job = running("a", "b")
    offer_anew(job, "a", 2.0)
    assert receive(job, "b", StateLost(7, "of another round"), 3.0) == []
    commands = receive(job, "b", StateLost(1, "rank 1 has no commit"), 3.0)
    assert held(commands) == {"a": 1, "b": 1} and assigned(commands) == {"a": 0, "b": 1}
    assert job.restarts.used == 0
    assert receive(job, "a", StateLost(1, "rank 0 has no commit"), 3.1) == []
    successor = new_job(2, 2)
    receive(successor, "a", join(successor, "a", held=place(1, 0, 2), status=Status.RUNNING, newest=1), 0.0)
    assert successor.phase is Phase.RECOVERING
    assert held(receive(successor, "a", StateLost(1, "rank 0 has no commit"), 0.1)) == {"a": 1}
    late = join(successor, "b", held=place(1, 1, 2), status=Status.RUNNING, newest=1)
    assert held(receive(successor, "b", late, 0.2)) == {"b": 1} and successor.restarts.used == 0


def test_a_leaving_node_does_not_wait_if_a_node_cannot_make_the_final_commit() -> None:
    job, _ = leave_with_notice()
    (command,) = receive(job, "c", FinalCommitMade(1, why_not="no State"), 4.0)
    assert command == Send("b", StandBy(1, "SIGTERM; no common commit: no State"))
    made = FinalCommitMade(1, (FinalCommit("state", 7, needs_copies=False),))
    assert [receive(job, name, made, 5.0) for name in "abc"] == [[], [], []]
    assert assigned(receive(job, "b", Left("SIGTERM"), 6.0)) == {"a": 0, "c": 1}


def test_an_invalid_final_commit_is_named_as_the_reason() -> None:
    job, _ = leave_with_notice()
    (command,) = receive(job, "c", FinalCommitMade(1, (FinalCommit("state", -1),)), 4.0)
    why = "node c reported too many States, or a value that is out of range"
    assert command == Send("b", StandBy(1, f"SIGTERM; no common commit: {why}"))


def test_copies_of_a_final_commit_of_too_many_states_are_not_waited_for() -> None:
    job = new_job(1, 3)
    for name in "abc":
        receive(job, name, join(job, name, ready=Ready(port(name), 0, replica_port=5000)), 0.0)
    assert all(place.partner for place in job.places.values())
    for number in range(16):
        for node in "abc":
            receive(job, node, Replicated(1, f"s{number}", 1), 1.0)
    receive(job, "b", Leaving("SIGTERM", is_planned=True), 3.0)
    made = FinalCommitMade(1, (FinalCommit("unknown", 7),))
    for node in "abc":
        receive(job, node, made, 4.0)
    assert job.why == "node b leaves: SIGTERM; all ranks have commit 7"


def test_a_job_that_is_about_to_finish_makes_no_final_commit_and_says_so() -> None:
    job = running("a", "b", "c")
    receive(job, "a", Succeeded(1), 2.0)
    (command,) = receive(job, "b", Leaving("SIGTERM", is_planned=True), 3.0)
    why = "SIGTERM; no final commit: workers of another node have already exited 0"
    assert command == Send("b", StandBy(1, why))


def test_leaving_nodes_do_not_wait_when_no_node_remains() -> None:
    job, _ = leave_with_notice()
    leaving = Leaving("SIGTERM", is_planned=True)
    assert held(receive(job, "c", leaving, 3.5)) == {}
    assert held(receive(job, "a", leaving, 3.6)) == {"a": 1, "b": 1, "c": 1}


def test_a_new_node_gets_no_place_when_the_job_is_about_to_finish() -> None:
    job = running("a", "b", high=3)
    receive(job, "a", Succeeded(1), 5.0)
    assert held(receive(job, "c", join(job, "c"), 5.1)) == {"c": 1}


def test_a_round_continues_until_the_next_store_has_a_port() -> None:
    job = new_job(1, 2)
    receive(job, "a", join(job, "a"), 0.0)
    on(job, Tick(), 2.0)
    assert receive(job, "b", join(job, "b"), 2.1) == []
    assert job.phase is Phase.RUNNING
    assert assigned(receive(job, "a", Ready(5000, 1), 2.2)) == {"a": 0, "b": 1}


def test_a_round_is_not_resized_while_a_member_is_reconnecting() -> None:
    job = running("a", "b", high=3)
    on(job, NodeDisconnected("b"), 5.0)
    assert assigned(receive(job, "c", join(job, "c"), 5.1)) == {}
    back = join(job, "b", held=job.places["b"], status=Status.RUNNING, newest=1)
    assert assigned(receive(job, "b", back, 5.2)) == {"a": 0, "b": 1, "c": 2}


def test_an_operator_scales_down_and_the_last_become_spares() -> None:
    job = running("a", "b", "c")
    commands = on(job, ScaleJob(2), 5.0)
    assert assigned(commands) == {"a": 0, "b": 1}
    assert held(commands) == {"c": 2}


def test_an_operator_scales_up_again() -> None:
    job = running("a", "b", "c")
    on(job, ScaleJob(2), 5.0)
    offer_anew(job, "a", 5.1)
    assert assigned(on(job, ScaleJob(3), 6.0)) == {"a": 0, "b": 1, "c": 2}


def test_nodes_beyond_an_initial_target_are_spares() -> None:
    job = Job(replace(new_job(1, 3).settings, target=2))
    receive(job, "a", join(job, "a"), 0.0)
    assert assigned(receive(job, "b", join(job, "b"), 0.1)) == {"a": 0, "b": 1}, "no other node is waited for"
    offer_anew(job, "a", 0.2)
    assert held(receive(job, "c", join(job, "c"), 5.0)) == {"c": 1}
    assert job.status(5.0).nodes[2].state is NodeState.SPARE
    assert assigned(receive(job, "b", Left("bye"), 6.0)) == {"a": 0, "c": 1}, "it takes a lost node's place at once"
    offer_anew(job, "a", 6.1)
    assert held(receive(job, "d", join(job, "d"), 7.0)) == {"d": 2}
    assert assigned(on(job, ScaleJob(3), 8.0)) == {"a": 0, "c": 1, "d": 2}


@pytest.mark.parametrize("nodes", [0, 5])
def test_a_scale_outside_the_range_is_rejected(nodes: int) -> None:
    job = running("a", high=4)
    why = f"the job runs on 1 to 4 nodes, not on {nodes}; choose one of these, or start it with other --nnodes"
    assert job.on(ScaleJob(nodes), 5.0) == [RecordEvent(ScaleRequested(nodes, False, why))]


def test_a_closing_job_rejects_operator_commands() -> None:
    job = running("a", "b")
    on(job, StopJob("enough"), 5.0)
    commands = (RestartRound("x"), DrainNode("b", "x"), ScaleJob(1), StopJob("x"))
    assert [on(job, command, 5.1) for command in commands] == [[], [], [], []]


def test_an_operators_restart_is_not_charged() -> None:
    job = running("a", "b")
    offer_anew(job, "a", 4.0)
    assert assigned(on(job, RestartRound("because"), 5.0)) == {"a": 0, "b": 1}
    assert (job.round, job.restarts.used) == (2, 0)


def test_a_node_is_drained_when_enough_nodes_stay() -> None:
    job = running("a", "b", low=1)
    assert on(job, DrainNode("b", "drained"), 5.0) == [Send("b", Drain("drained"))]


def test_a_node_that_the_job_needs_is_not_drained() -> None:
    job = running("a", "b", low=2)
    assert on(job, DrainNode("b", "drained"), 5.0) == []
    assert "needs 2 nodes" in operator_command_rejection(DrainNode("b", ""), job.status(5.0))
    assert "no node x" in operator_command_rejection(DrainNode("x", ""), job.status(5.0))


def test_only_one_of_two_nodes_can_be_drained() -> None:
    job = running("a", "b", low=1)
    on(job, DrainNode("b", "drained"), 5.0)
    receive(job, "b", Leaving("drained"), 5.1)
    assert "without a it has 0" in operator_command_rejection(DrainNode("a", ""), job.status(5.1))


def test_the_status_shows_the_state_of_every_node() -> None:
    job = running("a", "b", high=2)
    receive(job, "c", join(job, "c"), 5.0)
    receive(job, "d", join(job, "d", ready=None), 5.0)
    receive(job, "b", Leaving("x"), 5.0)
    status = job.status(7.0)
    assert [(n.name, n.state, n.group_rank) for n in status.nodes] == [
        ("a", "running", 0), ("b", "leaving", 1), ("c", "spare", -1), ("d", "warming", -1),
    ]  # fmt: skip
    assert (status.phase, status.round) == ("running", 1)


def test_survivors_of_a_round_are_ready_and_not_spares() -> None:
    job = running("a", "b", "c", low=3)
    receive(job, "c", Left("bye"), 5.0)
    assert [(n.name, n.state) for n in job.status(6.0).nodes] == [("a", NodeState.READY), ("b", NodeState.READY)]


def test_the_status_shows_current_charges_and_all_restarts() -> None:
    job = Job(JobSettings("job7", 1, 1, TIMING, Budget(3, window=60.0, backoff=0.0)))
    receive(job, "a", join(job, "a"), 0.0)
    for now in (10.0, 20.0):
        crash_again(job, "a", now)
    assert (job.status(20.0).restarts, job.status(20.0).charged) == (2, 2)
    assert (job.status(75.0).restarts, job.status(75.0).charged) == (2, 1)


def test_the_status_keeps_the_last_failure_after_an_operators_restart() -> None:
    job = running("a", "b")
    crash_again(job, "a", 10.0)
    failure = job.status(10.0).why
    on(job, RestartRound("maintenance"), 11.0)
    assert (job.status(11.0).why, job.status(11.0).last_failure) == ("maintenance", failure)


# rule 5: losses -------------------------------------------------------------------------------------------------------


def test_a_node_that_reconnects_in_time_changes_nothing() -> None:
    job = running("a", "b")
    assert on(job, NodeDisconnected("b"), 5.0) == []
    back = join(job, "b", held=job.places["b"], status=Status.RUNNING, newest=1)
    assert receive(job, "b", back, 5.0 + RECONNECT_TIMEOUT_S / 2) == []
    assert on(job, Tick(), 5.0 + RECONNECT_TIMEOUT_S) == []


def test_a_node_that_does_not_reconnect_is_lost() -> None:
    job = running("a", "b")
    receive(job, "a", Heartbeat(), 4.9)
    on(job, NodeDisconnected("b"), 4.9)
    assert job.deadline() == 4.9 + RECONNECT_TIMEOUT_S
    assert assigned(on(job, Tick(), 4.9 + RECONNECT_TIMEOUT_S)) == {"a": 0}


def test_a_disconnected_node_is_lost_at_once_when_a_worker_that_stays_has_lost_a_peer() -> None:
    job = running("a", "b", "c", restarts=0)
    on(job, NodeDisconnected("b"), 5.0)
    assert receive(job, "a", PeerLost(7), 5.1) == []  # of another round
    assert assigned(receive(job, "a", PeerLost(1), 5.1)) == {"a": 0, "c": 1}
    assert job.restarts.used == 0


def test_a_node_is_lost_at_once_if_its_connection_closes_just_after_a_worker_has_lost_a_peer() -> None:
    job = running("a", "b", "c", "d", restarts=0)
    assert receive(job, "a", PeerLost(1), 4.0) == []  # a worker may have died: its node reports that
    assert assigned(on(job, NodeDisconnected("b"), 4.1)).keys() == {"a", "c", "d"}
    assert on(job, NodeDisconnected("c"), 4.2) == []  # the report was about the last round
    later = running("a", "b", "c")
    receive(later, "a", PeerLost(1), 4.0)
    assert on(later, NodeDisconnected("b"), 4.0 + RECONNECT_TIMEOUT_S) == []


def test_a_node_of_two_is_lost_at_once_if_its_machine_closed_the_connection_and_a_worker_has_lost_it() -> None:
    job = Job(JobSettings("job7", 1, 2, TIMING, Budget(0, backoff=0.0), own="a"))
    for name in "ab":
        job.on(NodeMessage(name, join(job, name)), 0.0)
    offer_anew(job, "a", 2.0)
    assert on(job, NodeDisconnected("b", closed_by_node=True), 5.0) == []  # it may reconnect
    assert assigned(receive(job, "a", PeerLost(1), 5.1)) == {"a": 0}
    assert job.restarts.used == 0


def test_a_node_is_not_lost_at_once_by_its_own_report_of_a_lost_peer() -> None:
    job = running("a", "b", "c", restarts=0)
    receive(job, "b", PeerLost(1), 5.0)
    assert on(job, NodeDisconnected("b", closed_by_node=True), 5.1) == []


def test_a_connection_that_a_node_closed_once_is_forgotten_when_it_is_back() -> None:
    job = running("a", "b", restarts=0)
    on(job, NodeDisconnected("b", closed_by_node=True), 5.0)
    receive(job, "b", join(job, "b", held=job.places["b"], status=Status.RUNNING, newest=1), 5.1)
    on(job, NodeDisconnected("b"), 6.0)
    assert receive(job, "a", PeerLost(1), 6.1) == []


def test_a_fault_in_the_coordinators_own_network_removes_no_node_at_once() -> None:
    settings = JobSettings("job7", 1, 3, TIMING, Budget(0, backoff=0.0), own="a")
    own = Job(settings)
    for name in "abc":
        own.on(NodeMessage(name, join(own, name)), 0.0)
    two, three = running("a", "b", restarts=0), running("a", "b", "c", restarts=0)
    receive(own, "a", PeerLost(1), 5.0)
    assert on(own, NodeDisconnected("b"), 5.1) == on(own, NodeDisconnected("c"), 5.1) == []
    on(two, NodeDisconnected("b"), 5.0)
    on(three, NodeDisconnected("b"), 5.0)
    on(three, NodeDisconnected("c"), 5.0)
    for job in (two, three):
        assert receive(job, "a", PeerLost(1), 5.1) == []
    for job in (own, two, three):
        for name in [n for n in job.places if n != "a"]:
            back = join(job, name, held=job.places[name], status=Status.RUNNING, newest=1)
            assert receive(job, name, back, 5.3) == []
        assert (job.phase, job.round, job.liveness.disconnected) == (Phase.RUNNING, 1, {})


def test_a_disconnected_node_is_lost_at_once_when_a_peer_fails() -> None:
    job = running("a", "b", restarts=0)
    on(job, NodeDisconnected("b"), 5.0)
    assert assigned(receive(job, "a", Failed(1, (victim(0),)), 5.1)) == {"a": 0}
    assert job.restarts.used == 0


def test_a_node_that_is_silent_for_a_lease_is_lost_and_disconnected() -> None:
    job = running("a", "b")  # b has sent nothing since it joined at 0
    receive(job, "a", Heartbeat(), 29.0)
    assert silence(job, 30.0) == [Disconnect("b"), Send("a", Assign(job.places["a"], "node b lost: silent for 30.1 s"))]


def silence(job: Job, until: float) -> list[JobCommand]:
    """A lease expires: the coordinator ticks on time, and removes the node at the next tick."""
    assert job.deadline() == until
    assert on(job, Tick(), until) == []
    assert job.deadline() == until + LATE_TICK_S
    return on(job, Tick(), until + LATE_TICK_S)


def test_a_heartbeat_renews_the_lease() -> None:
    job = running("a")
    assert job.deadline() == 32.0
    receive(job, "a", Heartbeat(), 12.0)
    assert job.deadline() == 42.0
    assert on(job, Tick(), 42.0) == []


def test_the_coordinators_own_node_needs_no_lease() -> None:
    job = Job(JobSettings("job7", 1, 1, TIMING, own="a"))
    receive(job, "a", join(job, "a"), 0.0)
    assert job.deadline() is None


def test_a_coordinator_that_was_suspended_removes_no_node() -> None:
    job = running("a", "b")
    receive(job, "a", Heartbeat(), 2.5)
    receive(job, "b", Heartbeat(), 2.5)
    assert on(job, Tick(), 100.0) == []
    assert job.deadline() == 130.0


def test_a_coordinator_that_is_always_late_removes_a_silent_node() -> None:
    job = running("a", "b")
    receive(job, "a", Heartbeat(), 2.5)
    assert on(job, Tick(), 40.0) == []  # late: the lease of b is extended, once
    receive(job, "a", Heartbeat(), 60.0)
    on(job, Tick(), 80.0)  # late again
    assert "b" not in job.members
    assert "a" in job.members


def test_a_coordinator_reads_pending_messages_before_a_lease_expires() -> None:
    job = running("a", "b")
    receive(job, "a", Heartbeat(), 29.0)
    assert on(job, Tick(), 30.05) == []
    assert receive(job, "b", Heartbeat(), 30.06) == []
    assert on(job, Tick(), 30.1) == []


def test_a_lost_node_that_returns_must_stop_its_old_round() -> None:
    job = running("a", "b")
    old = job.places["b"]
    receive(job, "a", Heartbeat(), 4.9)
    on(job, NodeDisconnected("b"), 5.0)
    on(job, Tick(), 5.0 + RECONNECT_TIMEOUT_S)
    offer_anew(job, "a", 5.6)
    commands = receive(job, "b", join(job, "b", held=old, status=Status.RUNNING, newest=1), 6.0)
    assert held(commands) == {"b": 2}
    assert assigned(commands) == {"a": 0, "b": 1}


def test_a_node_whose_assignment_was_lost_with_its_connection_gets_it_again() -> None:
    job = running("a", "b")
    on(job, NodeDisconnected("b"), 2.1)
    commands = receive(job, "b", join(job, "b"), 2.2)
    assert commands == [Send("b", Assign(job.places["b"], "first round"))]


def test_a_node_whose_hold_was_lost_with_its_connection_gets_it_again() -> None:
    job = running("a", "b", low=2)
    receive(job, "b", Left("bye"), 5.0)
    on(job, NodeDisconnected("a"), 5.1)
    back = join(job, "a", held=job.places["a"], status=Status.RUNNING, newest=1)
    assert held(receive(job, "a", back, 5.2)) == {"a": 1}


# rule 6: charges ------------------------------------------------------------------------------------------------------


def test_a_failure_beyond_the_budget_closes_the_job() -> None:
    job = running("a", "b", restarts=0)
    why = "rank 1 on host exited with code 1; no restart is allowed (--max-restarts=0)"
    assert receive(job, "b", Failed(1, (crash(1),)), 5.0) == [
        Send("a", Closing(why, Outcome.FAILED)),
        Send("b", Closing(why, Outcome.FAILED)),
    ]


def test_a_loss_is_free() -> None:
    job = running("a", "b", restarts=0)
    assert assigned(receive(job, "b", Left("bye"), 5.0)) == {"a": 0}
    assert job.restarts.used == 0


def test_a_victims_failure_waits_for_the_loss_that_explains_it() -> None:
    job = running("a", "b", restarts=0)
    assert receive(job, "a", Failed(1, (victim(0),)), 2.5) == []
    assert job.deadline() == 2.5 + PEER_LOSS_TIMEOUT_S
    assert assigned(on(job, NodeDisconnected("b"), 2.9)) == {"a": 0}


def test_a_leaving_node_explains_a_victims_failure() -> None:
    job = running("a", "b", restarts=0)
    receive(job, "a", Failed(1, (victim(0),)), 2.5)
    assert assigned(receive(job, "b", Leaving("signal 15"), 2.6)) == {"a": 0}


def test_a_victims_failure_without_explanation_fails_the_job() -> None:
    job = running("a", "b", restarts=0)
    receive(job, "a", Failed(1, (victim(0),)), 2.5)
    commands = on(job, Tick(), 2.5 + PEER_LOSS_TIMEOUT_S)
    assert {type(c.message) for c in commands if isinstance(c, Send)} == {Closing}


def test_a_new_node_does_not_stop_a_pending_failure() -> None:
    job = running("a", "b", high=3, restarts=0)
    receive(job, "a", Failed(1, (victim(0),)), 2.5)
    assert assigned(receive(job, "c", join(job, "c"), 2.6)) == {}
    on(job, Tick(), 2.5 + PEER_LOSS_TIMEOUT_S)
    assert job.phase is Phase.CLOSING


def test_a_charge_is_refunded_when_a_loss_explains_it_later() -> None:
    job = running("a", "b", restarts=1)
    receive(job, "a", Failed(1, (victim(0),)), 29.0)
    offer_anew(job, "a", 29.1)
    assert assigned(silence(job, 30.0)) == {"a": 0}  # b
    offer_anew(job, "a", 30.2)
    assert assigned(receive(job, "a", Failed(3, (crash(0, round=3),)), 31.0)) == {"a": 0}


def test_a_failure_while_a_node_is_leaving_is_free() -> None:
    job = running("a", "b", restarts=0)
    receive(job, "b", Leaving("signal 15"), 5.0)
    assert assigned(receive(job, "a", Failed(1, (victim(0),)), 5.1)) == {"a": 0}


# rule 7: ports --------------------------------------------------------------------------------------------------------


def test_a_port_offered_again_after_its_round_is_not_used() -> None:
    job = new_job(1, 1)
    receive(job, "a", join(job, "a"), 0.0)
    receive(job, "a", Ready(port("a"), 0), 0.5)
    assert held(receive(job, "a", Failed(1, (crash(),)), 1.0)) == {"a": 1}
    (sent,) = receive(job, "a", Ready(5000, 1), 1.1)
    assert sent.message.place.store == Address("host-a", 5000)  # type: ignore[union-attr]


def test_a_port_offered_over_an_earlier_connection_is_not_used() -> None:
    job = running("a", "b")
    on(job, NodeDisconnected("a"), 2.1)
    receive(job, "a", join(job, "a", ready=None, held=job.places["a"], status=Status.RUNNING, newest=1), 2.2)
    assert assigned(receive(job, "b", Failed(1, (crash(1),)), 2.3)) == {}
    commands = receive(job, "a", Ready(5000, 1), 2.4)
    assert {c.message.place.store.port for c in commands if isinstance(c, Send)} == {5000}  # type: ignore[union-attr]


def test_a_round_is_replaced_when_the_connection_that_offered_its_port_closed() -> None:
    job = new_job(2, 2)
    receive(job, "a", join(job, "a"), 0.0)
    receive(job, "b", join(job, "b"), 0.1)
    on(job, NodeDisconnected("a"), 0.2)
    commands = receive(job, "a", join(job, "a", ready=Ready(5000, 0)), 0.3)
    assert assigned(commands) == {"a": 0, "b": 1}
    assert job.places["a"].store.port == 5000
    assert job.round == 2


def test_a_coordinator_that_is_always_late_still_removes_a_node_that_does_not_return() -> None:
    job = running("a", "b")
    on(job, NodeDisconnected("b"), 3.0)
    assert on(job, Tick(), 4.0) == []  # half a second late: the node may have returned meanwhile
    assert assigned(on(job, Tick(), 5.0)) == {"a": 0}


# rule 8: a new coordinator --------------------------------------------------------------------------------------------


def test_a_recovered_round_continues_when_all_its_nodes_are_back() -> None:
    job = new_job(1, 2, now=100.0)
    assert receive(job, "a", join(job, "a", held=place(5, 0, 2), status=Status.RUNNING, newest=5), 101.0) == []
    assert receive(job, "b", join(job, "b", held=place(5, 1, 2), status=Status.RUNNING, newest=5), 102.0) == []
    assert (job.phase, job.round) == (Phase.RUNNING, 5)


def test_a_recovered_round_may_be_larger_than_the_initial_target() -> None:
    job = Job(replace(new_job(1, 4).settings, target=1))
    for rank, name in enumerate("ab"):
        receive(job, name, join(job, name, held=place(5, rank, 2), status=Status.RUNNING, newest=5), 1.0)
    assert on(job, Tick(), 2.0) == []
    assert (job.phase, job.round, job.status(2.0).target) == (Phase.RUNNING, 5, 2)


def test_an_operators_scale_overrides_the_size_of_a_recovered_round() -> None:
    job = new_job(1, 4)
    on(job, ScaleJob(1), 0.5)
    for rank, name in enumerate("ab"):
        receive(job, name, join(job, name, held=place(5, rank, 2), status=Status.RUNNING, newest=5), 1.0)
    assert job.status(2.0).target == 1


def test_a_recovered_round_ends_when_a_node_does_not_return_for_a_lease() -> None:
    job = new_job(1, 2)
    receive(job, "a", join(job, "a", held=place(5, 1, 2), status=Status.RUNNING, newest=5), 1.0)
    receive(job, "a", Heartbeat(), 2.0)
    assert job.deadline() == 31.0
    assert assigned(on(job, Tick(), 31.0)) == {"a": 0}
    assert job.round == 6


def test_a_large_round_is_recovered_however_long_its_nodes_take_one_after_another() -> None:
    size = LARGE_JOB_NODES + 1
    job = new_job(1, size)
    for rank in range(size - 1):
        now = float(rank)
        for name in list(job.members):
            job.on(NodeMessage(name, Heartbeat()), now)
        receive(job, f"n{rank}", join(job, f"n{rank}", held=place(5, rank, size), newest=5), now)
    assert job.phase is Phase.RECOVERING
    assert job.deadline() == size - 2 + TIMING.lease
    job.on(Tick(), size - 2 + TIMING.lease)
    assert job.round == 6


def test_a_failed_recovered_round_ends_sooner_and_is_not_charged() -> None:
    job = new_job(1, 3)
    receive(job, "a", join(job, "a", held=place(5, 1, 3), status=Status.RUNNING, newest=5), 1.0)
    assert job.deadline() == 31.0
    back = join(job, "b", held=place(5, 2, 3), status=Status.FAILED, failures=(victim(2, 5),), newest=5)
    assert assigned(receive(job, "b", back, 2.0)) == {}
    assert job.deadline() == 11.5  # a live node would have reconnected after a third of a lease
    assert assigned(on(job, Tick(), 11.5)) == {"a": 1, "b": 0}
    assert job.restarts.used == 0


def back_by_number(job: Job, name: str, number: int, now: float, *, rank: int | None = None) -> list[JobCommand]:
    """A node that returns to a failed round of three; without a rank, a new node."""
    state: dict[str, Any] = {"rank_by": RankBy.SLOT}
    if rank is not None:
        state |= {"held": place(5, rank, 3), "status": Status.FAILED, "failures": (victim(rank, 5),), "newest": 5}
    return receive(job, name, replace(join(job, name, **state), node=node(name, number=number)), now)


def test_a_failed_recovered_round_does_not_wait_for_a_replaced_node() -> None:
    job = ranked_by(RankBy.SLOT, 1, 3)
    back_by_number(job, "a2", 0, 1.0)  # it replaces the node of rank 0
    assert assigned(back_by_number(job, "b", 1, 1.1, rank=1)) == {}
    assert assigned(back_by_number(job, "c", 2, 1.2, rank=2)) == {"a2": 0, "b": 1, "c": 2}
    assert job.restarts.used == 0


@pytest.mark.parametrize(
    ("new_node", "ranks"),
    [
        (3, {1: 1, 2: 2}),  # a new node that replaces no other
        (0, {3: 1, 2: 2}),  # ranks are not numbers, so rank 0 may have had another number
    ],
)
def test_a_failed_recovered_round_waits_for_a_node_that_is_not_replaced(new_node: int, ranks: dict[int, int]) -> None:
    job = ranked_by(RankBy.SLOT, 1, 4)
    back_by_number(job, "a2", new_node, 1.0)
    for name, (number, rank) in zip("bc", ranks.items(), strict=True):
        assert assigned(back_by_number(job, name, number, 1.1, rank=rank)) == {}
    assert job.phase is Phase.RECOVERING


def test_a_recovered_round_that_fails_late_ends_at_once() -> None:
    job = new_job(1, 2)
    receive(job, "a", join(job, "a", held=place(5, 1, 2), status=Status.RUNNING, newest=5), 1.0)
    assert assigned(receive(job, "a", Failed(5, (victim(1, 5),)), 20.0)) == {"a": 0}
    assert job.restarts.used == 0


def test_the_highest_round_wins() -> None:
    job = new_job(1, 2)
    receive(job, "a", join(job, "a", held=place(4, 0, 1), status=Status.RUNNING, newest=4), 1.0)
    assert job.round == 4
    job = new_job(1, 3)
    receive(job, "a", join(job, "a", held=place(4, 0, 2), status=Status.RUNNING, newest=4), 1.0)
    commands = receive(job, "b", join(job, "b", held=place(5, 0, 2), status=Status.RUNNING, newest=5), 1.1)
    assert held(commands) == {"a": 4}
    assert list(job.places) == ["b"]


def test_a_new_coordinator_learns_of_a_failure_and_charges_it_once() -> None:
    job = new_job(1, 2)
    receive(job, "a", join(job, "a", held=place(5, 0, 2), status=Status.FAILED, failures=(crash(0, 5),), newest=5), 1.0)
    commands = receive(job, "b", join(job, "b", held=place(5, 1, 2), status=Status.RUNNING, newest=5), 1.1)
    assert assigned(commands) == {"a": 0, "b": 1}
    assert job.restarts.used == 1


def test_a_new_coordinator_learns_of_success() -> None:
    job = new_job(1, 1)
    commands = receive(job, "a", join(job, "a", held=place(5), status=Status.SUCCEEDED, newest=5), 1.0)
    assert isinstance(commands[0], Send)
    assert isinstance(commands[0].message, Closed)
    assert commands[0].message.report.outcome is Outcome.SUCCEEDED


def test_a_new_coordinator_keeps_the_spent_restarts() -> None:
    job = new_job(1, 1, restarts=2)
    receive(job, "a", join(job, "a", newest=5, restarts=2), 1.0)
    receive(job, "a", Failed(6, (crash(0, 6),)), 2.0)
    assert job.phase is Phase.CLOSING


def test_a_new_coordinator_continues_to_close_a_closing_job() -> None:
    job = new_job(1, 2)
    receive(job, "a", join(job, "a"), 1.0)
    commands = receive(job, "b", join(job, "b", closing=Closing("enough", Outcome.STOPPED)), 1.1)
    assert commands == [
        Send("a", Closing("enough", Outcome.STOPPED)),
        Send("b", Closing("enough", Outcome.STOPPED)),
    ]


def test_a_newer_round_does_not_reopen_a_closing_job() -> None:
    job = running("a")
    on(job, StopJob("enough"), 5.0)
    receive(job, "b", join(job, "b", held=place(9), status=Status.RUNNING, newest=9), 5.1)
    assert job.phase is Phase.CLOSING


def test_a_live_round_ends_when_a_node_has_a_newer_one() -> None:
    job = running("a", high=2)
    commands = receive(job, "b", join(job, "b", held=place(9, 0, 1), status=Status.RUNNING, newest=9), 5.0)
    assert held(commands)["a"] == 1
    assert held(commands)["b"] == 9
    assert job.round == 10


# rule 10: the end -----------------------------------------------------------------------------------------------------


def test_the_job_succeeds_when_every_node_has_succeeded() -> None:
    job = running("a", "b")
    assert receive(job, "a", Succeeded(1), 2.5) == []
    commands = receive(job, "b", Succeeded(1), 2.6)
    assert [c.node for c in commands if isinstance(c, Send) and isinstance(c.message, Closed)] == ["a", "b"]
    assert job.report is not None
    assert job.report.outcome is Outcome.SUCCEEDED


def test_a_node_that_succeeded_may_leave_before_the_others() -> None:
    job = running("a", "b")
    receive(job, "a", Succeeded(1), 2.5)
    assert receive(job, "a", Left("signal 15"), 2.6) == [Disconnect("a")]
    receive(job, "b", Succeeded(1), 2.7)
    assert job.phase is Phase.CLOSED


def test_a_node_that_leaves_does_not_close_the_job() -> None:
    job = running("a", "b")
    receive(job, "a", Leaving("signal 15"), 5.0)
    assert job.phase is Phase.RUNNING
    assert assigned(receive(job, "a", Left("signal 15"), 5.5)) == {"b": 0}


def test_too_few_nodes_for_too_long_is_a_failure() -> None:
    job = new_job(2, 2)
    job.on(NodeMessage("a", join(job, "a")), 0.0)
    for t in range(1, 60):
        job.on(NodeMessage("a", Heartbeat()), float(t))
    (sent,) = on(job, Tick(), 60.0)
    assert sent == Send(
        "a",
        Closing(
            "2 nodes are needed and 1 ready after 60 s (first round); start more, or raise join_timeout", Outcome.FAILED
        ),
    )


def test_an_operator_closes_the_job() -> None:
    job = running("a")
    assert on(job, StopJob("enough"), 5.0) == [Send("a", Closing("enough", Outcome.STOPPED))]
    assert on(job, StopJob("again"), 5.1) == []


def test_the_report_waits_for_all_failures_and_lists_the_root_cause_first() -> None:
    job = running("a", "b", restarts=0)
    receive(job, "b", Failed(1, (crash(1),)), 2.5)
    assert receive(job, "a", Stopped((victim(0),)), 2.6) == []
    commands = receive(job, "b", Stopped((crash(1),)), 2.7)
    assert isinstance(commands[0], Send)
    assert isinstance(commands[0].message, Closed)
    assert [f.rank for f in commands[0].message.report.failures] == [1, 0]


def test_the_report_does_not_wait_longer_than_the_shutdown_timeout() -> None:
    job = Job(JobSettings("job7", 1, 1, TIMING, own="a"))
    receive(job, "a", join(job, "a"), 0.0)
    on(job, StopJob("enough"), 1.0)
    assert job.deadline() == 1.0 + TIMING.shutdown + FINAL_REPORT_TIMEOUT_S
    commands = on(job, Tick(), 1.0 + TIMING.shutdown + FINAL_REPORT_TIMEOUT_S)
    assert [type(c.message) for c in commands if isinstance(c, Send)] == [Closed]


def test_the_report_does_not_wait_for_a_lost_node() -> None:
    job = running("a", "b")
    on(job, NodeDisconnected("b"), 2.8)
    on(job, StopJob("enough"), 2.9)
    assert receive(job, "a", Stopped(), 3.0) == []
    receive(job, "a", Heartbeat(), 3.1)
    on(job, Tick(), 2.8 + RECONNECT_TIMEOUT_S)
    assert job.phase is Phase.CLOSED


def test_the_job_ends_when_every_node_has_left() -> None:
    job = running("a", "b")
    receive(job, "a", Succeeded(1), 2.5)
    receive(job, "b", Succeeded(1), 2.6)
    assert job.report is not None
    assert receive(job, "a", Left("done"), 2.7) == [Disconnect("a")]
    assert receive(job, "b", Left("done"), 2.8) == [Disconnect("b"), JobEnded(job.report)]


def test_the_job_ends_after_a_timeout_if_a_node_does_not_leave() -> None:
    job = running("a")
    receive(job, "a", Succeeded(1), 2.5)
    assert job.report is not None
    assert job.deadline() == 2.5 + FINAL_REPORT_TIMEOUT_S
    assert on(job, Tick(), 2.5 + FINAL_REPORT_TIMEOUT_S) == [JobEnded(job.report)]
    assert job.deadline() is None


def test_a_node_that_joins_after_success_receives_the_report() -> None:
    job = running("a")
    receive(job, "a", Succeeded(1), 2.5)
    assert job.report is not None
    assert receive(job, "late", join(job, "late"), 2.6) == [Send("late", Closed(job.report))]


# admission ------------------------------------------------------------------------------------------------------------


def rejection(commands: list[JobCommand]) -> str:
    assert isinstance(commands[0], Send)
    assert isinstance(commands[0].message, Rejected)
    assert commands[1] == Disconnect(commands[0].node)
    return commands[0].message.why


def test_a_node_with_a_different_nnodes_is_rejected() -> None:
    job = new_job(1, 4)
    assert rejection(receive(job, "a", Join(node("a"), 2, 4), 0.0)) == (
        "--nnodes must be the same on every node: this job has 1:4, node a has 2:4; start it with --nnodes=1:4"
    )


@pytest.mark.parametrize("slots", [0, -1, 4097])
def test_a_node_with_an_invalid_number_of_workers_is_rejected(slots: int) -> None:
    job = new_job()
    assert "1 to 4096 workers" in rejection(receive(job, "a", Join(node("a", slots=slots), 1, 4), 0.0))


def test_a_node_with_an_absurd_round_is_rejected_and_the_rounds_after_the_highest_allowed_one_work() -> None:
    job, high = new_job(2, 2), 2**52
    for state in ({"newest": high + 1}, {"held": place(high + 1)}, {"held": place(2**63 - 1)}, {"held": place(-1)}):
        assert f"from 0 to {high} here" in rejection(receive(job, "a", join(job, "a", **state), 0.0))
    receive(job, "a", join(job, "a", newest=high, restarts=2**63 - 1), 0.0)
    receive(job, "b", join(job, "b"), 0.0)
    for number in (high + 1, high + 2):
        assign = Assign(job.places["b"], "")
        assert job.round == number and decode(encode(assign), (Assign,)) == assign
        back = join(job, "b", held=job.places["b"], newest=number, restarts=job.places["b"].restarts)
        assert decode(encode(back), (Join,)) == back and receive(job, "b", back, 1.0) == []
        offer_anew(job, "a", 1.0)
        on(job, RestartRound("again"), 1.0)
    too_high = join(job, "b", newest=job.round + MAX_ROUND_STEP + 1)
    assert "node b reports" in rejection(receive(job, "b", too_high, 2.0))


def test_a_node_that_joins_under_another_name_is_rejected() -> None:
    job = new_job()
    assert "under its own name" in rejection(receive(job, "a", Join(node("b"), 1, 4), 0.0))


def test_in_a_static_job_every_node_needs_a_different_rank() -> None:
    job = new_job(2, 2, fixed=True)
    assert "has None" in rejection(receive(job, "a", Join(node("a"), 2, 2), 0.0))
    assert "has 2" in rejection(receive(job, "a", Join(node("a", requested_rank=2), 2, 2), 0.0))
    assert receive(job, "a", Join(node("a", requested_rank=1), 2, 2), 0.0) == []
    assert "--node-rank=1 is taken by node a" in rejection(
        receive(job, "b", Join(node("b", requested_rank=1), 2, 2), 0.1)
    )


def test_in_a_static_job_nodes_and_replacements_get_the_requested_ranks() -> None:
    job = new_job(2, 2, fixed=True)
    receive(job, "a", Join(node("a", requested_rank=1), 2, 2, ready=Ready(1, 0)), 0.0)
    assert assigned(receive(job, "b", Join(node("b", requested_rank=0), 2, 2, ready=Ready(2, 0)), 0.1)) == {
        "b": 0,
        "a": 1,
    }
    receive(job, "b", Ready(3, 1), 0.2)
    on(job, NodeDisconnected("a"), 1.0)
    receive(job, "c", Join(node("c", requested_rank=1), 2, 2, ready=Ready(4, 0)), 1.1)
    assert assigned(on(job, Tick(), 1.0 + RECONNECT_TIMEOUT_S)) == {"b": 0, "c": 1}


# the order of ranks----------------------------------------------------------------------------------------------------


def ranked(job: Job, name: str, now: float, **of_node: object) -> list[JobCommand]:
    """A ready node with these properties joins."""
    settings = job.settings
    who = node(name, **of_node)
    message = Join(who, settings.min_nodes, settings.max_nodes, settings.rank_by, ready=Ready(port(name), 0))
    return job.on(NodeMessage(name, message), now)


def ranked_by(by: RankBy, low: int, high: int) -> Job:
    return Job(JobSettings("job7", low, high, TIMING, Budget(3, backoff=0.0), rank_by=by))


def test_a_node_with_a_different_rank_by_is_rejected() -> None:
    job = ranked_by(RankBy.SLOT, 2, 2)
    assert rejection(receive(job, "a", Join(node("a"), 2, 2), 0.0)) == (
        "--rdzv-conf rank_by must be the same on every node: this job has slot, node a has join; "
        "start it with --rdzv-conf=rank_by=slot"
    )


def test_the_first_round_is_sorted_and_a_later_one_is_not() -> None:
    job = ranked_by(RankBy.LABEL, 2, 3)
    ranked(job, "a", 0.0, label="rack2")
    ranked(job, "b", 0.0, label="rack1")
    assert assigned(on(job, Tick(), 2.0)) == {"b": 0, "a": 1}
    offer_anew(job, "b", 2.1)
    assert assigned(ranked(job, "c", 3.0, label="rack0")) == {"b": 0, "a": 1, "c": 2}


def test_a_replacement_with_a_lost_nodes_number_gets_its_rank() -> None:
    job = ranked_by(RankBy.SLOT, 4, 4)
    for number, name in enumerate("abcd"):
        ranked(job, name, 0.0, number=number + 10)
    offer_anew(job, "a", 0.1)
    on(job, NodeDisconnected("b"), 1.0)
    on(job, NodeDisconnected("d"), 1.0)
    on(job, Tick(), 1.0 + RECONNECT_TIMEOUT_S)
    ranked(job, "d2", 2.0, number=13)
    assert assigned(ranked(job, "x", 3.0, number=14)) == {"a": 0, "x": 1, "c": 2, "d2": 3}


def test_a_denied_rank_request_is_recorded_once() -> None:
    job = new_job(2, 3)
    for name in "ab":
        job.on(NodeMessage(name, Join(node(name, requested_rank=1), 2, 3, ready=Ready(port(name), 0))), 0.0)

    def denials(commands: list[JobCommand]) -> list[RankRequestDenied]:
        return [c.event for c in commands if isinstance(c, RecordEvent) and isinstance(c.event, RankRequestDenied)]

    (denial,) = denials(job.on(Tick(), 2.0))
    assert denial == RankRequestDenied(1, "b", 1, 0, "node a requested it too and comes first")
    assert log_line(denial) == (
        "round=1 node=b has node rank 0, not the requested 1: node a requested it too and comes first"
    )
    offer_anew(job, "b", 2.1)
    again = job.on(RestartRound("again"), 3.0)
    assert assigned(again) == {"b": 0, "a": 1}
    assert denials(again) == []


# phases ---------------------------------------------------------------------------------------------------------------


def test_every_transition_of_the_table_can_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: set[tuple[Phase, Phase]] = set()
    enter = Job.enter

    def watched(job: Job, phase: Phase, now: float) -> None:
        moves.add((job.phase, phase))
        enter(job, phase, now)

    monkeypatch.setattr(Job, "enter", watched)
    finished = running("a")
    on(finished, NodeMessage("a", Succeeded(1)), 3.0)
    newer = running("a", "b", low=2)
    receive(newer, "b", Left("SIGTERM"), 3.0)
    receive(newer, "c", join(newer, "c", held=place(9)), 4.0)
    on(new_job(), StopJob("enough"), 1.0)
    for last in (Tick(), StopJob("enough"), NodeMessage("b", join(new_job(), "b", held=place(6, 1, 2)))):
        found = new_job()
        for round in (5, 6):
            receive(found, "a", join(found, "a", held=place(round, 0, 2)), 0.1 * round)
        on(found, last, 0.7 + TIMING.lease)
    assert moves == {(before, after) for before, reasons in TRANSITIONS.items() for after in reasons}


# cost -----------------------------------------------------------------------------------------------------------------


def test_two_thousand_nodes_get_a_few_messages_each_for_every_round() -> None:
    count = 2000
    job = Job(JobSettings("big", 1, count, TIMING, Budget(9, backoff=0.0)))
    sent: Counter[str] = Counter()

    def feed(event: JobInput, now: float) -> None:
        sent.update(c.node for c in on(job, event, now) if isinstance(c, Send))

    names = [f"n{i}" for i in range(count)]
    for i, name in enumerate(names):
        feed(NodeMessage(name, Join(Node(name, "h", 8), 1, count, ready=Ready(i + 1, 0))), i / count)
    assert job.phase is Phase.RUNNING
    assert max(sent.values()) <= 2  # a notice and its place
    sent.clear()
    feed(NodeMessage("n0", Ready(9000, 1)), 1.0)
    for i, name in enumerate(names):
        feed(NodeMessage(name, Failed(1, (crash(i, 1),))), 1.5)
    assert job.round == 2
    assert set(sent.values()) == {1}
    sent.clear()
    for name in names:
        feed(NodeDisconnected(name), 2.0)
    feed(Tick(), 2.0 + RECONNECT_TIMEOUT_S)
    assert sum(sent.values()) <= count


@pytest.mark.parametrize("low", [1, 600])
def test_heartbeats_of_many_unhealthy_nodes_cost_little(low: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removable nodes stay because no port is offered; the job needs the others."""
    names = [f"n{i}" for i in range(600)]
    healthy = names[300:] if low == 1 else []
    job = Job(JobSettings("big", low, 600, TIMING, Budget(9, backoff=0.0), quarantine=QuarantineLimits(failures=0)))
    for i, name in enumerate(names):
        job.on(NodeMessage(name, Join(Node(name, "h", 8), low, 600, ready=Ready(i + 1, 0))), i / 600)
    for name in names[: -len(healthy) or None]:
        job.on(NodeMessage(name, FULL), 2.0)
    assess = Mock(wraps=membership.classify_degraded_nodes)
    monkeypatch.setattr(membership, "classify_degraded_nodes", assess)
    receive(job, names[0], Problems(), 3.0)
    began = time.process_time()
    for now in (20.0, 45.0, 70.0):
        for name in names:
            job.on(NodeMessage(name, Heartbeat()), now)
    assert (job.phase, job.round) == (Phase.RUNNING, 1)
    assert assess.call_count == 1
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (NodeMessage("b", Failed(1, ())), RoundEndCause.APPLICATION),
        (NodeMessage("b", Left("SIGTERM")), RoundEndCause.NODE_LEFT),
        (NodeMessage("c", Join(node("c"), 1, 4, ready=Ready(port("c"), 0))), RoundEndCause.NODE_JOINED),
        (ScaleJob(1), RoundEndCause.SCALED),
        (RestartRound("an operator asked for it"), RoundEndCause.OPERATOR),
    ],
    ids=lambda value: value if isinstance(value, RoundEndCause) else "",
)
def test_the_end_of_a_round_has_a_cause(event: JobInput, cause: RoundEndCause) -> None:
    job = running("a", "b", high=4)
    assert ends(job, event, 5.0) == [cause]


def test_a_round_that_ends_by_a_loss_has_that_cause() -> None:
    job = running("a", "b")
    assert ends(job, NodeDisconnected("b"), 5.0) == []
    assert ends(job, Tick(), 5.0 + RECONNECT_TIMEOUT_S) == [RoundEndCause.NODE_LOST]


def ends(job: Job, event: JobInput, now: float) -> list[str]:
    """The causes of the rounds that this event ends."""
    return [
        command.event.cause
        for command in job.on(event, now)
        if isinstance(command, RecordEvent) and isinstance(command.event, RoundEnded)
    ]


# rule 9: degraded nodes -----------------------------------------------------------------------------------------------

FULL = Problems(("the disk is full",))


def recorded(commands: list[JobCommand], *kinds: type[Recordable]) -> list[Recordable]:
    return [c.event for c in commands if isinstance(c, RecordEvent) and isinstance(c.event, kinds)]


def state(job: Job, name: str) -> tuple[str, int]:
    return next((n.state, n.group_rank) for n in job.status(job._now).nodes if n.name == name)


def crash_again(job: Job, name: str, now: float) -> list[JobCommand]:
    """The node's worker fails after every node has offered a port again."""
    for other in job.places:
        offer_anew(job, other, now)
    rank = job.places[name].first_rank
    return job.on(NodeMessage(name, Failed(job.round, (crash(rank, job.round, now),))), now)


def test_a_spare_replaces_an_unhealthy_node_without_a_charge() -> None:
    job = running("a", "b", low=2)
    receive(job, "s", join(job, "s"), 5.0)
    assert recorded(job.on(NodeMessage("b", FULL), 10.0), NodeUnhealthy) == [NodeUnhealthy("b", FULL.problems)]
    assert job.deadline() == 10.0 + RECHECK_S
    commands = on(job, Tick(), 10.0 + RECHECK_S)
    assert assigned(commands) == {"a": 0, "s": 1}
    assert Send("b", StandBy(2, "unhealthy: the disk is full")) in commands
    assert job.restarts.used == 0
    assert state(job, "b") == ("unhealthy", -1)


def test_a_node_that_is_healthy_again_in_time_keeps_its_place() -> None:
    job = running("a", "b", low=1)
    job.on(NodeMessage("b", FULL), 10.0)
    assert recorded(job.on(NodeMessage("b", Problems()), 39.0), NodeHealthy) == [NodeHealthy("b")]
    receive(job, "a", Heartbeat(), 39.0)
    assert assigned(on(job, Tick(), 41.0)) == {}
    assert job.round == 1


def test_an_old_report_of_problems_that_arrives_late_is_ignored() -> None:
    job = running("a", "b", low=1)
    full = Problems(FULL.problems, version=1)
    assert recorded(job.on(NodeMessage("b", full), 10.0), NodeUnhealthy) == [NodeUnhealthy("b", FULL.problems)]
    assert recorded(job.on(NodeMessage("b", Problems(version=2)), 11.0), NodeHealthy) == [NodeHealthy("b")]
    assert job.on(NodeMessage("b", full), 12.0) == []
    assert job.members["b"].problems == ()
    late = join(job, "b", held=job.places["b"], status=Status.RUNNING, problems=full.problems, problems_version=1)
    assert recorded(job.on(NodeMessage("b", late), 13.0), NodeUnhealthy) == []
    newer = Problems(FULL.problems, version=3)
    assert recorded(job.on(NodeMessage("b", newer), 14.0), NodeUnhealthy) == [NodeUnhealthy("b", FULL.problems)]


def test_an_unhealthy_node_that_the_job_needs_is_retained_and_recorded_once() -> None:
    job = running("a", "b", low=2)
    retained = recorded(job.on(NodeMessage("b", FULL), 10.0), UnhealthyNodeRetained)
    assert [
        (event.name, "needs 2 nodes" in event.why) for event in retained if isinstance(event, UnhealthyNodeRetained)
    ] == [("b", True)]
    for now in (20.0, 40.0, 50.0):
        for name in "ab":
            assert recorded(job.on(NodeMessage(name, Heartbeat()), now), UnhealthyNodeRetained) == []
    assert (job.phase, job.round, state(job, "b")) == (Phase.RUNNING, 1, ("running", 1))
    assert job.status(50.0).nodes[1].unfit == "unhealthy: the disk is full"
    assert assigned(receive(job, "s", join(job, "s"), 51.0)) == {"a": 0, "s": 1}


def test_a_restart_for_another_reason_leaves_an_unhealthy_node_out_at_once() -> None:
    job = running("a", "b", low=1)
    job.on(NodeMessage("b", FULL), 10.0)
    assert assigned(receive(job, "a", Failed(1, (crash(0),)), 11.0)) == {"a": 0}


def test_an_unhealthy_node_outside_the_round_gets_no_place() -> None:
    job = running("a", "b", low=2)
    receive(job, "s", join(job, "s", problems=FULL.problems), 5.0)
    receive(job, "b", Left("bye"), 10.0)
    assert job.phase is Phase.GATHERING
    assert assigned(receive(job, "s", Problems(), 12.0)) == {"a": 0, "s": 1}


def test_no_node_is_replaced_when_most_of_the_round_is_unhealthy() -> None:
    job = running("a", "b", "c", low=1)
    for name in "bc":
        job.on(NodeMessage(name, FULL), 10.0)
    for name in "abc":
        receive(job, name, Heartbeat(), 35.0)
    on(job, Tick(), 10.0 + RECHECK_S)
    assert (job.phase, job.round) == (Phase.RUNNING, 1)
    assert assigned(receive(job, "a", Failed(1, (crash(0),)), 41.0)) == {"a": 0, "b": 1, "c": 2}


def test_no_node_is_replaced_when_the_others_find_the_problem_at_their_next_check() -> None:
    job = new_job(1, 3)
    for name, interval in (("a", 10.0), ("b", 30.0), ("c", 10.0)):
        receive(job, name, join(job, name, health_interval=interval), 0.0)
    offer_anew(job, "a", 2.0)
    job.on(NodeMessage("c", FULL), 10.0)
    for now in (35.0, 60.0, 85.0):
        for name in "abc":
            receive(job, name, Heartbeat(), now)
    assert job.deadline() == 10.0 + 2 * 30.0 + MAX_HEALTH_CHECK_S  # b has the longest interval
    job.on(NodeMessage("b", FULL), 99.0)
    assert assigned(on(job, Tick(), 10.0 + 2 * 30.0 + MAX_HEALTH_CHECK_S)) == {}


def test_the_recheck_time_of_a_node_is_limited() -> None:
    job = running("a", "b", low=1)
    receive(job, "b", join(job, "b", held=job.places["b"], status=Status.RUNNING, health_interval=1e300), 3.0)
    assert job.members["b"].recheck_time() == 2 * 3600.0 + MAX_HEALTH_CHECK_S


def test_a_node_that_is_healthy_again_returns_to_the_round() -> None:
    job = running("a", "b", low=1)
    job.on(NodeMessage("b", FULL), 10.0)
    assert assigned(on(job, Tick(), 10.0 + RECHECK_S)) == {"a": 0}
    offer_anew(job, "a", 41.0)
    assert assigned(receive(job, "b", Problems(), 60.0)) == {"a": 0, "b": 1}


def test_the_reason_for_too_few_nodes_names_an_unhealthy_one() -> None:
    job = new_job(2, 2)
    receive(job, "a", join(job, "a"), 0.0)
    receive(job, "b", join(job, "b", ready=None, problems=FULL.problems), 0.0)
    for now in (25.0, 50.0):
        for name in "ab":
            receive(job, name, Heartbeat(), now)
    commands = on(job, Tick(), 60.0)
    assert "node b is unhealthy: the disk is full" in next(
        c.message.why for c in commands if isinstance(c, Send) and isinstance(c.message, Closing)
    )


def test_a_spare_replaces_a_node_in_quarantine() -> None:
    job = running("a", "b", low=2, restarts=9)
    receive(job, "s", join(job, "s"), 5.0)
    for now in (10.0, 11.0):
        assert assigned(crash_again(job, "b", now)) == {"a": 0, "b": 1}
    commands = crash_again(job, "b", 12.0)
    (event,) = recorded(commands, NodeQuarantined)
    assert isinstance(event, NodeQuarantined)
    assert (event.name, event.seconds) == ("b", 600.0)
    assert event.why == "at fault 3 times in 2 s, last: rank 1 on host exited with code 1"
    assert assigned(commands) == {"a": 0, "s": 1}
    assert held(commands) == {"b": 4}
    assert state(job, "b") == ("quarantined", -1)


def test_a_node_is_released_after_the_cooldown() -> None:
    job = running("a", "b", restarts=9)
    for now in (10.0, 11.0, 12.0):
        crash_again(job, "b", now)
    assert list(job.places) == ["a"]
    for now in range(30, 612, 20):
        for name in "ab":
            assert assigned(receive(job, name, Heartbeat(), float(now))) == {}
    offer_anew(job, "a", 611.0)
    receive(job, "b", Heartbeat(), 611.0)
    assert job.deadline() == 612.0
    commands = job.on(Tick(), 612.0)
    assert recorded(commands, NodeReleased) == [NodeReleased("b")]
    assert assigned(commands) == {"a": 0, "b": 1}


def test_a_node_in_quarantine_gets_a_place_when_there_are_too_few_others() -> None:
    job = running("a", "b", low=2, restarts=9)
    receive(job, "s", join(job, "s"), 5.0)
    for now in (10.0, 11.0, 12.0):
        crash_again(job, "b", now)
    assert set(job.places) == {"a", "s"}
    offer_anew(job, "a", 13.0)
    commands = job.on(NodeMessage("s", Left("bye")), 13.0)
    assert assigned(commands) == {"a": 0, "b": 1}
    assert [
        event.name for event in recorded(commands, UnhealthyNodeRetained) if isinstance(event, UnhealthyNodeRetained)
    ] == ["b"]


def test_victims_are_not_at_fault_even_if_they_report_first() -> None:
    job = running("a", "b", "c", low=2, restarts=9)
    for now in (10.0, 11.0, 12.0):
        over = job.round
        for name in job.places:
            offer_anew(job, name, now)
        job.on(NodeMessage("a", Failed(over, (victim(0, over),))), now)
        job.on(NodeMessage("b", Failed(over, (crash(1, over, now),))), now + 0.1)
    assert assigned(receive(job, "a", Ready(99, job.round), 12.2)) == {"a": 0, "c": 1}
    assert state(job, "b") == ("quarantined", -1)


def test_a_change_to_unhealthy_is_a_fault() -> None:
    job = running("a", "b", restarts=9)
    now = 10.0
    for _ in range(3):
        offer_anew(job, "a", now)
        assert set(job.places) == {"a", "b"}
        job.on(NodeMessage("b", FULL), now)
        receive(job, "a", Heartbeat(), now + 25)
        receive(job, "b", Heartbeat(), now + 25)
        on(job, Tick(), now + RECHECK_S)
        assert set(job.places) == {"a"}
        offer_anew(job, "a", now + 31)
        job.on(NodeMessage("b", Problems()), now + 40)
        now += 50
    assert state(job, "b") == ("quarantined", -1)
    assert job.restarts.used == 0


def test_quarantine_can_be_turned_off() -> None:
    job = Job(JobSettings("job7", 1, 2, TIMING, Budget(99, backoff=0.0), quarantine=QuarantineLimits(failures=0)))
    for name in "ab":
        job.on(NodeMessage(name, join(job, name)), 0.0)
    job.on(Tick(), 2.0)
    for now in range(10, 30):
        assert set(assigned(crash_again(job, "b", float(now)))) == {"a", "b"}


def test_the_problems_of_an_unhealthy_node_are_bounded() -> None:
    job = running("a", "b")
    job.on(NodeMessage("b", Problems(tuple("x" * 10_000 for _ in range(1_000)))), 10.0)
    assert len(job.status(10.0).nodes[1].unfit) < 5_000


def test_a_failure_is_bounded() -> None:
    huge = "x" * 100_000
    flood = replace(
        crash(1), message=huge, traceback=huge, oom=huge, log_tail=(huge,) * 100, error_file=huge, logs=huge
    )
    message = message_within_limits(Failed(1, (flood,)))
    assert isinstance(message, Failed)
    assert len(repr(message)) < 70_000


HUGE = "\N{SNAKE}" * 100_000
PROGRESS = CollectiveProgress(HUGE, HUGE, 2, 2, HUGE, HUGE)


@pytest.mark.parametrize(
    "message",
    [
        Failed(1, (replace(crash(1), host=HUGE),)),
        Failed(1, (Failure(1, 0, 1, "host", 10.0, signal=HUGE),)),
        Failed(1, (Failure(1, 0, 1, "host", 10.0, hang=Hang(90.0, HUGE, HUGE, HUGE, False, HUGE)),)),
        Failed(
            1, tuple(Failure(2 * n, 0, 1, "h", 10.0, hang=Hang(1.0, "", "f", HUGE[n:], True, "S")) for n in range(9))
        ),
        Failed(1, (Failure(1, 0, 1, "h", 10.0, hang=Hang(1.0, "", "f", "g", True, "S", "", (PROGRESS,) * 4000)),)),
        Problems((HUGE,) * 100),
        Leaving(HUGE),
        Left(HUGE),
    ],
)
@pytest.mark.parametrize("restarts", [0, 3])
def test_messages_to_agents_fit_into_a_frame_whatever_a_node_sends(message: FromAgent, restarts: int) -> None:
    job = Job(JobSettings("job7", 1, 2, TIMING, Budget(restarts, max_infra_restarts=restarts, backoff=0.0)))
    for name in "ab":
        receive(job, name, join(job, name), 0.0)
    commands = receive(job, "b", message, 10.0)
    commands += receive(job, "a", Inspected(1), 10.1) + receive(job, "b", Inspected(1), 10.1)
    commands += on(job, StopJob("enough"), 11.0) + on(job, Tick(), 11.0 + TIMING.shutdown + FINAL_REPORT_TIMEOUT_S)
    sent = [command.message for command in commands if isinstance(command, Send)]
    assert sent
    assert all(len(encode(message)) <= MAX_FRAME_BYTES for message in sent)


def test_the_reason_for_a_quarantine_is_bounded() -> None:
    job = running("a", "b", low=1, restarts=9)
    for now in (10.0, 11.0, 12.0):
        over = job.round
        for name in job.places:
            offer_anew(job, name, now)
        job.on(NodeMessage("a", Failed(over, (victim(0, over),))), now)
        job.on(NodeMessage("b", Failed(over, (Failure(1, 0, over, "host", now, signal=HUGE),))), now + 0.1)
    assert 0 < len(job.membership.unfit_reason("b")) < 1000


@pytest.mark.parametrize("name", [HUGE, "half a pair of surrogates: \ud800"])
def test_a_node_with_an_invalid_name_is_rejected(name: str) -> None:
    job = new_job()
    for part in ("host", "role", "label"):
        new_node = replace(join(job, "a"), node=replace(node("a"), **{part: name}))
        assert "256 characters" in rejection(receive(job, "a", new_node, 0.0))
    held = replace(place(1), store=Address(name, 1))
    assert "the store of node a" in rejection(receive(job, "a", join(job, "a", held=held), 0.0))


# rule 11: hangs -------------------------------------------------------------------------------------------------------


def hang(rank: int, *, waits: bool = True) -> Failure:
    call, where = ("all_reduce", "train.py:41") if waits else ("load_batch", "data.py:17")
    return Failure(rank, 0, 1, "host", 10.0, hang=Hang(90.0, "no heartbeat", call, where, waits, "S"))


DIAGNOSIS = "rank 0 waits in all_reduce (train.py:41); rank 1 is in load_batch (data.py:17)"


def test_a_hang_is_diagnosed_on_all_nodes_before_the_round_ends() -> None:
    job = running("a", "b", restarts=0)
    assert receive(job, "a", Failed(1, (hang(0),)), 100.0) == [Send("b", Inspect(1))]
    assert job.phase is Phase.RUNNING
    commands = job.on(NodeMessage("b", Inspected(1, (hang(1, waits=False),))), 100.2)
    assert RecordEvent(HangDiagnosed(1, (1,), DIAGNOSIS)) in commands
    restart = f"{DIAGNOSIS}; infrastructure restart 1 of 3 in 3600 s"
    assert RecordEvent(BudgetCharged(1, "infrastructure", 1, 3, True, restart)) in commands
    assert assigned(commands) == {"a": 0, "b": 1}


def test_a_hang_on_a_single_node_ends_its_round_at_once() -> None:
    job = running("a", restarts=0)
    assert assigned(receive(job, "a", Failed(1, (hang(0), hang(1, waits=False))), 100.0)) == {"a": 0}


def test_a_diagnosis_does_not_wait_for_a_node_that_reports_the_hang_itself() -> None:
    job = running("a", "b", restarts=0)
    receive(job, "a", Failed(1, (hang(0),)), 100.0)
    assert assigned(receive(job, "b", Failed(1, (hang(1),)), 100.1)) == {"a": 0, "b": 1}
    assert job.restarts.used == 1


def test_a_new_coordinator_queries_only_nodes_that_have_not_reported_the_hang() -> None:
    job = new_job(3, 3)
    of_round = {name: place(1, rank, 3) for rank, name in enumerate("abc")}
    receive(job, "a", join(job, "a", held=of_round["a"], newest=1, status=Status.RUNNING), 0.0)
    sent = {"status": Status.FAILED, "failures": (hang(1),)}
    receive(job, "b", join(job, "b", held=of_round["b"], newest=1, **sent), 0.1)
    commands = receive(job, "c", join(job, "c", held=of_round["c"], newest=1, status=Status.RUNNING), 0.2)
    assert commands == [Send("a", Inspect(1)), Send("c", Inspect(1))]
    receive(job, "a", Inspected(1, (hang(0),)), 0.3)
    assert job.phase is Phase.RUNNING
    receive(job, "c", Inspected(1, (hang(2, waits=False),)), 0.4)
    assert "rank 2 is in load_batch" in job.status(0.4).why


def test_a_diagnosis_ends_at_its_timeout() -> None:
    job = running("a", "b", restarts=0)
    receive(job, "a", Failed(1, (hang(0),)), 10.0)
    assert job.deadline() == 10.0 + DIAGNOSIS_TIMEOUT_S
    assert on(job, Tick(), 10.0 + DIAGNOSIS_TIMEOUT_S - 0.01) == []
    assert assigned(on(job, Tick(), 10.0 + DIAGNOSIS_TIMEOUT_S)) == {"a": 0, "b": 1}


def test_a_crash_during_a_diagnosis_is_a_failure_as_usual() -> None:
    job = running("a", "b", restarts=0)
    receive(job, "a", Failed(1, (hang(0),)), 100.0)
    commands = receive(job, "b", Failed(1, (crash(1),)), 100.1)
    assert [c.message.why for c in commands if isinstance(c, Send) and isinstance(c.message, Closing)] == [
        "rank 1 on host exited with code 1; no restart is allowed (--max-restarts=0)"
    ] * 2


def test_a_spent_infrastructure_budget_fails_the_job_and_names_the_suspect() -> None:
    job = Job(JobSettings("job7", 2, 2, TIMING, Budget(5, max_infra_restarts=0)))
    for name in ("a", "b"):
        job.on(NodeMessage(name, join(job, name)), 0.0)
    receive(job, "a", Failed(1, (hang(0),)), 100.0)
    commands = receive(job, "b", Inspected(1, (hang(1, waits=False),)), 100.1)
    why = f"{DIAGNOSIS}; no infrastructure restart is allowed (--max-infra-restarts=0)"
    assert commands == [Send(name, Closing(why)) for name in ("a", "b")]


def test_a_diagnosis_of_another_round_is_ignored() -> None:
    job = running("a", "b", restarts=0)
    receive(job, "a", Failed(1, (hang(0),)), 100.0)
    assert receive(job, "b", Inspected(7, (hang(1),)), 100.1) == []


def test_a_diagnosis_skips_a_node_that_succeeded() -> None:
    job = running("a", "b", restarts=0)
    receive(job, "b", Succeeded(1), 50.0)
    assert assigned(receive(job, "a", Failed(1, (hang(0),)), 100.0)) == {"a": 0, "b": 1}
