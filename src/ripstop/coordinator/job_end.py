"""How a job ends: it collects the nodes' failures, sends the report, and waits until the nodes have left.  Pure.

Rules: (1) a job closes once; (2) after a failure or a stop, the report waits for the failures of every node, for the
shutdown timeout and `FINAL_REPORT_TIMEOUT_S` at most; (3) the coordinator then stays until every node has left, for
`FINAL_REPORT_TIMEOUT_S` at most.
"""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from ripstop.coordinator.job_types import Disconnect, JobEnded
from ripstop.model.events import JobClosed, JobClosing
from ripstop.model.failure import JobEnd
from ripstop.model.round import Outcome
from ripstop.model.status import Phase
from ripstop.protocol.limits import reason_within_limits
from ripstop.protocol.messages import Closed, Closing, FromAgent, Join, Left

if TYPE_CHECKING:
    from ripstop.coordinator.job import Job

FINAL_REPORT_TIMEOUT_S = 5.0  # how long nodes have to receive the report and leave


def begin_job_end(job: "Job", outcome: Outcome, why: str, now: float) -> None:
    if job.phase in (Phase.CLOSING, Phase.CLOSED):
        return
    job.why = why = reason_within_limits(why)
    job.failure_policy.reset()
    job.report = JobEnd(job.settings.run_id, outcome, why, job.round, job.restarts.used)
    job.enter(Phase.CLOSING, now)
    if outcome is not Outcome.SUCCEEDED:
        job.awaiting_stop = set(job.members)
        job.events.append(JobClosing(outcome, why))
        for node in job.members:
            job.send(node, Closing(why, outcome))
    report_job_end(job, now)


def report_job_end(job: "Job", now: float) -> None:
    """Send the report once the failures of all nodes have arrived, or their time is over."""
    assert job.report is not None
    if job.awaiting_stop and now < job_end_report_deadline(job):
        return
    failures = () if job.report.outcome is Outcome.SUCCEEDED else job.failure_policy.failures()
    job.report = report = replace(job.report, rounds=job.round, restarts=job.restarts.used, failures=failures)
    job.enter(Phase.CLOSED, now)
    job.events.append(JobClosed(report.outcome, report.why, report.rounds, report.restarts))
    for node in job.members:
        job.send(node, Closed(report))
    finish_job_end(job, now)


def finish_job_end(job: "Job", now: float) -> None:
    """End the coordinator's work once all nodes have left, or their time is over."""
    assert job.report is not None
    if not job.is_ended and (not job.members or now >= job_end_deadline(job)):
        job.is_ended = True
        job.commands.append(JobEnded(job.report))


def job_end_report_deadline(job: "Job") -> float:
    return job.phase_since + job.settings.timing.shutdown + FINAL_REPORT_TIMEOUT_S


def job_end_deadline(job: "Job") -> float:
    return job.phase_since + FINAL_REPORT_TIMEOUT_S


def on_message_after_job_end(job: "Job", name: str, message: FromAgent, now: float) -> None:
    """A message after the end."""
    assert job.report is not None
    match message:
        case Join(node=node):
            job.membership.join_after_end(name, node, now)
            job.send(name, Closed(job.report))
        case Left():
            if name in job.members:
                job.membership.remove(name, now)
            job.commands.append(Disconnect(name))
