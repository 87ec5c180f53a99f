"""The flags about monitoring: health checks, hangs, stragglers, API, probes, torch's timers and messages."""

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from ripstop.cli.options.flags import ParsedArguments, note_unused_option_flags
from ripstop.model.config import API_PORT, HealthLimits, StragglerLimits, StragglerMode, Tls
from ripstop.model.errors import UsageError
from ripstop.model.parsers import address, choice, duration, number, port, webhook_url
from ripstop.model.rendezvous_conf import health_limits
from ripstop.model.round import Address
from ripstop.workers.environment import TIMER_FILE

ENABLE_TIMERS = "TORCHELASTIC_ENABLE_FILE_TIMER"
PROBE_PORT_VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
MAX_STRAGGLER_FACTOR = 100.0


def monitoring_health_options(
    args: ParsedArguments, conf_name: str, conf: Mapping[str, str], *, alone: bool
) -> HealthLimits:
    """The limits of a healthy node; a single node, which no other can replace, has no limit on its disk by default."""
    found = health_limits(conf_name, conf)
    if alone and "min_disk" not in conf:
        found = replace(found, min_disk=0)
    if "--health-interval" in args:
        found = replace(found, interval=duration(*args.labelled("--health-interval"), positive=True))
    if "--health-check" in args:
        found = replace(found, command=_parse_health_check(*args.labelled("--health-check")))
    return found


def _parse_health_check(name: str, text: str) -> tuple[str, ...]:
    import shlex  # rarely needed
    import shutil

    try:
        command = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{name}={text}: {str(error).lower()}; quote it as for a shell") from None
    if not command:
        raise UsageError(f"{name}: the command is empty; write a program and its arguments, or leave {name} out")
    if shutil.which(command[0]) is None:
        problem = "not an executable file" if os.path.lexists(command[0]) else "no such program"
        raise UsageError(
            f"{name}={text}: {problem}: {command[0]}; give its path, or write sh -c '…' for a shell command"
        )
    return command


def monitoring_hang_timeout_option(args: ParsedArguments, notes: list[str]) -> float:
    timeout = duration(*args.labelled("--hang-timeout", "0"))
    if not timeout and "--max-infra-restarts" in args:
        label = args.label("--max-infra-restarts")
        notes.append(f"{label} has no effect without --hang-timeout: hangs are not detected")
    return timeout


def monitoring_straggler_options(args: ParsedArguments, notes: list[str]) -> StragglerLimits:
    default = StragglerLimits()
    mode = choice(*args.labelled("--straggler", default.mode.value), StragglerMode)
    if mode is StragglerMode.OFF:
        note_unused_option_flags(args, ("--straggler-factor", "--straggler-time"), "with --straggler=off", notes)
    factor = number(*args.labelled("--straggler-factor", str(default.factor)), above=1.0, maximum=MAX_STRAGGLER_FACTOR)
    seconds = duration(*args.labelled("--straggler-time", str(default.seconds)), positive=True)
    return StragglerLimits(mode, factor, seconds)


def monitoring_preemption_notice_option(args: ParsedArguments) -> str:
    """A file that need not exist, or a URL; "": none."""
    if "--preemption-notice" not in args:
        return ""
    name, text = args.labelled("--preemption-notice")
    if "://" in text:
        if not text.startswith("http://"):
            raise UsageError(f"{name}={text}: not a file and not an http:// URL; write http://HOST/PATH, or a path")
        return webhook_url(name, text)
    path = Path(text)
    if not path.parent.is_dir():
        raise UsageError(f"{name}={text}: no such directory: {path.parent}; create it before the job starts")
    return str(path.absolute())


def monitoring_probe_port_option(args: ParsedArguments, environ: Mapping[str, str]) -> int | None:
    if "--probe-port" in args:
        return port(*args.labelled("--probe-port"))
    text = environ.get(PROBE_PORT_VARIABLE)
    return port(PROBE_PORT_VARIABLE, text) if text else None


def monitoring_api_address_option(
    args: ParsedArguments, token: str, tls: Tls | None, *, local: bool, notes: list[str]
) -> Address | None:
    if "--api" not in args:
        return None
    name = args.label("--api")
    if not local:
        notes.append(f"{name} has no effect on a job of several nodes: its API is at its coordinator's port")
        return None
    endpoint = address(name, args.text("--api"), default_port=API_PORT)
    if not token and (tls is None or tls.ca is None):
        raise UsageError(
            f"{name}={endpoint}: the API needs the job's secret, and there is none; "
            "set RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE"
        )
    if tls is not None:
        from ripstop.transport.tls import check_coordinator_certificate

        check_coordinator_certificate(tls, endpoint.host)
    return endpoint


def monitoring_timer_pipe_option(environ: Mapping[str, str], notes: list[str]) -> Path | None:
    """The path of the pipe on which workers set timers, None if timers are off."""
    enabled = environ.get(ENABLE_TIMERS, "0")
    if enabled != "1":
        if enabled not in ("", "0"):
            notes.append(f"{ENABLE_TIMERS}={enabled} has no effect: timers are off; write 1 to enable them")
        return None
    from tempfile import gettempdir

    from ripstop.diagnostics.timer_pipe import check_pipe_path, is_pipe_in_use

    file = environ.get(TIMER_FILE)
    path = Path(file).absolute() if file else Path(gettempdir(), f"watchdog_timer_{os.urandom(16).hex()}")
    if is_pipe_in_use(path):  # for example in a worker that starts a job itself
        path = path.with_name(f"{path.name}_{os.urandom(4).hex()}")
        notes.append(f"{TIMER_FILE}={file}: another agent uses this pipe; this job uses {path}")
    check_pipe_path(f"{TIMER_FILE}={file}" if file else f"{path}", path)
    return path


def monitoring_notify_url_option(args: ParsedArguments) -> str:
    return webhook_url(*args.labelled("--notify-url")) if "--notify-url" in args else ""
