"""Parse the values of flags, variables and `--rdzv-conf`: `4`, `1:4`, `host:port`, `90s`, `0:1,1:2`, `k=v`.

A parser takes the flag's or variable's name for its error messages.  `config.py` describes the settings.
"""

import errno
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import BinaryIO, TypeVar

from msgspec.structs import replace

from ripstop.model import config
from ripstop.model.errors import UsageError
from ripstop.model.round import Address

MAX_NAME_LENGTH = 200
MAX_URL_LENGTH = 2000
MAX_FILE_BYTES = 1 << 20  # of a secret, a certificate or a job file
SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
NOT_STOP_SIGNALS = frozenset({"SIGKILL", "SIGSTOP", "SIGCHLD", "SIGCLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"})

Chosen = TypeVar("Chosen", bound=Enum)


def integer(name: str, text: str, *, minimum: int, maximum: int, remedy: str = "") -> int:
    remedy = remedy or f"give a number from {minimum} to {maximum}"
    digits = text.strip().removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise UsageError(f"{name}={text}: not a whole number; {remedy}")
    number = int(text)
    if number < minimum:
        raise UsageError(f"{name}={text}: below the minimum ({minimum}); {remedy}")
    if number > maximum:
        raise UsageError(f"{name}={text}: above the maximum ({maximum}); {remedy}")
    return number


