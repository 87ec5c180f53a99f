"""One node's decisions as transcripts: an event and its time go in, commands come out."""

from msgspec.structs import replace

from ripstop.agent.health.assessment import HealthProblem
from ripstop.agent.machine import (
    FAREWELL,
    HUSH,
    Agent,
    AgentCommand,
    AgentInput,
    AgentSettings,
    CoordinatorConnected,
    CoordinatorLost,
    CoordinatorMessage,
    ExitAgent,
    HealthChecked,
    InspectWorkers,
    LogLine,
    OpenStorePort,
    SendToCoordinator,
    Signalled,
    StartWorkers,
    StopWorkers,
    StorePortReady,
    Tick,
    WarmupDone,
    WorkersFailed,
    WorkersFinished,
    WorkersGone,
    WorkersInspected,
    WorkersState,
)
from ripstop.model.config import Timing
from ripstop.model.failure import Failure, JobReport
from ripstop.model.round import Address, Node, Outcome, Place
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
LOST = HealthProblem("gpu 3", "GPU 3: NVML says: GPU is lost")


def on(agent: Agent, event: AgentInput, now: float = 0.0) -> list[AgentCommand]:
    """What the agent does, without what it says to its operator."""
    return [command for command in agent.on(event, now) if not isinstance(command, LogLine)]


def place(round: int, rank: int = 1, restarts: int = 0) -> Place:
    store = Address("host-b", 9000) if rank else Address("host-a", 7001)
    return Place(round, rank, 2, rank * 2, 4, 2, rank * 2, 4, store, restarts)


def assign(round: int, rank: int = 1) -> CoordinatorMessage:
    return CoordinatorMessage(Assign(place(round, rank), "because"))


def failure(round: int = 1) -> Failure:
    return Failure(2, 0, round, "host-a", 5.0, exitcode=1)


def closed(outcome: Outcome) -> CoordinatorMessage:
    return CoordinatorMessage(Closed(JobReport("job7", outcome, "because", 1, 0)))


def join(**state: object) -> SendToCoordinator:
    return SendToCoordinator(Join(NODE, 1, 4, **state))  # type: ignore[arg-type]


def new_agent() -> Agent:
    """Healthy."""
    agent = Agent(AgentSettings(NODE, 1, 4, TIMING))
    agent.on(HealthChecked(()), 0.0)
    return agent


def ready_agent() -> Agent:
    """Linked, warm, its port 7001 offered."""
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


# joining --------------------------------------------------------------------------------------------------------------


def test_an_agent_joins_as_soon_as_it_is_linked() -> None:
    assert on(new_agent(), CoordinatorConnected("host-a")) == [join()]


def test_a_node_learns_its_address_from_the_link() -> None:
    agent = Agent(AgentSettings(Node("a", "", 2), 1, 4, TIMING))
    agent.on(HealthChecked(()), 0.0)
    assert on(agent, WarmupDone()) == []
    assert on(agent, CoordinatorConnected("10.0.0.7")) == [
        SendToCoordinator(Join(Node("a", "10.0.0.7", 2), 1, 4)),
        OpenStorePort(),
    ]


def test_an_address_that_was_given_is_kept() -> None:
    agent = new_agent()
    on(agent, CoordinatorConnected("10.0.0.7"))
    assert agent.node.host == "host-a"


def test_a_warm_node_offers_a_port_and_says_it_is_ready() -> None:
    agent = new_agent()
    on(agent, CoordinatorConnected("host-a"))
    assert on(agent, WarmupDone()) == [OpenStorePort()]
    assert on(agent, StorePortReady(7001)) == [SendToCoordinator(Ready(7001, after=0))]


def test_a_node_that_is_ready_before_it_is_linked_joins_ready() -> None:
    agent = new_agent()
    assert on(agent, WarmupDone()) == [OpenStorePort()]
    assert on(agent, StorePortReady(7001)) == []
    assert on(agent, CoordinatorConnected("host-a")) == [join(ready=Ready(7001, 0))]


def test_a_port_is_asked_for_once() -> None:
    agent = new_agent()
    assert on(agent, WarmupDone()) == [OpenStorePort()]
    assert on(agent, CoordinatorConnected("host-a")) == [join()]


