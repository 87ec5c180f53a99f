"""Ranks the failures of a job: the root cause first, the failures that it caused after it.  Pure.

When one worker dies, its peers die a moment later in a collective that lost its partner.  So among the failures of one
round, those that a peer can explain come last, regardless of the clocks of their hosts.  Among equals, the earlier one
comes first.  In a round that hangs, the suspect ranks come first (`hang_analysis.py`).
"""

import re
from collections.abc import Iterable
from enum import IntEnum

from msgspec.structs import replace

from ripstop.diagnostics.hang_analysis import hangs_among, suspect_ranks
from ripstop.model.failure import Failure

# compiled at first use: most jobs never need them
_COLLECTIVE = (
    r"gloo/transport|gloo::|\bpair\.cc\b|Application timeout caused pair closure"
    r"|ncclRemoteError|NCCL communicator was aborted|remote process exited"
    r"|Watchdog caught collective operation timeout|collective operation timeout|monitoredBarrier|watchdog got stuck"
    r"|DistStoreError|DistNetworkError|DistBackendError|TCPStore|wait timeout after \d+ ?ms|Timed out waiting \d+ ?ms"
    r"|failed to recv, got 0 bytes|(?:send|recv)(?:Bytes|Value|Vector|String) failed"
)
_CONNECTION = r"Connection (?:reset|closed|refused|aborted)|closed by (?:remote )?peer|Broken pipe|Socket Timeout"
_OWN_FAULT = (  # reported by collectives, too, but not caused by a peer
    r"out of memory|unhandled cuda error|UnhandledCudaError|EADDRINUSE|address already in use|invalid usage"
    r"|Duplicate GPU|InvalidArgument"
)

_MAX_FULL_FAILURES = 8  # that are sent with all their texts
_MAX_FAILURES = 64  # that are sent


class _Blame(IntEnum):
    """How likely a failure is the cause and not a consequence; smaller values are more likely."""

    CAUSE = 0  # killed, crashed, raised its own exception, or could not be started
    UNEXPLAINED = 1  # an exit code without a message, or an abort
    CONNECTION = 2  # lost a connection, perhaps to a peer
    COLLECTIVE = 3  # lost a peer


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """The first failure in order of blame; None if there is none."""
    return next(iter(rank_failures(failures)), None)


def rank_failures(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """The root cause first, its victims after it; the latest round before earlier rounds."""
    failures = tuple(failures)
    if len(failures) < 2:
        return failures
    rounds = {failure.round for failure in failures if failure.hang}
    suspects = {(round, rank) for round in rounds for rank in suspect_ranks(hangs_among(failures, round))}

    def blame(failure: Failure) -> _Blame:
        return _Blame.CAUSE if (failure.round, failure.rank) in suspects else _failure_blame(failure)

    return tuple(sorted(failures, key=lambda failure: (-failure.round, blame(failure), failure.at, failure.rank)))


def _failure_blame(failure: Failure) -> _Blame:
    if failure.hang:
        return _Blame.UNEXPLAINED if failure.hang.sign and not failure.hang.waits else _Blame.COLLECTIVE
    aborted = failure.signal == "SIGABRT"
    started = failure.exitcode is not None or failure.signal is not None
    if failure.oom or not started or (failure.signal and not aborted):
        return _Blame.CAUSE
    exceptions = [line for line in failure.traceback.split("\n") if not line.startswith(" ")]  # without frames
    text = "\n".join((failure.message, *exceptions))
    if aborted or not _has_explanation(failure):
        text = "\n".join((text, *failure.log_tail))  # messages of C++ threads are on stderr only
    if re.search(_OWN_FAULT, text, re.IGNORECASE):
        return _Blame.CAUSE
    if re.search(_COLLECTIVE, text, re.IGNORECASE):
        return _Blame.COLLECTIVE
    if re.search(_CONNECTION, text, re.IGNORECASE):
        return _Blame.CONNECTION
    return _Blame.CAUSE if _has_explanation(failure) and not aborted else _Blame.UNEXPLAINED


def _has_explanation(failure: Failure) -> bool:
    return bool(failure.traceback or failure.error_file)


def looks_like_victim(failure: Failure) -> bool:
    """Whether the loss of a peer can explain this failure."""
    return _failure_blame(failure) >= _Blame.CONNECTION


def trimmed_ranking(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """The failures, small enough to send: the likeliest causes in full, more without details, the rest left out."""
    sent = rank_failures(failures)[:_MAX_FAILURES]
    short = (replace(f, message=f.message[:200], traceback="", log_tail=()) for f in sent[_MAX_FULL_FAILURES:])
    return (*sent[:_MAX_FULL_FAILURES], *short)
