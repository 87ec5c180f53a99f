"""The flags about the program that workers run, and how workers are started and stopped."""

import os
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from ripstop.cli.options.flags import ParsedArguments, note_unused_option_flags
from ripstop.model.config import Entrypoint, Executable, Module, Script, Standby, StartMethod
from ripstop.model.errors import UsageError
from ripstop.model.parsers import duration, standby_until, standby_workers

SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def program_entrypoint_options(args: ParsedArguments, environ: Mapping[str, str], notes: list[str]) -> Entrypoint:
    """The program, whose file exists."""
    if not args.program or not args.program[0]:
        raise UsageError("no script; write it after the flags: ripstop run … train.py")
    name, *script_args = args.program
    if "--run-path" in args:
        note_unused_option_flags(args, ("--module", "--no-python"), "with --run-path: a script is run", notes)
        if environ.get("PYTHON_EXEC"):
            notes.append("PYTHON_EXEC has no effect with --run-path: ripstop's own interpreter runs the script")
        return Script(_existing_program_file(name), tuple(script_args))
    if "--no-python" in args:
        if "--module" in args:
            raise UsageError("-m and --no-python: a module needs an interpreter; remove one of them")
        if environ.get("PYTHON_EXEC"):
            notes.append("PYTHON_EXEC has no effect with --no-python: no interpreter is started")
        return Executable((_program_option_on_path("--no-python", name, environ), *script_args))
    if "--module" not in args:
        _existing_program_file(name)
    if python := environ.get("PYTHON_EXEC"):
        module = ("-m",) if "--module" in args else ()
        return Executable((_program_option_on_path("PYTHON_EXEC", python, environ), "-u", *module, name, *script_args))
    return Module(name, tuple(script_args)) if "--module" in args else Script(name, tuple(script_args))


def program_start_method_option(args: ParsedArguments, entry: Entrypoint, notes: list[str]) -> StartMethod:
    match args.text("--start-method", "zygote"):
        case "zygote" | "fork" | "forkserver":
            start = StartMethod.ZYGOTE
        case "exec" | "spawn":
            start = StartMethod.EXEC
        case other:
            name = args.label("--start-method")
            raise UsageError(f"{name}={other}: unknown start method; write zygote or exec")
    if isinstance(entry, Executable) and start is StartMethod.ZYGOTE:
        if "--start-method" in args:
            notes.append(
                f"{args.label('--start-method')} has no effect: {entry.argv[0]} is not a Python script, so exec is used"
            )
        return StartMethod.EXEC
    return start


def program_preload_option(args: ParsedArguments, start: StartMethod, notes: list[str]) -> tuple[str, ...] | None:
    if "--preload" not in args:
        return None
    name, text = args.labelled("--preload")
    if start is StartMethod.EXEC:
        notes.append(f"{name} has no effect with exec: there is no zygote to import modules")
    if text == "none":
        return ()
    modules = tuple(module.strip() for module in text.split(","))
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise UsageError(f"{name}={text}: {module!r} is not a module name; write {name}=torch,numpy or {name}=none")
    return modules


def program_standby_options(
    args: ParsedArguments, entry: Entrypoint, start: StartMethod, slots: int, notes: list[str]
) -> Standby:
    warm_up = ""
    if "--standby-warmup" in args:
        warm_up = program_standby_warm_up_option(*args.labelled("--standby-warmup"), entry)
    until = standby_until(*args.labelled("--standby-until", "script"))
    found = standby_workers(*args.labelled("--standby", "off"), Standby(0, False, warm_up, until), entry, start, slots)
    if not found.count:
        note_unused_option_flags(args, ("--standby-warmup", "--standby-until"), "without --standby", notes)
    return found


def program_standby_warm_up_option(name: str, text: str, entry: Entrypoint) -> str:
    """The user's function, whose top-level module exists; importing it is the standby's work."""
    module, _, function = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise UsageError(f"{name}={text}: not a function; write {name}=package.module:function")
    from importlib.util import find_spec  # rarely needed

    top = module.partition(".")[0]
    # the first directory in which the workers look for modules
    own = str(Path(entry.path).resolve().parent if isinstance(entry, Script) else Path.cwd())
    if find_spec(top) is None and PathFinder.find_spec(top, [own]) is None:
        raise UsageError(f"{name}={text}: there is no module {top!r} in {own} or on PYTHONPATH; correct the name")
    return text


def program_shutdown_timeout_option(args: ParsedArguments, environ: Mapping[str, str]) -> float:
    if "--shutdown-timeout" in args:
        return duration(*args.labelled("--shutdown-timeout"))
    return default_program_shutdown_timeout_option(environ)


def program_inprocess_timeout_option(args: ParsedArguments) -> float:
    return duration(*args.labelled("--inprocess-timeout", "5"))


def default_program_shutdown_timeout_option(environ: Mapping[str, str]) -> float:
    return duration(SHUTDOWN_VARIABLE, environ.get(SHUTDOWN_VARIABLE) or "30")


def _existing_program_file(script: str) -> str:
    if not os.path.exists(script):  # noqa: PTH110 - does not raise on a name too long
        remedy = "give the script's path, -m for a module, or --no-python for an executable"
        raise UsageError(f"{script}: no such file in {Path.cwd()}; {remedy}")
    return script


def _program_option_on_path(source: str, name: str, environ: Mapping[str, str]) -> str:
    from shutil import which  # slow to import, and rarely needed

    if which(name, path=environ.get("PATH")) is None:
        raise UsageError(f"{source} {name}: no such executable in this directory or on PATH; give its path")
    return name
