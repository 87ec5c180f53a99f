"""Parse the values of flags, variables and `--rdzv-conf`: `4`, `1:4`, `host:port`, `90s`, `0:1,1:2`, `k=v`.

A parser takes the flag's or variable's name for its error messages.  `config.py` describes the settings.
"""

import errno
import math
from collections.abc import Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from msgspec.structs import replace

from ripstop.model import config
from ripstop.model.errors import UsageError
from ripstop.model.round import Address, RankBy

MAX_NAME_LENGTH = 200
MAX_URL_LENGTH = 2000
MAX_FILE_BYTES = 1 << 20  # of a secret, a certificate or a job file
SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
NOT_STOP_SIGNALS = frozenset({"SIGKILL", "SIGSTOP", "SIGCHLD", "SIGCLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"})
TLS_CONF = frozenset({"tls_cert", "tls_key", "tls_ca"})
HEALTH_CONF = frozenset({"min_disk", "max_clock_skew"})
QUARANTINE_CONF = frozenset({"quarantine_failures", "quarantine_window", "quarantine_cooldown"})
KEEP_ALIVE_CONF = frozenset({"keep_alive_interval", "keep_alive_max_attempt"})  # torch's; their product is the lease
RDZV_CONF = TLS_CONF | KEEP_ALIVE_CONF | HEALTH_CONF | QUARANTINE_CONF | {
    "join_timeout", "timeout", "last_call_timeout", "lease", "coordinator_timeout", "is_host", "rank_by",
    "target",
}  # fmt: skip
IGNORED_CONF = frozenset(  # torch's keys without effect here; `rank` is --node-rank, which torch adds itself
    {"close_timeout", "read_timeout", "heartbeat_timeout", "use_libuv", "store_type", "rank"}
)

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


def node_range(name: str, text: str) -> tuple[int, int]:
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


def host(name: str, text: str) -> str:
    """A host name or address; brackets around an IPv6 address are removed."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not bare or not all(c.isalnum() or c in "._:-%" for c in bare):
        raise UsageError(f"{name}={text}: not a host name or address; write it like node0, 10.0.0.7 or [fd00::7]")
    return bare


def address(name: str, text: str, *, default_port: int) -> Address:
    """`host`, `host:port`, `[v6]`, `[v6]:port`, or a bare IPv6 address."""
    text = text.strip()
    if text.endswith("]") or (text.count(":") > 1 and not text.startswith("[")):
        where, number = text, ""
    else:
        where, _, number = text.rpartition(":") if ":" in text else (text, "", "")
        if ":" in text and not number:
            raise UsageError(f"{name}={text}: no port after the colon; write {name}={where}:{default_port}")
    return Address(host(name, where), port(f"{name} port", number, minimum=0) if number else default_port)


def streams(name: str, text: str, slots: int) -> config.StreamMap:
    """`3` for every worker, or `0:1,1:2` for some."""
    if text in ("0", "1", "2", "3"):
        return config.StreamMap(config.OutputStreams(int(text)))
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
    return config.StreamMap(config.OutputStreams.NONE, tuple(sorted(by_rank.items())))


def local_ranks(name: str, text: str, slots: int) -> frozenset[int]:
    """`0,2`: some of this node's workers."""
    remedy = f"this node's local ranks are 0 to {slots - 1}; write them like {name}=0,1"
    return frozenset(integer(name, part, minimum=0, maximum=slots - 1, remedy=remedy) for part in text.split(","))


def comma_separated(name: str, text: str) -> tuple[str, ...]:
    """`apple,orange`; a comma inside a text is written twice."""
    found = tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))
    if not all(found):
        raise UsageError(f"{name}={text}: every line contains an empty text; leave it out, or write ,, for a comma")
    return found


def signals(name: str, text: str) -> tuple[str, ...]:
    """`SIGTERM,SIGUSR1`: signals that ask a process to stop."""
    from signal import Signals

    names = tuple(part.strip() for part in text.split(","))
    for signal in names:
        if signal not in Signals.__members__:
            raise UsageError(f"{name}={text}: there is no signal {signal!r}; write names like SIGTERM,SIGUSR1")
        if signal in NOT_STOP_SIGNALS:
            raise UsageError(f"{name}={text}: {signal} cannot ask a process to stop; leave it out")
    return tuple(dict.fromkeys(names))


