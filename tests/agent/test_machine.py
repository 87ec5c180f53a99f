"""The agent's decisions as transcripts: each input and its time, and the commands that follow."""

import pytest
from msgspec.structs import replace

from ripstop.agent.activity import Activity, ActivityKind, node_activity
from ripstop.agent.health.assessment import HealthProblem
from ripstop.agent.machine import FINAL_REPORT_TIMEOUT_S, WAIT_LOG_DELAY_S, Agent
from ripstop.agent.machine_io import (
    AgentCommand,
    AgentInput,
    CoordinatorConnected,
    CoordinatorLost,
    CoordinatorMessage,
    ExitAgent,
    FinalCommitDone,
    FirstCommit,
    HealthChecked,
    InspectWorkers,
    LogLine,
    MakeFinalCommit,
    OpenStorePort,
    PreemptionNoticed,
    ReformWorkers,
    ReplaceWorkers,
    SendToCoordinator,
    SignalReceived,
    StartWorkers,
    StateLost,
    StopWorkers,
    StorePortReady,
    Tick,
    WarmupDone,
    WorkerLeft,
    WorkerLostPeer,
    WorkerReformed,
    WorkerRegistered,
    WorkersFailed,
    WorkersInspected,
    WorkersStopped,
    WorkersSucceeded,
    WorkersUnkillable,
)
from ripstop.agent.machine_state import AgentSettings, WorkersState
from ripstop.agent.machine_status import status_of_unready_machine
from ripstop.model.config import Timing
from ripstop.model.failure import Failure, JobEnd
from ripstop.model.round import Address, Node, Outcome, Place
from ripstop.model.text_formatting import signal_name
from ripstop.protocol import messages
from ripstop.protocol.messages import (
    Assign,
    Closed,
    Closing,
    Drain,
    Failed,
    Heartbeat,
    Inspect,
    Inspected,
    Join,
    Leaving,
    Left,
    Problems,
    Ready,
    Rejected,
    StandBy,
    Status,
    Stopped,
    Succeeded,
)

TIMING = Timing(join=100.0, coordinator=50.0, shutdown=30.0)
NODE = Node("a", "host-a", 2)
FULL = HealthProblem("disk logs", "/logs (logs) needs 32 MiB free and has 3 MiB")
FULLER = HealthProblem("disk logs", "/logs (logs) needs 32 MiB free and has 2 MiB")
LOST = HealthProblem("gpu 3", "GPU 3: NVML reports: GPU is lost")


def on(agent: Agent, event: AgentInput, now: float = 0.0) -> list[AgentCommand]:
    """The agent's commands without log lines."""
    return [command for command in agent.on(event, now) if not isinstance(command, LogLine)]


def place(round: int, rank: int = 1, restarts: int = 0) -> Place:
    store = Address("host-b", 9000) if rank else Address("host-a", 7001)
    return Place(round, rank, 2, rank * 2, 4, 2, rank * 2, 4, store, restarts)


def assign(round: int, rank: int = 1) -> CoordinatorMessage:
    return CoordinatorMessage(Assign(place(round, rank), "because"))


def failure(round: int = 1) -> Failure:
    return Failure(2, 0, round, "host-a", 5.0, exitcode=1)


def closed(outcome: Outcome) -> CoordinatorMessage:
    return CoordinatorMessage(Closed(JobEnd("job7", outcome, "because", 1, 0)))


def join(**state: object) -> SendToCoordinator:
    return SendToCoordinator(Join(NODE, 1, 4, **state))  # type: ignore[arg-type]


def new_agent() -> Agent:
    """Healthy."""
    agent = Agent(AgentSettings(NODE, 1, 4, TIMING))
    agent.on(HealthChecked(()), 0.0)
    return agent


def ready_agent() -> Agent:
    """Connected and warm; it has offered port 7001."""
    agent = new_agent()
    agent.on(CoordinatorConnected("host-a"), 0.0)
    agent.on(WarmupDone(), 0.0)
    agent.on(StorePortReady(7001), 0.0)
    return agent


def running_agent(round: int = 1, rank: int = 1) -> Agent:
    agent = ready_agent()
    agent.on(assign(round, rank), 1.0)
    assert agent.state is WorkersState.RUNNING
    return agent


# activity -------------------------------------------------------------------------------------------------------------


def test_the_activity_of_a_node_from_its_start_to_its_end() -> None:
    agent = Agent(AgentSettings(NODE, 1, 4, TIMING))
    assert node_activity(agent).kind is ActivityKind.WARMING_UP
    agent.on(WarmupDone(), 0.0)
    assert node_activity(agent) == Activity(ActivityKind.CONNECTING, limit=100.0)
    agent.on(CoordinatorConnected("host-a"), 0.0)
    agent.on(HealthChecked((FULL,)), 0.0)
    assert node_activity(agent) == Activity(ActivityKind.UNHEALTHY, FULL.text, 100.0)
    agent.on(HealthChecked(()), 0.0)
    assert node_activity(agent) == Activity(ActivityKind.WAITING)
    agent.on(CoordinatorMessage(StandBy(0, "1 of 2")), 0.0)
    assert node_activity(agent) == Activity(ActivityKind.WAITING, "1 of 2")
    agent.on(assign(1), 1.0)
    assert node_activity(agent) == Activity(ActivityKind.TRAINING, round=1)
    agent.on(assign(2), 2.0)
    assert node_activity(agent) == Activity(ActivityKind.STOPPING, limit=30.0, round=1)
    agent.on(WorkersStopped(1), 3.0)
    assert node_activity(agent) == Activity(ActivityKind.TRAINING, round=2)
    agent.on(WorkersSucceeded(2), 4.0)
    assert node_activity(agent).kind is ActivityKind.CLOSING


