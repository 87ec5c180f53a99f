"""A worker forked from the zygote is indistinguishable from `python -u script.py args`."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ripstop.model.config import Entrypoint, Module, Script, StartMethod

PROBE = """
import sys
before = sorted(globals())
modules = sorted(sys.modules)
import gc, json, os, re, resource, signal, threading

def stream(file):
    names = "name mode encoding errors newlines line_buffering write_through closed".split()
    seen = {name: repr(getattr(file, name)) for name in names}
    seen |= {"seekable": file.seekable(), "isatty": file.isatty(), "fileno": file.fileno()}
    seen |= {"type": str(type(file)), "buffer": str(type(file.buffer)), "raw": repr(file.buffer.name)}
    return seen

def depth():
    frame, n = sys._getframe(1), 0
    while frame is not None:
        frame, n = frame.f_back, n + 1
    return n

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
json.dump({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags),
    "executable": sys.executable, "prefix": sys.prefix, "xoptions": sys._xoptions, "warnoptions": sys.warnoptions,
    "globals": before, "name": __name__, "file": globals().get("__file__"),
    "spec": re.sub(" at 0x[0-9a-f]+", "", str(__spec__)),
    "package": __package__, "cached": globals().get("__cached__"), "doc": __doc__, "loader": type(__loader__).__name__,
    "builtins": type(__builtins__).__name__, "main": sys.modules["__main__"].__dict__ is globals(),
    "ours": [m for m in modules if m.split(".")[0] in
             ("ripstop", "channel", "imports", "import_observer", "preload", "preload_cache", "process",
              "sitecustomize", "store_process", "title", "usercustomize", "worker_hooks", "worker_setup", "zygote")],
    "cache": sorted(p for p in sys.path_importer_cache if "ripstop" in p),
    "cwd": os.getcwd(), "environ": dict(os.environ),
    "signals": {str(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
    # without the two that the C library uses
    "caught": [int(status[k], 16) & ~(3 << 31) for k in ("SigBlk", "SigIgn", "SigCgt")],
    "stdin": stream(sys.stdin), "stdout": stream(sys.stdout), "stderr": stream(sys.stderr),
    "dunder": [sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, sys.excepthook is sys.__excepthook__],
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:3], "count": len(os.listdir("/proc/self/fd")),
    "gc": [gc.isenabled(), gc.get_threshold()], "threads": [t.name for t in threading.enumerate()],
    "native": threading.main_thread().native_id == os.getpid(),
    "leader": os.getsid(0) == os.getpid() == os.getpgid(0),
    "cmdline": open("/proc/self/cmdline").read(), "comm": open("/proc/self/comm").read(),
    "umask": status["Umask"], "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "depth": depth(),
    "recursion": sys.getrecursionlimit(), "switch": sys.getswitchinterval(), "hooks": len(sys.meta_path),
}, open(os.environ["PROBE"], "w"), indent=1)
"""


def seen_by(stage, entry: Entrypoint, plain: list[str], **options) -> tuple[dict, dict]:
    """The probe's results in a plain process and in a worker."""
    env = {**stage.env, "RANK": "0"}
    files = [stage.directory / name for name in ("plain", "forked", "plain.out", "plain.err")]
    with files[2].open("a") as out, files[3].open("a") as err:
        subprocess.run(
            [sys.executable, "-u", *plain],
            env={**env, "PROBE": str(files[0])},
            stdout=out,
            stderr=err,
            check=True,
            start_new_session=True,
        )
    outcome = stage.run(entry, env={"PROBE": str(files[1])}, **options)
    assert outcome.exits[0].exitcode == 0, outcome.err
    assert outcome.err == [files[3].read_text()]
    assert outcome.ready.start is StartMethod.ZYGOTE, outcome.ready.fallback_reason
    plainly, forked = (json.loads(file.read_text()) for file in files[:2])
    for seen in (plainly, forked):
        assert seen["environ"].pop("PROBE")
    return plainly, forked