def standby_workers(
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


def standby_until(name: str, text: str) -> config.StandbyUntil:
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


def webhook_url(name: str, text: str) -> str:
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


def timing(name: str, conf: Mapping[str, str], shutdown: float, inprocess: float) -> tuple[config.Timing, list[str]]:
    """The timeouts that `--rdzv-conf` sets, and notes about keys without effect.

    As with torch, an unknown key is not an error, and `join_timeout` overrides `timeout`.
    """
    for key in sorted(KEEP_ALIVE_CONF & conf.keys()):
        if "lease" in conf:
            raise UsageError(f"{name}: lease={conf['lease']} and {key}={conf[key]} set the same timeout; keep lease")

    seconds = partial(_seconds, name, conf)
    default = config.Timing()
    lease = seconds("lease", default.lease)
    if KEEP_ALIVE_CONF & conf.keys():
        attempts = integer(
            f"{name} keep_alive_max_attempt", conf.get("keep_alive_max_attempt", "3"), minimum=1, maximum=1000
        )
        lease = seconds("keep_alive_interval", 5.0) * attempts
    timeouts = config.Timing(
        last_call=seconds("last_call_timeout", default.last_call, positive=False),
        join=seconds("join_timeout", seconds("timeout", default.join)),
        lease=lease,
        coordinator=seconds("coordinator_timeout", default.coordinator),
        shutdown=shutdown,
        inprocess=inprocess,
    )
    return timeouts, [note for key in conf if (note := _note_if_ignored(name, key, conf))]


def _seconds(name: str, conf: Mapping[str, str], key: str, default: float, *, positive: bool = True) -> float:
    return duration(f"{name} {key}", conf[key], positive=positive) if key in conf else default


def _note_if_ignored(name: str, key: str, conf: Mapping[str, str]) -> str:
    """Why a key has no effect; empty if it has one."""
    if key == "timeout" and conf.get("join_timeout", conf[key]) != conf[key]:
        return f"{name} timeout={conf[key]} has no effect beside join_timeout={conf['join_timeout']}"
    if key == "store_type" and conf[key].lower() == "tcp":
        return ""  # torch's default
    if key in IGNORED_CONF:
        return f"{name} {key} has no effect: ripstop does not use it"
    if key in ETCD_CONF:
        return f"{name} {key} has no effect without --rdzv-backend=etcd"
    if key in RDZV_CONF:
        return ""
    from difflib import get_close_matches  # imported only here: rarely needed

    near = get_close_matches(key, sorted(RDZV_CONF | ETCD_CONF.keys()), n=1)
    return f"{name}: there is no {key}, so it has no effect" + (f"; did you mean {near[0]}?" if near else "")


def health_limits(name: str, conf: Mapping[str, str]) -> config.HealthLimits:
    """The node health limits in `--rdzv-conf`, without the user's own command."""
    default = config.HealthLimits()
    disk, skew = conf.get("min_disk"), conf.get("max_clock_skew")
    return config.HealthLimits(
        min_disk=default.min_disk if disk is None else byte_size(f"{name} min_disk", disk),
        max_skew=default.max_skew if skew is None else duration(f"{name} max_clock_skew", skew),
    )


def quarantine(name: str, conf: Mapping[str, str]) -> config.QuarantineLimits:
    default = config.QuarantineLimits()
    failures = conf.get("quarantine_failures", str(default.failures))
    return config.QuarantineLimits(
        failures=integer(f"{name} quarantine_failures", failures, minimum=0, maximum=1_000_000),
        window=_seconds(name, conf, "quarantine_window", default.window),
        cooldown=_seconds(name, conf, "quarantine_cooldown", default.cooldown),
    )


def target(name: str, conf: Mapping[str, str], min_nodes: int, max_nodes: int) -> int | None:
    """The initial number of nodes in `--rdzv-conf`; None: the maximum."""
    if "target" not in conf:
        return None
    remedy = f"--nnodes allows {min_nodes} to {max_nodes}"
    return integer(f"{name} target", conf["target"], minimum=min_nodes, maximum=max_nodes, remedy=remedy)


def rank_by(name: str, conf: Mapping[str, str]) -> RankBy:
    text = conf.get("rank_by", RankBy.JOIN.value)
    if text not in (known := [key.value for key in RankBy]):
        raise UsageError(f"{name} rank_by={text}: ranks cannot be sorted by this; write one of {', '.join(known)}")
    return RankBy(text)


ETCD_CONF = {  # torch's two etcd backends have different names for the same settings
    "cacert": "ca",
    "ca_cert": "ca",
    "cert": "cert",
    "ssl_cert": "cert",
    "key": "key",
    "ssl_cert_key": "key",
    "protocol": "protocol",
    "etcd_prefix": "prefix",
    "coordinator_port": "port",  # ours
}


def etcd(
    name: str, text: str, conf_name: str, conf: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[config.Etcd, dict[str, str]]:
    """`HOST[:PORT],…` with the etcd settings in `--rdzv-conf` and the environment, and the rest of `--rdzv-conf`."""
    settings: dict[str, str] = {}
    for key, setting in ETCD_CONF.items():
        if key in conf:
            if setting in settings:
                raise UsageError(f"{conf_name}: {key} is given under two names; keep one of the two")
            settings[setting] = conf[key]
    tls = _etcd_tls(name, text, conf_name, settings)
    bare = [part.strip().removeprefix("http://").removeprefix("https://").rstrip("/") for part in text.split(",")]
    found = config.Etcd(
        endpoints=tuple(dict.fromkeys(address(name, part, default_port=config.ETCD_PORT) for part in bare)),
        prefix="/" + settings.get("prefix", config.ETCD_PREFIX).strip("/"),
        tls=tls,
        ca=_optional_pem_file(conf_name, "ca", settings),
        cert=_optional_pem_file(conf_name, "cert", settings),
        key=_optional_pem_file(conf_name, "key", settings),
        user=environ.get("RIPSTOP_ETCD_USER", ""),
        password=environ.get("RIPSTOP_ETCD_PASSWORD", ""),
        port=port(f"{conf_name} coordinator_port", settings.get("port", "0"), minimum=0),
    )
    if not all(endpoint.port for endpoint in found.endpoints):
        raise UsageError(f"{name}={text}: etcd cannot listen on port 0; write HOST:{config.ETCD_PORT}")
    if bool(found.user) != bool(found.password):
        there, missing = ("USER", "PASSWORD") if found.user else ("PASSWORD", "USER")
        raise UsageError(f"RIPSTOP_ETCD_{there} is set and RIPSTOP_ETCD_{missing} is not; set both, or neither")
    return found, {key: value for key, value in conf.items() if key not in ETCD_CONF}


def _etcd_tls(name: str, text: str, conf_name: str, settings: Mapping[str, str]) -> bool:
    protocol = settings.get("protocol", "").lower()
    if protocol not in ("", "http", "https"):
        raise UsageError(f"{conf_name} protocol={protocol}: etcd uses http or https; write one of the two")
    schemes = {part.strip().partition("://")[0] for part in text.split(",") if "://" in part} | ({protocol} - {""})
    files = {"ca", "cert", "key"} & settings.keys()
    if len(schemes) > 1 or not schemes <= {"http", "https"} or (files and "http" in schemes):
        raise UsageError(f"{name}={text}: certificates and all endpoints must agree; write protocol=https, or http")
    if ("cert" in settings) != ("key" in settings):
        there, missing = ("cert", "key") if "cert" in settings else ("key", "cert")
        raise UsageError(f"{conf_name}: {there} needs {missing}; give both, or neither")
    return bool(files) or "https" in schemes


def _optional_pem_file(name: str, key: str, settings: Mapping[str, str]) -> Path | None:
    return pem_file(f"{name} {key}", settings[key]) if key in settings else None


def read_file(path: str | Path) -> bytes:
    """The contents of a file that the user names.  A file that is too large raises `OSError`."""
    with Path(path).open("rb") as file:
        return read_bounded(file)


def read_bounded(file: BinaryIO) -> bytes:
    data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    return data


def pem_file(name: str, text: str) -> Path:
    """A readable file with certificates or a key.

    A pipe (`tls_key=<(command)`) is opened but not read, because it can be read only once.
    """
    try:
        with Path(text).open("rb") as file:
            if file.seekable():
                read_bounded(file)
    except OSError as error:
        raise UsageError(f"{name}={text}: cannot be read: {error.strerror}; name a PEM file you may read") from None
    return Path(text)


def tls(name: str, conf: Mapping[str, str]) -> tuple[config.Tls | None, list[str]]:
    """The certificates that `--rdzv-conf` names, and notes about their file modes."""
    if not TLS_CONF & conf.keys():
        return None, []
    for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if one in conf and other not in conf:
            raise UsageError(f"{name} {one}={conf[one]}: a certificate and its key go together; add {other}=FILE")
    ca, cert, key = (_optional_pem_file(name, setting, conf) for setting in ("tls_ca", "tls_cert", "tls_key"))
    notes = []
    if key is not None and key.stat().st_mode & 0o004:
        notes.append(f"{name} tls_key={key}: everyone can read it; chmod 600 {key}")
    return config.Tls(cert, key, ca), notes


def job_secret(environ: Mapping[str, str]) -> tuple[str, list[str]]:
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
        token, mode = read_file(path).decode().strip(), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"RIPSTOP_TOKEN_FILE={path}: cannot be read: {why}; name a text file you may read") from None
    if not token:
        raise UsageError(f"RIPSTOP_TOKEN_FILE={path}: is empty; put the job's secret into it")
    return token, [f"RIPSTOP_TOKEN_FILE={path}: everyone can read it; chmod 600 {path}"] if mode & 0o004 else []
