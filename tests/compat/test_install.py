"""`install()`: torch's names are ours, in this process or in all that a shell starts, and torch's again afterwards."""

import os
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

from ripstop.compat import MODULES

DEADLINE = 120.0


def execute(*words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words], env=os.environ | env, capture_output=True, text=True, timeout=DEADLINE, check=False
    )


def python(source: str, **env: str) -> str:
    """What a program prints."""
    done = execute("-c", textwrap.dedent(source), **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def environment() -> dict[str, str]:
    """The variables that `--environment` prints."""
    lines = execute("-m", "ripstop.compat", "--environment").stdout.splitlines()
    return dict(line.removeprefix("export ").split("=", 1) for line in lines)


def test_every_name_of_torchs_resolves_to_ours_and_is_torchs_again_afterwards() -> None:
    source = """
    import sys
    from importlib import import_module
    from ripstop.compat import MODULES, install, installed, uninstall
    import torch.distributed.run, torch.distributed.elastic.multiprocessing.errors
    before = {name: import_module(name) for name in list(MODULES)[::2]}
    install(), install()
    for name, ours in MODULES.items():
        assert import_module(name) is import_module(f"ripstop.compat.{ours}"), name
        assert import_module(f"ripstop.compat.{ours}").__spec__.name == f"ripstop.compat.{ours}", name
    import torch
    assert torch.distributed.run is import_module("ripstop.compat.run")
    from torch.distributed.elastic.multiprocessing import errors
    assert errors is import_module("ripstop.compat.multiprocessing.errors")
    uninstall(), uninstall()
    assert not installed()
    for name in MODULES:
        module = import_module(name)
        assert module.__name__ == name, (name, module)
        assert module is before.get(name, module)
    assert torch.distributed.run is before["torch.distributed.run"]
    print("ok")
    """
    assert python(source) == "ok"


def test_installing_imports_nothing() -> None:
    source = """
    import sys
    from ripstop.compat import install
    install()
    print([name for name in sys.modules if name.startswith(("torch", "asyncio", "ripstop.compat.", "ripstop.cli"))])
    """
    assert python(source) == "[]"


def test_the_names_that_torch_itself_imports_exist() -> None:
    source = """
    from ripstop.compat import install
    install()
    import torch.distributed.elastic.rendezvous.registry, torch.distributed.elastic.timer
    import torch.distributed.elastic.events, torch.distributed.elastic.metrics, torch.distributed.elastic.utils.data
    import torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.rpc
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    print(record.__module__, LaunchConfig.__module__)
    """
    assert python(source) == "ripstop.compat.multiprocessing.errors ripstop.compat.launcher.configuration"


NOT_FOR_USERS = {"cas_delay", "get_libc"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_our_modules_have_the_public_names_of_torchs(name: str) -> None:
    theirs, ours = import_module(name), import_module(f"ripstop.compat.{MODULES[name]}")
    public = getattr(theirs, "__all__", None) or [
        word
        for word, value in vars(theirs).items()
        if not word.startswith("_") and getattr(value, "__module__", "") == name
    ]
    assert [word for word in public if word not in NOT_FOR_USERS and not hasattr(ours, word)] == []


SCRIPT = "import sys; from ripstop.compat import installed; print(installed(), sys.argv[1:])"


def test_a_program_runs_with_our_names(tmp_path: Path) -> None:
    script = tmp_path / "tool.py"
    script.write_text(SCRIPT)
    done = execute("-m", "ripstop.compat", str(script), "-x", "y")
    assert (done.stdout, done.returncode) == ("True ['-x', 'y']\n", 0), done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "ripstop.compat", "-m", "tool", "z"],
        cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("True ['z']\n", 0), done.stderr


def test_a_program_on_the_path_and_its_children_use_ripstop(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    tool = tmp_path / "tool"
    tool.write_text(f"#!{sys.executable}\n{child}\n")
    tool.chmod(0o755)
    done = execute("-m", "ripstop.compat", "tool", SCRIPT, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.stdout, done.returncode) == ("True []\n", 0), done.stderr


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\nprint('here')\n", True),  # as pip writes it
        ("#!/usr/bin/env python3\nprint('here')\n", True),
        ("#!/bin/sh\nexec python3 -m tool\n", False),
        ("#!/opt/python/bin/bash\necho\n", False),
        ("echo python\n", False),
    ],
)
def test_a_python_program_is_recognised_by_its_first_line(text: str, is_one: bool, tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text(text)
    done = execute("-m", "ripstop.compat", str(tool))
    assert (done.returncode, done.stdout) == ((0, "here\n") if is_one else (2, "")), done.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["no-such-program"], "no such file here"),
        (["--no-such-flag"], "no such flag"),
        (["-m"], "needs a module's name"),
        (["/bin/ls"], "not a Python program"),
    ],
)
def test_a_wrong_command_line_prints_one_line_and_exits_with_2(words: list[str], error: str) -> None:
    done = execute("-m", "ripstop.compat", *words)
    assert done.returncode == 2 and error in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_environment_does_it_for_every_python(environment: dict[str, str], tmp_path: Path) -> None:
    assert environment["RIPSTOP_COMPAT"] == "1"
    assert python(SCRIPT, **environment) == "True []"
    assert python(SCRIPT, **(environment | {"RIPSTOP_COMPAT": "0"})) == "False []"
    script = tmp_path / "script.py"
    script.write_text("import os; print('worker', os.environ['RANK'])")
    done = execute("-X", "importtime", "-m", "torch.distributed.run", str(script), **environment)
    assert done.stdout == "worker 0\n" and "ripstop.compat.launcher" in done.stderr


def test_a_sitecustomize_of_the_users_is_still_run(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.mine = True")
    environment["PYTHONPATH"] += f":{tmp_path}"
    assert python("import sys, sitecustomize; print(sys.mine, sitecustomize.__file__)", **environment) == (
        f"True {tmp_path / 'sitecustomize.py'}"
    )


def test_workers_of_ripstop_run_have_the_names_too(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = execute("-m", "ripstop", "run", str(script), **environment)
    assert done.stdout == "True []\n", done.stderr
