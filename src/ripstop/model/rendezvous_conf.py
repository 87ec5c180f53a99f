"""Parse the keys of `--rdzv-conf`: timeouts, health limits, the quarantine, the first size, ranks, etcd and TLS.

The parsers take the flag's name for their error messages (`parsers.py`).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ripstop.model import config
from ripstop.model.errors import UsageError
from ripstop.model.parsers import byte_size, duration, integer, parse_address, parse_pem_file, port
from ripstop.model.round import RankBy

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


def rendezvous_conf_timing(
    name: str, conf: Mapping[str, str], shutdown: float, inprocess: float
) -> tuple[config.Timing, list[str]]:
    """The timeouts that `--rdzv-conf` sets, and notes about keys without effect.

    As with torch, an unknown key is not an error, and `join_timeout` overrides `timeout`.
    """
    for key in sorted(KEEP_ALIVE_CONF & conf.keys()):
        if "lease" in conf:
            raise UsageError(f"{name}: lease={conf['lease']} and {key}={conf[key]} set the same timeout; keep lease")

    seconds = partial(_rendezvous_conf_seconds, name, conf)
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
    return timeouts, [note for key in conf if (note := _ignored_rendezvous_conf_note(name, key, conf))]


def _rendezvous_conf_seconds(
    name: str, conf: Mapping[str, str], key: str, default: float, *, positive: bool = True
) -> float:
    return duration(f"{name} {key}", conf[key], positive=positive) if key in conf else default


def _ignored_rendezvous_conf_note(name: str, key: str, conf: Mapping[str, str]) -> str:
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


def rendezvous_conf_health_limits(name: str, conf: Mapping[str, str]) -> config.HealthLimits:
    """The node health limits in `--rdzv-conf`, without the user's own command."""
    default = config.HealthLimits()
    disk, skew = conf.get("min_disk"), conf.get("max_clock_skew")
    return config.HealthLimits(
        min_disk=default.min_disk if disk is None else byte_size(f"{name} min_disk", disk),
        max_skew=default.max_skew if skew is None else duration(f"{name} max_clock_skew", skew),
    )


def rendezvous_conf_quarantine(name: str, conf: Mapping[str, str]) -> config.QuarantineLimits:
    default = config.QuarantineLimits()
    failures = conf.get("quarantine_failures", str(default.failures))
    return config.QuarantineLimits(
        failures=integer(f"{name} quarantine_failures", failures, minimum=0, maximum=1_000_000),
        window=_rendezvous_conf_seconds(name, conf, "quarantine_window", default.window),
        cooldown=_rendezvous_conf_seconds(name, conf, "quarantine_cooldown", default.cooldown),
    )


def rendezvous_conf_target(name: str, conf: Mapping[str, str], min_nodes: int, max_nodes: int) -> int | None:
    """The initial number of nodes in `--rdzv-conf`; None: the maximum."""
    if "target" not in conf:
        return None
    remedy = f"--nnodes allows {min_nodes} to {max_nodes}"
    return integer(f"{name} target", conf["target"], minimum=min_nodes, maximum=max_nodes, remedy=remedy)


def rendezvous_conf_rank_by(name: str, conf: Mapping[str, str]) -> RankBy:
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


def rendezvous_conf_etcd(
    name: str, text: str, conf_name: str, conf: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[config.Etcd, dict[str, str]]:
    """`HOST[:PORT],…` with the etcd settings in `--rdzv-conf` and the environment, and the rest of `--rdzv-conf`."""
    settings: dict[str, str] = {}
    for key, setting in ETCD_CONF.items():
        if key in conf:
            if setting in settings:
                raise UsageError(f"{conf_name}: {key} is given under two names; keep one of the two")
            settings[setting] = conf[key]
    tls = _rendezvous_conf_etcd_tls(name, text, conf_name, settings)
    bare = [part.strip().removeprefix("http://").removeprefix("https://").rstrip("/") for part in text.split(",")]
    found = config.Etcd(
        endpoints=tuple(dict.fromkeys(parse_address(name, part, default_port=config.ETCD_PORT) for part in bare)),
        prefix="/" + settings.get("prefix", config.ETCD_PREFIX).strip("/"),
        tls=tls,
        ca=_rendezvous_conf_pem_file(conf_name, "ca", settings),
        cert=_rendezvous_conf_pem_file(conf_name, "cert", settings),
        key=_rendezvous_conf_pem_file(conf_name, "key", settings),
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


def _rendezvous_conf_etcd_tls(name: str, text: str, conf_name: str, settings: Mapping[str, str]) -> bool:
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


def _rendezvous_conf_pem_file(name: str, key: str, settings: Mapping[str, str]) -> Path | None:
    return parse_pem_file(f"{name} {key}", settings[key]) if key in settings else None


def rendezvous_conf_tls(name: str, conf: Mapping[str, str]) -> tuple[config.Tls | None, list[str]]:
    """The certificates that `--rdzv-conf` names, and notes about their file modes."""
    if not TLS_CONF & conf.keys():
        return None, []
    for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if one in conf and other not in conf:
            raise UsageError(f"{name} {one}={conf[one]}: a certificate and its key go together; add {other}=FILE")
    ca, cert, key = (_rendezvous_conf_pem_file(name, setting, conf) for setting in ("tls_ca", "tls_cert", "tls_key"))
    notes = []
    if key is not None and key.stat().st_mode & 0o004:
        notes.append(f"{name} tls_key={key}: everyone can read it; chmod 600 {key}")
    return config.Tls(cert, key, ca), notes
