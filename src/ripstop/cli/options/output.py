"""The flags about output: workers' output, ripstop's own lines, and torch's events."""

import os
from collections.abc import Mapping
from pathlib import Path

from ripstop.cli.options.flags import ParsedArguments
from ripstop.model.config import LogFormat, LogLevel, Logs, OutputStreams, OwnLog, StreamMap
from ripstop.model.errors import UsageError
from ripstop.model.parsers import choice, comma_separated, local_ranks, streams

PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
LOGS_GROUP = "torchrun.logs_specs"


def output_logs_options(args: ParsedArguments, environ: Mapping[str, str], slots: int, notes: list[str]) -> Logs:
    directory = Path(text) if (text := args.text("--log-dir")) else None
    kept = directory != Path(os.devnull)  # as in torchrun: write no files
    if not kept:
        directory = None
    if directory is not None and os.path.lexists(directory) and not os.path.isdir(directory):  # noqa: PTH112 (never raises)
        raise UsageError(f"{args.label('--log-dir')}={directory}: exists and is not a directory; name another")
    redirects, tee = (
        _output_stream_map_option(args, flag, slots, notes, kept=kept) for flag in ("--redirects", "--tee")
    )
    prefix = environ.get(PREFIX_VARIABLE, "")
    if prefix and not any(tee.of(rank) for rank in range(slots)):
        notes.append(f"{PREFIX_VARIABLE} has no effect without --tee: only lines of --tee have a prefix")
    shown = args.labelled("--local-ranks-filter")
    return Logs(
        directory=directory,
        redirects=redirects,
        tee=tee,
        shown=local_ranks(*shown, slots) if shown[1] else None,
        stdout_filters=_output_filters(args, "--duplicate-stdout-filters", OutputStreams.OUT, tee, slots, notes),
        stderr_filters=_output_filters(args, "--duplicate-stderr-filters", OutputStreams.ERR, tee, slots, notes),
        prefix=prefix or Logs().prefix,
        specs=_output_logs_specs_option(args),
        kept=kept,
    )


def _output_stream_map_option(
    args: ParsedArguments, flag: str, slots: int, notes: list[str], *, kept: bool
) -> StreamMap:
    name = args.label(flag)
    chosen = streams(name, args.text(flag, "0"), slots)
    if kept or not any(chosen.of(rank) for rank in range(slots)):
        return chosen
    notes.append(f"{name} has no effect with {args.label('--log-dir')}={os.devnull}: no files are written")
    return StreamMap()


def _output_logs_specs_option(args: ParsedArguments) -> str:
    if "--logs-specs" not in args:
        return ""
    from importlib.metadata import entry_points

    name = args.text("--logs-specs")
    known = sorted(entry_points(group=LOGS_GROUP).names)
    if name not in known:
        remedy = f"choose one of {', '.join(known)}" if known else "install the plugin's package"
        raise UsageError(f"{args.quoted('--logs-specs')}: no entry point {LOGS_GROUP} has this name; {remedy}")
    return name


def _output_filters(
    args: ParsedArguments, flag: str, stream: OutputStreams, tee: StreamMap, slots: int, notes: list[str]
) -> tuple[str, ...]:
    if flag not in args:
        return ()
    name = args.label(flag)
    if not any(stream in tee.of(rank) for rank in range(slots)):
        notes.append(f"{name} has no effect without --tee={stream.value}: only lines of --tee are filtered")
    return comma_separated(name, args.text(flag))


def output_own_log_options(args: ParsedArguments) -> OwnLog:
    """How ripstop's own lines are written; --quiet means warnings and no live line, unless --log-level is given."""
    is_quiet = "--quiet" in args
    level = choice(*args.labelled("--log-level", "warning" if is_quiet else "info"), LogLevel)
    return OwnLog(level, choice(*args.labelled("--log-format", "text"), LogFormat), live=not is_quiet)


def output_event_handler_option(args: ParsedArguments) -> str:
    """The handler that receives torch's events, "" for none."""
    handler = args.text("--event-log-handler", "null")
    if handler == "null":
        return ""
    from ripstop.telemetry.torch_handler_process import GROUP, NAMES  # imports logging

    if handler in NAMES:
        return handler if handler == "console" else ""
    from importlib.metadata import entry_points

    known = sorted(entry_points(group=GROUP).names)
    if handler not in known:
        name = args.label("--event-log-handler")
        raise UsageError(
            f"{name}={handler}: unknown handler, and no entry point {GROUP} has this name; "
            f"write {', '.join((*NAMES[:2], *known))}"
        )
    return handler