def test_a_script(stage):
    path = str(stage.script(PROBE))
    plain, forked = seen_by(stage, Script(path, ("a", "--b", "c d", "")), [path, "a", "--b", "c d", ""])
    assert forked == plain


def test_a_script_by_its_relative_path(stage, monkeypatch):
    stage.script(PROBE, "below/script.py")
    monkeypatch.chdir(stage.directory)
    plain, forked = seen_by(stage, Script("below/script.py", ("1",)), ["below/script.py", "1"])
    assert forked == plain


def test_a_script_behind_a_link(stage):
    stage.script(PROBE, "elsewhere/script.py")
    link = stage.directory / "link.py"
    link.symlink_to("elsewhere/script.py")
    plain, forked = seen_by(stage, Script(str(link)), [str(link)])
    assert forked == plain
    assert forked["path"][0] == str(stage.directory / "elsewhere")


def test_a_module(stage, monkeypatch):
    stage.script("", "package/__init__.py")
    stage.script(PROBE, "package/part.py")
    monkeypatch.chdir(stage.directory)
    plain, forked = seen_by(stage, Module("package.part", ("x", "y")), ["-m", "package.part", "x", "y"])
    assert forked == plain


def test_a_package_with_a_main(stage, monkeypatch):
    stage.script("", "package/__init__.py")
    stage.script(PROBE, "package/__main__.py")
    monkeypatch.chdir(stage.directory)
    plain, forked = seen_by(stage, Module("package"), ["-m", "package"])
    assert forked == plain


def test_a_directory_with_a_main(stage):
    folder = str(stage.script(PROBE, "folder/__main__.py").parent)
    plain, forked = seen_by(stage, Script(folder, ("x",)), [folder, "x"])
    assert forked == plain


def test_a_zip_file_with_a_main(stage):
    archive = stage.directory / "app.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", PROBE)
    plain, forked = seen_by(stage, Script(str(archive)), [str(archive)])
    assert forked == plain


def test_with_the_settings_of_the_environment(stage, monkeypatch):
    path = str(stage.script(PROBE))
    lib = stage.directory / "lib"
    lib.mkdir()
    for name, value in {
        "PYTHONPATH": f"{lib}{os.pathsep}/nowhere",
        "PYTHONSAFEPATH": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONIOENCODING": "latin-1:replace",
        "PYTHONOPTIMIZE": "1",
        "ODD": "a=b\nc\udcff",
    }.items():
        stage.env[name] = value
    plain, forked = seen_by(stage, Script(path), [path])
    assert forked == plain


def test_with_a_sitecustomize_of_the_users(stage):
    stage.script("import sys; sys.argv.append('seen'); customized = True", "lib/sitecustomize.py")
    stage.env["PYTHONPATH"] = str(stage.directory / "lib")
    path = str(stage.script(PROBE + "\nimport sitecustomize; assert sitecustomize.customized"))
    plain, forked = seen_by(stage, Script(path), [path])
    assert forked["ours"] == plain["ours"] == ["sitecustomize"]
    assert forked["path"] == plain["path"]


def test_with_a_broken_sitecustomize_of_the_users(stage):
    stage.script("raise RuntimeError('broken on purpose')", "lib/sitecustomize.py")
    stage.env["PYTHONPATH"] = str(stage.directory / "lib")
    path = str(stage.script(PROBE))
    plain, forked = seen_by(stage, Script(path), [path])
    assert forked == plain


def test_with_numpy_and_torch_preloaded(stage):
    path = str(stage.script("import torch\n" + PROBE))
    plain, forked = seen_by(stage, Script(path), [path], preload=None)
    assert forked == plain


