"""Hostile environments: early interrupts, unusual parents, full disks, resource limits, hostile scripts."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.harness import Job, wait_until


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with Job(tmp_path, PYTHONPATH=path) as job:
        yield job


def script(job: Job, text: str, name: str = "script.py") -> str:
    path = job.folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def go(job: Job) -> None:
    Path(f"{job.log}.go").touch()


def zygote_of(pid: int) -> int:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            if Path(f"/proc/{child}/comm").read_text().strip() == "ripstop-zygote":
                return child
    raise AssertionError("the agent has no zygote")


CRASH = "import os, time\nos._exit(3) if os.environ['RANK'] == '0' else time.sleep(1000)\n"
UNTIL_GO = """
import os, time
print("up", flush=True)
while not os.path.exists(os.environ["TRAIN_LOG"] + ".go"): time.sleep(0.01)
"""
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(1000)\n"


# signals --------------------------------------------------------------------------------------------------------------


def test_an_interrupt_while_the_zygote_imports_ends_the_agent(job: Job) -> None:
    script(
        job, f"import pathlib, time\npathlib.Path({str(job.folder / 'began')!r}).touch()\ntime.sleep(1000)\n", "slow.py"
    )
    agent = job.run("--standalone", "--preload=slow", script(job, SLEEP))
    wait_until(lambda: True if (job.folder / "began").exists() else None, why=job.describe)
    agent.signal(signal.SIGINT)
    assert agent.wait() == 130
    assert "Traceback" not in agent.err


def test_an_interrupt_during_the_start_prints_no_traceback(job: Job) -> None:
    path = script(job, SLEEP)
    for _ in range(5):
        agent = job.run("--standalone", path)
        wait_until(partial(_our_code_runs, agent.pid))
        agent.signal(signal.SIGINT)
        assert agent.wait() in (130, -signal.SIGINT)
        assert "Traceback" not in agent.err


def _our_code_runs(pid: int) -> bool | None:
    """`python -m ripstop` has loaded the agent's modules."""
    return True if "msgspec" in Path(f"/proc/{pid}/maps").read_text() else None


def test_an_agent_interrupted_while_it_waits_for_other_nodes_leaves(job: Job) -> None:
    agent = job.node(nnodes="2", script=Path(script(job, SLEEP)))
    agent.wait_for_log("1 of (at least )?2 nodes are ready, waiting for more")
    agent.signal(signal.SIGINT)
    assert agent.wait() == 130
    assert "left: SIGINT" in agent.err


@pytest.mark.parametrize("gap", ["immediately", "after the log line"])
def test_two_interrupts_during_restarts_end_the_agent_without_a_traceback(job: Job, gap: str) -> None:
    agent = job.run(
        "--standalone", "--nproc-per-node=2", "--max-restarts=100000", "--restart-backoff=0", script(job, CRASH)
    )
    agent.wait_for_log("round=5 ")
    agent.signal(signal.SIGINT)
    if gap == "after the log line":
        agent.wait_for_log("SIGINT: stopping")
    agent.signal(signal.SIGINT)
    assert agent.wait() in (130, -signal.SIGINT), agent.err  # the second may arrive just before the exit
    assert "launch.py" not in agent.err, "a traceback of the agent"  # workers may print theirs
    assert "never retrieved" not in agent.err


def test_an_agent_under_nohup_ignores_sighup(job: Job) -> None:
    agent = job.run("--standalone", script(job, UNTIL_GO), wrap=["nohup"])
    wait_until(lambda: True if "up" in agent.out else None, why=job.describe)
    agent.signal(signal.SIGHUP)
    go(job)
    assert agent.wait() == 0, job.describe()


def test_a_killed_zygote_is_replaced(job: Job) -> None:
    agent = job.run(
        "--standalone",
        "--max-restarts=1",
        script(job, UNTIL_GO + "os._exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"),
    )
    wait_until(lambda: True if "up" in agent.out else None, why=job.describe)
    os.kill(zygote_of(agent.pid), signal.SIGTERM)
    go(job)
    assert agent.wait() == 0
    assert agent.out.split() == ["up", "up"]