# rule 1: one group ----------------------------------------------------------------------------------------------------


def test_a_node_that_is_sent_away_stops_its_workers_and_ends_well() -> None:
    agent = running_agent()
    assert on(agent, CoordinatorMessage(Drain("drained"))) == [
        SendToCoordinator(Leaving("drained")),
        StopWorkers(1, 15, 30.0, "drained"),
    ]
    assert on(agent, assign(2)) == []
    assert on(agent, WorkersGone(1)) == [SendToCoordinator(Left("drained")), ExitAgent(0, "drained")]


def test_an_idle_agent_starts_its_round_at_once() -> None:
    assert on(ready_agent(), assign(1)) == [StartWorkers(place(1), "because")]


def test_the_next_round_starts_when_the_workers_of_the_last_are_gone() -> None:
    agent = running_agent()
    assert on(agent, assign(2)) == [StopWorkers(1, 15, 30.0, "because")]
    assert on(agent, WorkersGone(1)) == [StartWorkers(place(2), "because")]


def test_of_two_rounds_that_come_while_stopping_only_the_newest_starts() -> None:
    agent = running_agent()
    on(agent, assign(2))
    assert on(agent, assign(3)) == []
    assert on(agent, WorkersGone(1)) == [StartWorkers(place(3), "because")]


def test_the_host_of_the_store_offers_the_next_port_when_it_starts() -> None:
    agent = ready_agent()
    assert on(agent, assign(1, rank=0)) == [StartWorkers(place(1, 0), "because"), OpenStorePort()]
    assert on(agent, StorePortReady(7002)) == [SendToCoordinator(Ready(7002, after=1))]


def test_a_promised_port_is_not_replaced_before_its_round_starts() -> None:
    agent = running_agent()
    assert on(agent, assign(2, rank=0)) == [StopWorkers(1, 15, 30.0, "because")]
    assert on(agent, CoordinatorLost("reset")) == []
    assert on(agent, CoordinatorConnected("host-a")) == [join(newest=2, held=place(2, 0), status=Status.RUNNING)]
    assert on(agent, WorkersGone(1)) == [StartWorkers(place(2, 0), "because"), OpenStorePort()]


def test_a_promised_port_is_replaced_when_its_round_is_over_before_it_started() -> None:
    agent = running_agent()
    on(agent, assign(2, rank=0))
    assert on(agent, CoordinatorMessage(StandBy(2, "wait"))) == [OpenStorePort()]
    assert on(agent, StorePortReady(7002)) == [SendToCoordinator(Ready(7002, after=2))]


# rule 2: only newer ---------------------------------------------------------------------------------------------------


def test_an_assignment_that_comes_twice_starts_once() -> None:
    agent = running_agent()
    assert on(agent, assign(1)) == []


def test_an_older_assignment_is_not_started() -> None:
    agent = running_agent(round=3)
    assert on(agent, assign(2)) == []


def test_a_hold_stops_the_workers_of_its_round() -> None:
    agent = running_agent()
    assert on(agent, CoordinatorMessage(StandBy(1, "wait"))) == [StopWorkers(1, 15, 30.0, "wait")]
    assert on(agent, WorkersGone(1)) == []
    assert agent.state is WorkersState.IDLE


def test_a_hold_of_an_older_round_stops_nothing() -> None:
    assert on(running_agent(round=3), CoordinatorMessage(StandBy(2, "wait"))) == []


def test_an_assignment_overtaken_by_its_hold_is_not_started() -> None:
    agent = ready_agent()
    on(agent, CoordinatorMessage(StandBy(1, "wait")))
    assert on(agent, assign(1)) == []
    assert on(agent, assign(2)) == [StartWorkers(place(2), "because")]


def test_the_port_of_a_round_that_was_overtaken_by_its_hold_is_replaced() -> None:
    agent = ready_agent()
    on(agent, CoordinatorMessage(StandBy(1, "wait")))
    assert on(agent, assign(1, rank=0)) == [OpenStorePort()]
    assert on(agent, StorePortReady(7002)) == [SendToCoordinator(Ready(7002, after=1))]


def test_a_hold_takes_back_a_round_that_has_not_started() -> None:
    agent = running_agent()
    on(agent, assign(2))
    on(agent, CoordinatorMessage(StandBy(2, "wait")))
    assert on(agent, WorkersGone(1)) == []


