"""Where workers' output goes, from the flags of `ripstop run`."""

from collections.abc import Mapping
from pathlib import Path

from ripstop.cli.flags import Given
from ripstop.config import Logs, StreamMap, Streams, local_ranks, streams, words
from ripstop.errors import UsageError

PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
GROUP = "torchrun.logs_specs"
HANDLERS = ("null", "console", "dynamic_rendezvous")  # torch's own


def logs(given: Given, environ: Mapping[str, str], slots: int, notes: list[str]) -> Logs:
    directory = Path(given.text("--log-dir", "")) if given.text("--log-dir", "") else None
    if directory is not None and directory.exists() and not directory.is_dir():
        raise UsageError(f"{given.label('--log-dir')}={directory}: is there and no directory; name another")
    tee = streams(given.label("--tee"), given.text("--tee", "0"), slots)
    prefix = environ.get(PREFIX, "")
    if prefix and not any(tee.of(rank) for rank in range(slots)):
        notes.append(f"{PREFIX} has no effect without --tee: no line has a prefix")
    shown = given.text("--local-ranks-filter", "")
    return Logs(
        directory=directory,
        redirects=streams(given.label("--redirects"), given.text("--redirects", "0"), slots),
        tee=tee,
        shown=local_ranks(given.label("--local-ranks-filter"), shown, slots) if shown else None,
        stdout_filters=_filters(given, "--duplicate-stdout-filters", Streams.OUT, tee, slots, notes),
        stderr_filters=_filters(given, "--duplicate-stderr-filters", Streams.ERR, tee, slots, notes),
        prefix=prefix or Logs().prefix,
        specs=_specs(given),
    )


def _specs(given: Given) -> str:
    if "--logs-specs" not in given:
        return ""
    from importlib.metadata import entry_points

    name = given.text("--logs-specs", "")
    known = sorted(entry_points(group=GROUP).names)
    if name not in known:
        said = f"{given.label('--logs-specs')}={name}"
        there = f"there are {', '.join(known)}" if known else "there is none at all: install the plugin's package"
        raise UsageError(f"{said}: no entry point {GROUP} has this name; {there}")
    return name


def _filters(given: Given, flag: str, stream: Streams, tee: StreamMap, slots: int, notes: list[str]) -> tuple[str, ...]:
    if flag not in given:
        return ()
    name = given.label(flag)
    if not any(stream in tee.of(rank) for rank in range(slots)):
        notes.append(
            f"{name} has no effect without --tee={stream.value}: lines are filtered on their way to the console"
        )
    return words(name, given.text(flag, ""))


def event_handler(given: Given, notes: list[str]) -> None:
    """There are no events for handlers yet, so a handler that is asked for is told to have nothing to do."""
    name, handler = given.label("--event-log-handler"), given.text("--event-log-handler", "null")
    if handler not in HANDLERS:
        raise UsageError(f"{name}={handler}: there is no such handler; write {', '.join(HANDLERS)}")
    if handler == "console":
        notes.append(f"{name}=console has no effect in this version: no events are written")
