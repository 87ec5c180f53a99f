"""What the agent's state machine (`machine.py`) tells people and probes about its node.  Pure."""

from typing import TYPE_CHECKING

from ripstop.agent.machine_state import WorkersState

if TYPE_CHECKING:
    from ripstop.agent.machine import Agent


def status_of_unready_machine(agent: "Agent") -> str:
    """Why this node cannot work for its job now; "" while its workers run or could start immediately."""
    if agent.is_leaving():
        return "the node is leaving, or the job is over"
    if agent.state is WorkersState.RUNNING:
        return ""
    if not agent.is_warm:
        return "the node is warming up"
    if not agent.is_connected:
        return f"the node has no coordinator: {agent.connection_error or 'not found yet'}"
    if agent.passed_health_check:
        return ""
    problems = "; ".join(agent.problem_texts())
    return f"the node is unhealthy: {problems}" if problems else "the first health check is not complete"


def status_when_machine_gives_up(agent: "Agent", timeout: float) -> str:
    """Why the agent gives up after it could not reach a coordinator for this time."""
    error = agent.connection_error
    if agent.was_connected:
        return f"no coordinator for {timeout:g} s while the node needed one ({error}); raise coordinator_timeout"
    return f"no coordinator for {timeout:g} s ({error}); check that its node is up and that the job is not over"
