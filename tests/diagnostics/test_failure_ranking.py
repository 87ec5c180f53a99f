"""The root cause comes before the failures that it caused."""

import pytest
from msgspec.structs import replace

from ripstop.diagnostics.failure_ranking import rank_failures, root_cause, trimmed_ranking
from ripstop.model.failure import Failure

OWN = Failure(
    rank=1,
    local_rank=1,
    round=2,
    host="b",
    at=100.0,
    pid=77,
    exitcode=1,
    message="ValueError: the loss is not a number",
    traceback='Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
    "ValueError: the loss is not a number",
    error_file="/logs/1/error.json",
    logs="/logs/1",
)
CRASH = Failure(rank=2, local_rank=0, round=2, host="c", at=100.0, pid=78, signal="SIGSEGV", message="died of SIGSEGV")
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"

VICTIMS = [
    f"RuntimeError: {GLOO}",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/rank_1",
    "torch.distributed.DistBackendError: NCCL error, remote process exited or there was a network error",
    "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
    "RuntimeError: Application timeout caused pair closure",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
]


def victim(message: str, at: float = 99.0) -> Failure:
    traceback = f"Traceback (most recent call last):\n  File ...\n{message}"
    return Failure(
        rank=0, local_rank=0, round=2, host="a", at=at, exitcode=1, message=message, traceback=traceback, pid=70
    )


@pytest.mark.parametrize("culprit", [OWN, CRASH], ids=["exception", "crash"])
@pytest.mark.parametrize("message", VICTIMS)
def test_a_victim_is_not_blamed_even_if_its_clock_is_behind(message: str, culprit: Failure) -> None:
    assert root_cause([victim(message), culprit]) == culprit
    assert rank_failures([victim(message), culprit]) == (culprit, victim(message))


def test_of_two_independent_faults_the_earlier_is_blamed() -> None:
    later = replace(OWN, rank=0, at=100.5)
    assert root_cause([later, OWN]) == OWN


def test_of_victims_only_the_earliest_is_blamed() -> None:
    first, second = victim(VICTIMS[0], at=1.0), victim(VICTIMS[1], at=2.0)
    assert root_cause([second, first]) == first


def test_a_lost_connection_is_blamed_before_a_lost_peer() -> None:
    database = victim("ConnectionResetError: [Errno 104] Connection reset by peer", at=5.0)
    assert root_cause([victim(VICTIMS[0], at=4.0), database]) == database


def test_a_victim_that_wraps_the_error_of_a_collective_is_still_a_victim() -> None:
    wrapped = replace(
        victim("TrainingStopped: step 7"),
        traceback=f"Traceback (most recent call last):\n  File …\nRuntimeError: {GLOO}\n\nThe above exception was the "
        "direct cause of the following exception:\n\nTraceback (most recent call last):\n  File …\nTrainingStopped: 7",
    )
    assert root_cause([wrapped, OWN]) == OWN


def test_the_nccl_watchdogs_abort_is_not_a_crash() -> None:
    aborted = Failure(
        rank=0,
        local_rank=0,
        round=2,
        host="a",
        at=99.0,
        signal="SIGABRT",
        log_tail=("[rank0]:[E1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",),
    )
    assert root_cause([aborted, CRASH]) == CRASH
    assert root_cause([aborted, OWN]) == OWN


def test_an_abort_is_blamed_before_its_victims() -> None:
    aborted = replace(CRASH, signal="SIGABRT", log_tail=("train: engine.cc:12: Assertion `n > 0' failed.",))
    assert root_cause([victim(VICTIMS[0]), aborted]) == aborted


def test_an_exit_without_a_message_is_blamed_before_victims_and_after_crashes() -> None:
    silent = Failure(rank=3, local_rank=0, round=2, host="d", at=99.5, exitcode=3, message="exited with code 3")
    assert rank_failures([victim(VICTIMS[0]), silent, CRASH]) == (CRASH, silent, victim(VICTIMS[0]))


def test_a_victim_without_record_is_recognised_by_its_stderr() -> None:
    silent = Failure(rank=3, local_rank=0, round=2, host="d", at=99.5, exitcode=3, log_tail=(f"what(): {GLOO}",))
    assert root_cause([silent, OWN]) == OWN


@pytest.mark.parametrize(
    "message",
    [
        "torch.distributed.DistBackendError: NCCL error: unhandled cuda error: 'out of memory'",
        "torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE",
    ],
)
def test_a_local_fault_that_a_collective_reports_is_blamed(message: str) -> None:
    own = victim(message, at=100.0)
    assert root_cause([victim(VICTIMS[0]), own]) == own


def test_a_worker_that_could_not_be_started_is_blamed_before_its_victims() -> None:
    never = Failure(rank=1, local_rank=1, round=2, host="b", at=101.0, message="could not be started: no memory")
    silent = Failure(rank=3, local_rank=0, round=2, host="d", at=99.5, exitcode=3, message="exited with code 3")
    assert rank_failures([victim(VICTIMS[0]), silent, never]) == (never, silent, victim(VICTIMS[0]))


def test_a_worker_out_of_memory_is_blamed_before_its_victims() -> None:
    oom = replace(CRASH, signal="SIGKILL", oom="killed by the kernel's OOM killer")
    assert root_cause([victim(VICTIMS[3]), oom]) == oom


def test_failures_of_the_last_round_come_first() -> None:
    earlier = replace(CRASH, round=1, at=1.0)
    assert root_cause([earlier, victim(VICTIMS[0])]) == victim(VICTIMS[0])


def test_without_failures_there_is_no_root_cause() -> None:
    assert root_cause([]) is None


def test_the_root_cause_is_sent_in_full_even_with_many_victims() -> None:
    kept = trimmed_ranking([*(replace(victim(VICTIMS[0]), rank=rank) for rank in range(2, 200)), OWN])
    assert kept[0] == OWN
    assert len(kept) == 64
    assert not kept[-1].traceback