# joining --------------------------------------------------------------------------------------------------------------


def test_an_agent_joins_as_soon_as_it_is_connected() -> None:
    assert on(new_agent(), CoordinatorConnected("host-a")) == [join()]


def test_a_node_learns_its_address_from_the_link() -> None:
    agent = Agent(AgentSettings(Node("a", "", 2), 1, 4, TIMING))
    agent.on(HealthChecked(()), 0.0)
    assert on(agent, WarmupDone()) == []
    assert on(agent, CoordinatorConnected("10.0.0.7")) == [
        SendToCoordinator(Join(Node("a", "10.0.0.7", 2), 1, 4)),
        OpenStorePort(is_required=True),
    ]


def test_a_configured_address_is_kept() -> None:
    agent = new_agent()
    on(agent, CoordinatorConnected("10.0.0.7"))
    assert agent.node.host == "host-a"


def test_a_warm_node_offers_a_port_and_reports_ready() -> None:
    agent = new_agent()
    on(agent, CoordinatorConnected("host-a"))
    assert on(agent, WarmupDone()) == [OpenStorePort(is_required=True)]
    assert on(agent, StorePortReady(7001)) == [SendToCoordinator(Ready(7001, after=0))]


def test_a_node_that_is_ready_before_it_is_connected_joins_ready() -> None:
    agent = new_agent()
    assert on(agent, WarmupDone()) == [OpenStorePort(is_required=True)]
    assert on(agent, StorePortReady(7001)) == []
    assert on(agent, CoordinatorConnected("host-a")) == [join(ready=Ready(7001, 0))]


def test_a_port_is_opened_once() -> None:
    agent = new_agent()
    assert on(agent, WarmupDone()) == [OpenStorePort(is_required=True)]
    assert on(agent, CoordinatorConnected("host-a")) == [join()]


# rule 1: one group ----------------------------------------------------------------------------------------------------


def test_a_drained_node_stops_its_workers_and_exits_0() -> None:
    agent = running_agent()
    assert on(agent, CoordinatorMessage(Drain("drained"))) == [
        SendToCoordinator(Leaving("drained")),
        StopWorkers(1, 15, 30.0, "drained"),
    ]
    assert on(agent, assign(2)) == []
    assert on(agent, WorkersStopped(1)) == [SendToCoordinator(Left("drained")), ExitAgent(0, "drained")]


def test_an_idle_agent_starts_its_round_immediately() -> None:
    assert on(ready_agent(), assign(1)) == [StartWorkers(place(1), "because")]


def test_the_next_round_starts_when_the_old_workers_have_stopped() -> None:
    agent = running_agent()
    assert on(agent, assign(2)) == [StopWorkers(1, 15, 30.0, "because")]
    assert on(agent, WorkersStopped(1)) == [StartWorkers(place(2), "because")]


def test_of_two_rounds_assigned_while_stopping_only_the_newest_starts() -> None:
    agent = running_agent()
    on(agent, assign(2))
    assert on(agent, assign(3)) == []
    assert on(agent, WorkersStopped(1)) == [StartWorkers(place(3), "because")]


def test_the_host_of_the_store_offers_the_next_port_when_it_starts() -> None:
    agent = ready_agent()
    assert on(agent, assign(1, rank=0)) == [StartWorkers(place(1, 0), "because"), OpenStorePort()]
    assert on(agent, StorePortReady(7002)) == [SendToCoordinator(Ready(7002, after=1))]


def test_a_promised_port_is_not_replaced_before_its_round_starts() -> None:
    agent = running_agent()
    assert on(agent, assign(2, rank=0)) == [StopWorkers(1, 15, 30.0, "because")]
    assert on(agent, CoordinatorLost("reset")) == []
    assert on(agent, CoordinatorConnected("host-a")) == [join(newest=2, held=place(2, 0), status=Status.RUNNING)]
    assert on(agent, WorkersStopped(1)) == [StartWorkers(place(2, 0), "because"), OpenStorePort()]


def test_a_promised_port_is_replaced_when_its_round_ends_before_it_starts() -> None:
    agent = running_agent()
    on(agent, assign(2, rank=0))
    assert on(agent, CoordinatorMessage(StandBy(2, "wait"))) == [OpenStorePort()]
    assert on(agent, StorePortReady(7002)) == [SendToCoordinator(Ready(7002, after=2))]


