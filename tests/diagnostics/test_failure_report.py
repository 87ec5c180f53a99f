"""The report names the root cause, for people and as JSON."""

import json

from msgspec.structs import replace

from ripstop.diagnostics.failure_report import failure_report_json, render_failure_report
from ripstop.model.failure import Failure, JobEnd
from ripstop.model.round import Outcome
from tests.diagnostics.test_failure_ranking import CRASH, OWN, VICTIMS, victim


def report(*failures: Failure, outcome: Outcome = Outcome.FAILED, why: str = "rank 1 on b failed") -> JobEnd:
    return JobEnd("job7", outcome, why, rounds=2, restarts=1, failures=failures)


def test_the_text_has_rank_host_time_exit_status_and_message() -> None:
    text = render_failure_report(report(victim(VICTIMS[0]), replace(OWN, log_tail=("step 41", "step 42"))))
    assert text == (
        "job job7 failed (2 rounds, 1 restart): rank 1 on b failed\n"
        "\n"
        "root cause: rank 1 on b (local rank 1, pid 77)\n"
        "  when     1970-01-01 00:01:40.000 UTC, round 2\n"
        "  how      exited with code 1\n"
        "  why      ValueError: the loss is not a number\n"
        "  logs     /logs/1\n"
        "  error    /logs/1/error.json\n"
        "  traceback\n"
        "    Traceback (most recent call last):\n"
        '      File "train.py", line 3, in <module>\n'
        "    ValueError: the loss is not a number\n"
        "  last lines of stderr\n"
        "    step 41\n"
        "    step 42\n"
        "\n"
        "other failures (1), most likely because of it:\n"
        "  rank 0 on a exited with code 1: RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]…\n"
    )


def test_a_traceback_is_not_shown_a_second_time_as_the_end_of_stderr() -> None:
    again = tuple(f"[rank1]: {line}" for line in OWN.traceback.split("\n"))
    text = render_failure_report(
        report(replace(OWN, log_tail=("step 42", "[rank1]: Traceback (most recent call last):", *again[1:])))
    )
    assert text.endswith("  last lines of stderr\n    step 42\n")
    assert "last lines of stderr" not in render_failure_report(report(replace(OWN, log_tail=again[1:])))
    assert "    too late\n" in render_failure_report(report(replace(OWN, log_tail=(*again, "too late"))))


def test_no_text_is_repeated() -> None:
    silent = Failure(rank=3, local_rank=0, round=2, host="d", at=99.5, exitcode=3, message="exited with code 3")
    assert render_failure_report(report(silent, why="over")).count("exited with code 3") == 1
    assert "rank 3 on d exited with code 3\n" in render_failure_report(report(CRASH, silent))


def test_out_of_memory_is_reported() -> None:
    verdict = "killed by the kernel's OOM killer (cgroup limit 4.0 GiB, peak 3.9 GiB)"
    text = render_failure_report(report(replace(CRASH, signal="SIGKILL", oom=verdict, message=verdict)))
    assert "  how      died of SIGKILL, out of memory\n" in text
    assert text.count(verdict) == 1


def test_a_thousand_victims_do_not_fill_the_screen() -> None:
    victims = [replace(victim(VICTIMS[0]), rank=rank) for rank in range(2, 1000)]
    text = render_failure_report(report(OWN, *victims))
    assert "other failures (998)" in text
    assert len(text.splitlines()) < 50


def test_long_texts_are_wrapped_to_the_width() -> None:
    text = render_failure_report(report(replace(CRASH, message="word " * 200), why="because " * 50), width=80)
    assert max(map(len, text.splitlines())) <= 80


def test_an_invalid_time_does_not_break_the_report() -> None:
    assert "died of SIGSEGV" in render_failure_report(report(replace(CRASH, at=1e300)))


def test_a_worker_that_was_not_started_is_reported_without_pid_and_code() -> None:
    never = Failure(rank=1, local_rank=1, round=1, host="b", at=1.0, message="could not be started: no memory")
    assert "root cause: rank 1 on b (local rank 1)\n" in render_failure_report(report(never))
    assert "  how      was not started\n" in render_failure_report(report(never))


def test_a_success_is_one_line() -> None:
    text = render_failure_report(report(CRASH, outcome=Outcome.SUCCEEDED, why="all workers exited with 0"))
    assert text == "job job7 succeeded (2 rounds, 1 restart): all workers exited with 0\n"


def test_the_json_has_the_same_content() -> None:
    data = json.loads(failure_report_json(report(victim(VICTIMS[0]), OWN)))
    assert data["outcome"] == "failed"
    assert data["root_cause"] == data["failures"][0]
    assert data["root_cause"]["rank"] == 1
    assert [failure["rank"] for failure in data["failures"]] == [1, 0]
    assert data["restarts"] == 1


def test_a_success_has_no_root_cause_in_json() -> None:
    assert json.loads(failure_report_json(report(outcome=Outcome.SUCCEEDED)))["root_cause"] is None
