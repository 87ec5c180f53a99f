"""The flags about node health."""

import os
from collections.abc import Mapping

from msgspec.structs import replace

from ripstop.cli.options.flags import ParsedArguments
from ripstop.model.config import HealthLimits
from ripstop.model.errors import UsageError
from ripstop.model.parsers import duration, health_limits


def health(args: ParsedArguments, conf_name: str, conf: Mapping[str, str], *, alone: bool) -> HealthLimits:
    """The limits of a healthy node; a single node, which no other can replace, has no limit on its disk by default."""
    found = health_limits(conf_name, conf)
    if alone and "min_disk" not in conf:
        found = replace(found, min_disk=0)
    if "--health-interval" in args:
        interval = duration(*args.labelled("--health-interval"), positive=True)
        found = replace(found, interval=interval)
    if "--health-check" in args:
        found = replace(found, command=_command(*args.labelled("--health-check")))
    return found


def _command(name: str, text: str) -> tuple[str, ...]:
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
