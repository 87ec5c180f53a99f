"""What a zygote preloads for a script, what it leaves to the workers, and when it is replaced."""

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest

from ripstop.model.config import Module, Script, StartMethod
from ripstop.workers.spawner import ProcessSpec
from ripstop.workers.zygote import preload_cache
from tests.worker_fixtures import Stage, new_spawner

NOTE = "import os; PID = os.getpid()\n"  # who has imported this
REPORT = """
import json, os, sys
print(json.dumps({name: sys.modules[name].PID != os.getpid() for name in %r if name in sys.modules}))
"""


@pytest.fixture
def site(stage):
    """A directory of installed packages."""
    stage.env["PYTHONPATH"] = str(stage.directory / "site-packages")
    stage.env["XDG_CACHE_HOME"] = str(stage.directory / "cache")

    def install(**modules):
        for name, text in modules.items():
            stage.script(NOTE + text, f"site-packages/{name.replace('__in__', '/')}.py")

    return install


def preloaded(stage: Stage, imports: str, *names: str, workers: int = 1):
    """Run a script; return the result of the preloading, and which of these modules the worker had from the zygote."""
    outcome = stage.run(stage.script(imports + REPORT % (names,)), preload=None, workers=workers)
    assert [end.exitcode for end in outcome.exits] == [0] * workers, outcome.err
    seen = json.loads(outcome.out[0].splitlines()[-1])
    return outcome, [name for name, is_preloaded in seen.items() if is_preloaded]


def test_the_first_imports_are_preloaded_and_later_ones_are_not(stage, site):
    site(one="", two__in____init__="", two__in__part="", late="")
    outcome, found = preloaded(
        stage, "import one\nfrom two import part\nprint(end='')\nimport late", "one", "two", "two.part", "late"
    )
    assert found == ["one", "two", "two.part"]
    assert outcome.ready.preloaded == ("one", "two", "two.part")
    assert outcome.ready.left_out == {}


def test_an_attribute_that_a_package_loads_late_is_preloaded(stage, site):
    text = "def __getattr__(name):\n    import lazy.real as real\n    return real.Thing"
    site(lazy__in____init__=text, lazy__in__real="class Thing: pass")
    _, found = preloaded(stage, "from lazy import Thing", "lazy", "lazy.real")
    assert found == ["lazy", "lazy.real"]


IN_ZYGOTE = "if b'RANK' not in os.environ._data:"  # which is not observed
UNFIT = {
    "os.environ.get('RANK')": "it reads RANK",
    "'MASTER_PORT' in os.environ": "it reads MASTER_PORT",
    "os.environb.get(b'LOCAL_RANK')": "it reads LOCAL_RANK",
    "os.getenv('CUDA_VISIBLE_DEVICES')": "it reads CUDA_VISIBLE_DEVICES",
    "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()": "it starts a thread",
    "import subprocess; child = subprocess.Popen(['sleep', '60'])": "it starts a process",
    "file = open('/proc/self/maps')": "it opens ",
    "import socket; pair = socket.socketpair()": "it opens socket:",
    "import signal; signal.signal(signal.SIGUSR1, print)": "it changes signal handlers",
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)": "it changes signal handlers",
    "import faulthandler; faulthandler.enable()": "it changes signal handlers",
    "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])": "it blocks signals",
    "os.umask(0o27)": "it changes the umask",
    "os.chdir('/')": "it changes the working directory",
    "os.environ['KNOWN'] = 'changed'": "it sets KNOWN",
    "del os.environ['KNOWN']": "it sets KNOWN",
    "os.environ['RANK'] = '0'": "it sets RANK",
    "os.environ['NEW'] = str(os.getpid())": "it sets NEW",
    "print('hello')": "it writes output",
    "os.write(2, b'hello')": "it writes output",
    "import warnings; warnings.warn('old')": "it writes output",
    "import random; random.seed(7)": "it seeds random",
    "import sys; sys.path.insert(0, '/elsewhere')": "it changes the beginning of sys.path",
    f"{IN_ZYGOTE} raise OSError('no licence')": "OSError: no licence",
    f"{IN_ZYGOTE} raise SystemExit(3)": "SystemExit: 3",
    f"{IN_ZYGOTE} import absent": "ModuleNotFoundError: No module named 'absent'",
    f"{IN_ZYGOTE} import ctypes; ctypes.string_at(0)": "it ends the process",
    f"{IN_ZYGOTE} os._exit(0)": "it ends the process",
}


