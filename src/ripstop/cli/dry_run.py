"""`ripstop run --dry-run`: print the resolved configuration and each worker's environment.

Nothing is started, bound or written.  Values that only the rendezvous decides are marked; secrets are not shown.
"""

import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from shlex import join

from msgspec import Struct
from msgspec.structs import fields

from ripstop.logs.directory import file_name
from ripstop.model.config import Backend, Binding, Executable, Module, RunConfig, Script, StartMethod
from ripstop.model.round import Address, Place
from ripstop.system.numa import format_ranges
from ripstop.workers.environment import worker_environment
from ripstop.workers.spawner import command_line, entry_key
from ripstop.workers.zygote import verdicts
from ripstop.workers.zygote.imports import to_preload

AFTER_RENDEZVOUS = "(after the rendezvous)"
SET_BY_RENDEZVOUS = (
    *("RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR"),
)
HIDDEN_FIELDS = ("token", "password", "headers", "notes")


def describe(config: RunConfig, environ: Mapping[str, str]) -> str:
    lines = ["dry run: nothing is started", "", "configuration"]
    lines += [f"  {name:<24} {_value(value)}" for name, value in _flat("", config)]
    for local_rank in range(config.slots):
        lines += ["", f"worker {local_rank}: the {len(environ)} variables of this shell, and"]
        lines += [f"  {name}={value}" for name, value in sorted(_environment(config, environ, local_rank).items())]
    if notes := [*config.notes, *_left_out(config)]:
        lines += ["", "notes", *(f"  {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _left_out(config: RunConfig) -> Iterator[str]:
    """What an earlier start has found unfit for preloading."""
    if config.preload is not None or config.start is not StartMethod.ZYGOTE or isinstance(config.entry, Executable):
        return
    kind, target = entry_key(config.entry)
    home = str(Path(target).resolve() if Path(target).is_dir() else Path(target).resolve().parent)
    path = [home if kind == "script" else str(Path.cwd()), *sys.path[1:]]
    names, sources = to_preload(kind, target, path, config.entry.args)
    plan = verdicts.recall(verdicts.key(names, sources, path))
    for name, why in plan["left_out"].items() if plan else ():
        yield f"preload: {name} left out: {why}"


def _flat(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    """Every setting and its name; groups are flattened."""
    assert isinstance(value, Struct)
    for field in fields(value):
        inner = getattr(value, field.name)
        if field.name in HIDDEN_FIELDS:
            continue
        if field.name in ("budget", "timing", "health", "quarantine", "logs"):
            yield from _flat(f"{field.name}.", inner)
        else:
            yield prefix + field.name, inner


def _value(value: object) -> str:
    match value:
        case None:
            return "-"
        case Script() | Module() | Executable():
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
    """The variables that this worker has in addition to the shell's, in a first round without other nodes."""
    address = Address(config.local_addr or "127.0.0.1", config.store_port)
    env = worker_environment(
        environ,
        Place(1, 0, 1, 0, config.slots, config.slots, 0, config.slots, address, 0),
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
        env |= dict.fromkeys(SET_BY_RENDEZVOUS, AFTER_RENDEZVOUS)
    if not config.store_port:
        env["MASTER_PORT"] = "(a free port)"
    return {name: value for name, value in env.items() if environ.get(name) != value}


def _error_file(config: RunConfig, local_rank: int) -> Path:
    directory = config.logs.directory or Path("(a new directory)")
    rank = str(local_rank) if config.backend is Backend.LOCAL else "(rank)"
    return directory / file_name(config.run_id) / "round_1" / rank / "error.json"
