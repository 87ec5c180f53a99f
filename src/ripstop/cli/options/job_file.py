"""`--config job.toml`: a file of flags.

The keys are the flags' names without the leading dashes, with dashes or underscores inside; `script` and `args` are the
program.  A switch is true or false; a list stands for a comma-separated value; `rdzv-conf` may be a table.  Rules: (1)
the command line overrides PET_ variables, and these override the file; (2) unknown keys are rejected; (3) relative
paths are relative to the current directory, as on the command line.
"""

from collections.abc import Sequence
from typing import Any

from ripstop.cli.options.flags import Flag, ParsedArguments
from ripstop.model.errors import UsageError
from ripstop.model.parsers import read_file_for_parser

COMMAND_LINE_ONLY = frozenset({"--help", "--config", "--dry-run"})


def with_job_file(args: ParsedArguments, flags: Sequence[Flag]) -> ParsedArguments:
    """Add the values of the file of `--config` (rule 1)."""
    name = args.text("--config")
    job = _load_job_file(args.quoted("--config"), name)
    program = _job_file_program(name, job)
    known = {flag.name: flag for flag in flags if flag.name not in COMMAND_LINE_ONLY}
    texts: dict[str, str] = {}
    for key, value in job.items():
        flag_name = f"--{key.replace('_', '-')}"
        if flag_name in COMMAND_LINE_ONLY:
            raise UsageError(f"{name} {key}: allowed only on the command line; remove it")
        if (flag := known.get(flag_name)) is None:
            raise _unknown_job_file_key(name, key, list(known))
        if flag.name in texts:
            raise UsageError(f"{name} {key}: given twice, with dashes and with underscores; remove one")
        if (text := _job_file_text(f"{name} {key}", flag, value)) is not None:
            texts[flag.name] = text
    return args.with_defaults(texts, name, program)


def _load_job_file(label: str, name: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(read_file_for_parser(name).decode())
    except (OSError, ValueError) as error:  # UnicodeDecodeError and TOMLDecodeError are ValueErrors
        why = error.strerror if isinstance(error, OSError) else f"not TOML: {error}"
        raise UsageError(f"{label}: cannot be read: {why}; name a TOML file, with lines such as nnodes = 2") from None


def _job_file_program(name: str, job: dict[str, Any]) -> tuple[str, ...]:
    script, args = job.pop("script", None), job.pop("args", None)
    if script is None:
        if args is not None:
            raise UsageError(f'{name} args={args}: there is no script for these arguments; add script = "train.py"')
        return ()
    if not isinstance(script, str):
        raise UsageError(f'{name} script={script}: not a string; write script = "train.py"')
    if args is not None and not (isinstance(args, list) and all(isinstance(arg, str) for arg in args)):
        raise UsageError(f'{name} args={args}: not a list of strings; write args = ["--lr", "0.1"]')
    return (script, *(args or ()))


def _job_file_text(label: str, flag: Flag, value: Any) -> str | None:
    """The value as on the command line; None for a switch that is off."""
    if not flag.metavar:
        if not isinstance(value, bool):
            raise UsageError(f"{label}={value}: neither true nor false; write {label.split()[-1]} = true")
        return "" if value else None
    match value:
        case list() if flag.metavar.endswith(",…"):
            double = flag.metavar == "WORD,…"  # a comma inside a word is doubled
            return ",".join(_job_file_scalar(label, item).replace(",", ",," if double else ",") for item in value)
        case dict() if flag.metavar.startswith("KEY=VALUE"):
            return ",".join(f"{key}={_job_file_scalar(label, item)}" for key, item in value.items())
    return _job_file_scalar(label, value)


def _job_file_scalar(label: str, value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str() | int() | float():
            return str(value)
    raise UsageError(f"{label}={value}: a {type(value).__name__} is not allowed here; write a string or a number")


def _unknown_job_file_key(name: str, key: str, known: list[str]) -> UsageError:
    from difflib import get_close_matches

    close = get_close_matches(f"--{key}", known, n=1)
    remedy = f"did you mean {close[0].removeprefix('--')}?" if close else "the keys are the flags of ripstop run --help"
    return UsageError(f"{name} {key}: unknown key; {remedy}")
