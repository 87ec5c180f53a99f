"""The flags about the whole job, which `run` and `coordinator` share."""

from collections.abc import Mapping
from typing import TypeVar

from ripstop.cli.options.flags import HELP_FLAG, Flag, ParsedArguments
from ripstop.model.config import Budget, LogFormat, LogLevel, OwnLog, StragglerLimits, StragglerMode, Tls
from ripstop.model.errors import UsageError
from ripstop.model.parsers import duration, integer, number, webhook_url
from ripstop.model.rendezvous_conf import tls

JOB_FLAGS = (
    HELP_FLAG,
    Flag("--nnodes", "N|MIN:MAX"),
    Flag("--rdzv-id", "NAME"),
    Flag("--rdzv-endpoint", "HOST[:PORT]"),
    Flag("--rdzv-conf", "KEY=VALUE,…"),
    Flag("--max-restarts", "N"),
    Flag("--restart-window", "TIME", ours=True),
    Flag("--restart-backoff", "TIME", ours=True),
    Flag("--max-infra-restarts", "N", ours=True),
    Flag("--notify-url", "URL", ours=True),
    Flag("--straggler", "HOW", choices=tuple(mode.value for mode in StragglerMode), ours=True),
    Flag("--straggler-factor", "NUMBER", ours=True),
    Flag("--straggler-time", "TIME", ours=True),
    Flag("--quiet", short="-q", ours=True),
    Flag("--log-level", "LEVEL", choices=tuple(level.value for level in LogLevel), ours=True),
    Flag("--log-format", "FORMAT", choices=tuple(form.value for form in LogFormat), ours=True),
    Flag("--allow-chaos", ours=True),
)
MAX_RESTARTS = 1_000_000

MAX_STRAGGLER_FACTOR = 100.0

Chosen = TypeVar("Chosen", LogLevel, LogFormat, StragglerMode)


def budget(args: ParsedArguments, notes: list[str]) -> Budget:
    default = Budget()
    restarts = integer(*args.labelled("--max-restarts", "0"), minimum=0, maximum=MAX_RESTARTS)
    if restarts == 0:
        unused = (flag for flag in ("--restart-window", "--restart-backoff") if flag in args)
        notes.extend(
            f"{args.label(flag)} has no effect without --max-restarts: there are no restarts" for flag in unused
        )
    return Budget(
        max_restarts=restarts,
        window=duration(*args.labelled("--restart-window", str(default.window))),
        backoff=duration(*args.labelled("--restart-backoff", str(default.backoff))),
        max_infra_restarts=integer(
            *args.labelled("--max-infra-restarts", str(default.max_infra_restarts)), minimum=0, maximum=MAX_RESTARTS
        ),
    )


def notify_url(args: ParsedArguments) -> str:
    return webhook_url(*args.labelled("--notify-url")) if "--notify-url" in args else ""


def stragglers(args: ParsedArguments, notes: list[str]) -> StragglerLimits:
    default = StragglerLimits()
    mode = _choice(args, "--straggler", StragglerMode, default.mode)
    if mode is StragglerMode.OFF:
        unused = (flag for flag in ("--straggler-factor", "--straggler-time") if flag in args)
        notes.extend(f"{args.label(flag)} has no effect with --straggler=off" for flag in unused)
    factor = number(*args.labelled("--straggler-factor", str(default.factor)), above=1.0, maximum=MAX_STRAGGLER_FACTOR)
    seconds = duration(*args.labelled("--straggler-time", str(default.seconds)), positive=True)
    return StragglerLimits(mode, factor, seconds)


def own_log(args: ParsedArguments) -> OwnLog:
    """How ripstop's own lines are written; --quiet means warnings and no live line, unless --log-level is given."""
    is_quiet = "--quiet" in args
    level = _choice(args, "--log-level", LogLevel, LogLevel.WARNING if is_quiet else LogLevel.INFO)
    return OwnLog(level, _choice(args, "--log-format", LogFormat, LogFormat.TEXT), live=not is_quiet)


def _choice(args: ParsedArguments, flag: str, known: type[Chosen], default: Chosen) -> Chosen:
    text = args.text(flag, default.value).lower()
    for value in known:
        if value.value == text:
            return value
    raise UsageError(f"{args.quoted(flag)}: unknown value; write one of {', '.join(value.value for value in known)}")


def allow_chaos(args: ParsedArguments, notes: list[str]) -> bool:
    is_allowed = "--allow-chaos" in args
    if is_allowed:
        notes.append(f"{args.label('--allow-chaos')}: operators may inject faults into this job (ripstop chaos)")
    return is_allowed


def certificates(name: str, conf: Mapping[str, str], notes: list[str]) -> Tls | None:
    """The job's certificates, checked; `name` is the label of `--rdzv-conf`."""
    found, tls_notes = tls(name, conf)
    notes.extend(tls_notes)
    if found is not None:
        from ripstop.transport.tls import check_certificates  # ssl: only with TLS

        check_certificates(name, found)
    return found


def no_secret_warning(endpoint: object, tls: Tls | None) -> list[str]:
    """A warning that anyone can join the job; none if certificates are required."""
    if tls is not None and tls.ca is not None:
        return []
    return [
        f"no RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE: anyone who can reach {endpoint} can join this job and end it; "
        "set the same secret on all nodes (openssl rand -hex 32)"
    ]