# rule 7: a port that the user fixed ----------------------------------------------------------------------------------


def fixed_port_agent() -> Agent:
    """Healthy and connected; the user fixed port 7001."""
    agent = Agent(AgentSettings(NODE, 1, 4, TIMING, store_port=7001))
    agent.on(HealthChecked(()), 0.0)
    agent.on(CoordinatorConnected("host-a"), 0.0)
    return agent


def test_a_fixed_port_is_opened_once_and_offered_again_over_a_new_connection() -> None:
    agent = fixed_port_agent()
    assert on(agent, WarmupDone()) == [OpenStorePort(7001, is_required=True)]
    assert on(agent, StorePortReady(7001)) == [SendToCoordinator(Ready(7001, after=0))]
    assert on(agent, CoordinatorLost("reset")) == []
    assert on(agent, CoordinatorConnected("host-a")) == [join(ready=Ready(7001, 0))]


def test_a_fixed_port_is_offered_for_the_next_round_without_opening_it() -> None:
    agent = fixed_port_agent()
    on(agent, WarmupDone())
    on(agent, StorePortReady(7001))
    assert on(agent, assign(1, rank=0)) == [
        StartWorkers(place(1, 0), "because"),
        SendToCoordinator(Ready(7001, after=1)),
    ]


def test_only_a_node_that_never_ran_workers_requires_its_port() -> None:
    agent = ready_agent()
    assert on(agent, assign(1, rank=0))[-1] == OpenStorePort(is_required=False)


# rule 2: only newer ---------------------------------------------------------------------------------------------------


def test_an_assignment_that_arrives_twice_starts_once() -> None:
    agent = running_agent()
    assert on(agent, assign(1)) == []


def test_an_older_assignment_is_not_started() -> None:
    agent = running_agent(round=3)
    assert on(agent, assign(2)) == []


def test_a_stand_by_stops_the_workers_of_its_round() -> None:
    agent = running_agent()
    assert on(agent, CoordinatorMessage(StandBy(1, "wait"))) == [StopWorkers(1, 15, 30.0, "wait")]
    assert on(agent, WorkersStopped(1)) == []
    assert agent.state is WorkersState.IDLE


def test_a_stand_by_of_an_older_round_stops_nothing() -> None:
    assert on(running_agent(round=3), CoordinatorMessage(StandBy(2, "wait"))) == []


def test_an_assignment_that_arrives_after_its_stand_by_is_not_started() -> None:
    agent = ready_agent()
    on(agent, CoordinatorMessage(StandBy(1, "wait")))
    assert on(agent, assign(1)) == []
    assert on(agent, assign(2)) == [StartWorkers(place(2), "because")]


def test_the_port_of_an_assignment_that_arrives_after_its_stand_by_is_replaced() -> None:
    agent = ready_agent()
    on(agent, CoordinatorMessage(StandBy(1, "wait")))
    assert on(agent, assign(1, rank=0)) == [OpenStorePort(is_required=True)]
    assert on(agent, StorePortReady(7002)) == [SendToCoordinator(Ready(7002, after=1))]


def test_a_stand_by_cancels_a_round_that_has_not_started() -> None:
    agent = running_agent()
    on(agent, assign(2))
    on(agent, CoordinatorMessage(StandBy(2, "wait")))
    assert on(agent, WorkersStopped(1)) == []


def test_inputs_about_older_workers_change_nothing() -> None:
    agent = running_agent(round=3)
    for event in (WorkersFailed(2, (failure(2),)), WorkersSucceeded(2), WorkersStopped(2), WorkersStopped(3)):
        assert on(agent, event) == []
    assert agent.state is WorkersState.RUNNING


def test_a_round_whose_store_port_was_replaced_is_not_started() -> None:
    agent = ready_agent()
    on(agent, CoordinatorLost("reset"))
    on(agent, StorePortReady(7002))
    on(agent, CoordinatorConnected("host-a"))
    assert on(agent, assign(1, rank=0)) == []  # the coordinator formed it before it read the Join
    assert agent.state is WorkersState.IDLE


# rule 3: report, do not act -------------------------------------------------------------------------------------------


def test_a_failure_is_only_reported() -> None:
    assert on(running_agent(), WorkersFailed(1, (failure(),))) == [SendToCoordinator(Failed(1, (failure(),)))]


def test_success_is_reported_and_the_agent_waits_for_the_coordinator() -> None:
    agent = running_agent()
    assert on(agent, WorkersSucceeded(1)) == [SendToCoordinator(Succeeded(1))]
    assert agent.state is WorkersState.SUCCEEDED


def test_the_next_join_has_a_failure_that_could_not_be_sent() -> None:
    agent = running_agent()
    on(agent, CoordinatorLost("reset"))
    on(agent, StorePortReady(7002))
    assert on(agent, WorkersFailed(1, (failure(),))) == []
    assert on(agent, CoordinatorConnected("host-a")) == [
        join(newest=1, ready=Ready(7002, 1), held=place(1), status=Status.FAILED, failures=(failure(),))
    ]


