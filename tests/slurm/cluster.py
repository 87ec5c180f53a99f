"""A real Slurm cluster on this machine, for tests: munged, slurmctld and one slurmd a node.  Empty cgroups stay behind.

The nodes are n1, n2, n3 and p-07, so that node lists are heterogeneous.  Each node is a PID namespace with a host name
of its own, so that a node can be killed with all its processes.  All nodes have the address 127.0.0.1.  The cluster
preempts jobs: a job in the partition `urgent` requeues others.  With the tracking `linuxproc`, Slurm signals all
processes of a step; with `cgroup`, which most clusters have, its tasks only.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.harness import free_port, wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "munged", "unshare", "setpriv")
needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)),
    reason="needs root and Slurm: apt install slurmctld slurmd slurm-client munge",
)
FREEZER = Path("/sys/fs/cgroup/freezer")
needs_cgroup = pytest.mark.skipif(not (FREEZER / "cgroup.procs").exists(), reason="needs cgroup v1")
NAMES = ("n1", "n2", "n3", "p-07")
RIPSTOP = f"{sys.executable} -m ripstop"
NODE = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--propagation=slave", "--mount-proc", "--uts")
WITH_TEST = ("setpriv", "--pdeathsig=KILL")  # a process ends with the test process, even if that is killed
BECOME = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && { "$@" & wait; }'  # the shell reaps what is left
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first_job}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
CommunicationParameters=NoAddrCache,NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
SlurmdParameters=config_overrides
KillWait=30
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=normal Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=10
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


class Cluster:
    """Slurm with the nodes of `NAMES`."""

    def __init__(self, folder: Path, tracking: str) -> None:
        self.folder = folder
        self.first_job = random.randrange(1, 60_000)  # coordinators' ports follow from it
        self.home = folder / "home"
        self.home.mkdir()
        (folder / "state").mkdir()
        self.env = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith(("PET_", "RIPSTOP_", "SLURM_"))
            },
            "SLURM_CONF": str(folder / "slurm.conf"),
            "HOME": str(self.home),
        }
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"127.0.0.1 {name}\n" for name in NAMES))
        nodes = [
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8 RealMemory=1000"
            for name in NAMES
        ]
        text = CONFIGURATION.format(
            host=os.uname().nodename.partition(".")[0],
            port=free_port(),
            first_job=self.first_job,
            folder=folder,
            tracking=tracking,
            nodes="\n".join(nodes),
            names=",".join(NAMES),
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        files = (f"--{kind}-file={self.folder}/munged.{kind}" for kind in ("pid", "log", "seed"))
        self._start("munged", "munged", "--foreground", "--force", f"--key-file={key}",
                    f"--socket={self.folder}/munge.sock", *files)  # fmt: skip
        self._wait_for("munged", (self.folder / "munge.sock").exists)
        self._start("slurmctld", "slurmctld", "-D", "-f", self.env["SLURM_CONF"])
        self._wait_for("slurmctld", lambda: self.run("scontrol", "ping").returncode == 0)
        for name in NAMES:
            self.start_node(name)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        self._wait_for("slurmctld", lambda: self._idle() == set(NAMES))

    def start_node(self, name: str) -> None:
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        slurmd = ("slurmd", "-D", "-N", name, "-f", self.env["SLURM_CONF"])
        self._start(name, *NODE, "bash", "-c", BECOME, name, str(self.folder / "hosts"), *slurmd)

    def kill_node(self, name: str) -> None:
        """End all processes of the node at once, as a power failure does."""
        process = self.processes.pop(name)
        init = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        os.kill(init, signal.SIGKILL)
        process.wait(60)

    def stop(self) -> None:
        for name in [name for name in NAMES if name in self.processes]:
            with suppress(OSError, IndexError, ValueError):
                self.kill_node(name)
        for process in self.processes.values():
            process.kill()
            process.wait(60)
        self._remove_cgroups()

    def _remove_cgroups(self) -> None:
        """Those of this cluster's jobs; other clusters have nodes of the same names, but other jobs."""
        for job in FREEZER.glob("slurm_*/uid_*/job_*"):
            if 0 <= int(job.name.removeprefix("job_")) - self.first_job < 1000:
                for folder in (*job.iterdir(), job):
                    with suppress(OSError):  # the files in it, which go with it
                        folder.rmdir()

    def run(self, *command: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=timeout, check=False
        )

    def submit(self, script: str, *options: str) -> "BatchJob":
        submitted = self.run_script("sbatch", "--parsable", "--output=%j.out", *options, script=script)
        return BatchJob(self, int(submitted))

    def run_script(self, *command: str, script: str) -> str:
        done = subprocess.run(
            command,
            env=self.env,
            cwd=self.folder,
            input=script,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def log(self, name: str) -> str:
        files = sorted(self.folder.glob(f"{name}*.log")) + sorted(self.folder.glob(f"{name}.err"))
        return "\n".join(file.read_text(errors="replace")[-3000:] for file in files)

    def _wait_for(self, name: str, is_ready: Callable[[], bool]) -> None:
        def ready() -> bool | None:
            assert self.processes[name].poll() is None, f"{name} has exited\n{self.log(name)}"
            return is_ready() or None

        wait_until(ready, why=lambda: self.log(name))

    def _idle(self) -> set[str]:
        return set(self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").stdout.split())

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.err").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*WITH_TEST, *command],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


class BatchJob:
    """A job of sbatch, and its output."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number

    @property
    def output(self) -> str:
        file = self.cluster.folder / f"{self.number}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, pattern: str, count: int = 1, timeout: float = 120.0) -> list[str]:
        """Wait for so many matches in the output."""

        def found() -> list[str] | None:
            matches = re.findall(pattern, self.output)
            return matches if len(matches) >= count else None

        return wait_until(found, timeout, lambda: f"never printed {pattern!r}:\n{self.output}")

    def wait_until_over(self, timeout: float = 120.0) -> str:
        """Its state at the end."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        return wait_until(lambda: state if (state := self.state()) in over else None, timeout, lambda: self.output)

    def state(self) -> str:
        shown = self.cluster.run("scontrol", "show", "job", str(self.number)).stdout
        found = re.search(r"JobState=(\w+)", shown)
        return found[1] if found else ""

    def release(self) -> None:
        """Start a requeued job in two seconds: by itself, Slurm waits two minutes.

        Not at once: Slurm has revoked the job's credential, and kills a job with a new one of the same second.
        """
        wait_until(lambda: self.state() == "PENDING" or None, why=lambda: self.output)
        updated = self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+2")
        assert updated.returncode == 0, updated.stderr

    def end_in(self, seconds: int) -> None:
        """Move the time limit of a running job."""
        updated = self.cluster.run("scontrol", "update", f"JobId={self.number}", f"EndTime=now+{seconds}")
        assert updated.returncode == 0, updated.stderr

    def cancel(self) -> None:
        self.cluster.run("scancel", str(self.number))
        self.wait_until_over()


@contextmanager
def running_cluster(folder: Path, tracking: str = "linuxproc") -> Iterator[Cluster]:
    cluster = Cluster(folder, tracking)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
