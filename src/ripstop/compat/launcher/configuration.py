"""From a `LaunchConfig` to the engine's `RunConfig`.

The settings become the flags of `ripstop run` and go through the same parser, so every setting has one meaning.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ripstop.cli.commands.run import configure_run
from ripstop.cli.options.program import default_program_shutdown_timeout_option, program_standby_warm_up_option
from ripstop.cli.options.rendezvous import BACKENDS
from ripstop.compat.launcher.custom_logs import is_custom
from ripstop.compat.launcher.handler_link import HANDLER_TIMEOUT_S
from ripstop.compat.launcher.spawners import METHODS
from ripstop.compat.multiprocessing import DefaultLogsSpecs, LogsSpecs
from ripstop.compat.rendezvous import rendezvous_handler_registry
from ripstop.model.config import Entrypoint, Executable, Module, RunConfig, Script, Standby, StartMethod
from ripstop.model.errors import UsageError
from ripstop.model.parsers import parse_standby_until, parse_standby_workers

log = logging.getLogger("ripstop.compat")


@dataclass
class LaunchConfig:
    """How to launch; the names, their order and their defaults are torch's, but for the last three."""

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: float | None = None
    standby: int | str = "off"  # ripstop's own: `--standby…` of `ripstop run`
    standby_warmup: str = ""
    standby_until: str = "script"

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        else:
            self.rdzv_configs.setdefault("timeout", HANDLER_TIMEOUT_S)
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()
        if self.shutdown_timeout is None:
            self.shutdown_timeout = _launcher_config_shutdown_timeout()
        elif self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout={self.shutdown_timeout}: a time is 0 or more; give seconds")


def _launcher_config_shutdown_timeout() -> float:
    try:
        seconds = default_program_shutdown_timeout_option(os.environ)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return int(seconds) if seconds.is_integer() else seconds  # torch's is an int, and some programs print it


def run_config_from_launcher_config(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: Sequence[Any]
) -> RunConfig:
    """The engine's configuration; ValueError for one that cannot be right."""
    if callable(entrypoint) and config.start_method not in METHODS:
        raise ValueError(f"start_method={config.start_method}: there are {', '.join(METHODS)}; choose one of them")
    try:
        run = _parsed_launcher_config(config)
    except UsageError as error:
        if not getattr(config.numa_options, "should_fall_back_if_binding_fails", False):
            raise ValueError(str(error)) from None
        try:
            run = _parsed_launcher_config(dataclasses.replace(config, numa_options=None))
        except UsageError as other:  # the binding was not the cause
            raise ValueError(str(other)) from None
        log.warning("workers are not bound: %s", error)
    entry = (
        _launcher_config_entrypoint("-", ()) if callable(entrypoint) else _launcher_config_entrypoint(entrypoint, args)
    )
    start = StartMethod.EXEC if isinstance(entry, Executable) else StartMethod.ZYGOTE
    standby = _launcher_config_standby(config, entry, start, "a function is not" if callable(entrypoint) else "")
    return replace(run, entry=entry, start=start, standby=standby, role=config.role)  # torch allows the role ""


def _launcher_config_standby(config: LaunchConfig, entry: Entrypoint, start: StartMethod, why_not: str) -> Standby:
    text = str(config.standby)
    if why_not and text not in ("off", "0"):
        raise ValueError(f"standby={text}: standbys are forked from a zygote, and {why_not}; leave standby out")
    try:
        warm_up = (
            program_standby_warm_up_option("standby_warmup", config.standby_warmup, entry)
            if config.standby_warmup
            else ""
        )
        settings = Standby(0, False, warm_up, parse_standby_until("standby_until", config.standby_until))
        return parse_standby_workers("standby", text, settings, entry, start, config.nproc_per_node)
    except UsageError as error:
        raise ValueError(str(error)) from None


def _parsed_launcher_config(config: LaunchConfig) -> RunConfig:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    if config.log_line_prefix_template is not None:
        environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = config.log_line_prefix_template
    registered = {config.rdzv_backend} if _launcher_config_names_handler(config.rdzv_backend) else set()
    return configure_run([*_launcher_config_flags(config), "--no-python", sys.executable], environ, registered)