# the parent process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["zygote", "exec"])
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_closed_standard_streams_become_dev_null(job: Job, closed: tuple[int, ...], start: str) -> None:
    redirections = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    seen = job.folder / "seen"
    text = f"""
import os, sys
print('to stdout')
print('to stderr', file=sys.stderr)
with open({str(seen)!r}, 'w') as f: f.write(' '.join(os.readlink(f'/proc/self/fd/{{n}}') for n in (0, 1, 2)))
"""
    wrap = ["sh", "-c", f'exec "$@" {redirections}', "sh"]
    agent = job.run("--standalone", f"--start-method={start}", script(job, text), wrap=wrap)
    assert agent.wait() == 0
    streams = seen.read_text().split()
    assert all(streams[number] == "/dev/null" for number in closed if number < 2), streams
    assert "stderr.log" in streams[2]
    assert agent.out == ("" if 1 in closed else "to stdout\n")


def test_a_console_reader_that_exits_does_not_end_the_job(job: Job) -> None:
    """`ripstop run … 2>&1 | head -1`."""
    path = script(job, "for i in range(20000): print('line', i)\n")
    agent = subprocess.Popen(
        [sys.executable, "-m", "ripstop", "run", f"--log-dir={job.logs}", "--tee=3", path],
        env=job.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        assert agent.stdout is not None
        agent.stdout.readline()
        agent.stdout.close()
        assert agent.wait(120) == 0
    finally:
        agent.kill()
        agent.wait()
    (log,) = job.logs.glob("*/round_1/0/stdout.log")
    assert len(log.read_text().splitlines()) == 20000


def test_a_console_gets_all_of_a_flood(job: Job) -> None:
    line = "x" * 99
    agent = job.run(
        "--standalone", script(job, f"import sys\nfor _ in range(200000): sys.stderr.write({line!r} + '\\n')\n")
    )
    assert agent.wait() == 0
    assert agent.err.splitlines().count(line) == 200000


# limited resources ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="a small disk needs root and util-linux")
def test_a_full_disk_fails_the_worker_and_the_report_is_still_printed(job: Job) -> None:
    disk = job.folder / "disk"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=128k tmpfs "$0" && exec "$@"'
    agent = job.ripstop(
        "run",
        f"--log-dir={disk}",
        "--redirects=3",
        script(job, "import sys\nfor i in range(10000): print('a line that fills the disk', i)\n"),
        wrap=["unshare", "--mount", "sh", "-c", mount, str(disk)],
    )
    assert agent.wait() == 1
    assert "root cause: rank 0" in agent.err
    assert "No space left on device" in agent.err
    assert "report.json cannot be written (No space left on device)" in agent.err


@pytest.mark.parametrize("limit", [20, 30, 34, 38])
def test_too_few_file_descriptors_are_an_error_and_not_a_hang(job: Job, limit: int) -> None:
    wrap = ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh"]
    agent = job.run("--standalone", "--nproc-per-node=8", "--tee=3", script(job, "pass\n"), wrap=wrap)
    code = agent.wait()
    assert code == 0 or "Too many open files" in agent.err


def test_sixty_four_workers_start(job: Job) -> None:
    agent = job.run(
        "--standalone", "--nproc-per-node=64", "-r", "3", script(job, "import os\nprint(os.environ['RANK'])\n")
    )
    assert agent.wait() == 0
    assert sorted(int(log.read_text()) for log in job.logs.glob("*/round_1/*/stdout.log")) == list(range(64))


# deleted files --------------------------------------------------------------------------------------------------------


def test_the_error_names_a_script_that_was_deleted_between_rounds(job: Job) -> None:
    path = script(job, "import os\nos.unlink(__file__)\nos._exit(3)\n")
    agent = job.run("--standalone", "--max-restarts=1", path)
    assert agent.wait() == 1
    assert f"can't open file '{path}'" in agent.err


def test_workers_restart_after_the_working_directory_was_deleted(job: Job) -> None:
    here = job.folder / "here"
    here.mkdir()
    text = "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n  os.rmdir(os.getcwd())\n  os._exit(3)\n"
    agent = job.run("--standalone", "--max-restarts=1", script(job, text), wrap=["env", f"--chdir={here}"])
    assert agent.wait() == 0


@pytest.mark.parametrize("removed", ["run", "top"])
@pytest.mark.parametrize("named", [True, False])
def test_a_job_recovers_after_its_log_directory_was_removed(job: Job, named: bool, removed: str) -> None:
    text = f"""
import os, pathlib, shutil, sys
run = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[2]
print(run.name, file=sys.stderr)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    shutil.rmtree(run if {removed!r} == "run" else run.parent)
    os._exit(3)
"""
    top = job.folder / "tmp"
    top.mkdir()
    flags = [f"--log-dir={job.logs}"] if named else []
    agent = job.ripstop("run", "--standalone", *flags, "--max-restarts=2", script(job, text), env={"TMPDIR": str(top)})
    assert agent.wait() == 0, job.describe()
    (log,) = (job.logs if named else top).rglob("stderr.log")
    assert log.parent.parent.name == "round_2"


def test_the_report_is_saved_after_the_log_directory_was_removed(job: Job) -> None:
    text = """
import os, pathlib, shutil
shutil.rmtree(pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[3])
os._exit(3)
"""
    agent = job.run("--standalone", script(job, text))
    assert agent.wait() == 1
    assert len(list(job.logs.glob("*/report.json"))) == 1, job.describe()


def test_a_relative_log_directory_in_a_deleted_directory_is_exit_2(job: Job) -> None:
    here = job.folder / "here"
    here.mkdir()
    wrap = ["sh", "-c", f'cd {here} && rmdir {here} && exec "$@"', "sh"]
    agent = job.ripstop("run", "--log-dir=logs", script(job, "pass\n"), wrap=wrap)
    assert agent.wait() == 2
    assert "--log-dir" in agent.err
    assert "Traceback" not in agent.err


# hostile scripts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 4])
def test_daemons_that_a_script_leaves_behind_end_with_the_job(job: Job, code: int) -> None:
    text = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
os._exit({code})
"""
    agent = job.run("--standalone", "--nproc-per-node=2", script(job, text))
    assert agent.wait() == (1 if code else 0)
    assert not job.leftovers()


def test_the_exit_of_a_worker_that_closed_every_descriptor_is_seen(job: Job) -> None:
    text = "import os, time\nos.closerange(0, 4096)\ntime.sleep(0.1)\nos._exit(int(os.environ['RANK']))\n"
    agent = job.run("--standalone", "--nproc-per-node=2", script(job, text))
    assert agent.wait() == 1
    assert "rank 1" in agent.err
    assert "exited with code 1" in agent.err


def test_a_worker_reads_the_agents_stdin(job: Job) -> None:
    text = "import sys\nprint(sys.stdin.read())\n"
    agent = job.run("--standalone", script(job, text), wrap=["sh", "-c", 'echo piped | "$@"', "sh"])
    assert agent.wait() == 0
    assert agent.out.strip() == "piped"


def test_a_path_may_have_spaces_and_non_ascii_letters(job: Job) -> None:
    path = script(job, "import sys\nprint(sys.argv)\n", "größe mit abstand/tr ain – 1.py")
    agent = job.run("--standalone", path, "a b", "ü")
    assert agent.wait() == 0
    assert agent.out.strip() == str([path, "a b", "ü"])


# full disks and planted links -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> list[str]:
    """A prefix for a command: it mounts an 8 MiB file system at `disk` for that command, and runs $FIRST before it."""
    (tmp_path / "disk").mkdir()
    mounts = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=8m none "$0"', str(tmp_path / "disk")]
    if shutil.which("unshare") is None or subprocess.run(mounts, capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a small disk")
    return [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=8m none "$0" && eval "$FIRST"; exec "$@"',
        mounts[-1],
    ]


FILL = """
import os, sys, time

def fill():
    with open(os.environ["TMPDIR"] + "/fill", "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
"""
NOISY = """
fill()
for number in range(40):  # more than the disk holds; each part is on the console before the next is written
    sys.stderr.write("x" * 199_999 + f"\\npart {number}\\n")
    while not os.path.exists(os.environ["TRAIN_LOG"] + f".{number}"):
        time.sleep(0.001)
"""


def test_workers_can_write_to_stderr_when_the_disk_is_full(job: Job, small_disk: list[str]) -> None:
    env = {"TMPDIR": small_disk[-1], "FIRST": 'head -c 9m /dev/zero > "$0/fill" 2> /dev/null'}
    text = "import sys\nsys.stderr.write('x' * 1_000_000 + '\\n')\nsys.stdout.write('trained\\n')\n"  # one write
    agent = job.ripstop("run", "--standalone", "--nproc-per-node=2", script(job, text), env=env, wrap=small_disk)
    assert agent.wait() == 0, job.describe()
    assert agent.out.split() == ["trained"] * 2
    assert agent.err.count("x") >= 2_000_000
    assert agent.err.count("is full: workers write stderr to the console only") == 1
    assert "Traceback" not in agent.err


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_workers_can_write_to_stderr_while_the_disk_fills_up(
    job: Job, small_disk: list[str], dies: bool, named: bool
) -> None:
    flags = [f"--log-dir={small_disk[-1]}/logs"] if named else []
    end = "raise ValueError('the end')\n" if dies else "print('trained')\n"
    path = script(job, FILL + NOISY + end)
    agent = job.ripstop("run", "--standalone", *flags, path, env={"TMPDIR": small_disk[-1]}, wrap=small_disk)
    for number in range(40):
        agent.wait_for_log(f"part {number}\n")
        Path(f"{job.log}.{number}").touch()
    assert agent.wait() == int(dies), job.describe()
    assert agent.err.count("x") >= 40 * 199_999  # a line of the log may be in between
    assert len(re.findall(r"the disk of \S+ is full: only the console", agent.err)) == 1
    if dies:
        assert "ValueError: the end" in agent.err.split("root cause")[1]
        assert "part 39" in agent.err.split("last lines of stderr")[1]


def test_the_failure_of_a_worker_on_a_full_disk_mentions_the_disk(job: Job, small_disk: list[str]) -> None:
    text = FILL + "fill()\nos.kill(os.getpid(), 9)\n"
    agent = job.ripstop("run", "--standalone", script(job, text), env={"TMPDIR": small_disk[-1]}, wrap=small_disk)
    assert agent.wait() == 1
    assert re.search(r"killed by SIGKILL.*; the disk of \S+ is full", agent.err), job.describe()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to plant what belongs to another user")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", ["round_1/0/stderr.log", "events.jsonl", "job-events.jsonl"])
def test_planted_links_in_a_shared_log_directory_are_not_followed(job: Job, name: str, own: bool) -> None:
    secret = job.folder / "secret"
    secret.write_text("secret")
    planted = job.folder / "logs" / "job7" / name
    planted.parent.mkdir(parents=True)
    planted.symlink_to(secret)
    for path in [] if own else [planted.parent, *planted.parent.parents]:
        if path.is_relative_to(job.folder / "logs"):
            os.chown(path, 4242, 4242)
    text = "import sys\nsys.stderr.write('planted')\n"
    agent = job.run("--rdzv-id=job7", f"--log-dir={job.folder}/logs", script(job, text))
    agent.wait()
    if not own:
        assert agent.process.returncode == 2
        assert "job7 belongs to user 4242" in agent.err
    assert "Traceback" not in agent.err
    assert secret.read_text() == "secret"


# limits of the system -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", range(1, 9))
def test_a_process_limit_is_an_error_in_one_line(job: Job, processes: int) -> None:
    rights = ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]  # root has no limit
    other = ["setpriv", "--reuid=424242", "--clear-groups", *rights, "prlimit", f"--nproc={processes}"]
    if shutil.which("setpriv") is None or subprocess.run([*other, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root, and setpriv")
    job.folder.chmod(0o777)
    path = script(job, SLEEP)  # none ends before all have started
    env = {"TMPDIR": str(job.folder)}
    agent = job.ripstop("run", "--standalone", "--nproc-per-node=6", "--tee=3", path, env=env, wrap=other)
    assert agent.wait() == 1
    assert re.search("error: .*ulimit|could not be started: .*(ulimit|limits)", agent.err), job.describe()
    assert "Traceback" not in agent.err


def test_a_log_directory_whose_name_is_not_utf_8_is_printed_with_replacements(job: Job) -> None:
    logs = os.fsdecode(os.fsencode(job.folder) + b"/l\xffgs")
    agent = job.ripstop("run", "--standalone", f"--log-dir={logs}", script(job, "raise ValueError('no')"))
    assert agent.wait() == 1
    assert "ValueError: no" in agent.err.split("root cause")[1]
    assert "/l?gs/" in agent.err
    assert "launch.py" not in agent.err, "a traceback of the agent"
    assert list(Path(logs).glob("*/report.json"))


@pytest.mark.parametrize(
    ("name", "variable"), [("x" * 300, "--log-dir"), ("x" * 300, "TMPDIR"), ("x" * 300, "TORCHELASTIC_TIMER_FILE")]
)
def test_a_path_that_is_too_long_is_an_error_in_one_line(job: Job, name: str, variable: str) -> None:
    path, env = str(job.folder / name), {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"} if "TIMER" in variable else {}
    if variable.startswith("--"):
        agent = job.ripstop("run", "--standalone", f"{variable}={path}", script(job, ""))
    else:
        agent = job.ripstop("run", "--standalone", script(job, ""), env={**env, variable: path})
    assert agent.wait() == 2
    assert re.search(r"^ripstop run: error: .*File name too long.*; (name|choose) another", agent.err, re.MULTILINE)
    assert "Traceback" not in agent.err