def test_a_join_reports_success() -> None:
    agent = running_agent()
    on(agent, CoordinatorLost("reset"))
    on(agent, WorkersSucceeded(1))
    assert on(agent, CoordinatorConnected("host-a")) == [join(newest=1, held=place(1), status=Status.SUCCEEDED)]


def test_a_join_has_the_restart_count_even_without_workers() -> None:
    agent = ready_agent()
    on(agent, CoordinatorMessage(Assign(place(4, restarts=3), "because")))
    on(agent, CoordinatorMessage(StandBy(4, "wait")))
    on(agent, WorkersStopped(4))
    on(agent, CoordinatorLost("reset"))
    assert on(agent, CoordinatorConnected("host-a")) == [join(newest=4, restarts=3)]


def test_an_unused_offer_is_replaced_when_the_connection_breaks() -> None:
    agent = ready_agent()
    assert on(agent, CoordinatorLost("reset")) == [OpenStorePort(is_required=True)]
    assert on(agent, StorePortReady(7002)) == []
    assert on(agent, CoordinatorConnected("host-a")) == [join(ready=Ready(7002, 0))]


def test_a_connection_attempt_that_fails_replaces_no_offer() -> None:
    agent = new_agent()
    on(agent, WarmupDone())
    on(agent, StorePortReady(7001))
    assert on(agent, CoordinatorLost("connection refused")) == []
    assert on(agent, CoordinatorConnected("host-a")) == [join(ready=Ready(7001, 0))]


# rule 4: unreachable coordinator --------------------------------------------------------------------------------------


def test_healthy_workers_continue_without_a_coordinator() -> None:
    agent = running_agent()
    agent.on(CoordinatorLost("reset"), 10.0)
    assert agent.deadline() is None
    assert on(agent, Tick(), 10_000.0) == []


def test_an_agent_that_never_finds_a_coordinator_gives_up() -> None:
    agent = new_agent()
    agent.on(CoordinatorLost("node0:29400: connection refused"), 1.0)
    agent.on(Tick(), WAIT_LOG_DELAY_S)
    assert agent.deadline() == 100.0
    assert on(agent, Tick(), 99.9) == []
    assert on(agent, Tick(), 100.0) == [
        ExitAgent(
            1,
            "no coordinator for 100 s (node0:29400: connection refused); "
            "check that its node is up and that the job is not over",
        )
    ]


def test_a_wait_for_the_coordinator_is_logged_once() -> None:
    agent = new_agent()
    agent.on(CoordinatorLost("node0:29400: connection refused"), 1.0)
    assert agent.deadline() == WAIT_LOG_DELAY_S
    line = "waiting for the coordinator, at most 100 s (node0:29400: connection refused)"
    assert agent.on(Tick(), WAIT_LOG_DELAY_S) == [LogLine(line)]
    assert agent.on(Tick(), 2 * WAIT_LOG_DELAY_S) == []


def test_a_node_that_succeeded_alone_exits_0_without_a_coordinator() -> None:
    agent = ready_agent()
    agent.on(CoordinatorMessage(Assign(replace(place(1, rank=0), group_size=1), "first round")), 1.0)
    agent.on(CoordinatorLost("reset"), 10.0)
    agent.on(WorkersSucceeded(1), 20.0)
    assert agent.deadline() == 20.0 + FINAL_REPORT_TIMEOUT_S
    assert [type(c) for c in on(agent, Tick(), 20.0 + FINAL_REPORT_TIMEOUT_S)] == [StopWorkers]
    assert [c.code for c in on(agent, WorkersStopped(1), 26.0) if isinstance(c, ExitAgent)] == [0]


def test_an_agent_of_a_closing_job_ends_soon_without_its_coordinator() -> None:
    agent = running_agent()
    agent.on(CoordinatorMessage(Closing("rank 3 failed")), 5.0)
    agent.on(WorkersStopped(1), 6.0)
    agent.on(CoordinatorLost("reset"), 7.0)
    assert agent.deadline() == 7.0 + FINAL_REPORT_TIMEOUT_S
    assert on(agent, Tick(), 7.0 + FINAL_REPORT_TIMEOUT_S) == [ExitAgent(1, "rank 3 failed")]


def test_an_agent_whose_workers_failed_needs_a_coordinator_and_stops_them_when_it_gives_up() -> None:
    agent = running_agent()
    agent.on(CoordinatorLost("reset"), 10.0)
    agent.on(WorkersFailed(1, (failure(),)), 20.0)
    agent.on(Tick(), 20.0 + WAIT_LOG_DELAY_S)
    assert agent.deadline() == 70.0
    why = "no coordinator for 50 s while the node needed one (reset); raise coordinator_timeout"
    assert on(agent, Tick(), 70.0) == [StopWorkers(1, 15, 30.0, why)]
    assert on(agent, WorkersStopped(1), 71.0) == [ExitAgent(1, why)]