def test_events_of_workers_long_gone_change_nothing() -> None:
    agent = running_agent(round=3)
    for event in (WorkersFailed(2, (failure(2),)), WorkersFinished(2), WorkersGone(2), WorkersGone(3)):
        assert on(agent, event) == []
    assert agent.state is WorkersState.RUNNING


def test_a_round_whose_store_is_on_a_port_that_was_replaced_is_not_started() -> None:
    agent = ready_agent()
    on(agent, CoordinatorLost("reset"))
    on(agent, StorePortReady(7002))
    on(agent, CoordinatorConnected("host-a"))
    assert on(agent, assign(1, rank=0)) == []  # decided before the coordinator had read the Join
    assert agent.state is WorkersState.IDLE


# rule 3: tell, do not act ---------------------------------------------------------------------------------------------


def test_a_failure_is_told_and_nothing_else_is_done() -> None:
    assert on(running_agent(), WorkersFailed(1, (failure(),))) == [SendToCoordinator(Failed(1, (failure(),)))]


def test_success_is_told_and_the_agent_waits_for_the_word() -> None:
    agent = running_agent()
    assert on(agent, WorkersFinished(1)) == [SendToCoordinator(Succeeded(1))]
    assert agent.state is WorkersState.SUCCEEDED


def test_what_could_not_be_told_is_in_the_next_join() -> None:
    agent = running_agent()
    on(agent, CoordinatorLost("reset"))
    on(agent, StorePortReady(7002))
    assert on(agent, WorkersFailed(1, (failure(),))) == []
    assert on(agent, CoordinatorConnected("host-a")) == [
        join(newest=1, ready=Ready(7002, 1), held=place(1), status=Status.FAILED, failures=(failure(),))
    ]


def test_a_join_tells_of_success() -> None:
    agent = running_agent()
    on(agent, CoordinatorLost("reset"))
    on(agent, WorkersFinished(1))
    assert on(agent, CoordinatorConnected("host-a")) == [join(newest=1, held=place(1), status=Status.SUCCEEDED)]


def test_a_join_tells_how_many_failures_were_healed_even_without_workers() -> None:
    agent = ready_agent()
    on(agent, CoordinatorMessage(Assign(place(4, restarts=3), "because")))
    on(agent, CoordinatorMessage(StandBy(4, "wait")))
    on(agent, WorkersGone(4))
    on(agent, CoordinatorLost("reset"))
    assert on(agent, CoordinatorConnected("host-a")) == [join(newest=4, restarts=3)]


def test_an_unused_offer_is_replaced_when_the_link_breaks() -> None:
    agent = ready_agent()
    assert on(agent, CoordinatorLost("reset")) == [OpenStorePort()]
    assert on(agent, StorePortReady(7002)) == []
    assert on(agent, CoordinatorConnected("host-a")) == [join(ready=Ready(7002, 0))]


def test_a_link_that_never_was_replaces_no_offer() -> None:
    agent = new_agent()
    on(agent, WarmupDone())
    on(agent, StorePortReady(7001))
    assert on(agent, CoordinatorLost("connection refused")) == []
    assert on(agent, CoordinatorConnected("host-a")) == [join(ready=Ready(7001, 0))]


# rule 4: the coordinator is away --------------------------------------------------------------------------------------


def test_healthy_workers_go_on_without_a_coordinator() -> None:
    agent = running_agent()
    agent.on(CoordinatorLost("reset"), 10.0)
    assert agent.deadline() is None
    assert on(agent, Tick(), 10_000.0) == []


def test_an_agent_that_never_finds_a_coordinator_gives_up() -> None:
    agent = new_agent()
    agent.on(CoordinatorLost("node0:29400: connection refused"), 1.0)
    agent.on(Tick(), HUSH)
    assert agent.deadline() == 100.0
    assert on(agent, Tick(), 99.9) == []
    assert on(agent, Tick(), 100.0) == [
        ExitAgent(
            1,
            "no coordinator for 100 s (node0:29400: connection refused); is its node up, and the job not over?",
        )
    ]


