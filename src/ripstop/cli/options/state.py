"""The flags about training state (`ripstop.train.State`)."""

from pathlib import Path

from ripstop.cli.options.flags import ParsedArguments
from ripstop.model.config import Checkpoints
from ripstop.model.errors import UsageError
from ripstop.model.parsers import byte_size, duration


def state_replication_options(args: ParsedArguments, notes: list[str], *, max_nodes: int) -> tuple[bool, int]:
    """Whether nodes keep copies of each other's commits, and the limit in bytes per second (0: none)."""
    mode = args.text("--replicate", "auto")
    if mode not in ("auto", "off"):
        raise UsageError(f"{args.quoted('--replicate')}: must be auto or off; write --replicate=off for no copies")
    name, text = args.labelled("--replicate-bandwidth", "0")
    limit = byte_size(name, text.strip().removesuffix("/s"))
    if "--replicate-bandwidth" in args and (mode == "off" or max_nodes == 1):
        why = f"with {args.label('--replicate')}=off" if mode == "off" else "in a job of one node"
        notes.append(f"{name} has no effect {why}: nothing is copied")
    return mode == "auto", limit


def state_checkpoint_options(args: ParsedArguments, notes: list[str]) -> Checkpoints | None:
    default = Checkpoints(Path())
    interval = duration(*args.labelled("--checkpoint-interval", str(default.interval)), positive=True)
    if not args.text("--checkpoint-dir"):
        if "--checkpoint-interval" in args:
            label = args.label("--checkpoint-interval")
            notes.append(f"{label} has no effect without --checkpoint-dir: no commit is saved to disk")
        return None
    return Checkpoints(Path(args.text("--checkpoint-dir")).absolute(), interval)
