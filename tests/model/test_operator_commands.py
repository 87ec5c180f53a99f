"""What operators may want of a job, and what it says to that."""

import pytest
from msgspec.structs import replace

from ripstop.model.operator_commands import (
    DrainNode,
    OperatorCommand,
    RestartRound,
    ScaleJob,
    StopJob,
    rejection_reason,
)
from ripstop.model.status import JobStatus, NodeState, NodeStatus, Phase

NODES = tuple(NodeStatus(name, f"host-{name}", 1, "default", NodeState.RUNNING) for name in "abc")
RUNNING = JobStatus("job7", Phase.RUNNING, "first round", 1.0, 1, 3, 0, 3, 2, 4, 4, NODES)

WISHES = [RestartRound("x"), DrainNode("a", "x"), ScaleJob(3), StopJob("x")]
each_wish = pytest.mark.parametrize("wish", WISHES, ids=lambda wish: type(wish).__name__)


@each_wish
def test_a_running_job_grants_what_can_be(wish: OperatorCommand) -> None:
    assert rejection_reason(wish, RUNNING) == ""


@each_wish
@pytest.mark.parametrize("phase", [Phase.CLOSING, Phase.CLOSED])
def test_a_job_that_ends_grants_nothing(wish: OperatorCommand, phase: Phase) -> None:
    assert rejection_reason(wish, replace(RUNNING, phase=phase)).startswith(f"the job is {phase}")


def test_a_job_between_rounds_has_nothing_to_restart_and_grants_the_rest() -> None:
    gathering = replace(RUNNING, phase=Phase.GATHERING)
    assert [bool(rejection_reason(wish, gathering)) for wish in WISHES] == [True, False, False, False]


def test_who_is_leaving_already_is_not_counted_when_another_is_drained() -> None:
    leaving = (replace(NODES[0], state=NodeState.LEAVING), *NODES[1:])
    why = rejection_reason(DrainNode("b", "x"), replace(RUNNING, nodes=leaving))
    assert why == "the job needs 2 nodes, and without b it has 1; stop the job, or add a node first"


def test_a_node_that_is_not_there_is_not_drained() -> None:
    assert rejection_reason(DrainNode("z", "x"), RUNNING) == "no node z is part of the job; `status` lists them"


@pytest.mark.parametrize("nodes", [1, 5])
def test_a_size_beyond_the_jobs_bounds_is_refused(nodes: int) -> None:
    assert rejection_reason(ScaleJob(nodes), RUNNING).startswith(f"the job runs on 2 to 4 nodes, not on {nodes}; ")