def test_an_agent_that_waits_for_a_coordinator_says_so_once() -> None:
    agent = new_agent()
    agent.on(CoordinatorLost("node0:29400: connection refused"), 1.0)
    assert agent.deadline() == HUSH
    said = "waiting for the coordinator, 100 s at most (node0:29400: connection refused)"
    assert agent.on(Tick(), HUSH) == [LogLine(said)]
    assert agent.on(Tick(), 2 * HUSH) == []


def test_a_node_that_finished_alone_does_not_fail_for_want_of_a_coordinator() -> None:
    agent = ready_agent()
    agent.on(CoordinatorMessage(Assign(replace(place(1, rank=0), group_size=1), "first round")), 1.0)
    agent.on(CoordinatorLost("reset"), 10.0)
    agent.on(WorkersFinished(1), 20.0)
    assert agent.deadline() == 20.0 + FAREWELL
    assert [type(c) for c in on(agent, Tick(), 20.0 + FAREWELL)] == [StopWorkers]
    assert [c.code for c in on(agent, WorkersGone(1), 26.0) if isinstance(c, ExitAgent)] == [0]


def test_a_job_that_was_closing_ends_soon_without_its_coordinator() -> None:
    agent = running_agent()
    agent.on(CoordinatorMessage(Closing("rank 3 failed")), 5.0)
    agent.on(WorkersGone(1), 6.0)
    agent.on(CoordinatorLost("reset"), 7.0)
    assert agent.deadline() == 7.0 + FAREWELL
    assert on(agent, Tick(), 7.0 + FAREWELL) == [ExitAgent(1, "rank 3 failed")]


def test_an_agent_whose_workers_failed_needs_a_coordinator_and_stops_them_when_it_gives_up() -> None:
    agent = running_agent()
    agent.on(CoordinatorLost("reset"), 10.0)
    agent.on(WorkersFailed(1, (failure(),)), 20.0)
    agent.on(Tick(), 20.0 + HUSH)
    assert agent.deadline() == 70.0
    why = "no coordinator for 50 s while one was needed (reset); raise coordinator_timeout"
    assert on(agent, Tick(), 70.0) == [StopWorkers(1, 15, 30.0, why)]
    assert on(agent, WorkersGone(1), 71.0) == [ExitAgent(1, why)]


def test_a_coordinator_found_again_ends_the_waiting() -> None:
    agent = ready_agent()
    agent.on(CoordinatorLost("reset"), 10.0)
    assert agent.deadline() == 10.0 + HUSH
    agent.on(CoordinatorConnected("host-a"), 20.0)
    assert agent.deadline() is None


# rule 5: signals ------------------------------------------------------------------------------------------------------


def test_a_signal_stops_the_workers_with_it_and_the_agent_leaves() -> None:
    agent = running_agent()
    assert on(agent, Signalled(2)) == [SendToCoordinator(Leaving("SIGINT")), StopWorkers(1, 2, 30.0, "SIGINT")]
    assert on(agent, WorkersGone(1)) == [SendToCoordinator(Left("SIGINT")), ExitAgent(130, "SIGINT")]


def test_an_idle_agent_leaves_at_once() -> None:
    assert on(ready_agent(), Signalled(15)) == [
        SendToCoordinator(Leaving("SIGTERM")),
        SendToCoordinator(Left("SIGTERM")),
        ExitAgent(143, "SIGTERM"),
    ]


def test_a_second_signal_means_now() -> None:
    agent = running_agent()
    on(agent, Signalled(15))
    assert on(agent, Signalled(15)) == [StopWorkers(1, 15, 0.0, "second signal")]


def test_a_leaving_agent_starts_no_other_round() -> None:
    agent = running_agent()
    on(agent, assign(2))
    on(agent, Signalled(15))
    assert on(agent, assign(3)) == []
    assert on(agent, WorkersGone(1)) == [SendToCoordinator(Left("SIGTERM")), ExitAgent(143, "SIGTERM")]


def test_a_leaving_agent_says_so_over_a_new_connection_and_does_not_offer_itself() -> None:
    agent = running_agent()
    on(agent, Signalled(15))
    assert on(agent, CoordinatorLost("reset")) == []
    assert on(agent, CoordinatorConnected("host-a")) == [join(newest=1), SendToCoordinator(Leaving("SIGTERM"))]


