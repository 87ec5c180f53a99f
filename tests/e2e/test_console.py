"""What `ripstop run` shows at a terminal, and writes where there is none."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job, wait_until
from tests.e2e.terminal import COLOR, ripstop, terminal

REPORTING = SCRIPTS / "reporting.py"
PRINTING = """
import os, sys
for n in range(200):
    print(f"stdout {os.environ['RANK']} {n}", flush=True)
    print(f"stderr {os.environ['RANK']} {n}", file=sys.stderr, flush=True)
"""
FAILING = """
import os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ.get("PASSES"):
    print("trained")
    sys.exit()
print("loss: 1.25", end="", flush=True)
raise ValueError("the loss is not a number")
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: None)
print("started", flush=True)
while True:
    time.sleep(1)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path), LC_ALL="C.UTF-8") as job:
        yield job


def script(job: Job, text: str) -> Path:
    path = job.folder / "script.py"
    path.write_text(text)
    return path


def two_nodes(job: Job, *rest: object) -> list[object]:
    return [
        *("run", f"--log-dir={job.logs}", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=e2e"),
        *(f"--rdzv-endpoint=127.0.0.1:{job.port}", *rest),
    ]


# at a terminal --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "env"), [(80, {}), (200, {"NO_COLOR": "1"})])
def test_a_wait_is_one_live_line_and_output_is_whole(job: Job, width: int, env: dict[str, str]) -> None:
    path = script(job, PRINTING)
    who = r"waiting, \d+ s: 1 of 2 nodes ready, 1 missing; fails in 5\d\d s"
    rest = "" if width == 80 else r"; ready: \S+$"
    with terminal(job, ripstop(*two_nodes(job, path)), width, 24, **env) as screen:
        shown = screen.shows(rf"(?m)^\[ripstop\] {who}{rest}").string
        assert len(re.findall("waiting, .* s: 1 of", shown)) == 1
        job.ripstop(*map(str, two_nodes(job, path)))
        screen.shows("exit code 0")
        lines = screen.lines()
        for stream in ("stdout", "stderr"):
            written = [line for line in lines if re.fullmatch(rf"{stream} \d \d+", line)]
            rank = written[0].split()[1]
            assert written == [f"{stream} {rank} {n}" for n in range(200)]
        assert not [line for line in lines if "waiting, " in line], "the live line is gone"
        assert len(re.findall(r"I round=1 (?!stopping)", "\n".join(lines))) == 1, "one line a round"
        assert any(re.search(r" job=e2e succeeded rounds=1 restarts=0$", line) for line in lines)
        assert re.search(r"(?m)^job report: .*job-report.html$", "\n".join(lines))
        assert bool(COLOR.search(screen.text("-e", "-S", "-"))) is not bool(env)


def test_a_failure_that_is_survived_is_a_block_and_a_begun_line_stays(job: Job) -> None:
    command = ripstop("run", f"--log-dir={job.logs}", "--max-restarts=1", "--rdzv-id=e2e", script(job, FAILING))
    with terminal(job, command, 120, 50, PASSES="1", NO_COLOR="1") as screen:
        screen.shows("exit code 0")
        text = "\n".join(screen.lines())
        assert re.search(r"(?m)^loss: 1\.25(Traceback|$)", text), text
        block = r"W round=1 root cause: rank 0 on \S+ exited with code 1, logs \S+/round_1/0\n    Traceback .*\n"
        assert re.search(block + r"(      .*\n)+    ValueError: the loss is not a number\n", text), text
        assert "\ntrained\n" in text and " succeeded rounds=2 restarts=1\n" in text


def test_a_failed_job_ends_with_its_report_in_colour(job: Job) -> None:
    command = ripstop("run", f"--log-dir={job.logs}", "--rdzv-id=e2e", script(job, FAILING))
    with terminal(job, command, 120, 50) as screen:
        screen.shows("exit code 1")
        assert re.search(r"\x1b\[[\d;]*31mjob e2e failed (?:.*\n)+root cause: rank 0 on ", screen.text("-e"))
        last = [line for line in screen.lines() if line][-3:]
        assert last[0] == f"report: {job.logs}/e2e/report.json"
        assert last[1:] == [f"job report: {job.logs}/e2e/job-report.html", "exit code 1"]


def test_steps_are_a_live_line_where_workers_write_to_files(job: Job) -> None:
    command = ripstop("run", f"--log-dir={job.logs}", "-r3", "--nproc-per-node=2", REPORTING)
    with terminal(job, command, 80, 24) as screen:
        screen.shows(r"(?m)^\[ripstop\] round 1, \d+ s: step \d{2,}, \d+\.\d steps/s$")
        screen.press("C-c")
        screen.shows("exit code 130")
        assert "round 1, " not in screen.text(), "the live line is gone"


def test_lines_of_tee_stay_above_the_live_line(job: Job) -> None:
    command = ripstop("run", f"--log-dir={job.logs}", "-t3", REPORTING)
    with terminal(job, command, 80, 24) as screen:
        screen.shows(r"\[default0\]:\[rank 0\] step \d{2,}: loss \d\.\d{4}\n\[ripstop\] round 1, \d+ s: step \d{2,}")
        screen.press("C-c")
        screen.shows("exit code 130")
        lines = [line for line in screen.lines() if line.startswith("[default0]:[rank 0] ")]  # no traceback
        steps = [re.fullmatch(r"\[default0\]:\[rank 0\] step (\d+): loss \d\.\d{4}", line) for line in lines]
        assert [step and int(step[1]) for step in steps] == list(range(len(lines)))


def test_a_stop_names_who_still_runs(job: Job) -> None:
    flags = ("run", f"--log-dir={job.logs}", "-r3", "--nproc-per-node=2", "--shutdown-timeout=60")
    with terminal(job, ripstop(*flags, script(job, STUBBORN)), 100, 24) as screen:
        logs = "*/round_1/*/stdout.log"
        wait_until(lambda: len([log for log in job.logs.glob(logs) if log.read_text()]) == 2 or None)
        screen.press("C-c")
        still = "ranks 0,1 still run"
        screen.shows(rf"(?m)^\[ripstop\] stopping the workers, \d+ s of 1 min: {still}$")
        screen.press("C-c")
        screen.shows("exit code 130")


@pytest.mark.long
def test_a_job_in_the_background_leaves_the_terminal_alone(job: Job) -> None:
    command = f"set -m; {ripstop(*two_nodes(job, script(job, PRINTING)))} & wait $!"
    with terminal(job, command, 80, 24) as screen:
        screen.shows("ripstop=")
        job.ripstop(*map(str, two_nodes(job, job.folder / "script.py")))
        screen.shows("exit code 0")
        text = "\n".join(screen.lines())
        assert "\njob report: " in text and "waiting, " not in text


# without a terminal ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_stdout_is_the_scripts_own_with_every_console(job: Job) -> None:
    path = script(job, "import sys\nsys.stdout.buffer.write(bytes(range(256)) * 500)\n")
    with terminal(job, f"{ripstop('run', path)} >{job.folder}/out", 80, 24) as screen:
        screen.shows("exit code 0")
    assert (job.folder / "out").read_bytes() == bytes(range(256)) * 500
    for flags in ((), ("--log-format=json",), ("--log-level=debug",), ("--quiet",)):
        agent = job.run(*flags, str(path))
        assert agent.wait() == 0
        assert b"".join(agent._out) == bytes(range(256)) * 500


def test_a_quiet_job_says_nothing_unless_it_fails(job: Job) -> None:
    agent = job.run("--quiet", str(script(job, "")))
    assert (agent.wait(), agent.err) == (0, "")
    agent = job.run("--quiet", str(script(job, FAILING)))
    assert agent.wait() == 1
    assert "root cause: rank 0 on" in agent.err and " I " not in agent.err and "job report" not in agent.err
    agent = job.run("--log-level=error", str(script(job, FAILING)))
    assert agent.wait() == 1
    assert "root cause: rank 0 on" in agent.err and "[ripstop]" not in agent.err


def test_json_is_one_object_a_line_until_the_end(job: Job) -> None:
    agent = job.run("--log-format=json", "-r3", "--max-restarts=1", str(script(job, FAILING)))
    assert agent.wait() == 1
    records = [json.loads(line) for line in agent.err.splitlines()]
    assert {record["level"] for record in records} == {"info", "warning", "error"}
    kinds = [record["event"]["kind"] for record in records if "event" in record]
    assert kinds.count("workers_started") == 2
    report, path, page = records[-3:]
    assert "root cause: rank 0 on" in report["message"] and report["level"] == "error"
    assert path["message"].startswith("report: /") and page["message"].startswith("job report: /")


def test_debugging_shows_every_event(job: Job) -> None:
    agent = job.run("--log-level=debug", str(script(job, "")))
    assert agent.wait() == 0
    for kind in ("agent_started", "workers_succeeded", "workers_stopped", "agent_ended"):
        assert f" D {kind} " in agent.err
    assert re.search(r" I node=\S+ joined from ", agent.err), "the coordinator's lines, too"


@pytest.mark.long
def test_a_wait_is_a_plain_line_now_and_then(job: Job) -> None:
    agent = job.ripstop(*map(str, two_nodes(job, REPORTING)))
    who = r"1 of 2 nodes ready, 1 missing; fails in 5\d\d s; ready: \S+"
    agent.wait_for_log(rf" I waiting, 30 s: {who}\n")
    assert "\x1b" not in agent.err and "\r" not in agent.err


def test_a_pipe_at_stdout_means_plain_lines(job: Job) -> None:
    with terminal(job, f"{ripstop(*two_nodes(job, script(job, PRINTING)))} | cat", 80, 24) as screen:
        screen.shows("1 of (at least )?2 nodes are ready, waiting for more")
        job.ripstop(*map(str, two_nodes(job, job.folder / "script.py")))
        screen.shows("exit code 0")
        assert not [line for line in screen.lines() if "waiting, " in line]
