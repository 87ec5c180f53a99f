"""The flags about training state (`ripstop.train.State`)."""

from ripstop.cli.options.flags import ParsedArguments
from ripstop.model.errors import UsageError
from ripstop.model.parsers import byte_size


def replication(args: ParsedArguments, notes: list[str], *, max_nodes: int) -> tuple[bool, int]:
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
