"""What the workers run and how they are started, from the flags of `ripstop run`."""

import os
from collections.abc import Mapping
from pathlib import Path

from ripstop.cli.options.flags import Given
from ripstop.model.config import Entrypoint, Executable, Module, Script, StartMethod
from ripstop.model.errors import UsageError


def entry(given: Given, environ: Mapping[str, str], notes: list[str]) -> Entrypoint:
    """The entrypoint; its file or program is there."""
    if not given.program or not given.program[0]:
        raise UsageError("nothing to run; name the script after the flags: ripstop run … train.py")
    name, *args = given.program
    if "--run-path" in given:
        idle = (flag for flag in ("--module", "--no-python") if flag in given)
        notes.extend(f"{given.label(flag)} has no effect beside --run-path: a script is run" for flag in idle)
        if environ.get("PYTHON_EXEC"):
            notes.append("PYTHON_EXEC has no effect beside --run-path: ripstop's own interpreter runs the script")
        return Script(_there(name), tuple(args))
    if "--no-python" in given:
        if "--module" in given:
            raise UsageError("-m and --no-python: a module needs python; leave one of them out")
        if environ.get("PYTHON_EXEC"):
            notes.append("PYTHON_EXEC has no effect with --no-python: no python is started")
        return Executable((_program("--no-python", name, environ), *args))
    if "--module" not in given:
        _there(name)
    if python := environ.get("PYTHON_EXEC"):
        module = ("-m",) if "--module" in given else ()
        return Executable((_program("PYTHON_EXEC", python, environ), "-u", *module, name, *args))
    return Module(name, tuple(args)) if "--module" in given else Script(name, tuple(args))


def start(given: Given, entry: Entrypoint, notes: list[str]) -> StartMethod:
    match given.text("--start-method", "zygote"):
        case "zygote" | "fork" | "forkserver":
            start = StartMethod.ZYGOTE
        case "exec" | "spawn":
            start = StartMethod.EXEC
        case other:
            name = given.label("--start-method")
            raise UsageError(f"{name}={other}: there is no such way to start workers; write zygote or exec")
    if isinstance(entry, Executable) and start is StartMethod.ZYGOTE:
        if "--start-method" in given:
            notes.append(f"{given.label('--start-method')} has no effect: {entry.argv[0]} can only be started by exec")
        return StartMethod.EXEC
    return start


def preload(given: Given, start: StartMethod, notes: list[str]) -> tuple[str, ...] | None:
    if "--preload" not in given:
        return None
    name, text = given.label("--preload"), given.text("--preload", "")
    if start is StartMethod.EXEC:
        notes.append(f"{name} has no effect: workers are started by exec, nothing is imported for them")
    if text == "none":
        return ()
    modules = tuple(module.strip() for module in text.split(","))
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise UsageError(f"{name}={text}: {module!r} is no module's name; write {name}=torch,numpy or {name}=none")
    return modules


def _there(script: str) -> str:
    if not os.path.exists(script):  # noqa: PTH110 - does not raise on a name too long
        remedy = "give the script's path, -m for a module, or --no-python for another program"
        raise UsageError(f"{script}: no such file in {Path.cwd()}; {remedy}")
    return script


def _program(source: str, name: str, environ: Mapping[str, str]) -> str:
    from shutil import which  # not needed to run a Python script, and slow to import

    if which(name, path=environ.get("PATH")) is None:
        raise UsageError(f"{source} {name}: no such program, here or on PATH; give the path of an executable file")
    return name
