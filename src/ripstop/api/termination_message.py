"""What an agent leaves behind for whoever started it: how the job ended, in a file that Kubernetes reads.

One JSON object of at most `MOST` bytes, which is what Kubernetes keeps: `outcome` (`succeeded`, `failed` or `stopped`
for the job; `left` when this agent ended and the job, for all it knows, did not), `why`, `rounds`, `restarts`, and
`culprit` when a worker was to blame: who, how it ended, and its message or its last line on stderr.  Pure.
"""

import json

from ripstop.diagnostics.failure_report import how, root_cause
from ripstop.model.failure import Failure, JobReport
from ripstop.model.text import truncate

MOST = 4096
LEFT = "left"


def termination_message(why: str, report: JobReport | None) -> str:
    """The object; texts are cut until it fits."""
    word: dict[str, str | int] = {"outcome": LEFT, "why": why}
    if report is not None:
        word = {
            "outcome": report.outcome.value,
            "why": report.why,
            "rounds": report.rounds,
            "restarts": report.restarts,
        }
        if (culprit := root_cause(report.failures)) is not None:
            word["culprit"] = ": ".join(filter(None, (_who(culprit), _detail(culprit))))
    longest = MOST
    while len(text := json.dumps(_cut(word, longest))) > MOST:  # ASCII: a character is a byte
        longest //= 2
    return text


def _who(culprit: Failure) -> str:
    return f"rank {culprit.rank} on {culprit.host} {how(culprit)}"


def _detail(culprit: Failure) -> str:
    """The worker's own message, or the last line that it wrote to stderr."""
    if culprit.message not in ("", how(culprit)):
        return culprit.message
    return next((line.strip() for line in reversed(culprit.log_tail) if line.strip()), "")


def _cut(word: dict[str, str | int], longest: int) -> dict[str, str | int]:
    return {key: truncate(value, longest) if isinstance(value, str) else value for key, value in word.items()}