ENDS = {
    "returns": "print('hello')",
    "exits with a number": "import sys; sys.exit(7)",
    "exits with a text": "import sys; sys.exit('so long')",
    "exits with None": "import sys; sys.exit(None)",
    "exits with a big number": "import sys; sys.exit(300)",
    "raises": "def f():\n    raise RuntimeError('no')\nf()",
    "raises from a cause": "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('x') from e",
    "raises a group": "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])",
    "raises in a function imported": "import helper; helper.fail()",
    "does not parse": "x = (1,\nprint('never'",
    "is not utf-8": None,
    "is interrupted": "raise KeyboardInterrupt",
    "interrupts itself": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminates itself": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "aborts": "import os; os.abort()",
    "has an excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, a[2].tb_next)\n1/0",
    "ends its excepthook with an exit code": (
        "import sys\ndef hook(*a):\n    sys.__excepthook__(*a)\n    sys.exit(17)\nsys.excepthook = hook\n1/0"
    ),
    "shows an exception and goes on": (
        "import sys\ntry:\n    1/0\nexcept ZeroDivisionError:\n    sys.excepthook(*sys.exc_info())\nprint('on')"
    ),
    "raises with work left to do": (
        "import atexit, threading, time\n"
        "def finish():\n    time.sleep(0.05)\n    print('thread')\n"
        "threading.Thread(target=finish).start()\natexit.register(print, 'exit')\n1/0"
    ),
    "puts the excepthook back": "import sys\nsys.excepthook = sys.__excepthook__\n1/0",
    "has exit handlers": "import atexit; atexit.register(print, 'bye'); 1/0",
    "leaves a thread": "import threading, time\n"
    "threading.Thread(target=lambda: (threading.main_thread().join(), print('last'))).start()\nprint('first')",
    "fails in a thread": "import threading; t = threading.Thread(target=lambda: 1/0, name='t'); t.start(); t.join()",
    "prints its stack": "import traceback\ndef f(): traceback.print_stack()\nf()",
    "warns": "import warnings; warnings.warn('careful', stacklevel=3)",
    "logs": "import logging; logging.basicConfig(format='%(module)s %(funcName)s %(lineno)d'); logging.error('x')",
    "recurses": "def f(n): return f(n + 1)\ntry: f(0)\nexcept RecursionError as e: print(type(e))",
    "writes without a newline": "import sys; sys.stdout.write('a'); sys.stderr.write('b'); sys.stdout.write('c')",
}


@pytest.mark.parametrize("what", ENDS)
def test_a_script_that(stage, what):
    stage.script("def fail():\n    raise LookupError('from helper')\n", "helper.py")
    path = stage.script(ENDS[what] or "")
    if ENDS[what] is None:
        path.write_bytes(b"x = '\xff'\n")
    plain = subprocess.run(
        [sys.executable, "-u", path], env={**stage.env, "RANK": "0"}, capture_output=True, text=True, check=False
    )
    outcome = stage.run(path, env={"TORCHELASTIC_ERROR_FILE": str(stage.directory / "error.json")})
    (end,) = outcome.exits
    assert (-end.signal if end.signal else end.exitcode) == plain.returncode
    assert outcome.out == [plain.stdout]
    assert outcome.err == [plain.stderr]


def test_open_files_are_flushed_after_an_exception(stage):
    written = stage.directory / "unclosed"
    path = stage.script(f"file = open({str(written)!r}, 'w')\nfile.write('kept')\nraise ValueError")
    outcome = stage.run(path, env={"TORCHELASTIC_ERROR_FILE": str(stage.directory / "error.json")})
    assert outcome.exits[0].exitcode == 1
    assert written.read_text() == "kept"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_works_in_a_worker(stage, method):
    path = stage.script(f"""
import multiprocessing as mp, os

class Thing:
    def __init__(self, n): self.n = n

def work(thing, queue):
    queue.put((thing.n * 2, os.getppid()))

if __name__ == "__main__":
    context = mp.get_context("{method}")
    queue = context.Queue()
    child = context.Process(target=work, args=(Thing(21), queue))
    child.start()
    print(queue.get()[0])
    child.join()
    with context.Pool(2) as pool:
        print(pool.map(abs, [-1, -2]))
    assert child.exitcode == 0
""")
    outcome = stage.run(path, preload=("multiprocessing",))
    assert outcome.err == [""]
    assert outcome.out == ["42\n[1, 2]\n"]
    assert outcome.exits[0].exitcode == 0


