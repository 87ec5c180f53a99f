"""`ripstop run --dry-run`: the resolved configuration and each worker's environment, in words.

Nothing is started, bound or written.  What only the meeting of the nodes decides is said to be so; no secret is shown.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from shlex import join

from msgspec import Struct
from msgspec.structs import fields

from ripstop.logs.directory import file_name
from ripstop.model.config import Backend, Binding, Executable, Function, Module, RunConfig, Script
from ripstop.model.round import Address, Place
from ripstop.system.numa import format_ranges
from ripstop.workers.environment import worker_environment
from ripstop.workers.spawner import command_line

MET = "(when the nodes have met)"
BY_THE_MEETING = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR")
UNSHOWN = ("token", "password", "headers", "notes")


def describe(config: RunConfig, environ: Mapping[str, str]) -> str:
    """All of it, as one text."""
    lines = ["nothing is started (--dry-run)", "", "configuration"]
    lines += [f"  {name:<24} {_value(value)}" for name, value in _flat("", config)]
    for local_rank in range(config.slots):
        lines += ["", f"worker {local_rank}: this shell's {len(environ)} variables, and"]
        lines += [f"  {name}={value}" for name, value in sorted(_environment(config, environ, local_rank).items())]
    if config.notes:
        lines += ["", "notes", *(f"  {note}" for note in config.notes)]
    return "\n".join(lines) + "\n"


def _flat(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    """Every setting by its name; a group of settings comes one by one."""
    assert isinstance(value, Struct)
    for field in fields(value):
        inner = getattr(value, field.name)
        if field.name in UNSHOWN:
            continue
        if field.name in ("budget", "timing", "health", "quarantine", "logs"):
            yield from _flat(f"{field.name}.", inner)
        else:
            yield prefix + field.name, inner


def _value(value: object) -> str:
    match value:
        case None:
            return "-"
        case Script() | Module() | Function() | Executable():
            return join(command_line(value))
        case Binding(cpus, memory):
            return f"processors {format_ranges(cpus)}" + (f", memory of node {memory}" if memory is not None else "")
        case Enum():
            return str(value.value) if isinstance(value.value, str) else str(value.name).lower()
        case (Binding(), *_):
            return "; ".join(map(_value, value))
        case tuple() | frozenset():
            return ", ".join(map(_value, sorted(value) if isinstance(value, frozenset) else value)) or "-"
        case Struct() if not isinstance(value, Address):
            return ", ".join(f"{name}={_value(inner)}" for name, inner in _flat("", value))
    return str(value)


def _environment(config: RunConfig, environ: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """What this worker's environment has beyond the shell's."""
    env = worker_environment(
        environ,
        _place(config),
        local_rank,
        run_id=config.run_id,
        role=config.role,
        max_restarts=config.budget.max_restarts,
        error_file=_error_file(config, local_rank),
        signals=config.signals,
        virtual_local_rank=config.virtual_local_rank,
        timer_pipe=config.timer_pipe,
    )
    if config.backend is not Backend.LOCAL:
        env |= dict.fromkeys(BY_THE_MEETING, MET)
    if not config.store_port:
        env["MASTER_PORT"] = "(a free port)"
    return {name: value for name, value in env.items() if environ.get(name) != value}


def _place(config: RunConfig) -> Place:
    """This node's place in a first round that it has for itself."""
    host = config.local_addr or "127.0.0.1"
    return Place(1, 0, 1, 0, config.slots, config.slots, 0, config.slots, Address(host, config.store_port), 0)


def _error_file(config: RunConfig, local_rank: int) -> Path:
    directory = config.logs.directory or Path("(a new directory)")
    rank = str(local_rank) if config.backend is Backend.LOCAL else "(rank)"
    return directory / file_name(config.run_id) / "round_1" / rank / "error.json"
