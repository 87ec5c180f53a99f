"""One agent with real workers that fail."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ripstop.agent.machine import REPEATED_SIGNAL_S
from tests.e2e.harness import SCRIPTS, TRAIN, Job, alive, wait_until

RECORDED = SCRIPTS / "recorded.py"


@pytest.fixture
def job(tmp_path: Path):
    with Job(tmp_path) as job:
        yield job


def test_a_job_runs_to_its_end_and_exits_0(job: Job) -> None:
    agent = job.run("--standalone", "--nproc-per-node=2", str(TRAIN))
    assert agent.wait() == 0
    assert len(job.worker_events(event="done")) == 2
    assert {h["rank"] for h in job.worker_events(event="step", step=20)} == {0, 1}


def test_a_failed_worker_is_restarted_and_the_job_continues_whatever_the_failure(job: Job) -> None:
    faults = "kill:1:5:0,segv:1:8:1,raise:1:11:2,exit:1:14:3"  # each in a round of its own
    flags = "--standalone", "--nproc-per-node=2", "--max-restarts=4", "--restart-backoff=0"
    agent = job.run(*flags, str(TRAIN), env={"TRAIN_FAULT": faults})
    assert agent.wait() == 0
    assert {h["restart"] for h in job.worker_events(event="done")} == {4}
    for number, how in enumerate(("SIGKILL", "SIGSEGV", "RuntimeError: the fault", "exited with code 7"), 1):
        assert how in agent.err
        assert f"restart {number} of 4" in agent.err


def test_an_exhausted_restart_budget_ends_the_job_with_a_report_of_the_root_cause(job: Job) -> None:
    agent = job.run(
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--rdzv-id=x",
        str(TRAIN),
        env={"TRAIN_FAULT": "raise:1:5"},
    )
    assert agent.wait() == 1
    assert {h["restart"] for h in job.worker_events(event="fault")} == {0, 1}
    assert "root cause: rank 1" in agent.err
    assert "RuntimeError: the fault that was asked for" in agent.err
    (path,) = job.logs.glob("*/report.json")
    report = json.loads(path.read_text())
    assert report["outcome"] == "failed"
    assert report["root_cause"]["rank"] == 1
    assert report["root_cause"]["exitcode"] == 1


def test_the_report_has_the_exception_that_torchs_record_decorator_saved(job: Job) -> None:
    agent = job.run("--standalone", "--nproc-per-node=1", "--start-method=exec", str(RECORDED))
    assert agent.wait() == 1
    assert "ValueError: recorded by torch" in agent.err
    (path,) = job.logs.glob("*/report.json")
    assert "py_callstack" not in path.read_text()
    assert "in main" in json.loads(path.read_text())["root_cause"]["traceback"]


def test_the_report_has_the_end_of_stderr_of_a_program_without_an_error_file(job: Job) -> None:
    agent = job.run("--standalone", "--no-python", "sh", "-c", "echo the disk is on fire >&2; exit 3")
    assert agent.wait() == 1
    assert "exited with code 3" in agent.err
    (path,) = job.logs.glob("*/report.json")
    assert json.loads(path.read_text())["root_cause"]["log_tail"] == ["the disk is on fire"]


def test_a_terminated_agent_stops_its_workers_with_that_signal_and_exits_143(job: Job) -> None:
    agent = job.run("--standalone", "--nproc-per-node=2", str(SCRIPTS / "graceful.py"))
    job.wait_for(event="start", count=2)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
    assert len(job.worker_events(event="saved", signal=int(signal.SIGTERM))) == 2


def test_an_interrupted_agent_exits_130(job: Job) -> None:
    agent = job.run("--standalone", "--nproc-per-node=1", str(SCRIPTS / "graceful.py"))
    job.wait_for(event="start")
    agent.signal(signal.SIGINT)
    assert agent.wait() == 130
    assert job.worker_events(event="saved", signal=int(signal.SIGINT))


def test_a_worker_that_ignores_sigterm_is_killed_after_the_shutdown_timeout(job: Job) -> None:
    agent = job.run("--standalone", "--shutdown-timeout=1", str(SCRIPTS / "graceful.py"), env={"STUBBORN": "1"})
    pid = job.wait_for(event="start")["pid"]
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
    assert not alive(pid)


def test_a_second_signal_does_not_wait_for_the_grace_period(job: Job) -> None:
    agent = job.run("--standalone", "--shutdown-timeout=600", str(SCRIPTS / "graceful.py"), env={"STUBBORN": "1"})
    job.wait_for(event="start")
    agent.signal(signal.SIGTERM)
    first = time.monotonic()
    job.wait_for(event="ignored")
    wait_until(lambda: time.monotonic() - first > 2 * REPEATED_SIGNAL_S or None)  # no copy of the first
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143


def test_all_processes_of_a_killed_agent_exit(job: Job) -> None:
    agent = job.run("--standalone", "--nproc-per-node=2", str(TRAIN), env={"TRAIN_STEPS": "100000"})
    job.steps(2)
    agent.signal(signal.SIGKILL)
    agent.wait()
    wait_until(lambda: True if not job.leftovers() else None, why=lambda: str(job.leftovers()))


def test_every_start_method_gives_the_workers_the_same_environment(job: Job) -> None:
    seen = []
    for flags in (["--start-method=zygote"], ["--start-method=exec"]):
        agent = job.run(
            "--standalone",
            "--nproc-per-node=2",
            "--role=trainer",
            "-r",
            "3",
            *flags,
            str(SCRIPTS / "environment.py"),
            "--lr",
            "0.1",
        )
        assert agent.wait() == 0, agent.err
        (round_1,) = job.logs.glob("*/round_1")
        seen.append([json.loads((round_1 / str(rank) / "stdout.log").read_text()) for rank in (0, 1)])
        subprocess.run(["rm", "-r", str(round_1.parent)], check=True)
    for first, second in zip(*seen, strict=True):
        changing = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        assert {k: v for k, v in first["env"].items() if k not in changing} == {
            k: v for k, v in second["env"].items() if k not in changing
        }
        assert first["argv"] == second["argv"] == [str(SCRIPTS / "environment.py"), "--lr", "0.1"]


def test_the_agent_never_imports_torch(job: Job) -> None:
    agent = job.run("--standalone", "--nproc-per-node=2", str(TRAIN), env={"TRAIN_STEPS": "100000"})
    job.steps(2)
    maps = Path(f"/proc/{agent.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "numpy" not in maps
    agent.signal(signal.SIGTERM)
    agent.wait()


def test_tee_prefixes_every_line_and_drops_none(job: Job) -> None:
    agent = job.run("--standalone", "--nproc-per-node=2", "--tee=3", "--role=w", str(SCRIPTS / "lines.py"), "2000")
    assert agent.wait() == 0
    lines = agent.out.splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[w{rank}]:")]
        assert mine == [f"[w{rank}]:out {rank} {i}" for i in range(2000)]
        (log,) = job.logs.glob(f"*/round_1/{rank}/stdout.log")
        assert log.read_text().splitlines() == [f"out {rank} {i}" for i in range(2000)]
        errors = [line for line in agent.err.splitlines() if line.startswith(f"[w{rank}]:")]
        assert errors == [f"[w{rank}]:err {rank} {i}" for i in range(2000)]


def test_two_concurrent_jobs_do_not_interfere(job: Job, tmp_path: Path) -> None:
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    with Job(other_folder) as other:
        agents = [j.run("--nproc-per-node=2", str(TRAIN)) for j in (job, other)]
        assert [a.wait() for a in agents] == [0, 0]


def test_a_fixed_master_port_is_the_store_port_of_every_round(job: Job) -> None:
    agent = job.run(
        "--nproc-per-node=2",
        f"--master-port={job.port}",
        "--max-restarts=2",
        str(TRAIN),
        env={"TRAIN_FAULT": "kill:0:3:0,kill:1:6:1"},
    )
    assert agent.wait() == 0, agent.err
    assert {h["restart"] for h in job.worker_events(event="done")} == {2}


def test_a_missing_script_is_one_line_of_error_and_exit_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ripstop", "run", "no_such_script.py"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "no_such_script.py" in done.stderr


def test_the_agent_does_not_poll_while_its_workers_run(job: Job) -> None:
    agent = job.run("--standalone", "--nproc-per-node=2", "-t", "3", str(TRAIN), env={"TRAIN_STEPS": "100000"})
    job.steps(2)

    def wakeups() -> int:
        status = Path(f"/proc/{agent.pid}/status").read_text()
        return int(status.split("voluntary_ctxt_switches:")[1].split()[0])

    before, began = wakeups(), time.monotonic()
    job.wait_for(event="step", count=len(job.worker_events(event="step")) + 100)
    assert wakeups() - before <= 5 + time.monotonic() - began, "something polls"  # more often than once a second
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143


def test_a_successful_job_leaves_nothing_in_the_temporary_directory(tmp_path: Path) -> None:
    scripts = tmp_path / "s.py"
    scripts.write_text("pass\n")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run([sys.executable, "-m", "ripstop", "run", str(scripts)], env=env, check=True, timeout=120)
    assert not list(temporary.iterdir())


def test_stderr_that_is_not_kept_does_not_fill_the_disk(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text(
        "import os, sys, time\n"
        "for _ in range(100_000): sys.stderr.write('~' * 99 + '\\n')\n"
        "path = os.readlink('/proc/self/fd/2')\n"
        "while os.stat(path).st_blocks * 512 > 4 << 20: time.sleep(0.01)\n"
        "print(os.stat(path).st_size)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "ripstop", "run", script], capture_output=True, check=True, timeout=120
    )
    assert done.stdout == b"10000000\n"
    assert done.stderr.count(b"~") == 9_900_000  # a log line of ripstop may divide one of these lines


def test_a_console_that_is_not_read_blocks_neither_signals_nor_the_exit(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "loud.py"
    script.write_text(
        "import sys\nsys.path.insert(0, '')\n"
        "for _ in range(3000): print('x' * 99, file=sys.stderr)\n"
        f"exec(open({str(SCRIPTS / 'graceful.py')!r}).read())\n"
    )
    read_end, write_end = os.pipe()
    agent = subprocess.Popen(
        [sys.executable, "-m", "ripstop", "run", script],
        env=job.env,
        stdout=write_end,
        stderr=write_end,
        start_new_session=True,
    )
    try:
        job.wait_for(event="start")
        agent.send_signal(signal.SIGTERM)
        job.wait_for(event="saved")
        assert agent.wait(120) == 143
    finally:
        agent.kill()
        agent.wait()
        os.close(read_end)
        os.close(write_end)


def test_workers_do_not_get_the_secret(job: Job) -> None:
    agent = job.run("--no-python", "env", env={"RIPSTOP_TOKEN": "very-secret"})
    assert agent.wait() == 0
    assert "WORLD_SIZE=1" in agent.out
    assert "very-secret" not in agent.out


def test_a_worker_that_exits_on_sigterm_is_not_a_failure(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "if os.environ['RANK'] == '0':\n"
        "    while not os.path.exists('ready'): time.sleep(0.01)\n"
        "    raise RuntimeError('Connection reset by peer')\n"
        "open('ready', 'w').close()\n"
        "while True: signal.pause()\n"
    )
    agent = job.run("--nproc-per-node=2", "--no-python", "env", "-C", str(tmp_path), sys.executable, str(script))
    assert agent.wait() == 1
    (path,) = job.logs.glob("*/report.json")
    assert [f["rank"] for f in json.loads(path.read_text())["failures"]] == [0]