# the end --------------------------------------------------------------------------------------------------------------


def test_the_jobs_success_ends_the_agent_with_zero() -> None:
    agent = running_agent()
    on(agent, WorkersFinished(1))
    report = JobReport("job7", Outcome.SUCCEEDED, "because", 1, 0)
    assert on(agent, closed(Outcome.SUCCEEDED)) == [StopWorkers(1, 15, 30.0, "because")]
    assert on(agent, WorkersGone(1)) == [SendToCoordinator(Left("because")), ExitAgent(0, "because", report)]


def test_a_node_without_a_place_in_a_job_that_succeeds_says_that_it_ran_nothing() -> None:
    report = JobReport("job7", Outcome.SUCCEEDED, "because", 1, 0)
    why = "job=job7 had ended (because) before this node had a place in it: this node ran no worker"
    end = [LogLine(why, warning=True), SendToCoordinator(Left("because")), ExitAgent(0, "because", report)]
    assert ready_agent().on(closed(Outcome.SUCCEEDED), 5.0) == end


def test_the_jobs_failure_ends_the_agent_with_one() -> None:
    report = JobReport("job7", Outcome.FAILED, "because", 1, 0)
    assert on(ready_agent(), closed(Outcome.FAILED)) == [
        SendToCoordinator(Left("because")),
        ExitAgent(1, "because", report),
    ]


def test_a_closing_job_stops_the_workers_and_tells_how_they_died() -> None:
    agent = running_agent()
    assert on(agent, CoordinatorMessage(Closing("over"))) == [StopWorkers(1, 15, 30.0, "over")]
    assert on(agent, WorkersFailed(1, (failure(),))) == []
    assert on(agent, WorkersGone(1)) == [SendToCoordinator(Stopped((failure(),)))]


def test_an_idle_agent_answers_a_closing_job_at_once() -> None:
    assert on(ready_agent(), CoordinatorMessage(Closing("over"))) == [SendToCoordinator(Stopped())]


def test_a_closing_job_starts_nothing() -> None:
    agent = running_agent()
    on(agent, assign(2))
    on(agent, CoordinatorMessage(Closing("over")))
    assert on(agent, assign(3)) == []
    assert on(agent, WorkersGone(1)) == [SendToCoordinator(Stopped())]


def test_a_closing_job_is_remembered_for_the_next_coordinator() -> None:
    agent = ready_agent()
    on(agent, CoordinatorMessage(Closing("over", Outcome.STOPPED)))
    on(agent, CoordinatorLost("reset"))
    (told,) = on(agent, CoordinatorConnected("host-a"))
    assert told == join(closing=Closing("over", Outcome.STOPPED))


def test_a_refusal_ends_the_agent_with_two() -> None:
    assert on(ready_agent(), CoordinatorMessage(Rejected("not you"))) == [
        SendToCoordinator(Left("not you")),
        ExitAgent(2, "not you"),
    ]


def test_a_signal_shows_in_the_exit_code_even_when_the_job_fails_meanwhile() -> None:
    agent = running_agent()
    on(agent, Signalled(15))
    on(agent, closed(Outcome.FAILED))
    assert on(agent, WorkersGone(1))[-1] == ExitAgent(
        143, "because", JobReport("job7", Outcome.FAILED, "because", 1, 0)
    )


def test_nothing_happens_after_the_end() -> None:
    agent = ready_agent()
    on(agent, Signalled(15))
    for event in (
        assign(9),
        CoordinatorMessage(Heartbeat()),
        CoordinatorConnected("x"),
        CoordinatorLost("x"),
        Signalled(15),
        Tick(),
        StorePortReady(1),
    ):
        assert agent.on(event, 99.0) == []
    assert agent.deadline() is None


# health ---------------------------------------------------------------------------------------------------------------


def unchecked_agent() -> Agent:
    """Linked and warm; nobody has looked at its health yet."""
    agent = Agent(AgentSettings(NODE, 1, 4, TIMING))
    agent.on(CoordinatorConnected("host-a"), 0.0)
    agent.on(WarmupDone(), 0.0)
    return agent


