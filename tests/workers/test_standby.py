"""Standbys with a real zygote: a taken one is like a forked worker, and a bad warm-up costs only the standby."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ripstop.model import events
from ripstop.model.config import Binding, Script, Standby, StandbyUntil
from ripstop.model.errors import StartError
from ripstop.system import linux
from ripstop.workers import standby, standby_policy
from ripstop.workers.group import Exit, Group
from ripstop.workers.spawner import ProcessSpec, Spawner
from ripstop.workers.standby import Place, Standbys, standby_conflict_in_script
from tests.worker_fixtures import DEADLINE, Stage, new_spawner

HELLO = "import os; print('hello', os.environ['RANK'], os.getpid())"
TELLS_ALL = """
import gc, json, os, random, signal, sys, threading, time
status = open('/proc/self/status').read().split()
print(json.dumps({
    'environ': dict(os.environ), 'proc': open('/proc/self/environ').read().rstrip('\\0'),
    'command': open('/proc/self/cmdline').read(), 'name': open('/proc/self/comm').read(),
    'argv': sys.argv, 'orig_argv': sys.orig_argv, 'path': sys.path, 'main': sorted(vars(sys.modules['__main__'])),
    'modules': sorted(name for name in sys.modules), 'cwd': os.getcwd(), 'umask': os.umask(0),
    'fds': sorted(os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')[:-1]),
    'signals': [repr(signal.getsignal(n)) for n in signal.valid_signals()],
    # without the two signals that libc sets up for itself when the first thread starts
    'masks': [int(status[status.index(f'Sig{n}:') + 1], 16) & ~(3 << 31) for n in ('Blk', 'Ign', 'Cgt')],
    'affinity': sorted(os.sched_getaffinity(0)), 'nice': os.getpriority(os.PRIO_PROCESS, 0),
    'policy': os.sched_getscheduler(0), 'parent': os.getppid(), 'leads': os.getsid(0) == os.getpid(),
    'threads': threading.active_count(), 'main thread': threading.main_thread().native_id == os.getpid(),
    'excepthook': sys.excepthook is sys.__excepthook__, 'gc': gc.isenabled(), 'out': sys.stdout.write_through,
    'finders': sorted(sys.path_importer_cache), 'flags': list(sys.flags), 'warnings': len(sys.warnoptions),
}))
"""


@dataclass
class Pool:
    """Standbys of one script, and the events that they recorded."""

    spawner: Spawner
    directory: Path
    entry: Script
    env: dict[str, str]
    standbys: Standbys = field(init=False)
    recorded: list[events.Event] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def record(self, event: events.Event, level: int = 0) -> None:
        self.recorded.append(event)
        self.changed.set()

    async def wait_for(self, kind: type[events.Event]) -> Any:
        """The next event of this kind."""
        while not (found := [event for event in self.recorded if isinstance(event, kind)]):
            self.changed.clear()
            await self.changed.wait()
        self.recorded.remove(found[0])
        return found[0]

    def begin_round(self) -> None:
        """A round starts, its workers call their function, and one reports a step."""
        self.standbys.on_round_started()
        for rank in range(2):
            self.standbys.on_function_called(rank)
        self.standbys.on_first_step()

    async def make(self) -> None:
        """Make standbys, and wait until they are ready."""
        self.begin_round()
        await self.wait_for(events.StandbysReady)

    async def fail(self) -> str:
        """Make a standby whose warm-up fails; why it failed."""
        self.begin_round()
        return str((await self.wait_for(events.StandbyDiscarded)).why)

    def pids(self) -> list[int]:
        """The standbys.  A child of a standby has its name too, until it executes its program."""
        leaders = (p for p in linux.children() if p.session == p.pid and not p.dead)
        return sorted(p.pid for p in leaders if p.name == "ripstop-standby")

    def spec(self, rank: int, **more: Any) -> ProcessSpec:
        out, err = self.directory / f"{rank}.out", self.directory / f"{rank}.err"
        env = {**self.env, "LOCAL_RANK": str(rank), "RANK": str(rank + 10)}
        return ProcessSpec(env, self.entry, out, err, local_rank=rank, **more)

    def shadowed_spec(self, rank: int) -> ProcessSpec:
        """The worker that a standby shadows, in an earlier round."""
        output = self.directory / f"standby_{rank}.log"
        own = {"RANK": "99", "RIPSTOP_STANDBY": "1", "TORCHELASTIC_ERROR_FILE": str(self.directory / "error.json")}
        return ProcessSpec({**self.spec(rank).env, **own}, self.entry, output, output)

    async def run(self, *specs: ProcessSpec) -> list[int]:
        """Start these workers, and wait for their success; their pids."""
        specs = specs or (self.spec(0),)
        ended = asyncio.Event()
        exits: list[Exit] = []

        def on_exit(end: Exit) -> None:
            exits.append(end)
            if len(exits) == len(specs):
                ended.set()

        group = Group(self.spawner.children, self.standbys, specs, on_exit)
        try:
            await group.start()
            await ended.wait()
        finally:
            await group.stop(0)
        assert [end.exitcode for end in exits] == [0] * len(specs), self.output(0, "err")
        return list(group.pids)

    def output(self, rank: int, kind: str = "out") -> str:
        return (self.directory / f"{rank}.{kind}").read_text()


@dataclass
class Pools:
    stage: Stage

    @asynccontextmanager
    async def open(
        self,
        script: str = HELLO,
        *,
        count: int = 1,
        warm_up: str = "",
        binding: Binding | None = None,
        preload: tuple[str, ...] = (),
        until: StandbyUntil = StandbyUntil.SCRIPT,
    ) -> AsyncIterator[Pool]:
        """`warm_up` is the body of the function."""
        entry = Script(str(self.stage.script(script)))
        if warm_up:
            body = "\n".join(f"    {line}" for line in warm_up.splitlines())
            self.stage.script(f"import os, sys\ndef prepare(local_rank):\n{body}\n", "warming.py")
        config = Standby(count, warm_up="warming:prepare" if warm_up else "", until=until)
        async with asyncio.timeout(DEADLINE):
            with new_spawner(entry, self.stage.env, preload=preload) as spawner:
                places = [Place({**self.stage.env, "LOCAL_RANK": str(rank)}, binding) for rank in range(count)]
                pool = Pool(spawner, self.stage.directory, entry, self.stage.env)
                pool.standbys = Standbys(spawner, config, places, pool.record, shadowed_spec=pool.shadowed_spec)
                try:
                    await spawner.wait_ready()
                    yield pool
                finally:
                    await pool.standbys.stop()


@pytest.fixture
def pools(stage: Stage) -> Pools:
    return Pools(stage)


# taking ---------------------------------------------------------------------------------------------------------------


def test_the_workers_of_a_round_are_the_standbys_and_others_are_made(pools):
    async def scenario() -> None:
        async with pools.open(count=2) as pool:
            for _ in range(3):
                await pool.make()
                waiting = pool.pids()
                assert len(waiting) == 2
                pids = await pool.run(pool.spec(0), pool.spec(1))
                assert sorted(pids) == waiting and pool.standbys.taken == tuple(pids)
                assert [pool.output(rank).splitlines()[-1] for rank in (0, 1)] == [
                    f"hello {rank + 10} {pid}" for rank, pid in enumerate(pids)
                ]
                assert pool.pids() == []

    asyncio.run(scenario())


def test_local_ranks_without_a_standby_are_forked(pools):
    async def scenario() -> None:
        async with pools.open(count=1) as pool:
            await pool.make()
            waiting = pool.pids()
            pids = await pool.run(pool.spec(0), pool.spec(1), pool.spec(2))
            assert pids[:1] == waiting and len(set(pids)) == 3
            assert pool.standbys.taken == tuple(waiting)

    asyncio.run(scenario())


@pytest.mark.parametrize("binding", [None, Binding((min(os.sched_getaffinity(0)),))], ids=["free", "bound"])
def test_a_taken_standby_does_not_differ_from_a_forked_worker(pools, binding):
    async def scenario() -> None:
        async with pools.open(TELLS_ALL, binding=binding) as pool:
            spec = pool.spec(0, binding=binding)
            await pool.run(spec)
            forked = json.loads(pool.output(0))
            (pool.directory / "0.out").unlink()
            await pool.make()
            waiting = pool.pids()
            assert await pool.run(spec) == waiting
            assert json.loads(pool.output(0)) == forked

    asyncio.run(scenario())


LEAVES_TRACES = """
import atexit, random, signal, subprocess
os.environ['LEFT'] = 'behind'; del os.environ['PATH']
os.chdir('/'); os.umask(0o77); sys.path.insert(0, '/left'); sys.excepthook = print
signal.signal(signal.SIGTERM, print); signal.signal(signal.SIGHUP, signal.SIG_IGN); random.seed(0)
subprocess.run(['/bin/true'])
print('a warm-up prints to stderr')
"""
TELLS_TRACES = """
import json, os, random, signal, sys
print(json.dumps([os.environ.get('LEFT'), os.environ['PATH'], os.getcwd(), os.umask(0), sys.path[1:],
    sys.excepthook is sys.__excepthook__, [repr(signal.getsignal(n)) for n in signal.valid_signals()]]))
print(random.random())
"""


def test_changes_of_a_warm_up_are_undone(pools, capfd):
    async def scenario() -> None:
        async with pools.open(TELLS_TRACES, warm_up=LEAVES_TRACES) as pool:
            await pool.run()
            await pool.make()
            waiting = pool.pids()
            assert await pool.run() == waiting
            await pool.make()
            await pool.run()
            texts = pool.output(0).splitlines()
            assert texts[0] == texts[2] == texts[4]
            assert len({texts[1], texts[3], texts[5]}) == 3  # random

    asyncio.run(scenario())
    out, err = capfd.readouterr()
    assert "a warm-up prints to stderr" in err
    assert "a warm-up prints" not in out


TELLS_OF_TORCH = """
import json, os, torch, torch.distributed as dist
print(json.dumps([torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled(),
    str(torch.get_default_dtype()), torch.cuda.is_initialized(), dist.is_initialized(),
    torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()]))
torch.set_num_interop_threads(2)  # an error after the first parallel work
print(torch.rand(1).item(), torch.initial_seed())
"""


def test_with_torch_a_taken_standby_has_the_settings_of_a_fork_and_random_states_of_its_own(pools):
    async def scenario() -> None:
        async with pools.open(TELLS_OF_TORCH, preload=("torch", "torch.distributed")) as pool:
            await pool.run()
            for _ in range(2):
                await pool.make()
                waiting = pool.pids()
                assert await pool.run() == waiting
            texts = pool.output(0).splitlines()
            assert texts[0] == texts[2] == texts[4]
            assert len({texts[1], texts[3], texts[5]}) == 3

    asyncio.run(scenario())


def test_a_standby_that_is_dead_at_the_take_is_replaced_by_a_fork(pools):
    async def scenario() -> None:
        async with pools.open() as pool:
            await pool.make()
            (waiting,) = pool.pids()
            os.kill(waiting, signal.SIGKILL)
            (pid,) = await pool.run()
            assert pid != waiting
            assert "killed by SIGKILL" in pool.recorded[0].why or "died" in pool.recorded[0].why

    asyncio.run(scenario())


def test_a_standby_that_does_not_answer_is_killed_before_its_worker_is_forked(pools, monkeypatch):
    monkeypatch.setattr(standby, "TAKE_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        async with pools.open() as pool:
            await pool.make()
            (waiting,) = pool.pids()
            os.kill(waiting, signal.SIGSTOP)
            (pid,) = await pool.run()
            assert pid != waiting and linux.read_process(waiting) is None
            assert pool.output(0) == f"hello 10 {pid}\n"

    asyncio.run(scenario())


@pytest.mark.parametrize("is_checked_first", [False, True])
def test_a_standby_whose_module_changed_on_disk_is_not_taken(pools, is_checked_first):
    async def scenario() -> None:
        async with pools.open("import warming; print(warming.VERSION)", warm_up="pass") as pool:
            await pool.make()
            pool.directory.joinpath("warming.py").write_text("VERSION = 'fixed'\ndef prepare(rank): pass\n")
            if is_checked_first:
                pool.standbys.check_files([0])
            await pool.run()
            assert pool.output(0) == "fixed\n"
            assert "warming.py has changed" in pool.recorded[0].why

    asyncio.run(scenario())


def test_a_standby_that_was_checked_is_taken(pools):
    async def scenario() -> None:
        async with pools.open() as pool:
            await pool.make()
            standbys = pool.pids()
            pool.standbys.check_files([0, 1])
            assert await pool.run() == standbys

    asyncio.run(scenario())


def test_the_standbys_of_a_replaced_zygote_are_not_taken(pools):
    async def scenario() -> None:
        async with pools.open(count=1) as pool:
            await pool.make()
            (waiting,) = pool.pids()
            zygote = pool.spawner._pid
            os.kill(zygote, signal.SIGKILL)
            await pool.run(pool.spec(1))  # the spawner notices that its zygote is dead
            (pid,) = await pool.run(pool.spec(0))
            assert pid != waiting
            assert pool.recorded[0] == events.StandbyDiscarded(0, "its zygote was replaced")
            await pool.make()
            assert await pool.run(pool.spec(0)) != [waiting]

    asyncio.run(scenario())


def test_a_standby_is_not_taken_for_a_round_with_other_variables(pools):
    async def scenario() -> None:
        async with pools.open() as pool:
            await pool.make()
            (waiting,) = pool.pids()
            spec = pool.spec(0)
            other = ProcessSpec({**spec.env, "LOCAL_RANK": "7"}, spec.entry, spec.stdout, spec.stderr, local_rank=0)
            assert await pool.run(other) != [waiting]

    asyncio.run(scenario())


def test_a_log_file_that_cannot_be_opened_is_an_error_as_with_a_fork(pools):
    async def scenario() -> None:
        async with pools.open(count=1) as pool:
            await pool.make()
            missing = pool.directory / "no" / "file"
            for _ in range(2):  # taken, then forked
                with pytest.raises(
                    StartError, match=rf"no worker can be started: No such file or directory: {missing}"
                ):
                    await pool.standbys.spawn([ProcessSpec(pool.spec(0).env, pool.entry, missing, local_rank=0)])
            assert pool.pids() == []

    asyncio.run(scenario())


def test_a_request_larger_than_a_socket_buffer_arrives(pools):
    async def scenario() -> None:
        async with pools.open("import os; print(sum(len(v) for n, v in os.environ.items() if n[:3] == 'BIG'))") as pool:
            await pool.make()
            waiting = pool.pids()
            spec = pool.spec(0)
            big = {f"BIG{n}": "x" * 100_000 for n in range(10)}
            pids = await pool.run(ProcessSpec({**spec.env, **big}, spec.entry, spec.stdout, spec.stderr, local_rank=0))
            assert pids == waiting
            assert pool.output(0) == "1000000\n"

    asyncio.run(scenario())


def test_signals_to_workers_do_not_reach_standbys(pools):
    async def scenario() -> None:
        async with pools.open("import signal; signal.pause()", count=1) as pool:
            await pool.make()
            waiting = pool.pids()
            ended = asyncio.Event()
            specs = [pool.spec(1)]
            group = Group(pool.spawner.children, pool.standbys, specs, lambda end: ended.set())
            await group.start()
            await group.stop(5.0)
            assert ended.is_set() and pool.pids() == waiting

    asyncio.run(scenario())


# bad warm-ups ---------------------------------------------------------------------------------------------------------

BAD = {
    "raises": ("raise ValueError('not today')", "the warm-up failed: ValueError: not today"),
    "exits": ("sys.exit(3)", "the warm-up failed: SystemExit: 3"),
    "dies": ("os._exit(7)", "it exited with code 7"),
    "is killed": ("os.kill(os.getpid(), 9)", "it was killed by SIGKILL (if memory ran out, the kernel's log says so)"),
    "crashes": ("os.kill(os.getpid(), 11)", "it was killed by SIGSEGV"),
    "starts a thread": (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "it left a Python thread running; join it before you return",
    ),
    "leaves a child": (
        "import subprocess; subprocess.Popen(['sleep', '60'])",
        "it left a child process; wait for it before you return",
    ),
    "forks and returns twice": ("if not os.fork():\n    return\nos.wait()", ""),
    "removes its directory": (
        "import tempfile; os.chdir(tempfile.mkdtemp()); os.rmdir(os.getcwd())",
        "the warm-up failed: FileNotFoundError",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_warm_up_costs_the_standby_and_not_the_worker(pools, kind):
    body, message = BAD[kind]

    async def scenario() -> None:
        async with pools.open(warm_up=body) as pool:
            if message:
                why = await pool.fail()
                assert message in why and why.endswith("; workers start without it")
            else:
                await pool.make()
                assert len(pool.pids()) == 1
            (pid,) = await pool.run()
            assert pool.output(0) == f"hello 10 {pid}\n"  # once
            assert pool.pids() == []
            await pool.spawner.children.end_trees([], 0.0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent_module:prepare", "ModuleNotFoundError: No module named 'absent_module'"),
        ("warming:absent", "AttributeError: module 'warming' has no attribute 'absent'"),
    ],
)
def test_a_warm_up_that_does_not_exist_is_reported(pools, function, message):
    async def scenario() -> None:
        async with pools.open(warm_up="pass") as pool:
            pool.standbys._config = Standby(1, warm_up=function)
            assert message in await pool.fail()
            await pool.run()

    asyncio.run(scenario())


def test_a_warm_up_that_hangs_is_ended(pools, monkeypatch):
    monkeypatch.setattr(standby_policy, "WARM_UP_TIMEOUT_S", 0.5)

    async def scenario() -> None:
        async with pools.open(warm_up="import time; time.sleep(600)") as pool:
            assert "the warm-up took longer than 0.5 s" in await pool.fail()
            await pool.run()
            assert pool.pids() == []

    asyncio.run(scenario())


def test_after_three_failures_no_further_standby_is_made(pools):
    async def scenario() -> None:
        async with pools.open(warm_up="raise ValueError") as pool:
            endings = [(await pool.fail()).rpartition("; ")[2] for _ in range(3)]
            assert endings == ["workers start without it"] * 2 + ["ripstop does not try again"]
            pool.standbys.on_round_started()
            pool.standbys.on_first_step()
            await pool.run()
            assert pool.recorded == []

    asyncio.run(scenario())


# cost and end ---------------------------------------------------------------------------------------------------------


def test_the_memory_of_a_standby_is_what_it_alone_uses(pools):
    async def scenario() -> None:
        async with pools.open(warm_up="import array; sys.kept = array.array('b', bytes(64 << 20))") as pool:
            pool.standbys.on_round_started()
            pool.standbys.on_first_step()
            ready = await pool.wait_for(events.StandbysReady)
            assert ready.local_ranks == (0,) and ready.gpu_memory == (0,)
            assert 64 << 20 <= ready.memory[0] < 160 << 20
            assert [each.memory for each in pool.standbys.samples()] == list(ready.memory)

    asyncio.run(scenario())


@pytest.mark.parametrize(("auto", "free"), [(True, 1 << 30), (True, 3 << 30), (True, None), (False, 1 << 30)])
def test_auto_makes_no_standby_where_little_gpu_memory_is_free(pools, monkeypatch, auto, free):
    asked: list[tuple[str | None, int]] = []

    def read(visible: str | None, index: int) -> int | None:
        asked.append((visible, index))
        return free

    monkeypatch.setattr(standby, "free_memory", read)

    async def scenario() -> None:
        async with pools.open() as pool:
            pool.standbys._config = Standby(1, auto)
            if not auto or free != 1 << 30:
                await pool.make()
            else:
                assert await pool.fail() == (
                    "not made: a standby needs 2.0 GiB of free GPU memory, and 1.0 GiB are free; "
                    "--standby=N makes it anyway"
                )
            await pool.run()

    asyncio.run(scenario())
    assert asked == ([(os.environ.get("CUDA_VISIBLE_DEVICES"), 0)] if auto else [])


def descriptors(pid: int) -> list[tuple[int, str]]:
    links = Path(f"/proc/{pid}/fd").iterdir()
    return [(int(link.name), str(link.readlink()).partition(":")[0]) for link in links]


def test_a_standby_holds_nothing_but_its_socket(pools):
    async def scenario() -> None:
        async with pools.open() as pool:
            await pool.make()
            (pid,) = pool.pids()
            assert [kind for fd, kind in descriptors(pid) if fd > 2] == ["socket"]

    asyncio.run(scenario())


@pytest.mark.parametrize("moment", ["waiting", "warming up"])
def test_close_leaves_no_process(pools, moment):
    async def scenario() -> None:
        body = "" if moment == "waiting" else "import subprocess; subprocess.run(['sleep', '600'])"
        async with pools.open(count=2, warm_up=body) as pool:
            if moment == "waiting":
                await pool.make()
            else:
                pool.standbys.on_round_started()
                pool.standbys.on_first_step()
                while len(pool.pids()) < 2:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.01)
            await pool.standbys.stop()
            assert pool.pids() == []
            await pool.spawner.children.end_trees([], 0.0)  # as an agent does

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']", "CUDA_VISIBLE_DEVICES"),
        ('os.environ["NCCL_P2P_DISABLE"]="1"', "NCCL_P2P_DISABLE"),
        ("environ.setdefault( 'CUBLAS_WORKSPACE_CONFIG', ':4096:8')", "CUBLAS_WORKSPACE_CONFIG"),
        ("os.putenv('PYTORCH_CUDA_ALLOC_CONF', 'x')", "PYTORCH_CUDA_ALLOC_CONF"),
        ("print(os.environ['CUDA_VISIBLE_DEVICES'])", ""),
        ("if os.environ['CUDA_VISIBLE_DEVICES'] == '0': pass", ""),
        ("os.environ['TOKENIZERS_PARALLELISM'] = 'false'", ""),
    ],
)
def test_a_script_that_sets_gpu_variables_is_recognised(tmp_path, text, name):
    script = tmp_path / "script.py"
    script.write_text(f"import os\n{text}\n")
    assert standby_conflict_in_script(script) == name