def test_forked_siblings_do_not_share_their_randomness(stage):
    path = stage.script("""
import json, multiprocessing, random, sys, uuid
import numpy
print(json.dumps([random.random(), numpy.random.rand(), multiprocessing.current_process().authkey.hex(),
                  str(uuid.uuid4())]))
""")
    outcome = stage.run(path, workers=2, preload=("numpy.random", "random", "multiprocessing", "uuid"))
    one, two = (json.loads(out) for out in outcome.out)
    assert all(a != b for a, b in zip(one, two, strict=True))


def test_forked_siblings_do_not_share_torchs_seed(stage):
    path = stage.script("import torch; print(torch.initial_seed(), torch.rand(1).item())")
    outcome = stage.run(path, workers=2, preload=None)
    assert outcome.ready.preloaded == ("torch",)
    assert outcome.out[0] != outcome.out[1]


def test_a_module_beside_the_script_may_have_any_name(stage):
    names = "channel, group, hook, imports, linux, process, ripstop, store, title, worker_hooks, zygote"
    for name in names.split(", "):
        stage.script("mine = True", f"{name}.py")
    path = stage.script(f"import {names}\nassert all(m.mine for m in ({names}))")
    assert stage.run(path).exits[0].exitcode == 0


def test_ps_shows_only_workers_under_the_scripts_command_line(stage):
    path = stage.script("""
import os
mine = open("/proc/self/cmdline").read()
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        line = open(f"/proc/{pid}/cmdline").read()
    except OSError:
        continue
    if line == mine:
        print(pid == str(os.getpid()))
""")
    assert stage.run(path).out == ["True\n"]


def test_an_uncaught_exception_is_written_to_the_error_file(stage, tmp_path):
    file = tmp_path / "error.json"
    path = stage.script("def step():\n    raise RuntimeError('diverged')\nstep()\n")
    outcome = stage.run(path, env={"TORCHELASTIC_ERROR_FILE": str(file)})
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "RuntimeError: diverged"
    assert message["extraInfo"]["py_callstack"] == outcome.err[0]
    assert int(message["extraInfo"]["timestamp"]) == pytest.approx(outcome.exits[0].at, abs=10)
    assert [f.name for f in tmp_path.iterdir() if "error.json" in f.name] == ["error.json"]


def test_an_existing_error_file_is_not_overwritten(stage, tmp_path):
    file = tmp_path / "error.json"
    path = stage.script(f"open({str(file)!r}, 'w').write('mine'); 1/0")
    stage.run(path, env={"TORCHELASTIC_ERROR_FILE": str(file)})
    assert file.read_text() == "mine"


def test_the_error_file_has_the_format_of_torchs_record(stage, tmp_path):
    body = "def main():\n    raise RuntimeError('diverged')\n"
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    stage.run(stage.script(f"{body}main()"), env={"TORCHELASTIC_ERROR_FILE": str(ours)})
    recorded = stage.script(
        f"from torch.distributed.elastic.multiprocessing.errors import record\n@record\n{body}main()", "recorded.py"
    )
    stage.run(recorded, preload=None, env={"TORCHELASTIC_ERROR_FILE": str(theirs)})
    one, two = (json.loads(Path(file).read_text()) for file in (ours, theirs))
    assert one["message"].keys() == two["message"].keys()
    assert one["message"]["message"] == two["message"]["message"]
    assert {k: type(v) for k, v in one["message"]["extraInfo"].items()} == {
        k: type(v) for k, v in two["message"]["extraInfo"].items()
    }