def test_a_reconnect_ends_the_wait_for_the_coordinator() -> None:
    agent = ready_agent()
    agent.on(CoordinatorLost("reset"), 10.0)
    assert agent.deadline() == 10.0 + WAIT_LOG_DELAY_S
    agent.on(CoordinatorConnected("host-a"), 20.0)
    assert agent.deadline() is None


# rule 5: signals ------------------------------------------------------------------------------------------------------


def test_a_signal_stops_the_workers_with_it_and_the_agent_leaves() -> None:
    agent = running_agent()
    assert on(agent, SignalReceived(2)) == [SendToCoordinator(Leaving("SIGINT")), StopWorkers(1, 2, 30.0, "SIGINT")]
    assert on(agent, WorkersStopped(1)) == [SendToCoordinator(Left("SIGINT")), ExitAgent(130, "SIGINT")]


def test_an_idle_agent_leaves_immediately() -> None:
    assert on(ready_agent(), SignalReceived(15)) == [
        SendToCoordinator(Leaving("SIGTERM")),
        SendToCoordinator(Left("SIGTERM")),
        ExitAgent(143, "SIGTERM"),
    ]


def test_a_second_signal_kills_the_workers() -> None:
    agent = running_agent()
    on(agent, SignalReceived(15), 10.0)
    assert on(agent, SignalReceived(15), 11.0) == [StopWorkers(1, 15, 0.0, "second signal")]


def test_the_same_signal_again_at_once_is_the_same_request() -> None:
    agent = running_agent()
    on(agent, SignalReceived(15), 10.0)
    assert on(agent, SignalReceived(15), 10.1) == []
    assert on(agent, SignalReceived(2), 10.1) == [StopWorkers(1, 2, 0.0, "second signal")]


def agent_with_state() -> Agent:
    agent = running_agent()
    on(agent, FirstCommit(1))
    return agent


LEAVES = SendToCoordinator(Leaving("SIGTERM", is_planned=True))


def test_workers_with_a_state_make_a_final_commit_before_the_agent_leaves() -> None:
    agent = agent_with_state()
    assert on(agent, SignalReceived(15), 5.0) == [LEAVES]
    assert on(agent, CoordinatorMessage(messages.MakeFinalCommit(1))) == [MakeFinalCommit(1)]
    made = (messages.FinalCommit("state", 7),)
    assert on(agent, FinalCommitDone(1, made)) == [SendToCoordinator(messages.FinalCommitMade(1, made))]
    assert on(agent, CoordinatorMessage(StandBy(1, "spare"))) == [StopWorkers(1, 15, 30.0, "spare")]
    assert on(agent, WorkersStopped(1)) == [SendToCoordinator(Left("SIGTERM")), ExitAgent(143, "SIGTERM")]


def test_a_final_commit_has_a_deadline() -> None:
    agent = agent_with_state()
    on(agent, SignalReceived(15), 5.0)
    assert agent.deadline() == 25.0
    log, stop = agent.on(Tick(), 25.0)
    assert isinstance(log, LogLine) and log.is_warning and log.text.endswith("leaving without it")
    assert isinstance(stop, StopWorkers) and stop.grace == 30.0
    assert agent.deadline() is None


def test_a_second_signal_ends_the_wait_for_a_final_commit() -> None:
    agent = agent_with_state()
    on(agent, SignalReceived(15), 5.0)
    stop = StopWorkers(1, 15, 30.0, "SIGTERM")
    assert on(agent, SignalReceived(15), 6.0) == [SendToCoordinator(Leaving("SIGTERM")), stop]
    assert on(agent, SignalReceived(15), 7.0) == [StopWorkers(1, 15, 0.0, "second signal")]


@pytest.mark.parametrize("signum", [2, 3])
def test_a_signal_from_a_terminal_waits_for_no_commit(signum: int) -> None:
    assert StopWorkers(1, signum, 30.0, signal_name(signum)) in on(agent_with_state(), SignalReceived(signum), 5.0)


def test_a_state_of_an_earlier_round_makes_no_final_commit() -> None:
    agent = agent_with_state()
    on(agent, assign(2))
    on(agent, WorkersStopped(1))
    assert StopWorkers(2, 15, 30.0, "SIGTERM") in on(agent, SignalReceived(15), 5.0)


def test_a_drain_and_a_preemption_notice_are_planned_departures_too() -> None:
    agent = agent_with_state()
    assert on(agent, CoordinatorMessage(Drain("drained"))) == [SendToCoordinator(Leaving("drained", is_planned=True))]
    on(agent, CoordinatorMessage(StandBy(1, "spare")))
    assert on(agent, WorkersStopped(1)) == [SendToCoordinator(Left("drained")), ExitAgent(0, "drained")]
    agent = agent_with_state()
    (leaving,) = on(agent, PreemptionNoticed("/run/notice"))
    assert leaving == SendToCoordinator(Leaving("preemption notice in /run/notice", is_planned=True))
    assert on(agent, PreemptionNoticed("/run/notice")) == []


