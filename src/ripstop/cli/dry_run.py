"""`ripstop run --dry-run`: print the resolved configuration and each worker's environment.

Nothing is started, bound or written.  Values that only the rendezvous decides are marked; secrets are not shown.
"""

from collections.abc import Mapping
from pathlib import Path

from ripstop.logs.directory import file_name
from ripstop.model.config import Backend, RunConfig
from ripstop.model.round import Address, Place
from ripstop.telemetry.run_settings import setting_text, settings
from ripstop.workers.environment import worker_environment

AFTER_RENDEZVOUS = "(after the rendezvous)"
SET_BY_RENDEZVOUS = (
    *("RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR"),
)


def describe(config: RunConfig, environ: Mapping[str, str]) -> str:
    lines = ["dry run: nothing is started", "", "configuration"]
    lines += [f"  {name:<24} {setting_text(value)}" for name, value in settings("", config)]
    for local_rank in range(config.slots):
        lines += ["", f"worker {local_rank}: the {len(environ)} variables of this shell, and"]
        lines += [f"  {name}={value}" for name, value in sorted(_environment(config, environ, local_rank).items())]
    if config.notes:
        lines += ["", "notes", *(f"  {note}" for note in config.notes)]
    return "\n".join(lines) + "\n"


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