def test_nothing_is_offered_before_the_node_was_found_healthy() -> None:
    agent = unchecked_agent()
    assert not agent.admitted
    assert on(agent, HealthChecked(()), 1.0) == [OpenStorePort()]
    assert on(agent, StorePortReady(7001), 1.0) == [SendToCoordinator(Ready(7001, 0))]


def test_an_unhealthy_node_says_so_once_and_is_ready_when_it_is_mended() -> None:
    agent = unchecked_agent()
    said = agent.on(HealthChecked((FULL,)), 1.0)
    assert said == [
        LogLine(f"unhealthy: {FULL.words}; not ready for the job until that is mended, 100 s at most"),
        SendToCoordinator(Problems((FULL.words,))),
    ]
    assert agent.on(HealthChecked((FULLER,)), 31.0) == []
    assert agent.on(HealthChecked(()), 61.0) == [
        LogLine("healthy again"),
        SendToCoordinator(Problems()),
        OpenStorePort(),
    ]


def test_another_problem_is_told_too() -> None:
    agent = running_agent()
    on(agent, HealthChecked((FULL,)), 2.0)
    assert on(agent, HealthChecked((FULL, LOST)), 32.0) == [SendToCoordinator(Problems((FULL.words, LOST.words)))]


def test_a_node_that_is_never_healthy_gives_up_after_the_join_timeout_and_says_why() -> None:
    agent = unchecked_agent()
    agent.on(HealthChecked((FULL,)), 5.0)
    assert agent.deadline() == 105.0
    agent.on(HealthChecked((FULLER,)), 95.0)
    assert on(agent, Tick(), 105.0) == [
        SendToCoordinator(Left(f"unhealthy for 100 s: {FULLER.words}")),
        ExitAgent(1, f"unhealthy for 100 s: {FULLER.words}"),
    ]


def test_a_node_that_was_healthy_once_never_gives_up_for_its_health() -> None:
    agent = running_agent()
    assert on(agent, HealthChecked((FULL,)), 5.0) == [SendToCoordinator(Problems((FULL.words,)))]
    assert agent.deadline() is None
    assert agent.state is WorkersState.RUNNING


def test_a_join_tells_the_problems_too() -> None:
    agent = running_agent()
    on(agent, CoordinatorLost("gone"), 5.0)
    assert on(agent, HealthChecked((LOST,)), 6.0) == []
    (told,) = (
        command for command in on(agent, CoordinatorConnected("host-a"), 7.0) if isinstance(command, SendToCoordinator)
    )
    assert isinstance(told.message, Join)
    assert told.message.problems == (LOST.words,)


# hangs ----------------------------------------------------------------------------------------------------------------


def test_an_agent_that_is_asked_looks_at_its_workers_and_tells() -> None:
    agent = running_agent()
    assert on(agent, CoordinatorMessage(Inspect(1))) == [InspectWorkers(1)]
    assert on(agent, WorkersInspected(1, (failure(),))) == [SendToCoordinator(Inspected(1, (failure(),)))]
    assert agent.state is WorkersState.RUNNING  # looking changes nothing


def test_an_agent_without_such_workers_has_nothing_to_tell() -> None:
    agent = running_agent()
    assert on(agent, CoordinatorMessage(Inspect(2))) == [SendToCoordinator(Inspected(2))]


# probes ---------------------------------------------------------------------------------------------------------------


def test_a_node_is_of_use_when_it_is_warm_and_linked_or_trains() -> None:
    agent = Agent(AgentSettings(NODE, 2, 2, TIMING))
    assert agent.unready() == "it is warming up"
    on(agent, WarmupDone())
    on(agent, CoordinatorLost("host-b:29400: connection refused"))
    assert agent.unready() == "it has no coordinator: host-b:29400: connection refused"
    on(agent, CoordinatorConnected("host-a"))
    assert agent.unready() == "its health is being looked at"
    on(agent, HealthChecked((FULL,)))
    assert agent.unready() == f"it is unhealthy: {FULL.words}"
    on(agent, HealthChecked(()))
    assert agent.unready() == ""
    on(agent, StorePortReady(7001))
    on(agent, assign(1))
    on(agent, CoordinatorLost("gone"))
    assert agent.unready() == "", "healthy workers go on"
    on(agent, Signalled(15))
    assert agent.unready() == "it is leaving, or the job is over"
