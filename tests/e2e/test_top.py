"""`ripstop top` in a real terminal (tmux), on a real job."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.harness import SCRIPTS, Job, wait_until
from tests.e2e.terminal import COLOR, ripstop, terminal

SCRIPT = SCRIPTS / "reporting.py"
TOP = ripstop("top")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("top")
    env = {"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder), "LC_ALL": "C.UTF-8", "SLOW": "3"}
    with Job(folder, **env) as job:
        job.run("--nproc-per-node=4", "--rdzv-id=top", "--max-restarts=9", str(SCRIPT))
        wait_until(lambda: next(iter((folder / "ripstop").glob("*.sock")), None), why=job.describe)
        yield job


@pytest.mark.parametrize(("width", "height", "env"), [(80, 24, {}), (120, 40, {}), (200, 60, {"NO_COLOR": "1"})])
def test_a_job_is_shown_at_every_size(job: Job, width: int, height: int, env: dict[str, str]) -> None:
    with terminal(job, TOP, width, height, **env) as screen:
        screen.shows(r"top  running .* 4 ranks on 1 nodes\n")
        screen.shows(r"rank 3: straggler")
        screen.shows(r"■■■s\n")
        screen.shows(r"EVENTS\n")
        assert bool(COLOR.search(screen.text("-e"))) is not bool(env), "colours, but not with NO_COLOR"
        screen.press("q")
        screen.shows("exit code 0")


def test_keys_show_logs_and_stacks_and_sort_and_filter(job: Job) -> None:
    with terminal(job, TOP, 80, 24) as screen:
        screen.shows("rank 3: straggler")
        screen.press("o", "l")  # sorted by state: the straggler is first
        screen.shows(r"stderr of rank 3\n(.*\n)*\[rank 3\] step \d+: loss")
        screen.press("Escape")
        screen.press("s")
        screen.shows(r"stack of rank 3\n(.*\n)*.*train_step")
        screen.press("Escape")
        screen.press("S")
        screen.shows(r"4 workers, \d stacks")
        screen.press("Escape")
        screen.press("/")
        screen.press("1-2", "Enter")
        screen.shows(r"filter '1-2': 2 of 4")


def test_a_killed_worker_and_a_restart_become_rounds(job: Job) -> None:
    with terminal(job, TOP, 140, 40) as screen:
        before = int(screen.shows(r"running .*  round (\d+)  4 ranks")[1])
        os.kill(int(screen.shows(r"\n +1 \S+ running .* (\d+)\n")[1]), signal.SIGKILL)
        screen.shows(rf"round {before + 1}  4 ranks")
        screen.shows(r"ROUNDS\n(.*\n)*.*died of SIGKILL")
        screen.press("r")
        screen.shows(rf"restart all 4 workers as round {before + 2}\? y/n")
        screen.press("n")
        screen.press("d")
        screen.shows(r"its 4 workers stop")
        screen.press("y")
        screen.shows(r"the job needs 1 nodes")  # refused, and why
        screen.press("r")
        screen.press("y")
        screen.shows(rf"round {before + 2}  4 ranks")
