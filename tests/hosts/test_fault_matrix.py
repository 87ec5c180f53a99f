"""The fault matrix: one fault each, on one node and on three, and what it costs.  `docs/fault-matrix.md` has the rows.

With $FAULT_MATRIX=FILE, each test adds its row to this JSON file, from which `python -m tests.docs.tables` makes the
table.  The victim is the last node and its worker; the coordinator is on the first.
"""

import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from ripstop.system.cgroup_memory import memory_cgroup_path
from tests.e2e.harness import SCRIPTS, TIMEOUT_S, Agent, Job, wait_until
from tests.hosts.network import PORT, Host, hosts, needs_hosts, needs_loss

pytestmark = [needs_hosts, pytest.mark.long, pytest.mark.timeout(240)]

TRAINING = SCRIPTS / "matrix.py"
WARM_UP_STEPS = 30
QUIET_S = 12.0  # a fault that does not disturb training is watched for this time: longer than a lease
FLAGS = ("--max-restarts=5", "--restart-backoff=0", "--shutdown-timeout=5")
DISK_BYTES = 48 << 20
DNS_FAILURE_S = 10.0


@dataclass(frozen=True)
class FullStep:
    """A step that all ranks of a round have done, when the last one had."""

    round: str
    world: int
    step: int
    at: float


@dataclass
class Bed:
    """A job on one node with two workers, or on three hosts with one worker each."""

    job: Job
    machines: list[Host]
    agents: list[Agent] = field(default_factory=list)
    coordinator: Agent | None = None  # if it is a process of its own
    undo: list[Callable[[], object]] = field(default_factory=list)  # before the end of the job
    clean_up: list[Callable[[], object]] = field(default_factory=list)  # after it

    @property
    def host(self) -> Host:
        """The victim's."""
        return self.machines[-1]

    @property
    def agent(self) -> Agent:
        """The victim's."""
        return self.agents[-1]

    def start(self, *flags: str, wrap: list[str] | None = None, endpoint: str = "") -> None:
        wrap = wrap or []
        if not self.machines:
            self.agents.append(
                self.job.run("--standalone", "--nproc-per-node=2", *FLAGS, *flags, str(TRAINING), wrap=wrap)
            )
            return
        for number, host in enumerate(self.machines):
            is_victim = number == len(self.machines) - 1
            agent = self.job.node(
                "--rdzv-conf=last_call_timeout=30",
                f"--node-rank={number}",
                *FLAGS,
                *flags,
                nnodes="2:3",
                script=TRAINING,
                endpoint=endpoint or f"{self.machines[0].address}:{PORT}",
                wrap=[*host.namespace.enter, *(wrap if is_victim else [])],
            )
            self.agents.append(agent)
            (self.coordinator or self.agents[0]).wait_for_log(rf"joined from ({host.address}|host{host.number}) ")

    def heal(self) -> None:
        """Undo what was injected."""
        while self.undo:
            self.undo.pop()()

    @property
    def world(self) -> int:
        return 3 if self.machines else 2

    def worker(self) -> int:
        """The pid of the victim, the worker of the highest rank."""
        return int(self.job.worker_events(rank=self.world - 1)[-1]["pid"])

    def order(self, text: str) -> None:
        path = Path(self.job.env["ORDERS"], str(self.world - 1))
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)

    def full_steps(self) -> list[FullStep]:
        ranks: dict[tuple[str, int, int], set[int]] = {}
        found = []
        for event in self.job.worker_events(event="step"):
            key = event["round"], event["world"], event["step"]
            ranks.setdefault(key, set()).add(event["rank"])
            if len(ranks[key]) == event["world"]:
                found.append(FullStep(*key, event["t"]))
        return found

    def wait_for_steps(self, count: int, timeout: float, *, other_than: str = "") -> None:
        """Wait for so many full steps of the latest round, which is not this one."""

        def enough() -> bool | None:
            steps = self.full_steps()
            latest = [step for step in steps if step.round == steps[-1].round != other_than]
            return len(latest) >= count or None

        wait_until(enough, timeout, self.job.describe)


@contextmanager
def bed(nodes: int, folder: Path) -> Iterator[Bed]:
    (folder / "orders").mkdir()
    with ExitStack() as stack:
        machines = stack.enter_context(hosts(3, folder)) if nodes == 3 else []
        names = "".join(f"{host.address} host{host.number}\n" for host in machines)
        for host in machines:
            (folder / f"etc-hosts-host{host.number}").write_text(f"127.0.0.1 localhost\n{names}")
        (folder / "run").mkdir()
        job = Job(folder, ORDERS=str(folder / "orders"), XDG_RUNTIME_DIR=str(folder / "run"))
        made = Bed(job, machines)
        stack.callback(lambda: [clean_up() for clean_up in made.clean_up])
        stack.enter_context(job)
        stack.callback(made.heal)
        yield made


