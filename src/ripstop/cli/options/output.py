"""Where workers' output goes, from the flags of `ripstop run`."""

import os
from collections.abc import Mapping
from pathlib import Path

from ripstop.cli.options.flags import Given
from ripstop.model.config import Logs, OutputStreams, StreamMap
from ripstop.model.errors import UsageError
from ripstop.model.parsers import comma_separated, local_ranks, streams

PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
LOGS_GROUP = "torchrun.logs_specs"


def logs(given: Given, environ: Mapping[str, str], slots: int, notes: list[str]) -> Logs:
    directory = Path(given.text("--log-dir", "")) if given.text("--log-dir", "") else None
    kept = directory != Path(os.devnull)  # torchrun's way to ask for no files
    if not kept:
        directory = None
    if directory is not None and os.path.lexists(directory) and not os.path.isdir(directory):  # noqa: PTH112 (never raises)
        raise UsageError(f"{given.label('--log-dir')}={directory}: is there and no directory; name another")
    redirects, tee = (_to_files(given, flag, slots, notes, kept=kept) for flag in ("--redirects", "--tee"))
    prefix = environ.get(PREFIX, "")
    if prefix and not any(tee.of(rank) for rank in range(slots)):
        notes.append(f"{PREFIX} has no effect without --tee: no line has a prefix")
    shown = given.text("--local-ranks-filter", "")
    return Logs(
        directory=directory,
        redirects=redirects,
        tee=tee,
        shown=local_ranks(given.label("--local-ranks-filter"), shown, slots) if shown else None,
        stdout_filters=_filters(given, "--duplicate-stdout-filters", OutputStreams.OUT, tee, slots, notes),
        stderr_filters=_filters(given, "--duplicate-stderr-filters", OutputStreams.ERR, tee, slots, notes),
        prefix=prefix or Logs().prefix,
        specs=_specs(given),
        kept=kept,
    )


def _to_files(given: Given, flag: str, slots: int, notes: list[str], *, kept: bool) -> StreamMap:
    name = given.label(flag)
    chosen = streams(name, given.text(flag, "0"), slots)
    if kept or not any(chosen.of(rank) for rank in range(slots)):
        return chosen
    notes.append(f"{name} has no effect with {given.label('--log-dir')}={os.devnull}: there are no files to write to")
    return StreamMap()


def _specs(given: Given) -> str:
    if "--logs-specs" not in given:
        return ""
    from importlib.metadata import entry_points

    name = given.text("--logs-specs", "")
    known = sorted(entry_points(group=LOGS_GROUP).names)
    if name not in known:
        said = f"{given.label('--logs-specs')}={name}"
        there = f"there are {', '.join(known)}" if known else "there is none at all: install the plugin's package"
        raise UsageError(f"{said}: no entry point {LOGS_GROUP} has this name; {there}")
    return name


def _filters(
    given: Given, flag: str, stream: OutputStreams, tee: StreamMap, slots: int, notes: list[str]
) -> tuple[str, ...]:
    if flag not in given:
        return ()
    name = given.label(flag)
    if not any(stream in tee.of(rank) for rank in range(slots)):
        notes.append(
            f"{name} has no effect without --tee={stream.value}: lines are filtered on their way to the console"
        )
    return comma_separated(name, given.text(flag, ""))


def event_handler(given: Given) -> str:
    """The handler that is told of events, "" for none."""
    handler = given.text("--event-log-handler", "null")
    if handler == "null":
        return ""
    from ripstop.telemetry.torch_handler_process import (
        GROUP,
        NAMES,
    )  # it imports logging: only where somebody is to be told

    if handler in NAMES:
        return handler if handler == "console" else ""
    from importlib.metadata import entry_points

    known = sorted(entry_points(group=GROUP).names)
    if handler not in known:
        name = given.label("--event-log-handler")
        raise UsageError(
            f"{name}={handler}: there is no such handler, and no entry point {GROUP} of this name; "
            f"write {', '.join((*NAMES[:2], *known))}"
        )
    return handler