def test_a_leaving_agent_starts_no_other_round() -> None:
    agent = running_agent()
    on(agent, assign(2))
    on(agent, SignalReceived(15))
    assert on(agent, assign(3)) == []
    assert on(agent, WorkersStopped(1)) == [SendToCoordinator(Left("SIGTERM")), ExitAgent(143, "SIGTERM")]


def test_a_leaving_agent_reports_that_over_a_new_connection_and_makes_no_offer() -> None:
    agent = running_agent()
    on(agent, SignalReceived(15))
    assert on(agent, CoordinatorLost("reset")) == []
    assert on(agent, CoordinatorConnected("host-a")) == [join(newest=1), SendToCoordinator(Leaving("SIGTERM"))]


# the end --------------------------------------------------------------------------------------------------------------


def test_the_agent_of_a_successful_job_exits_0() -> None:
    agent = running_agent()
    on(agent, WorkersSucceeded(1))
    report = JobEnd("job7", Outcome.SUCCEEDED, "because", 1, 0)
    assert on(agent, closed(Outcome.SUCCEEDED)) == [StopWorkers(1, 15, 30.0, "because")]
    assert on(agent, WorkersStopped(1)) == [SendToCoordinator(Left("because")), ExitAgent(0, "because", report)]


def test_a_node_without_a_place_in_a_successful_job_warns_that_it_ran_no_worker() -> None:
    report = JobEnd("job7", Outcome.SUCCEEDED, "because", 1, 0)
    why = "job=job7 ended (because) before this node got a place: this node ran no worker"
    end = [LogLine(why, is_warning=True), SendToCoordinator(Left("because")), ExitAgent(0, "because", report)]
    assert ready_agent().on(closed(Outcome.SUCCEEDED), 5.0) == end


def test_the_agent_of_a_failed_job_exits_1() -> None:
    report = JobEnd("job7", Outcome.FAILED, "because", 1, 0)
    assert on(ready_agent(), closed(Outcome.FAILED)) == [
        SendToCoordinator(Left("because")),
        ExitAgent(1, "because", report),
    ]


def test_a_closing_job_stops_the_workers_and_reports_their_failures() -> None:
    agent = running_agent()
    assert on(agent, CoordinatorMessage(Closing("over"))) == [StopWorkers(1, 15, 30.0, "over")]
    assert on(agent, WorkersFailed(1, (failure(),))) == []
    assert on(agent, WorkersStopped(1)) == [SendToCoordinator(Stopped((failure(),)))]


def test_an_idle_agent_of_a_closing_job_reports_stopped_immediately() -> None:
    assert on(ready_agent(), CoordinatorMessage(Closing("over"))) == [SendToCoordinator(Stopped())]


def test_a_closing_job_starts_nothing() -> None:
    agent = running_agent()
    on(agent, assign(2))
    on(agent, CoordinatorMessage(Closing("over")))
    assert on(agent, assign(3)) == []
    assert on(agent, WorkersStopped(1)) == [SendToCoordinator(Stopped())]


def test_a_join_reports_to_a_new_coordinator_that_the_job_is_closing() -> None:
    agent = ready_agent()
    on(agent, CoordinatorMessage(Closing("over", Outcome.STOPPED)))
    on(agent, CoordinatorLost("reset"))
    (sent,) = on(agent, CoordinatorConnected("host-a"))
    assert sent == join(closing=Closing("over", Outcome.STOPPED))


def test_a_rejected_agent_exits_2() -> None:
    assert on(ready_agent(), CoordinatorMessage(Rejected("not you"))) == [
        SendToCoordinator(Left("not you")),
        ExitAgent(2, "not you"),
    ]


def test_a_signal_determines_the_exit_code_even_if_the_job_fails_meanwhile() -> None:
    agent = running_agent()
    on(agent, SignalReceived(15))
    on(agent, closed(Outcome.FAILED))
    assert on(agent, WorkersStopped(1))[-1] == ExitAgent(
        143, "because", JobEnd("job7", Outcome.FAILED, "because", 1, 0)
    )


def test_nothing_happens_after_the_end() -> None:
    agent = ready_agent()
    on(agent, SignalReceived(15))
    for event in (
        assign(9),
        CoordinatorMessage(Heartbeat()),
        CoordinatorConnected("x"),
        CoordinatorLost("x"),
        SignalReceived(15),
        Tick(),
        StorePortReady(1),
    ):
        assert agent.on(event, 99.0) == []
    assert agent.deadline() is None


# health ---------------------------------------------------------------------------------------------------------------


def unchecked_agent() -> Agent:
    """Connected and warm; no health check is complete."""
    agent = Agent(AgentSettings(NODE, 1, 4, TIMING))
    agent.on(CoordinatorConnected("host-a"), 0.0)
    agent.on(WarmupDone(), 0.0)
    return agent


def test_a_node_offers_nothing_before_its_first_passed_health_check() -> None:
    agent = unchecked_agent()
    assert not agent.passed_health_check
    assert on(agent, HealthChecked(()), 1.0) == [OpenStorePort(is_required=True)]
    assert on(agent, StorePortReady(7001), 1.0) == [SendToCoordinator(Ready(7001, 0))]


