"""What `ripstop run` leaves at its end is what the operator reads."""

from typing import Any

import pytest
from msgspec.structs import replace

from ripstop.api.termination_message import termination_message
from ripstop.kubernetes.manifests import Owner
from ripstop.kubernetes.pods import Pod
from ripstop.kubernetes.reconcile import CreatePod, Decision, DeletePod, ElasticJob, Emit, decide_reconciliation
from ripstop.model.failure import Failure, JobEnd
from ripstop.model.round import Outcome

NOW = 1_800_000_000.0
SPEC = {
    "maxReplicas": 2,
    "replicas": 2,
    "template": {"spec": {"containers": [{"name": "main", "image": "x:1"}]}},
}
CULPRIT = Failure(3, 1, 2, "host-b", 5.0, exitcode=7, message="no such file")


def after(word: str, code: int) -> Decision:
    """What is decided when the pod of slot 1 has ended with this word."""
    running = Pod("train-0", 0, "uid-0", "Running", NOW, ready=True)
    phase = "Succeeded" if code == 0 else "Failed"
    over = Pod("train-1", 1, "uid-1", phase, NOW - 100, exit_code=code, finished=NOW, message=word)
    return decide_reconciliation(ElasticJob(Owner("train", "ml", "u-1"), SPEC, {}), [running, over], NOW)


@pytest.mark.parametrize(
    ("outcome", "failures", "phase", "text"),
    [
        (Outcome.SUCCEEDED, (), "Succeeded", None),
        (Outcome.FAILED, (), "Failed", "the budget is spent"),
        (
            Outcome.FAILED,
            (CULPRIT,),
            "Failed",
            "the budget is spent; rank 3 on host-b exited with code 7: no such file",
        ),
    ],
)
def test_the_jobs_end_is_the_elastic_jobs(outcome: Outcome, failures: Any, phase: str, text: str | None) -> None:
    report = JobEnd("job", outcome, "the budget is spent", 4, 3, failures)
    decision = after(termination_message("", report), int(outcome is Outcome.FAILED))
    assert (decision.status["phase"], decision.status.get("lastFailure")) == (phase, text)


@pytest.mark.parametrize("message", ["no such file", "exited with code 7"])
def test_the_culprit_is_named_once_and_with_its_last_line(message: str) -> None:
    culprit = replace(CULPRIT, message=message, log_tail=("a line", "no such file", ""))
    why = "rank 3 on host-b exited with code 7; 3 of 3 restarts are used"
    decision = after(termination_message("", JobEnd("job", Outcome.FAILED, why, 4, 3, (culprit,))), 1)
    assert decision.status["lastFailure"] == (
        "rank 3 on host-b exited with code 7: no such file; 3 of 3 restarts are used"
    )
    assert decision.status["restarts"] == 3


@pytest.mark.parametrize(("why", "code"), [("SIGTERM", 143), ("no coordinator for 600 s", 1), ("sent away", 0)])
def test_an_agent_that_left_is_replaced_and_ends_nothing(why: str, code: int) -> None:
    decision = after(termination_message(why, None), code)
    assert "completionTime" not in decision.status
    assert any(isinstance(action, DeletePod | CreatePod) for action in decision.actions)
    said = "".join(action.text for action in decision.actions if isinstance(action, Emit))
    assert "{" not in said, "a person reads it"