def number(name: str, text: str, *, above: float, maximum: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not above < value <= maximum:
        raise UsageError(f"{name}={text}: not a number above {above:g} and up to {maximum:g}; write one, such as 1.5")
    return value


def port(name: str, text: str, *, minimum: int = 1) -> int:
    return integer(name, text, minimum=minimum, maximum=65535, remedy=f"give a port from {minimum} to 65535")


def duration(name: str, text: str, *, positive: bool = False) -> float:
    """Seconds, from a number with or without a unit: `90`, `0.5`, `90s`, `10m`, `1h`."""
    digits = text.strip().rstrip("smhd")
    unit = text.strip()[len(digits) :] or "s"
    try:
        seconds = float(digits) * TIME_UNITS[unit]
    except (ValueError, KeyError):
        raise UsageError(f"{name}={text}: not a time; give seconds, or a number with a unit: 90s, 10m, 1h") from None
    if not 0 <= seconds < float("inf") or (positive and seconds == 0):
        bound = "above 0" if positive else "0 or more"
        raise UsageError(f"{name}={text}: a time is {bound} and finite; give seconds, or 90s, 10m, 1h")
    return seconds


def byte_size(name: str, text: str) -> int:
    """Bytes, from a number with or without a unit: `512M`, `1G`, `1GiB`."""
    digits = text.strip().rstrip("KMGTiB")
    unit = text.strip()[len(digits) :].removesuffix("B").removesuffix("i")
    try:
        number = float(digits) * SIZE_UNITS[unit]
    except (ValueError, KeyError):
        raise UsageError(f"{name}={text}: not a size; give bytes, or a number with a unit: 512M, 1G") from None
    if not 0 <= number < 1 << 63:
        raise UsageError(f"{name}={text}: a size is 0 or more, and finite; give bytes, or 512M, 1G")
    return int(number)


def boolean(name: str, text: str) -> bool:
    match text.strip().lower():
        case "1" | "true" | "t" | "yes" | "y":
            return True
        case "0" | "false" | "f" | "no" | "n":
            return False
    raise UsageError(f"{name}={text}: neither true nor false; write {name}=1 or {name}=0")


def choice(name: str, text: str, known: type[Chosen]) -> Chosen:
    for value in known:
        if value.value == text.lower():
            return value
    raise UsageError(f"{name}={text}: unknown value; write one of {', '.join(value.value for value in known)}")


def parse_node_range(name: str, text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX`."""
    parts = text.split(":")
    if len(parts) > 2:
        raise UsageError(f"{name}={text}: neither a number nor a range; write {name}=4 or {name}=2:4")
    minimum, maximum = (
        integer(name, part, minimum=1, maximum=config.MAX_NODES, remedy=f"write {name}=4 or {name}=2:4")
        for part in (parts[0], parts[-1])
    )
    if minimum > maximum:
        raise UsageError(
            f"{name}={text}: the minimum ({minimum}) is above the maximum ({maximum}); write {name}={maximum}:{minimum}"
        )
    return minimum, maximum


def parse_host(name: str, text: str) -> str:
    """A host name or address; brackets around an IPv6 address are removed."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not bare or not all(c.isalnum() or c in "._:-%" for c in bare):
        raise UsageError(f"{name}={text}: not a host name or address; write it like node0, 10.0.0.7 or [fd00::7]")
    return bare


def parse_address(name: str, text: str, *, default_port: int) -> Address:
    """`host`, `host:port`, `[v6]`, `[v6]:port`, or a bare IPv6 address."""
    text = text.strip()
    if text.endswith("]") or (text.count(":") > 1 and not text.startswith("[")):
        where, number = text, ""
    else:
        where, _, number = text.rpartition(":") if ":" in text else (text, "", "")
        if ":" in text and not number:
            raise UsageError(f"{name}={text}: no port after the colon; write {name}={where}:{default_port}")
    return Address(parse_host(name, where), port(f"{name} port", number, minimum=0) if number else default_port)


def parse_streams(name: str, text: str, slots: int) -> config.ConfiguredStreams:
    """`3` for every worker, or `0:1,1:2` for some."""
    if text in ("0", "1", "2", "3"):
        return config.ConfiguredStreams(config.OutputStreams(int(text)))
    by_rank: dict[int, config.OutputStreams] = {}
    for part in text.split(","):
        rank, _, choice = part.partition(":")
        if not (rank.isascii() and rank.isdigit() and len(rank) < 20) or choice not in ("0", "1", "2", "3"):
            raise UsageError(
                f"{name}={text}: {part!r} is not a choice of streams; write 0 none, 1 stdout, 2 stderr, 3 both, "
                "or LOCAL_RANK:CHOICE pairs such as 0:3,1:2"
            )
        if int(rank) in by_rank:
            raise UsageError(f"{name}={text}: names local rank {rank} twice; keep one of the two")
        if int(rank) >= slots:
            raise UsageError(f"{name}={text}: names local rank {rank}; this node has 0 to {slots - 1}; leave it out")
        by_rank[int(rank)] = config.OutputStreams(int(choice))
    return config.ConfiguredStreams(config.OutputStreams.NONE, tuple(sorted(by_rank.items())))


def parse_local_ranks(name: str, text: str, slots: int) -> frozenset[int]:
    """`0,2`: some of this node's workers."""
    remedy = f"this node's local ranks are 0 to {slots - 1}; write them like {name}=0,1"
    return frozenset(integer(name, part, minimum=0, maximum=slots - 1, remedy=remedy) for part in text.split(","))


def comma_separated(name: str, text: str) -> tuple[str, ...]:
    """`apple,orange`; a comma inside a text is written twice."""
    found = tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))
    if not all(found):
        raise UsageError(f"{name}={text}: every line contains an empty text; leave it out, or write ,, for a comma")
    return found


def parse_signals(name: str, text: str) -> tuple[str, ...]:
    """`SIGTERM,SIGUSR1`: signals that ask a process to stop."""
    from signal import Signals

    names = tuple(part.strip() for part in text.split(","))
    for signal in names:
        if signal not in Signals.__members__:
            raise UsageError(f"{name}={text}: there is no signal {signal!r}; write names like SIGTERM,SIGUSR1")
        if signal in NOT_STOP_SIGNALS:
            raise UsageError(f"{name}={text}: {signal} cannot ask a process to stop; leave it out")
    return tuple(dict.fromkeys(names))


def parse_standby_workers(
    name: str, text: str, base: config.Standby, entry: config.Entrypoint, start: config.StartMethod, slots: int
) -> config.Standby:
    """`base` with the number of standbys from `auto`, `off` or a number."""
    if text == "off":
        return config.Standby()
    if text == "auto":
        count = slots
    else:
        remedy = f"give 1 to {slots}, the workers of this node, or auto or off"
        count = integer(name, text, minimum=0, maximum=slots, remedy=remedy)
    if count and start is config.StartMethod.EXEC:
        why = (
            f"{entry.argv[0]} is no Python script" if isinstance(entry, config.Executable) else "--start-method is exec"
        )
        raise UsageError(f"{name}={text}: standbys are forked, and {why}; leave {name} out")
    return replace(base, count=count, auto=text == "auto") if count else config.Standby()


def parse_standby_until(name: str, text: str) -> config.StandbyUntil:
    try:
        return config.StandbyUntil(text)
    except ValueError:
        remedy = "script: they wait before the script; elastic: before its function with @train.elastic"
        raise UsageError(f"{name}={text}: standbys run until script or elastic; write one of them ({remedy})") from None


def identifier(name: str, text: str) -> str:
    """A name that can be part of log lines, variables and paths."""
    if not text or len(text) > MAX_NAME_LENGTH:
        raise UsageError(f"{name}={text[:40]}: has {len(text)} characters; choose a name of 1 to {MAX_NAME_LENGTH}")
    if text.startswith(".") or not all(c.isprintable() and not c.isspace() and c not in "/[]:" for c in text):
        raise UsageError(f"{name}={text}: no spaces, no / [ ] : and no dot at the start; use letters, digits, - and _")
    return text


def parse_webhook_url(name: str, text: str) -> str:
    """An HTTP address.  Its path may be a secret, so errors show the host at most."""
    from urllib.parse import urlsplit  # rarely needed

    remedy = "write https://HOST/PATH"
    try:
        parts = urlsplit(text)
        host, port_number = parts.hostname, parts.port
    except ValueError:
        raise UsageError(f"{name}: not a valid URL; {remedy}") from None
    if parts.scheme not in ("http", "https") or not host:
        seen = f"{parts.scheme}://…" if parts.scheme else "no scheme"
        raise UsageError(f"{name}: not an HTTP address ({seen}); {remedy}")
    if len(text) > MAX_URL_LENGTH or not all("!" <= c <= "~" for c in text):
        raise UsageError(
            f"{name}=…{host}…: has spaces, control characters or non-ASCII characters, or more than {MAX_URL_LENGTH} "
            "characters; encode them with %"
        )
    if parts.username or parts.password or parts.fragment or port_number == 0:
        raise UsageError(f"{name}=…{host}…: a user, a password, a fragment and port 0 are not allowed; {remedy}")
    return text


def key_values(name: str, text: str) -> dict[str, str]:
    """`key=value,key=value`; may be empty."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise UsageError(f"{name}={text}: {part!r} is not key=value; write {name}=join_timeout=600,lease=3")
        if key in found:
            raise UsageError(f"{name}={text}: {key} is given twice; keep one of the two")
        found[key] = value
    return found


def read_file_for_parser(path: str | Path) -> bytes:
    """The contents of a file that the user names.  A file that is too large raises `OSError`."""
    with Path(path).open("rb") as file:
        return read_bounded_for_parser(file)


def read_bounded_for_parser(file: BinaryIO) -> bytes:
    data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    return data


def parse_pem_file(name: str, text: str) -> Path:
    """A readable file with certificates or a key.

    A pipe (`tls_key=<(command)`) is opened but not read, because it can be read only once.
    """
    try:
        with Path(text).open("rb") as file:
            if file.seekable():
                read_bounded_for_parser(file)
    except OSError as error:
        raise UsageError(f"{name}={text}: cannot be read: {error.strerror}; name a PEM file you may read") from None
    return Path(text)


def parse_secret_variables(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """The job's secret (empty: none), and notes about its file mode."""
    if "RIPSTOP_TOKEN" in environ and "RIPSTOP_TOKEN_FILE" in environ:
        raise UsageError("RIPSTOP_TOKEN and RIPSTOP_TOKEN_FILE are both set; a job has one secret: unset one of them")
    if "RIPSTOP_TOKEN" in environ:
        if not (token := environ["RIPSTOP_TOKEN"].strip()):
            raise UsageError("RIPSTOP_TOKEN is empty; give the job's secret, or unset it to run without one")
        return token, []
    if "RIPSTOP_TOKEN_FILE" not in environ:
        return "", []
    path = Path(environ["RIPSTOP_TOKEN_FILE"])
    try:
        token, mode = read_file_for_parser(path).decode().strip(), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"RIPSTOP_TOKEN_FILE={path}: cannot be read: {why}; name a text file you may read") from None
    if not token:
        raise UsageError(f"RIPSTOP_TOKEN_FILE={path}: is empty; put the job's secret into it")
    return token, [f"RIPSTOP_TOKEN_FILE={path}: everyone can read it; chmod 600 {path}"] if mode & 0o004 else []