def test_an_unhealthy_node_reports_that_once_and_is_ready_after_recovery() -> None:
    agent = unchecked_agent()
    commands = agent.on(HealthChecked((FULL,)), 1.0)
    assert commands == [
        LogLine(f"unhealthy: {FULL.text}; waiting at most 100 s for recovery before joining"),
        SendToCoordinator(Problems((FULL.text,), version=1)),
    ]
    assert agent.on(HealthChecked((FULLER,)), 31.0) == []
    assert agent.on(HealthChecked(()), 61.0) == [
        LogLine("healthy again"),
        SendToCoordinator(Problems(version=2)),
        OpenStorePort(is_required=True),
    ]


def test_a_new_problem_is_reported() -> None:
    agent = running_agent()
    on(agent, HealthChecked((FULL,)), 2.0)
    assert on(agent, HealthChecked((FULL, LOST)), 32.0) == [
        SendToCoordinator(Problems((FULL.text, LOST.text), version=2))
    ]


def test_a_node_that_is_never_healthy_gives_up_after_the_join_timeout() -> None:
    agent = unchecked_agent()
    agent.on(HealthChecked((FULL,)), 5.0)
    assert agent.deadline() == 105.0
    agent.on(HealthChecked((FULLER,)), 95.0)
    assert on(agent, Tick(), 105.0) == [
        SendToCoordinator(Left(f"unhealthy for 100 s: {FULLER.text}")),
        ExitAgent(1, f"unhealthy for 100 s: {FULLER.text}"),
    ]


def test_a_node_that_was_healthy_once_never_gives_up_because_of_its_health() -> None:
    agent = running_agent()
    assert on(agent, HealthChecked((FULL,)), 5.0) == [SendToCoordinator(Problems((FULL.text,), version=1))]
    assert agent.deadline() is None
    assert agent.state is WorkersState.RUNNING


def test_a_join_has_the_health_problems() -> None:
    agent = running_agent()
    on(agent, CoordinatorLost("reset"), 5.0)
    assert on(agent, HealthChecked((LOST,)), 6.0) == []
    (sent,) = (
        command for command in on(agent, CoordinatorConnected("host-a"), 7.0) if isinstance(command, SendToCoordinator)
    )
    assert isinstance(sent.message, Join)
    assert sent.message.problems == (LOST.text,)


# hangs ----------------------------------------------------------------------------------------------------------------


def test_an_agent_inspects_its_workers_on_request() -> None:
    agent = running_agent()
    assert on(agent, CoordinatorMessage(Inspect(1))) == [InspectWorkers(1)]
    assert on(agent, WorkersInspected(1, (failure(),))) == [SendToCoordinator(Inspected(1, (failure(),)))]
    assert agent.state is WorkersState.RUNNING  # an inspection changes nothing


def test_an_agent_without_workers_of_the_round_reports_an_empty_inspection() -> None:
    agent = running_agent()
    assert on(agent, CoordinatorMessage(Inspect(2))) == [SendToCoordinator(Inspected(2))]


# probes ---------------------------------------------------------------------------------------------------------------


def test_a_node_is_ready_when_it_is_warm_connected_and_healthy_or_its_workers_run() -> None:
    agent = Agent(AgentSettings(NODE, 2, 2, TIMING))
    assert status_of_unready_machine(agent) == "the node is warming up"
    on(agent, WarmupDone())
    on(agent, CoordinatorLost("host-b:29400: connection refused"))
    assert status_of_unready_machine(agent) == "the node has no coordinator: host-b:29400: connection refused"
    on(agent, CoordinatorConnected("host-a"))
    assert status_of_unready_machine(agent) == "the first health check is not complete"
    on(agent, HealthChecked((FULL,)))
    assert status_of_unready_machine(agent) == f"the node is unhealthy: {FULL.text}"
    on(agent, HealthChecked(()))
    assert status_of_unready_machine(agent) == ""
    on(agent, StorePortReady(7001))
    on(agent, assign(1))
    on(agent, CoordinatorLost("reset"))
    assert status_of_unready_machine(agent) == "", "healthy workers continue"
    on(agent, SignalReceived(15))
    assert status_of_unready_machine(agent) == "the node is leaving, or the job is over"


# workers that go on in place ------------------------------------------------------------------------------------------


def elastic_agent(*local_ranks: int) -> Agent:
    agent = running_agent()
    for rank in local_ranks:
        agent.on(WorkerRegistered(1, rank), 1.0)
    return agent


def test_workers_that_registered_go_on_in_the_next_round_unless_they_failed() -> None:
    agent = elastic_agent(0, 1)
    agent.on(WorkersFailed(1, (failure(),)), 5.0)
    assert on(agent, assign(2), 6.0) == [ReformWorkers(place(2), "because", (1,), 30.0)]
    assert (agent.state, agent.place, agent.deadline()) == (WorkersState.RUNNING, place(2), 11.0)
    assert on(agent, WorkerReformed(2, 1), 7.0) == []
    assert agent.deadline() is None


