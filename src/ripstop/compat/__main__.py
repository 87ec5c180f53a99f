"""`python -m ripstop.compat PROGRAM …`: run a program whose torch launcher modules resolve to ripstop's.

PROGRAM is a Python script, `-m` and a module, or a Python program on PATH.  The setting is inherited by the Python
processes that it starts.
"""

import os
import runpy
import shlex
import shutil
import sys
from pathlib import Path

from ripstop.compat import install

USAGE = """\
usage: python -m ripstop.compat PROGRAM [ARGS]     a script, or a Python program on PATH, such as accelerate
       python -m ripstop.compat -m MODULE [ARGS]
       python -m ripstop.compat --environment      print the variables that set this for all Python processes of a
                                                   shell: eval "$(python -m ripstop.compat --environment)"
"""
SITE = Path(__file__).with_name("site")


def main(argv: list[str]) -> int:
    match argv:
        case [] | ["-h" | "--help", *_]:
            print(USAGE, end="")
            return 0 if argv else 2
        case ["--environment"]:
            for name, value in _compat_command_environment().items():
                print(f"export {name}={shlex.quote(value)}")
            return 0
        case ["-m"]:
            return _compat_command_usage_error("-m needs a module's name; write -m MODULE")
        case ["-m", module, *args]:
            _install_for_compat_command()
            sys.argv = [module, *args]
            sys.path[0] = str(Path.cwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            return 0
        case [flag, *_] if flag.startswith("-"):
            return _compat_command_usage_error(
                f"{flag}: there is no such flag; the program comes first, then its own flags"
            )
    name, *args = argv
    path = name if Path(name).is_file() else shutil.which(name)
    if path is None:
        return _compat_command_usage_error(
            f"{name}: no such file here, and no such program on PATH; give the path of a Python script"
        )
    if not _is_python_program_for_compat(Path(path)):
        return _compat_command_usage_error(
            f"{path}: not a Python program; set the variables of --environment and run it as it is"
        )
    _install_for_compat_command()
    sys.argv = [path, *args]
    sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")
    return 0


def _install_for_compat_command() -> None:
    os.environ.update(_compat_command_environment())
    install()


def _compat_command_environment() -> dict[str, str]:
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(SITE)]
    return {"RIPSTOP_COMPAT": "1", "PYTHONPATH": os.pathsep.join([str(SITE), *others])}


def _is_python_program_for_compat(path: Path) -> bool:
    with path.open("rb") as file:
        first, second = file.readline(512), file.readline(512)
    if path.suffix == ".py":
        return True
    if first.startswith(b"#!/bin/sh") and second.startswith(b"'''exec'"):  # pip writes this for long paths
        first = b"#!" + second
    names = (part.strip(b"'\"").rpartition(b"/")[2] for part in first[2:].split())
    return first.startswith(b"#!") and any(name.startswith(b"python") for name in names)


def _compat_command_usage_error(why: str) -> int:
    print(f"python -m ripstop.compat: error: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
