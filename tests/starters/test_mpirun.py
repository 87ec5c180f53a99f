"""A job that a real mpirun starts.  Its two nodes are on this machine, with host names of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import free_port

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("mpirun", "unshare"))),
    reason="needs root and Open MPI: apt install openmpi-bin",
)
REMOTE_SHELL = """\
#!/bin/sh
host=$1
shift
exec unshare --uts sh -c 'hostname "$0" && exec sh -c "$1"' "$host" "$*"
"""
SCRIPT = """\
import os, signal
if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
    os.kill(os.getpid(), signal.SIGKILL)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
line = f"{attempt}: {os.environ['RANK']} {os.environ['WORLD_SIZE']} {os.uname().nodename}\\n"
os.write(1, line.encode())  # in one piece: the nodes share the output
"""


def mpirun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    shell = folder / "shell"
    shell.write_text(REMOTE_SHELL)
    shell.chmod(0o755)
    (folder / "train.py").write_text(SCRIPT)
    unset = ("PET_", "RIPSTOP_", "OMPI_", "PMI", "SLURM_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    start = ["mpirun", "--allow-run-as-root", "--mca", "plm_rsh_agent", str(shell), "--oversubscribe"]
    run = [sys.executable, "-m", "ripstop", "run", "--rdzv-backend=mpi", "--max-restarts=1", "--log-dir=logs"]
    command = [*start, *arguments, *run, f"--rdzv-endpoint=127.0.0.1:{free_port()}", "train.py"]
    environ |= {"HOME": str(folder), "TMPDIR": str(folder)}
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_mpirun_starts_a_job_of_two_nodes_that_survives_the_death_of_a_worker(tmp_path: Path) -> None:
    done = mpirun(tmp_path, "-H", "node1,node2", "-N", "1")
    assert done.returncode == 0, done.stderr
    again = [line for line in done.stdout.splitlines() if line.startswith("1: ")]
    assert sorted(again) == ["1: 0 2 node1", "1: 1 2 node2"]
    assert (tmp_path / ".config" / "ripstop" / "key").exists()


def test_mpirun_with_several_processes_a_node_is_an_error(tmp_path: Path) -> None:
    done = mpirun(tmp_path, "-n", "2")
    assert done.returncode == 2
    assert "OMPI_COMM_WORLD_LOCAL_SIZE=2: several processes on one node; ripstop needs one" in done.stderr
