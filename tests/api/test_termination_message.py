import json

from ripstop.api.termination_message import MAX_BYTES, termination_message
from ripstop.model.failure import Failure, JobEnd
from ripstop.model.round import Outcome

FAILURE = Failure(3, 1, 2, "host-b", 5.0, exitcode=7, message="no such file")


def test_an_agent_that_leaves_reports_it() -> None:
    assert json.loads(termination_message("SIGTERM", None)) == {"outcome": "left", "why": "SIGTERM"}


def test_the_message_has_the_outcome_and_the_culprit() -> None:
    report = JobEnd("job", Outcome.FAILED, "the budget is spent", 4, 3, (FAILURE,))
    assert json.loads(termination_message("", report)) == {
        "outcome": "failed",
        "why": "the budget is spent",
        "rounds": 4,
        "restarts": 3,
        "culprit": "rank 3 on host-b exited with code 7: no such file",
    }


def test_the_message_is_shortened_to_what_kubernetes_keeps() -> None:
    report = JobEnd("job", Outcome.FAILED, "é" * 9000, 4, 3, (FAILURE,))
    message = termination_message("", report)
    assert len(message.encode()) <= MAX_BYTES
    assert json.loads(message)["why"].endswith("é…")
