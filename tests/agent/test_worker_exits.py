"""Which exits of workers are failures, and which expired timers kill a worker."""

import pytest

from ripstop.agent.worker_exits import ExitKind, TimerAction, WorkerExits

SIGSEGV, SIGTERM, SIGKILL = 11, 15, 9


def test_a_round_succeeds_when_its_last_worker_exits_0() -> None:
    exits = WorkerExits(2)
    assert exits.on_exit(1, 0, None, wrote_error_file=False) is ExitKind.SUCCEEDED
    assert exits.on_exit(0, 0, None, wrote_error_file=False) is ExitKind.ALL_SUCCEEDED
    assert exits.exited == {0, 1}


def test_a_round_that_is_being_stopped_does_not_succeed() -> None:
    exits = WorkerExits(2)
    exits.on_stop(SIGTERM)
    kinds = [exits.on_exit(rank, 0, None, wrote_error_file=False) for rank in range(2)]
    assert kinds == [ExitKind.SUCCEEDED, ExitKind.SUCCEEDED]


@pytest.mark.parametrize("wrote_error_file", [False, True])
@pytest.mark.parametrize(("exitcode", "signum"), [(1, None), (None, SIGKILL), (None, SIGTERM)])
def test_any_other_exit_is_a_failure_while_the_workers_run(
    exitcode: int | None, signum: int | None, wrote_error_file: bool
) -> None:
    exits = WorkerExits(1)
    assert exits.on_exit(0, exitcode, signum, wrote_error_file=wrote_error_file) is ExitKind.FAILED


@pytest.mark.parametrize(
    ("exitcode", "signum", "wrote_error_file", "kind"),
    [
        (None, SIGTERM, False, ExitKind.STOPPED),
        (None, SIGTERM, True, ExitKind.STOPPED),
        (None, SIGKILL, True, ExitKind.STOPPED),  # the agent sends it after the grace period
        (None, SIGSEGV, False, ExitKind.STOPPED),
        (1, None, False, ExitKind.STOPPED),
        (1, None, True, ExitKind.FAILED),
        (None, SIGSEGV, True, ExitKind.FAILED),
    ],
)
def test_an_exit_while_the_workers_are_stopped_is_a_failure_only_with_an_error_file(
    exitcode: int | None, signum: int | None, wrote_error_file: bool, kind: ExitKind
) -> None:
    exits = WorkerExits(1)
    exits.on_stop(SIGTERM)
    assert exits.on_exit(0, exitcode, signum, wrote_error_file=wrote_error_file) is kind


@pytest.mark.parametrize(
    ("local_rank", "signum", "action"),
    [(0, SIGKILL, TimerAction.KILL), (0, 0, TimerAction.RECORD), (None, SIGKILL, TimerAction.IGNORE)],
)
def test_an_expired_timer_kills_only_a_live_worker_and_only_if_it_names_a_signal(
    local_rank: int | None, signum: int, action: TimerAction
) -> None:
    assert WorkerExits(1).on_timer_expired(local_rank, signum) is action


def test_an_expired_timer_is_ignored_while_the_workers_are_stopped() -> None:
    exits = WorkerExits(1)
    exits.on_stop(SIGTERM)
    assert exits.is_stopping
    assert exits.on_timer_expired(0, SIGKILL) is TimerAction.IGNORE