# the faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """`prepare` starts the job, `inject` does it; the outcome is expected on one node and on three (None: no row).

    "restart": a new round trains.  "goes on": the round trains on.  "ends": the agent is gone.  "fails": the job ends
    with an error.
    """

    name: str
    inject: Callable[[Bed], object]
    one: str | None = "restart"
    three: str | None = "restart"
    prepare: Callable[[Bed], object] = Bed.start
    marks: tuple[pytest.MarkDecorator, ...] = ()


def signalled(signum: int) -> Callable[[Bed], object]:
    return lambda bed: os.kill(bed.worker(), signum)


def with_hang_detection(bed: Bed) -> None:
    bed.start("--hang-timeout=5")


def freeze_worker(bed: Bed) -> None:
    """In a frozen cgroup (version 1), a process is in D state, and SIGKILL does not end it."""
    parent = Path("/sys/fs/cgroup/freezer")
    if not os.access(parent, os.W_OK) or not (parent / "cgroup.procs").exists():
        pytest.skip("needs the right to make a freezer cgroup (version 1)")
    group = parent / f"ripstop_matrix_{os.getpid()}"
    group.mkdir()
    bed.clean_up.append(lambda: wait_until(lambda: _removed(group), 20))
    bed.undo.append(lambda: (group / "freezer.state").write_text("THAWED"))
    (group / "cgroup.procs").write_text(str(bed.worker()))
    (group / "freezer.state").write_text("FROZEN")


def stop_agent(bed: Bed) -> None:
    bed.agent.signal(signal.SIGSTOP)
    bed.undo.append(lambda: bed.agent.signal(signal.SIGCONT))


def cut(bed: Bed) -> None:
    bed.host.cut()
    bed.undo.append(bed.host.heal)


def cut_one_way(bed: Bed) -> None:
    """What the victim sends is lost; what is sent to it arrives."""
    for other in bed.machines[:-1]:
        bed.host.speaks_past(other)


def lose_packets(bed: Bed) -> None:
    bed.host.loses(0.3)


def with_own_coordinator(bed: Bed) -> None:
    start_coordinator(bed)
    bed.start()


def start_coordinator(bed: Bed) -> None:
    first = bed.machines[0]
    flags = "--rdzv-id=e2e", "--nnodes=2:3", "--rdzv-conf=last_call_timeout=30", *FLAGS[:2]
    endpoint = f"--rdzv-endpoint={first.address}:{PORT}"
    bed.coordinator = bed.job.ripstop("coordinator", endpoint, *flags, wrap=first.namespace.enter)
    bed.coordinator.wait_for_log("coordinator of job=")


def kill_coordinator(bed: Bed) -> None:
    """Something starts it again, as a service manager does."""
    assert bed.coordinator is not None
    bed.coordinator.signal(signal.SIGKILL)
    bed.coordinator.wait()
    start_coordinator(bed)
    assert bed.coordinator is not None
    bed.coordinator.wait_for_log("have rejoined")


def take_agents_descriptors(bed: Bed) -> None:
    """The agent may open no file that it has not open, and its worker dies."""
    pid = bed.agent.pid
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
    os.kill(bed.worker(), signal.SIGKILL)


def in_small_cgroup(bed: Bed) -> None:
    version, path = memory_cgroup_path(Path("/proc/self/cgroup").read_text())
    group = Path(f"/sys/fs/cgroup/memory{path}/ripstop_matrix_{os.getpid()}")
    if version != 1 or not os.access(group.parent, os.W_OK):
        pytest.skip("needs the right to make a memory cgroup (version 1)")
    group.mkdir()
    bed.clean_up.append(lambda: wait_until(lambda: _removed(group), 20))
    (group / "memory.limit_in_bytes").write_text(str(1536 << 20))
    bed.start(wrap=["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")])


def _removed(group: Path) -> bool | None:
    try:
        group.rmdir()
    except OSError:
        return None
    return True


def on_small_disk(variable: str) -> Callable[[Bed], object]:
    """The victim's log directory, or its directory for temporary files, is a small file system of its own."""

    def start(bed: Bed) -> None:
        folder = bed.job.logs if variable == "logs" else bed.job.folder / "tmp"
        folder.mkdir()
        if variable == "tmp":
            bed.job.env["TMPDIR"] = str(folder)
        mount = f'mount -t tmpfs -o size={DISK_BYTES} none "$0" && exec "$@"'
        bed.start("--tee=3", "--health-interval=2", wrap=["unshare", "--mount", "sh", "-c", mount, str(folder)])
        bed.job.env["SMALL_DISK"] = str(folder)

    return start


