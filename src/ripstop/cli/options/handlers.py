"""`--rdzv-backend=NAME` of another package: a rendezvous handler of torch's kind, an entry point `torchrun.handlers`.

Such a job is run by `compat/launcher/handler_run.py`, which may import what this layer may not: torch, and the handler.
"""

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from ripstop.cli.options.flags import Given
from ripstop.cli.options.rendezvous import BACKENDS, MASTER, RendezvousOptions, idle
from ripstop.model.config import Backend, Handler
from ripstop.model.parsers import host, key_values

GROUP = "torchrun.handlers"
PROGRAM = (
    "import sys; sys.path.append({root!r}); from ripstop.compat.launcher.handler_run import main; sys.exit(main())"
)


def handler(given: Given, registered: Collection[str] = ()) -> Handler | None:
    """The handler that the flags name, if they do; its settings are its own and not looked at."""
    name = given.text("--rdzv-backend", "static")
    if name in BACKENDS or "--standalone" in given or (name not in registered and not _is_installed(name)):
        return None
    conf = key_values(given.label("--rdzv-conf"), given.text("--rdzv-conf", ""))
    return Handler(name, given.text("--rdzv-endpoint", ""), tuple(conf.items()))


def meeting(given: Given, notes: list[str]) -> RendezvousOptions:
    """Where the handler says."""
    said = f"{given.label('--rdzv-backend')}={given.text('--rdzv-backend', '')}"
    idle(given, (*MASTER, "--node-rank"), f"with {said}: its handler knows where nodes meet", notes)
    local_addr = host(given.label("--local-addr"), given.text("--local-addr", "")) if "--local-addr" in given else None
    return RendezvousOptions(Backend.HANDLER, local_addr=local_addr)


def run(argv: Sequence[str]) -> int:
    """Go on as the program that can; its interpreter does not look for modules where the user happens to be."""
    root = str(Path(__file__).parents[3])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-c", PROGRAM.format(root=root), *argv])


def _is_installed(name: str) -> bool:
    from importlib.metadata import entry_points

    return name in entry_points(group=GROUP).names