def _launcher_config_names_handler(backend: str) -> bool:
    """Whether this is a rendezvous handler that the program or another package has registered."""
    return backend not in BACKENDS and rendezvous_handler_registry._creator(backend) is not None


# flags of `ripstop run` -----------------------------------------------------------------------------------------------


def _launcher_config_flags(config: LaunchConfig) -> Iterator[str]:
    conf = {} if _launcher_config_names_handler(config.rdzv_backend) else config.rdzv_configs
    conf = {key: value for key, value in conf.items() if value is not None}
    rank = conf.pop("rank", None)
    if "join_timeout" in conf and conf.get("timeout") == HANDLER_TIMEOUT_S:
        del conf["timeout"]  # the default of `LaunchConfig`
    if config.rdzv_backend not in BACKENDS and not _launcher_config_names_handler(config.rdzv_backend):
        raise ValueError(
            f"rdzv_backend={config.rdzv_backend!r}: there are c10d, etcd, and static for fixed ranks; write "
            "rdzv_backend='c10d', or register a handler of your own with rendezvous_handler_registry"
        )
    flags = {
        "nnodes": f"{config.min_nodes}:{config.max_nodes}",
        "nproc-per-node": config.nproc_per_node,
        "rdzv-backend": config.rdzv_backend,
        "rdzv-id": config.run_id,
        "role": config.role or None,
        "max-restarts": config.max_restarts,
        "shutdown-timeout": config.shutdown_timeout,
        "rdzv-conf": ",".join(f"{key}={value}" for key, value in conf.items()),
        "rdzv-endpoint": config.rdzv_endpoint or None,
        "node-rank": rank if config.rdzv_backend == "static" else None,
        "local-addr": config.local_addr or None,
        "signals-to-handle": _unless_default(config, "signals_to_handle"),
        "monitor-interval": _unless_default(config, "monitor_interval"),
        "numa-binding": config.numa_options.affinity_mode.value if config.numa_options is not None else None,
        **_launcher_config_log_flags(config),
    }
    yield from (f"--{name}={value}" for name, value in flags.items() if value is not None)
    if config.virtual_local_rank:
        yield "--virtual-local-rank"


def _unless_default(config: LaunchConfig, name: str) -> Any:
    """None for the default of `LaunchConfig`: the flag is not given."""
    value = getattr(config, name)
    return None if value == LaunchConfig.__dataclass_fields__[name].default else value


def _launcher_config_log_flags(config: LaunchConfig) -> dict[str, str | None]:
    specs = config.logs_specs
    assert specs is not None, "__post_init__ sets it"
    flags: dict[str, str | None] = {
        "duplicate-stdout-filters": _launcher_config_filters_flag(config.duplicate_stdout_filters),
        "duplicate-stderr-filters": _launcher_config_filters_flag(config.duplicate_stderr_filters),
    }
    if is_custom(specs):
        return flags | {"tee": "3"}  # `reify` decides; without this flag there would be a warning that nothing is teed
    if specs._root_log_dir != os.devnull:
        flags |= {
            "redirects": _launcher_config_streams_flag(specs._redirects),
            "tee": _launcher_config_streams_flag(specs._tee),
        }
    ranks = ",".join(map(str, sorted(specs._local_ranks_filter or ())))
    return flags | {"log-dir": specs._root_log_dir or None, "local-ranks-filter": ranks or None}


def _launcher_config_filters_flag(filters: list[str] | None) -> str | None:
    """A comma inside a text is written twice."""
    return ",".join(text.replace(",", ",,") for text in filters) if filters else None


def _launcher_config_streams_flag(choice: Any) -> str:
    if isinstance(choice, Mapping):
        return ",".join(f"{rank}:{int(one)}" for rank, one in choice.items()) or "0"
    return str(int(choice))


def _launcher_config_entrypoint(entrypoint: str, args: Sequence[Any]) -> Entrypoint:
    """A command.  This interpreter with a script or a module, as torchrun builds it, starts as a script or module."""
    texts = [str(arg) for arg in args]
    match [entrypoint, *texts]:
        case [sys.executable, "-u", "-m", name, *rest]:
            return Module(name, tuple(rest))
        case [sys.executable, "-u", path, *rest] if not path.startswith("-"):
            return Script(path, tuple(rest))
    return Executable((entrypoint, *texts))
