"""torchrun's flags with an effect on workers, in real jobs; compared with torchrun itself where possible."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Agent, Job, wait_until

# A line is one write; print makes two, and other output could come between them on a shared console.
LINES = """
import os
rank = os.environ["RANK"]
for word in ("apple", "pear", "orange,red"):
    os.write(1, f"out {rank} {word}\\n".encode())
    os.write(2, f"err {rank} {word}\\n".encode())
"""
VIRTUAL = """
import os
names = "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"
os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())
"""
PRINT_ARGV = "import os, sys; print(sys.orig_argv[1:], sys.argv, __name__)"
PLUGIN = """
import os
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std

class Mine(LogsSpecs):
    @property
    def root_log_dir(self):
        return self._root_log_dir

    def reify(self, envs):
        if os.environ.get("PLUGIN_FAULT"):
            raise RuntimeError("the plugin's own message")
        assert isinstance(self._tee, Std) and self._tee is Std.ALL
        top = os.path.join(self._root_log_dir, "mine", envs[0]["TORCHELASTIC_RESTART_COUNT"])
        path = {(kind, rank): os.path.join(top, kind + envs[rank]["RANK"]) for kind in ("o", "e") for rank in envs}
        for env in envs.values():
            env["SET_BY_PLUGIN"] = str(len(envs))
            env["TORCHELASTIC_ERROR_FILE"] = os.path.join(top, "error" + env["RANK"])
        return LogsDest(
            stdouts={rank: path["o", rank] for rank in envs},
            stderrs={rank: path["e", rank] for rank in envs},
            tee_stdouts={0: path["o", 0]},
            error_files={rank: env["TORCHELASTIC_ERROR_FILE"] for rank, env in envs.items()},
            filtered_stdout=os.path.join(top, "kept"),
        )
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path) as job:
        yield job


def script(job: Job, text: str, name: str = "script.py") -> str:
    (job.folder / name).write_text(text)
    return str(job.folder / name)


def finished(agent: Agent) -> Agent:
    assert agent.wait() == 0, agent.err
    return agent


