"""`--config job.toml`: a file that stands behind the flags and their variables.

Its keys are the flags' names, with dashes or underscores, without the two in front; `script` and `args` are the
program.  A switch is true or false; a list stands for a value with commas; `rdzv-conf` may be a table.  Rules: (1)
flags win over PET_ variables, and these over the file; (2) a key that is no flag is refused; (3) paths in it mean what
they would mean on the command line: they are seen from the current directory.
"""

from collections.abc import Sequence
from typing import Any

from ripstop.cli.options.flags import Flag, Given
from ripstop.model.errors import UsageError
from ripstop.model.parsers import read_file

NOT_IN_A_FILE = frozenset({"--help", "--config", "--dry-run"})


def behind(given: Given, flags: Sequence[Flag]) -> Given:
    """What the user wrote, and what the file says where the user wrote nothing."""
    if "--config" not in given:
        return given
    name = given.text("--config", "")
    job = _load(f"{given.label('--config')}={name}", name)
    program = _program(name, job)
    known = {flag.name: flag for flag in flags if flag.name not in NOT_IN_A_FILE}
    texts: dict[str, str] = {}
    for key, value in job.items():
        flag = known.get(f"--{key.replace('_', '-')}")
        if f"--{key.replace('_', '-')}" in NOT_IN_A_FILE:
            raise UsageError(f"{name} {key}: is for the command line alone; leave it out")
        if flag is None:
            raise _unknown(name, key, list(known))
        if flag.name in texts:
            raise UsageError(f"{name} {key}: is there twice, with dashes and with underscores; keep one of the two")
        if (text := _text(f"{name} {key}", flag, value)) is not None:
            texts[flag.name] = text
    return given.behind(texts, name, program)


def _load(said: str, name: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(read_file(name).decode())
    except (OSError, ValueError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        why = error.strerror if isinstance(error, OSError) else f"it is not TOML: {error}"
        raise UsageError(f"{said}: cannot be read: {why}; name a TOML file such as nnodes = 2") from None


def _program(name: str, job: dict[str, Any]) -> tuple[str, ...]:
    script, args = job.pop("script", None), job.pop("args", None)
    if script is None:
        if args is not None:
            raise UsageError(f'{name} args={args}: arguments of no script; write script = "train.py" beside it')
        return ()
    if not isinstance(script, str):
        raise UsageError(f'{name} script={script}: not a name; write script = "train.py"')
    if args is not None and not (isinstance(args, list) and all(isinstance(arg, str) for arg in args)):
        raise UsageError(f'{name} args={args}: not a list of texts; write args = ["--lr", "0.1"]')
    return (script, *(args or ()))


def _text(said: str, flag: Flag, value: Any) -> str | None:
    """The value as it would be written on the command line; None for a switch that is off."""
    if not flag.metavar:
        if not isinstance(value, bool):
            raise UsageError(f"{said}={value}: neither true nor false; write {said.split()[-1]} = true")
        return "" if value else None
    match value:
        case list() if flag.metavar.endswith(",…"):
            double = flag.metavar == "WORD,…"  # where a comma may be part of a word
            return ",".join(_scalar(said, item).replace(",", ",," if double else ",") for item in value)
        case dict() if flag.metavar.startswith("KEY=VALUE"):
            return ",".join(f"{key}={_scalar(said, item)}" for key, item in value.items())
    return _scalar(said, value)


def _scalar(said: str, value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str() | int() | float():
            return str(value)
    raise UsageError(f"{said}={value}: a {type(value).__name__} says nothing here; write a text or a number")


def _unknown(name: str, key: str, known: list[str]) -> UsageError:
    from difflib import get_close_matches

    close = get_close_matches(f"--{key}", known, n=1)
    remedy = f"did you mean {close[0].removeprefix('--')}?" if close else "keys are the flags of ripstop run --help"
    return UsageError(f"{name} {key}: there is no such key; {remedy}")