@pytest.mark.parametrize("text", UNFIT)
def test_an_unfit_import_is_left_to_the_workers_and_the_others_are_preloaded(stage, site, text):
    stage.env |= {"KNOWN": "1"}
    site(before="", unfit=text, after="")
    outcome, found = preloaded(stage, "import random, before\nimport unfit\nimport after", "before", "unfit", "after")
    assert list(outcome.ready.left_out) == ["unfit"]
    assert outcome.ready.left_out["unfit"].startswith(UNFIT[text])
    assert found == ["before", "after"]
    assert outcome.ready.start is StartMethod.ZYGOTE


def test_packages_that_an_unfit_package_imports_are_preloaded(stage, site):
    site(
        unfit__in____init__="import brought\nfrom unfit import inner\nimport depends",
        unfit__in__inner="import other\nos.environ.get('RANK')",
        brought="",
        other__in____init__="from other import part",
        other__in__part="",
        depends="import unfit.inner",
    )
    names = ("unfit", "unfit.inner", "brought", "other", "other.part", "depends")
    outcome, found = preloaded(stage, "import unfit", *names)
    assert outcome.ready.left_out == {"unfit": "it reads RANK"}
    assert found == ["brought", "other", "other.part"]


def test_a_module_that_depends_on_an_unfit_one_is_left_out(stage, site):
    site(unfit="os.environ.get('RANK')\nclass Base: pass", other="from unfit import Base", fit="")
    stage.script("from other import Base\nclass Mine(Base): pass", "mine.py")
    outcome, found = preloaded(stage, "import unfit\nimport mine\nimport fit", "unfit", "other", "fit")
    assert found == ["fit"]
    imports = {name: why for name, why in outcome.ready.left_out.items() if why.startswith("it imports ")}
    assert (outcome.ready.left_out["unfit"], set(imports)) == ("it reads RANK", {"other", "mine"})


def test_a_package_that_an_unfit_one_has_patched_is_still_preloaded(stage, site):
    site(
        patched__in____init__="from patched import part",
        patched__in__part="def f(): pass",
        unfit="import patched.part, warnings\ndef other(*a): pass\n"
        "patched.part.f = warnings.showwarning = other\nos.environ.get('RANK')",
    )
    outcome, found = preloaded(stage, "import unfit", "unfit", "patched", "patched.part")
    assert outcome.ready.left_out == {"unfit": "it reads RANK"}
    assert found == ["patched", "patched.part"]


def test_a_module_that_reads_what_an_unfit_one_sets_is_left_out(stage, site):
    stage.env |= {"KNOWN": "1"}
    site(setter="os.environ['KNOWN'] = '2'", reader="SEEN = os.environ['KNOWN']", fit="")
    imports = "import setter\nimport reader\nimport fit\nassert reader.SEEN == '2'"
    outcome, found = preloaded(stage, imports, "setter", "reader", "fit")
    assert outcome.ready.left_out == {"setter": "it sets KNOWN", "reader": "it reads KNOWN"}
    assert found == ["fit"]


def test_a_variable_that_an_import_adds_is_in_the_workers(stage, site):
    site(adds="os.environ.setdefault('ADDED', 'yes')")
    _, found = preloaded(stage, "import adds\nimport os\nassert os.environ['ADDED'] == 'yes'", "adds")
    assert found == ["adds"]


def test_harmless_uses_are_no_offence(stage, site):
    site(
        fit="""
import random, subprocess, tempfile, threading
random.random()
{name: value for name, value in os.environ.items() if name.startswith("FIT_")}
thread = threading.Thread(target=print, kwargs={"end": ""}); thread.start(); thread.join()
subprocess.run(["true"], check=True)
with tempfile.TemporaryFile() as file: file.write(b"x")
os.environ.get("HOME")
"""
    )
    stage.env |= {"CUDA_VISIBLE_DEVICES": "0"}
    outcome, found = preloaded(stage, "import random\nimport fit", "fit")
    assert (found, outcome.ready.left_out) == (["fit"], {})


def test_a_missing_package_is_the_scripts_business(stage, site):
    site(fit="")
    imports = "try:\n    import absent\nexcept ImportError:\n    absent = None\nimport fit"
    outcome, found = preloaded(stage, imports, "fit")
    assert (found, outcome.ready.preloaded, outcome.ready.left_out) == (["fit"], ("fit",), {})


def test_the_observation_leaves_no_trace_in_workers(stage, site):
    site(fit="STREAMS = [(os.fstat(n).st_dev, os.fstat(n).st_ino) for n in (1, 2)]")
    imports = """
import fit
import os, sys
assert type(os.environ).__name__ == type(os.environb).__name__ == "_Environ", type(os.environ)
assert [(os.fstat(n).st_dev, os.fstat(n).st_ino) for n in (1, 2)] != fit.STREAMS
assert sorted(os.listdir("/proc/self/fd"), key=int)[:-1] == ["0", "1", "2"], os.listdir("/proc/self/fd")
assert sys.path[0] == os.path.dirname(os.path.abspath(__file__))
"""
    assert preloaded(stage, imports, "fit")[1] == ["fit"]