def torchrun(job: Job, *arguments: str, **env: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the installed torchrun with the same arguments and another log directory."""
    pytest.importorskip("torch.distributed.run")
    logs = job.folder / "torchs"
    argv = [sys.executable, "-m", "torch.distributed.run", f"--log-dir={logs}", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False, env={**job.env, **env})
    return done, logs


def lines_with_fruit(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if " apple" in line or " pear" in line or " orange" in line)


# output ---------------------------------------------------------------------------------------------------------------


def test_filters_ranks_and_prefixes_have_the_same_effect_as_with_torchrun(job: Job) -> None:
    arguments = [
        "--standalone",
        "--nproc-per-node=3",
        "--tee=3",
        "--local-ranks-filter=0,2",
        "--duplicate-stdout-filters=apple,ge,,r",
        "--duplicate-stderr-filters=pear",
        script(job, LINES),
    ]
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}/${local_rank} $other>"}
    agent = finished(job.run(*arguments, env=env))
    theirs, their_logs = torchrun(job, *arguments, **env)
    if theirs.returncode == 2:
        pytest.skip("this torchrun does not know these flags")
    assert lines_with_fruit(agent.out) == lines_with_fruit(theirs.stdout)
    assert lines_with_fruit(agent.err) == lines_with_fruit(theirs.stderr)
    assert "<default 2/2 $other>out 2 pear" in agent.out.splitlines()
    for name in ("filtered_stdout.log", "filtered_stderr.log"):
        (mine,), (other,) = job.logs.rglob(name), their_logs.rglob(name)
        assert sorted(mine.read_text().splitlines()) == sorted(other.read_text().splitlines()) != []
    (hidden,) = job.logs.glob("*/round_*/1/stdout.log")
    assert hidden.read_text() == "out 1 apple\nout 1 pear\nout 1 orange,red\n"


def test_a_filtered_worker_is_not_shown_and_its_stderr_is_kept(job: Job) -> None:
    agent = finished(job.run("--standalone", "--nproc-per-node=2", "--local-ranks-filter=1", script(job, LINES)))
    assert lines_with_fruit(agent.out) == ["out 1 apple", "out 1 orange,red", "out 1 pear"]
    assert lines_with_fruit(agent.err) == ["err 1 apple", "err 1 orange,red", "err 1 pear"]
    (kept,) = job.logs.glob("*/round_*/0/stderr.log")
    assert lines_with_fruit(kept.read_text()) == ["err 0 apple", "err 0 orange,red", "err 0 pear"]
    assert list(job.logs.glob("*/round_*/0/stdout.log")) == []


def test_filtered_lines_are_complete_and_in_order(job: Job) -> None:
    count = 3000
    flags = ["--standalone", "--nproc-per-node=2", "--tee=3", "--duplicate-stdout-filters=7,out 1"]
    finished(job.run(*flags, str(SCRIPTS / "lines.py"), str(count)))
    (path,) = job.logs.rglob("filtered_stdout.log")
    lines = path.read_text().splitlines()
    sevens = [f"[default0]:out 0 {i}" for i in range(count) if "7" in str(i)]
    assert [line for line in lines if line.startswith("[default0]")] == sevens
    assert [line for line in lines if line.startswith("[default1]")] == [f"[default1]:out 1 {i}" for i in range(count)]


def test_with_dev_null_as_log_directory_no_files_are_kept(job: Job) -> None:
    flags = ["--standalone", "--log-dir=/dev/null", "--tee=3", "--redirects=3"]
    (temporary := job.folder / "temporary").mkdir()
    env = {"TMPDIR": str(temporary)}
    agent = finished(job.run(*flags, script(job, LINES), env=env))
    assert lines_with_fruit(agent.out) == ["out 0 apple", "out 0 orange,red", "out 0 pear"]
    for flag in ("--tee", "--redirects"):
        assert f"{flag} has no effect with --log-dir=/dev/null" in agent.err
    failing = job.run(*flags, script(job, "import ripstop\n@ripstop.record\ndef main(): 1 / 0\nmain()"), env=env)
    assert failing.wait() == 1
    assert "ZeroDivisionError" in failing.err and str(temporary) not in failing.err
    assert list(temporary.iterdir()) == []


# plugins --------------------------------------------------------------------------------------------------------------


def plugin(job: Job) -> dict[str, str]:
    """An installed package with a plugin, as the environment that has it."""
    site = job.folder / "site"
    (site / "mylogs-1.0.dist-info").mkdir(parents=True)
    (site / "mylogs.py").write_text(PLUGIN)
    (site / "mylogs-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mylogs\nVersion: 1.0\n")
    (site / "mylogs-1.0.dist-info" / "entry_points.txt").write_text("[torchrun.logs_specs]\nmine = mylogs:Mine\n")
    return {"PYTHONPATH": str(site)}


def test_a_plugin_chooses_log_files_and_can_add_variables(job: Job) -> None:
    pytest.importorskip("torch")
    first = "rank == '0' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    fault = f"if {first}:\n    raise RuntimeError('fault ' + os.environ['SET_BY_PLUGIN'])"
    agent = job.run(
        "--standalone", "--nproc-per-node=2", "--max-restarts=1", "--tee=3", "--logs-specs=mine",
        "--duplicate-stdout-filters=apple", script(job, f"{LINES}\n{fault}"), env=plugin(job),
    )  # fmt: skip
    finished(agent)
    assert lines_with_fruit(agent.out) == [
        f"[default0]:out 0 {word}" for word in ("apple", "apple", "orange,red", "orange,red", "pear", "pear")
    ]
    mine = job.logs / "mine"
    assert {path.name for path in (mine / "1").iterdir()} == {"o0", "o1", "e0", "e1", "kept"}
    assert (mine / "1" / "o1").read_text() == "out 1 apple\nout 1 pear\nout 1 orange,red\n"
    assert (mine / "1" / "kept").read_text() == "[default0]:out 0 apple\n"
    assert "fault 2" in json.loads((mine / "0" / "error0").read_text())["message"]["message"]


@pytest.mark.long
def test_torchs_own_specs_are_a_plugin_too(job: Job) -> None:
    pytest.importorskip("torch")
    finished(job.run("--standalone", "--redirects=3", "--logs-specs=default", script(job, LINES)))
    (path,) = job.logs.glob("*/attempt_0/0/stdout.log")
    assert path.read_text() == "out 0 apple\nout 0 pear\nout 0 orange,red\n"


def test_a_plugin_that_fails_fails_the_job_with_its_message(job: Job) -> None:
    pytest.importorskip("torch")
    agent = job.run("--standalone", "--logs-specs=mine", script(job, LINES), env={**plugin(job), "PLUGIN_FAULT": "1"})
    assert agent.wait() == 1
    assert "--logs-specs=mine: the plugin failed: RuntimeError: the plugin's own message" in agent.err


# programs and ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--run-path"], ["--run-path", "--start-method=spawn"]])
def test_a_script_is_main_with_its_own_arguments(job: Job, flags: list[str]) -> None:
    path = script(job, PRINT_ARGV)
    agent = finished(job.run("--standalone", *flags, path, "--x"))
    assert agent.out == f"{['-u', path, '--x']} {[path, '--x']} __main__\n"


def test_python_exec_sets_the_interpreter(job: Job) -> None:
    other = script(job, f'#!/bin/sh\necho "other python $*"\nexec {sys.executable} "$@"\n', "other")
    os.chmod(other, 0o755)  # noqa: PTH101
    path = script(job, PRINT_ARGV)
    agent = finished(job.run("--standalone", path, env={"PYTHON_EXEC": other}))
    assert agent.out.startswith(f"other python -u {path}\n")


@pytest.mark.long
def test_python_exec_also_serves_the_store_because_it_has_torch(job: Job) -> None:
    started = job.folder / "started"
    other = script(job, f'#!/bin/sh\necho "$2" >> {started}\nexec {sys.executable} "$@"\n', "other")
    os.chmod(other, 0o755)  # noqa: PTH101
    path = script(job, "import torch.distributed as dist\ndist.init_process_group('gloo')\nprint(dist.get_rank())\n")
    agent = finished(job.run("--standalone", path, env={"PYTHON_EXEC": other}))
    assert agent.out == "0\n"
    assert sorted(Path(line).name for line in started.read_text().splitlines()) == ["script.py", "store_process.py"]


def test_with_virtual_local_rank_each_worker_is_0_and_sees_its_own_gpu(job: Job) -> None:
    arguments = ["--standalone", "--nproc-per-node=2", "--virtual-local-rank", script(job, VIRTUAL)]
    agent = finished(job.run(*arguments, env={"CUDA_VISIBLE_DEVICES": "5,GPU-aa"}))
    assert sorted(agent.out.splitlines()) == ["0 0 2 5", "1 0 2 GPU-aa"]
    theirs, _ = torchrun(job, *arguments, CUDA_VISIBLE_DEVICES="5,GPU-aa")
    if theirs.returncode != 2:
        assert sorted(theirs.stdout.splitlines()) == sorted(agent.out.splitlines())


# signals --------------------------------------------------------------------------------------------------------------

CATCH = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (print("caught", flush=True), sys.exit(0)))
print("ready", flush=True)
time.sleep(100)
"""


def test_a_handled_signal_ends_the_job_and_reaches_the_workers(job: Job) -> None:
    agent = job.run("--standalone", "--signals-to-handle=SIGTERM,SIGUSR1", script(job, CATCH))
    wait_until(lambda: "ready\n" in agent.out or None)
    agent.signal(signal.SIGUSR1)
    assert agent.wait() == 128 + signal.SIGUSR1
    assert agent.out == "ready\ncaught\n"


def test_another_signal_has_its_default_effect_and_no_worker_survives(job: Job) -> None:
    agent = job.run("--standalone", "--signals-to-handle=SIGTERM", script(job, CATCH))
    wait_until(lambda: "ready" in agent.out or None)
    agent.signal(signal.SIGQUIT)
    assert agent.wait() == -signal.SIGQUIT
    wait_until(lambda: None if job.leftovers() else True)