def test_a_worker_that_has_lost_a_peer_is_reported_while_its_round_runs() -> None:
    agent = elastic_agent(0, 1)
    assert on(agent, WorkerLostPeer(1), 5.0) == [SendToCoordinator(messages.PeerLost(1))]
    agent.on(assign(2), 6.0)
    assert on(agent, WorkerLostPeer(1), 6.1) == []
    agent.on(WorkersFailed(2, (failure(2),)), 7.0)
    assert on(agent, WorkerLostPeer(2), 7.1) == []  # the coordinator knows of the failure


def test_a_lost_state_is_reported_to_every_coordinator_until_the_round_is_replaced() -> None:
    agent, report = elastic_agent(0, 1), SendToCoordinator(messages.StateLost(1, "rank 0 has no commit"))
    agent.on(CoordinatorLost("gone"), 5.0)
    assert on(agent, StateLost(1, "rank 0 has no commit"), 5.1) == []
    for now in (6.0, 7.0):
        assert report in agent.on(CoordinatorConnected("host"), now)
        agent.on(CoordinatorLost("gone"), now)
    agent.on(CoordinatorConnected("host"), 8.0)
    agent.on(assign(2), 8.0)
    agent.on(CoordinatorLost("gone"), 9.0)
    assert report not in agent.on(CoordinatorConnected("host"), 9.0)


def test_workers_of_a_node_without_a_fault_all_go_on() -> None:
    assert on(elastic_agent(0, 1), assign(2), 6.0) == [ReformWorkers(place(2), "because", (0, 1), 30.0)]


def test_without_a_worker_that_can_go_on_all_are_replaced() -> None:
    agent = elastic_agent(0)
    agent.on(WorkersFailed(1, (failure(),)), 5.0)
    assert on(agent, assign(2), 6.0) == [StopWorkers(1, 15, 30.0, "because")]
    left = elastic_agent(1)
    left.on(WorkerLeft(1, 1), 2.0)
    assert on(left, assign(2), 6.0) == [StopWorkers(1, 15, 30.0, "because")]


def test_a_worker_that_does_not_leave_its_last_round_in_time_is_replaced_in_the_new_one() -> None:
    agent = elastic_agent(0, 1)
    agent.on(assign(2), 6.0)
    agent.on(WorkerReformed(2, 0), 6.1)
    assert on(agent, WorkerReformed(1, 1), 6.2) == []  # of an earlier round
    assert on(agent, Tick(), 10.9) == []
    assert on(agent, Tick(), 11.0) == [ReplaceWorkers(2, (1,))]
    assert on(agent, assign(3), 12.0) == [ReformWorkers(place(3), "because", (0,), 30.0)]


def test_a_worker_that_exits_before_it_has_entered_the_new_round_is_replaced_at_once() -> None:
    agent = elastic_agent(0, 1)
    agent.on(assign(2), 6.0)
    assert on(agent, WorkerLeft(2, 1, has_exited=True), 6.1) == [ReplaceWorkers(2, (1,))]
    assert on(agent, WorkerLeft(2, 1, has_exited=True), 6.2) == []


def test_a_node_without_a_place_stops_its_workers() -> None:
    agent = elastic_agent(0, 1)
    assert on(agent, CoordinatorMessage(StandBy(1, "too few nodes")), 6.0) == [
        StopWorkers(1, 15, 30.0, "too few nodes")
    ]
    assert on(agent, assign(2), 6.1) == []
    assert on(agent, WorkersStopped(1), 6.2) == [StartWorkers(place(2), "because")]


# rule 9: a worker that SIGKILL does not end ---------------------------------------------------------------------------


def test_a_node_with_a_worker_that_cannot_be_killed_leaves_the_job() -> None:
    agent = running_agent()
    on(agent, assign(2))
    assert on(agent, WorkersUnkillable(1, "pid=7 hangs")) == [
        SendToCoordinator(Left("pid=7 hangs")),
        ExitAgent(1, "pid=7 hangs"),
    ]


def test_a_node_leaves_also_if_the_worker_was_to_be_replaced_in_its_round() -> None:
    assert on(running_agent(), WorkersUnkillable(1, "pid=7 hangs"))[-1] == ExitAgent(1, "pid=7 hangs")


def test_a_signalled_agent_does_not_wait_for_a_worker_that_cannot_be_killed() -> None:
    agent = running_agent()
    on(agent, SignalReceived(15))
    assert on(agent, WorkersUnkillable(1, "pid=7 hangs"))[-1] == ExitAgent(143, "pid=7 hangs")


def test_at_the_end_of_a_job_a_worker_that_cannot_be_killed_counts_as_stopped() -> None:
    agent = running_agent()
    on(agent, CoordinatorMessage(Closing(Outcome.FAILED, "too many restarts")))
    assert agent.on(WorkersUnkillable(1, "pid=7 hangs"), 0.0) == [
        LogLine("pid=7 hangs", is_warning=True),
        SendToCoordinator(Stopped()),
    ]
    assert on(agent, closed(Outcome.FAILED))[-1].code == 1  # type: ignore[union-attr]
