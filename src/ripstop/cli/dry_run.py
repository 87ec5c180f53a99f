"""`ripstop run --dry-run`: print the resolved configuration and each worker's environment.

Nothing is started, bound or written.  Values that only the rendezvous decides are marked; secrets are not shown.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ripstop.logs.directory import directory_name
from ripstop.model.config import Backend, Executable, RunConfig, StartMethod
from ripstop.model.round import Address, Place
from ripstop.telemetry.run_settings import setting_text, settings
from ripstop.workers.environment import worker_environment
from ripstop.workers.spawner import zygote_key
from ripstop.workers.zygote import preload_cache
from ripstop.workers.zygote.imports import imports_to_preload

AFTER_RENDEZVOUS = "(after the rendezvous)"
SET_BY_RENDEZVOUS = (
    *("RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR"),
)


def describe_dry_run(config: RunConfig, environ: Mapping[str, str]) -> str:
    lines = ["dry run: nothing is started", "", "configuration"]
    lines += [f"  {name:<24} {setting_text(value)}" for name, value in settings("", config)]
    for local_rank in range(config.slots):
        lines += ["", f"worker {local_rank}: the {len(environ)} variables of this shell, and"]
        lines += [
            f"  {name}={value}" for name, value in sorted(_dry_run_environment(config, environ, local_rank).items())
        ]
    if notes := [*config.notes, *_dry_run_preload_notes(config)]:
        lines += ["", "notes", *(f"  {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _dry_run_preload_notes(config: RunConfig) -> Iterator[str]:
    """What an earlier start has found unfit for preloading."""
    if config.preload is not None or config.start is not StartMethod.ZYGOTE or isinstance(config.entry, Executable):
        return
    kind, target = zygote_key(config.entry)
    home = str(Path(target).resolve() if Path(target).is_dir() else Path(target).resolve().parent)
    path = [home if kind == "script" else str(Path.cwd()), *sys.path[1:]]
    names, sources = imports_to_preload(kind, target, path, config.entry.args)
    plan = preload_cache.recall_from_cache(preload_cache.cache_key(names, sources, path))
    for name, why in plan["left_out"].items() if plan else ():
        yield f"preload: {name} left out: {why}"


def _dry_run_environment(config: RunConfig, environ: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The variables that this worker has in addition to the shell's, in a first round without other nodes."""
    address = Address(config.local_addr or "127.0.0.1", config.store_port)
    env = worker_environment(
        environ,
        Place(1, 0, 1, 0, config.slots, config.slots, 0, config.slots, address, 0),
        local_rank,
        run_id=config.run_id,
        role=config.role,
        max_restarts=config.budget.max_restarts,
        error_file=_dry_run_error_file(config, local_rank),
        earlier_restarts=config.earlier_restarts,
        signals=config.signals,
        virtual_local_rank=config.virtual_local_rank,
        timer_pipe=config.timer_pipe,
    )
    if config.backend is not Backend.LOCAL:
        env |= dict.fromkeys(SET_BY_RENDEZVOUS, AFTER_RENDEZVOUS)
    if not config.store_port:
        env["MASTER_PORT"] = "(a free port)"
    return {name: value for name, value in env.items() if environ.get(name) != value}


def _dry_run_error_file(config: RunConfig, local_rank: int) -> Path:
    directory = config.logs.directory or Path("(a new directory)")
    rank = str(local_rank) if config.backend is Backend.LOCAL else "(rank)"
    return directory / directory_name(config.run_id) / "round_1" / rank / "error.json"