def test_a_terminal_stays_a_terminal_for_an_import(tmp_path):
    program = """
import sys
from ripstop.workers.zygote.import_observer import ImportObserver, Unfit
found = []
with ImportObserver(set()) as observer:
    observer.run(lambda: found.append(sys.stdout.isatty()))
    try:
        observer.run(lambda: print("hello"))
    except Unfit as unfit:
        found.append(str(unfit))
assert found == [True, "it writes output"], found
"""
    terminal, other = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], check=False, stdout=other, stderr=subprocess.PIPE, timeout=120
        )
        os.set_blocking(terminal, False)
        with pytest.raises(BlockingIOError):
            os.read(terminal, 1)
    finally:
        os.close(terminal)
        os.close(other)
    assert done.returncode == 0, done.stderr


# memory ---------------------------------------------------------------------------------------------------------------


def imports_of(stage: Stage) -> int:
    """How often the module was imported that writes to this file."""
    return len((stage.directory / "imports").read_text())


def test_the_second_start_does_not_import_what_is_unfit(stage, site):
    file = str(stage.directory / "imports")
    site(unfit=f"open({file!r}, 'a').write('x')\nos.environ.get('RANK')", fit="")
    first, _ = preloaded(stage, "import unfit\nimport fit")
    after_first = imports_of(stage)
    second, found = preloaded(stage, "import unfit\nimport fit", "fit")
    assert imports_of(stage) == after_first + 1  # the worker's
    assert first.ready.left_out == second.ready.left_out == {"unfit": "it reads RANK"}
    assert found == ["fit"]


@pytest.mark.parametrize("change", ["script", "packages", "own module"])
def test_a_verdict_is_not_used_after_a_change_of(stage, site, change):
    file = str(stage.directory / "imports")
    site(unfit=f"open({file!r}, 'a').write('x')\nos.environ.get('RANK')")
    stage.script("import unfit", "own.py")
    preloaded(stage, "import own")
    after_first = imports_of(stage)
    match change:
        case "packages":
            stage.script("", "site-packages/other-1.0.dist-info/RECORD")
        case "own module":
            stage.script("import unfit\nX = 1", "own.py")
    preloaded(stage, "import own\nimport string" if change == "script" else "import own")
    assert imports_of(stage) > after_first + 1


@pytest.mark.parametrize("what", ["a link", "writable for others", "a file", "not writable"])
def test_without_a_safe_cache_directory_nothing_is_remembered_and_workers_start(stage, site, what):
    cache = stage.directory / "cache"
    cache.mkdir()
    match what:
        case "a link":
            (stage.directory / "elsewhere").mkdir(mode=0o700)
            (cache / "ripstop").symlink_to(stage.directory / "elsewhere")
        case "writable for others":
            (cache / "ripstop").mkdir()
            (cache / "ripstop").chmod(0o777)
        case "a file":
            (cache / "ripstop").write_text("")
        case "not writable":
            stage.env["XDG_CACHE_HOME"] = "/proc/nowhere"
    site(unfit="os.environ.get('RANK')", fit="")
    _, found = preloaded(stage, "import unfit\nimport fit", "fit")
    assert found == ["fit"]
    assert not [path for path in stage.directory.rglob("*") if len(path.name) == 32]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ripstop"


PLAN = {"steps": [("a", []), ("b", ["b", "b.c"])], "left_out": {"d": "it reads RANK"}, "variables": ["X"]}


def test_a_plan_is_recalled(cache):
    preload_cache.remember_in_cache("k", PLAN)
    assert preload_cache.recall_from_cache("k") == {**PLAN, "careful": False, "fit": 0}
    assert preload_cache.recall_from_cache("other") is None
    assert oct(cache.stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"steps": 1}', '{"steps": [1], "left_out": {}, "variables": []}', "\0"]
)
def test_a_broken_entry_is_ignored(cache, text):
    preload_cache.remember_in_cache("k", PLAN)
    (cache / "k").write_text(text)
    assert preload_cache.recall_from_cache("k") is None


def test_a_linked_entry_is_ignored(cache):
    preload_cache.remember_in_cache("k", PLAN)
    (cache / "link").symlink_to("k")
    assert preload_cache.recall_from_cache("link") is None


def test_old_entries_are_ignored_and_removed(cache):
    preload_cache.remember_in_cache("old", PLAN)
    os.utime(cache / "old", (1, 1))
    assert preload_cache.recall_from_cache("old") is None
    preload_cache.remember_in_cache("new", PLAN)
    assert [path.name for path in cache.iterdir()] == ["new"]


