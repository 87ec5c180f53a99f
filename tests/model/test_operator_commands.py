"""When a job accepts and rejects operator commands."""

import pytest
from msgspec.structs import replace

from ripstop.model.operator_commands import (
    DrainNode,
    OperatorCommand,
    RestartRound,
    ScaleJob,
    StopJob,
    operator_command_rejection,
)
from ripstop.model.status import JobStatus, NodeState, NodeStatus, Phase

NODES = tuple(NodeStatus(name, f"host-{name}", 1, "default", NodeState.RUNNING) for name in "abc")
RUNNING = JobStatus("job7", Phase.RUNNING, "first round", 1.0, 1, 3, 0, 3, 2, 4, 4, NODES)

COMMANDS = [RestartRound("x"), DrainNode("a", "x"), ScaleJob(3), StopJob("x")]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)


@each_command
def test_a_running_job_accepts_commands(command: OperatorCommand) -> None:
    assert operator_command_rejection(command, RUNNING) == ""


@each_command
@pytest.mark.parametrize("phase", [Phase.CLOSING, Phase.CLOSED])
def test_a_job_that_is_ending_rejects_commands(command: OperatorCommand, phase: Phase) -> None:
    assert operator_command_rejection(command, replace(RUNNING, phase=phase)).startswith(f"the job is {phase}")


def test_a_job_between_rounds_rejects_only_a_restart() -> None:
    gathering = replace(RUNNING, phase=Phase.GATHERING)
    assert [bool(operator_command_rejection(command, gathering)) for command in COMMANDS] == [True, False, False, False]


def test_a_leaving_node_does_not_count_when_another_is_drained() -> None:
    leaving = (replace(NODES[0], state=NodeState.LEAVING), *NODES[1:])
    why = operator_command_rejection(DrainNode("b", "x"), replace(RUNNING, nodes=leaving))
    assert why == "the job needs 2 nodes, and without b it has 1; stop the job, or add a node first"


def test_an_unknown_node_cannot_be_drained() -> None:
    assert (
        operator_command_rejection(DrainNode("z", "x"), RUNNING) == "no node z is part of the job; `status` lists them"
    )


@pytest.mark.parametrize("nodes", [1, 5])
def test_a_target_outside_min_and_max_nodes_is_rejected(nodes: int) -> None:
    assert operator_command_rejection(ScaleJob(nodes), RUNNING).startswith(
        f"the job runs on 2 to 4 nodes, not on {nodes}; "
    )
