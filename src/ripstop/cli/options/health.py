"""What a good node is, from the flags of `ripstop run`."""

import os
from collections.abc import Mapping

from msgspec.structs import replace

from ripstop.cli.options.flags import Given
from ripstop.model.config import HealthLimits
from ripstop.model.errors import UsageError
from ripstop.model.parsers import duration, health_limits


def health(given: Given, conf_name: str, conf: Mapping[str, str], *, alone: bool) -> HealthLimits:
    """The user's own check must be there before anything is started.

    A node that is alone has nobody to give its place to: what it needs of its disk is its workers' affair.
    """
    found = health_limits(conf_name, conf)
    if alone and "min_disk" not in conf:
        found = replace(found, min_disk=0)
    if "--health-interval" in given:
        name, text = given.label("--health-interval"), given.text("--health-interval", "")
        found = replace(found, interval=duration(name, text, positive=True))
    if "--health-check" in given:
        found = replace(found, command=_command(given.label("--health-check"), given.text("--health-check", "")))
    return found


def _command(name: str, text: str) -> tuple[str, ...]:
    import shlex  # few have a command
    import shutil

    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{name}={text}: {str(error).lower()}; quote it as for a shell") from None
    if not words:
        raise UsageError(f"{name}: a command is a program and its arguments; name one, or leave {name} out")
    if shutil.which(words[0]) is None:
        here = "is no program that may be run" if os.path.lexists(words[0]) else "there is no such program"
        raise UsageError(f"{name}={text}: {here}: {words[0]}; give its path, or write sh -c '…' for a shell's words")
    return words
