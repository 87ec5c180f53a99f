"""The termination message: how the job ended, in a file that Kubernetes reads when the agent has exited.  Pure.

One JSON object of at most `MAX_BYTES`, which Kubernetes keeps: `outcome` (`succeeded`, `failed` or `stopped` for the
job; `left` if this agent ended and the job may continue), `why`, `rounds`, `restarts`, and `culprit` if a worker
failed: its rank and host, how it ended, and its message or its last line on stderr.
"""

import json

from ripstop.diagnostics.failure_ranking import root_cause
from ripstop.model.failure import Failure, JobEnd, failure_in_short

MAX_BYTES = 4096
LEFT = "left"


def termination_message(why: str, report: JobEnd | None) -> str:
    """The message; its texts are shortened until it fits."""
    message: dict[str, str | int] = {"outcome": LEFT, "why": why}
    if report is not None:
        message = {
            "outcome": report.outcome.value,
            "why": report.why,
            "rounds": report.rounds,
            "restarts": report.restarts,
        }
        if (culprit := root_cause(report.failures)) is not None:
            worker = f"rank {culprit.rank} on {culprit.host} {failure_in_short(culprit)}"
            message["culprit"] = ": ".join(filter(None, (worker, _termination_message_of_culprit(culprit))))
    max_characters = MAX_BYTES
    while (
        len(text := json.dumps(_shortened_termination_message(message, max_characters))) > MAX_BYTES
    ):  # ASCII: a character is a byte
        max_characters //= 2
    return text


def _termination_message_of_culprit(culprit: Failure) -> str:
    """The worker's own message, or its last line on stderr."""
    if culprit.message not in ("", failure_in_short(culprit)):
        return culprit.message
    return next((line.strip() for line in reversed(culprit.log_tail) if line.strip()), "")


def _shortened_termination_message(message: dict[str, str | int], max_characters: int) -> dict[str, str | int]:
    return {
        key: f"{value[:max_characters]}…" if isinstance(value, str) and len(value) > max_characters else value
        for key, value in message.items()
    }
