"""`--rdzv-backend=NAME` of another package: a rendezvous handler from an entry point `torchrun.handlers`.

`compat/launcher/handler_link.py` runs such a job, since this layer must not import torch or the handler.
"""

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from ripstop.cli.options.flags import ParsedArguments
from ripstop.cli.options.rendezvous import BACKENDS, MASTER_FLAGS, RendezvousOptions, local_address, note_no_effect
from ripstop.model.config import Backend, Handler
from ripstop.model.parsers import key_values

ENTRY_POINT_GROUP = "torchrun.handlers"
PROGRAM = (
    "import sys; sys.path.append({root!r}); from ripstop.compat.launcher.handler_link import main; sys.exit(main())"
)


def handler(args: ParsedArguments, registered: Collection[str] = ()) -> Handler | None:
    """The handler that the flags name, None for ripstop's own backends.  Its settings are passed on unread."""
    name = args.text("--rdzv-backend", "static")
    if name in BACKENDS or "--standalone" in args or (name not in registered and not _is_installed(name)):
        return None
    conf = key_values(*args.labelled("--rdzv-conf"))
    return Handler(name, args.text("--rdzv-endpoint"), tuple(conf.items()))


def rendezvous_options(args: ParsedArguments, notes: list[str]) -> RendezvousOptions:
    why = f"with {args.quoted('--rdzv-backend')}: its handler does the rendezvous"
    note_no_effect(args, (*MASTER_FLAGS, "--node-rank"), why, notes)
    return RendezvousOptions(Backend.HANDLER, local_addr=local_address(args))


def replace_process(argv: Sequence[str]) -> int:
    """Continue as the program that runs handlers.  `-P` keeps the current directory out of its module path."""
    root = str(Path(__file__).parents[3])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-c", PROGRAM.format(root=root), *argv])


def _is_installed(name: str) -> bool:
    from importlib.metadata import entry_points

    return name in entry_points(group=ENTRY_POINT_GROUP).names