def test_of_too_many_entries_the_oldest_are_removed(cache, monkeypatch):
    now = time.time()
    for age in range(5):
        preload_cache.remember_in_cache(f"aged {age}", PLAN)
        os.utime(cache / f"aged {age}", (now - age - 1, now - age - 1))
    monkeypatch.setattr(preload_cache, "MAX_ENTRIES", 3)
    preload_cache.remember_in_cache("new", PLAN)
    assert sorted(path.name for path in cache.iterdir()) == ["aged 0", "aged 1", "new"]


# changed files --------------------------------------------------------------------------------------------------------


def rounds(stage: Stage, edits, entry=None) -> tuple[list[str], list[int]]:
    """Start a worker, then once after each edit; return their output and the zygotes' pids."""
    path = stage.directory / "script.py"
    entry = entry or Script(str(path))
    zygotes: list[int] = []

    async def scenario() -> None:
        with new_spawner(entry, stage.env, StartMethod.ZYGOTE, None) as spawner:
            for edit in (lambda: None, *edits):
                edit()
                (pid,) = await spawner.spawn([ProcessSpec(stage.env, entry, stage.directory / "out")])
                assert spawner.children.reap(pid)[:2] == (0, None)
                zygotes.append(spawner._pid)

    asyncio.run(scenario())
    return (stage.directory / "out").read_text().split(), zygotes


def test_an_own_module_that_changed_is_imported_anew(stage, site):
    site(fit="")
    stage.script("import fit\nTEXT = 'old'", "own.py")
    stage.script("import own\nprint(own.TEXT)")
    # Another size: Python takes its bytecode for current if the source has the same size and second of change.
    edit = lambda: stage.script("import fit\nTEXT = 'changed'", "own.py")  # noqa: E731
    out, zygotes = rounds(stage, [edit, lambda: None, lambda: None])
    assert out == ["old", "changed", "changed", "changed"]
    assert zygotes[0] != zygotes[1] == zygotes[2] == zygotes[3]


def test_an_installed_package_that_changed_is_imported_anew(stage, site):
    site(package__in____init__="from package.part import TEXT", package__in__part="TEXT = 'old'")
    stage.script("from package import TEXT\nprint(TEXT)")
    out, zygotes = rounds(stage, [lambda: site(package__in__part="TEXT = 'changed'")])
    assert out == ["old", "changed"]
    assert zygotes[0] != zygotes[1]


def test_a_removed_module_is_not_served_from_memory(stage, site):
    site(gone="")
    stage.script("try:\n    import gone\nexcept ImportError:\n    gone = None\nprint(gone is None)")

    def remove():
        (stage.directory / "site-packages/gone.py").unlink()

    assert rounds(stage, [remove])[0] == ["False", "True"]


def test_an_edited_script_needs_a_new_zygote_only_if_its_imports_changed(stage, site):
    site(one="", two="")
    stage.script("import one\nprint(1)")
    edits = [lambda: stage.script("import one\nprint(2)"), lambda: stage.script("import two\nprint(3)")]
    out, zygotes = rounds(stage, edits)
    assert out == ["1", "2", "3"]
    assert zygotes[0] == zygotes[1] != zygotes[2]


# modules --------------------------------------------------------------------------------------------------------------


def test_pytest_as_the_module_with_a_test_that_uses_torch(stage, monkeypatch):
    """Nothing of site-packages is loaded that pytest and torch do not import."""
    stage.script(
        "import sys\nhad = set(sys.modules)\ndef test_it():\n    import torch\n"
        "    assert 'torch' in had\n    assert not {'numpy.f2py', 'numpy.distutils'} & had\n",
        "test_it.py",
    )
    monkeypatch.chdir(stage.directory)
    outcome = stage.run(Module("pytest", ("-q", "-p", "no:cacheprovider", "test_it.py")), preload=None)
    assert outcome.exits[0].exitcode == 0, outcome.out
    assert {name.partition(".")[0] for name in outcome.ready.preloaded} == {"pytest", "_pytest", "torch"}
    assert outcome.ready.left_out == {}


@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", ">&- 2>&-"])
def test_imports_are_observed_without_standard_streams(stage, site, closed):
    site(fit="", unfit="os.environ['RANK']")
    script = stage.script("import fit\ntry:\n    import unfit\nexcept ImportError:\n    pass")
    command = f"exec {sys.executable} -m ripstop run --standalone {script} {closed}"
    done = subprocess.run(
        ["sh", "-c", command], env=stage.env, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    if "2" not in closed:
        assert "preloaded=fit " in done.stderr
        assert "left_out='unfit: it reads RANK'" in done.stderr