def fill_disk(bed: Bed) -> None:
    disk = Path(f"/proc/{bed.agent.pid}/root{bed.job.env['SMALL_DISK']}")
    assert os.statvfs(disk).f_blocks * os.statvfs(disk).f_frsize == DISK_BYTES, "not the small disk"
    subprocess.run(["dd", "if=/dev/zero", f"of={disk}/filler", "bs=64k"], check=False, capture_output=True)
    assert os.statvfs(disk).f_bavail == 0


def take_descriptors(bed: Bed) -> None:
    """The worker may open no file that it has not open; its next line for the log fails."""
    pid = bed.worker()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))


CLOCK_JUMP_S = 3600
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile long long *offset;
__attribute__((constructor)) static void start(void) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY | O_CLOEXEC);
    offset = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if ((clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) && offset) now->tv_sec += *offset;
    return result;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict to, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


def with_own_clock(bed: Bed) -> None:
    """The victim's agent and workers have a wall clock that the test can move.  The monotonic clock is real."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler, for a clock of its own")
    library, offset = bed.job.folder / "clock.so", bed.job.folder / "clock-offset"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "-", "-ldl"], input=CLOCK, text=True, check=True
    )
    offset.write_bytes(struct.pack("q", 0))
    bed.start(wrap=["env", f"LD_PRELOAD={library}", f"CLOCK_OFFSET={offset}"])


def move_clock(bed: Bed, seconds: int) -> None:
    with (bed.job.folder / "clock-offset").open("r+b") as file:  # in place: the victims have mapped it
        file.write(struct.pack("q", seconds))
    skewed = f"import time; print(time.time() - {time.time()})"
    variables = dict(e.split("=", 1) for e in Path(f"/proc/{bed.worker()}/environ").read_text().split("\0") if "=" in e)
    found = subprocess.run([sys.executable, "-c", skewed], env=variables, capture_output=True, check=True, text=True)
    assert abs(float(found.stdout) - seconds) < 60, "the victims' clock did not move"


def move_clock_back(bed: Bed) -> None:
    move_clock(bed, -CLOCK_JUMP_S)
    os.kill(bed.worker(), signal.SIGKILL)


def by_name(bed: Bed) -> None:
    bed.start(endpoint=f"host1:{PORT}")


def break_dns(bed: Bed) -> None:
    """For ten seconds, every host knows only its own name, and a worker dies."""
    files = [bed.job.folder / f"etc-hosts-host{host.number}" for host in bed.machines]
    texts = [file.read_text() for file in files]
    for file, host in zip(files, bed.machines, strict=True):
        file.write_text(f"127.0.0.1 localhost\n{host.address} host{host.number}\n")
    timer = threading.Timer(DNS_FAILURE_S, lambda: [f.write_text(t) for f, t in zip(files, texts, strict=True)])
    timer.start()
    bed.undo += [timer.cancel, timer.join]
    os.kill(bed.worker(), signal.SIGKILL)


FAULTS = (
    Fault("worker: SIGKILL", signalled(signal.SIGKILL)),
    Fault("worker: SIGSEGV", signalled(signal.SIGSEGV)),
    Fault("worker: exception", lambda bed: bed.order("raise")),
    Fault("worker: exit code 7", lambda bed: bed.order("exit")),
    Fault("worker: SIGSTOP, with `--hang-timeout=5`", signalled(signal.SIGSTOP), prepare=with_hang_detection),
    Fault(
        "worker: uninterruptible sleep (D state), with `--hang-timeout=20`",
        freeze_worker,
        one="fails",
        prepare=lambda bed: bed.start("--hang-timeout=20"),
    ),
    Fault("worker: out of memory in its cgroup", lambda bed: bed.order("allocate"), prepare=in_small_cgroup),
    Fault("worker: no file descriptors", take_descriptors),
    Fault("agent: SIGKILL", lambda bed: bed.agent.signal(signal.SIGKILL), one="ends"),
    Fault("agent: SIGSTOP", stop_agent, one="goes on"),
    Fault("agent: no file descriptors, and a worker gets SIGKILL", take_agents_descriptors),
    Fault(
        "coordinator: SIGKILL, and it is started again",
        kill_coordinator,
        one=None,
        three="goes on",
        prepare=with_own_coordinator,
    ),
    Fault("host: cut off", cut, one=None),
    Fault("host: cut off one way, its packets get lost", cut_one_way, one=None),
    Fault("host: 30 % of arriving packets get lost", lose_packets, one=None, three="goes on", marks=(needs_loss,)),
    Fault("disk of the logs: full", fill_disk, one="goes on", prepare=on_small_disk("logs")),
    Fault("/tmp: full", fill_disk, one="goes on", prepare=on_small_disk("tmp")),
    Fault(
        "clock: jumps one hour ahead",
        lambda bed: move_clock(bed, CLOCK_JUMP_S),
        one="goes on",
        three="goes on",
        prepare=with_own_clock,
    ),
    Fault("clock: jumps one hour back, and a worker gets SIGKILL", move_clock_back, prepare=with_own_clock),
    Fault("DNS: fails for 10 s, and a worker gets SIGKILL; `--rdzv-endpoint` is an address", break_dns, one=None),
    Fault("DNS: the same; `--rdzv-endpoint` is a name", break_dns, one=None, prepare=by_name),
)
ROWS = [
    pytest.param(fault, nodes, marks=fault.marks, id=f"{fault.name}-{nodes}")
    for fault in FAULTS
    for nodes in (1, 3)
    if (fault.one if nodes == 1 else fault.three) is not None
]


# the test -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "nodes"), ROWS)
def test_a_fault_is_detected_and_healed(fault: Fault, nodes: int, tmp_path: Path) -> None:
    expected = fault.one if nodes == 1 else fault.three
    with bed(nodes, tmp_path) as job:
        fault.prepare(job)
        job.wait_for_steps(WARM_UP_STEPS, 90)
        before = job.full_steps()[-1]
        assert before.world == job.world
        at = time.monotonic()
        fault.inject(job)
        row = {"fault": fault.name, "nodes": nodes, "outcome": expected}
        if expected in ("ends", "fails"):
            job.agent.process.wait(TIMEOUT_S)
            row |= {"detected": "", "seconds": time.monotonic() - at, "lost_steps": None}
            job.heal()  # a worker that cannot end has the agent's stderr
            code = job.agent.wait()
            if expected == "fails":
                assert code == 1
                row |= {"detected": re.sub(r"pid=\d+", "pid=PID", re.findall(r"error: (.*)", job.agent.err)[-1])}
            wait_until(lambda: None if job.job.leftovers() else True, why=job.job.describe)
            write_row(row)
            return
        if expected == "restart":
            job.wait_for_steps(5, 90, other_than=before.round)
        else:
            wait_until(lambda: time.monotonic() > at + QUIET_S or None)
            job.wait_for_steps(5, 60)
        steps = job.full_steps()
        after = [step for step in steps if step.at > at]
        assert (after[-1].round != before.round) == (expected == "restart"), job.job.describe()
        if expected == "restart":
            first = next(step for step in after if step.round != before.round)
            done = max(step.step for step in steps if step.round == before.round)
            row |= {"seconds": first.at - at, "lost_steps": max(0, done + 1 - first.step)}
            row |= {"detected": reason(job.agents[0].err)}
        else:
            times = [before.at, *(step.at for step in after)]
            row |= {"seconds": max(b - a for a, b in pairwise(times)), "lost_steps": 0}
            row |= {"detected": ""}
        write_row(row)


def reason(log: str) -> str:
    """Why the second round was formed, without names that differ from run to run."""
    why = re.findall(r"round=2 .*why=(?:'(.*)'|\"(.*)\")", log)[0]
    text = re.sub(r"; (infrastructure )?restart \d+ of .*", "", why[0] or why[1])
    text = re.sub(r"node \S+-\d+-[0-9a-f]{4}", "the node", text)
    return re.sub(r"/\S+/(logs/e2e|tmp) \(", "its directory (", text)


def write_row(row: dict[str, object]) -> None:
    print(row)
    if file := os.environ.get("FAULT_MATRIX"):
        path = Path(file)
        rows = json.loads(path.read_text()) if path.exists() else []
        rows = [old for old in rows if (old["fault"], old["nodes"]) != (row["fault"], row["nodes"])]
        order = [fault.name for fault in FAULTS]
        rows = sorted([*rows, row], key=lambda row: (order.index(row["fault"]), row["nodes"]))
        path.write_text(json.dumps(rows, indent=1) + "\n")
