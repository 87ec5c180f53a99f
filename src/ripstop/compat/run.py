"""`torch.distributed.run`: torchrun's parser and launch function, for tools that call them.

It uses argparse, because tools add options, read defaults and fill namespaces themselves.  `ripstop.cli` defines the
meaning of the flags; a launch from here ends there too.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ripstop.compat.launcher import LaunchConfig, elastic_launch
from ripstop.compat.multiprocessing import DefaultLogsSpecs, LogsSpecs, Std
from ripstop.compat.multiprocessing.errors import record
from ripstop.compat.numa import AffinityMode, NumaOptions
from ripstop.compat.utils import macros
from ripstop.model.config import MASTER_PORT
from ripstop.model.errors import UsageError
from ripstop.model.parsers import boolean
from ripstop.system.gpus import visible_gpu_count
from ripstop.system.linux import usable_cpu_count

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_rdzv_endpoint",
    "get_use_env",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

log = logging.getLogger("ripstop.compat")

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
ANY_LOCAL_PORT = "localhost:0"
SAME_NAMES = (
    "role", "rdzv_backend", "max_restarts", "monitor_interval", "start_method", "local_addr", "event_log_handler",
    "signals_to_handle", "duplicate_stdout_filters", "duplicate_stderr_filters", "virtual_local_rank",
    "shutdown_timeout",
)  # fmt: skip  # of options and fields of LaunchConfig


class _FromEnvironment(argparse.Action):
    """An option whose default is the variable `PET_` + its name."""

    def __init__(self, dest: str, default: Any = None, required: bool = False, **kwargs: Any) -> None:
        default = os.environ.get(f"PET_{dest.upper()}", default)
        super().__init__(dest=dest, default=default, required=required and not default, **kwargs)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)


class _SwitchFromEnvironment(_FromEnvironment):
    """A switch that the variable `PET_` + its name turns on with 1."""

    def __init__(self, dest: str, **kwargs: Any) -> None:
        super().__init__(dest, const=True, nargs=0, **kwargs)
        try:
            self.default = boolean(f"PET_{dest.upper()}", self.default or "0")
        except UsageError as error:
            raise ValueError(str(error)) from None

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, True)


def get_args_parser() -> argparse.ArgumentParser:
    """torchrun's parser: its options, their defaults and their names in the namespace."""
    parser = argparse.ArgumentParser(description="Launch a distributed job with ripstop; the options are torchrun's")

    def option(*names: str, **kwargs: Any) -> None:
        names_with_underscores = dict.fromkeys(
            [*names, *(f"--{name[2:].replace('-', '_')}" for name in names if name[:2] == "--")]
        )
        parser.add_argument(*names_with_underscores, **({"action": _FromEnvironment} | kwargs))

    def switch(*names: str, **kwargs: Any) -> None:
        option(*names, action=_SwitchFromEnvironment, **kwargs)

    option("--nnodes", type=str, default="1:1", help="number of nodes, or MIN:MAX")
    option("--nproc-per-node", type=str, default="1", help="workers on this node: a number, auto, gpu or cpu")
    option("--rdzv-backend", type=str, default="static", help="c10d, or static for fixed ranks")
    option("--rdzv-endpoint", type=str, default="", help="HOST:PORT of the rendezvous")
    option("--rdzv-id", type=str, default="none", help="the job's name")
    option("--rdzv-conf", type=str, default="", help="timeouts, as KEY=VALUE,KEY=VALUE")
    switch("--standalone", help="a job of this node alone")
    option("--max-restarts", type=int, default=0, help="maximum number of restarts after failures")
    option("--monitor-interval", type=float, default=0.1, help="no effect: ripstop does not poll")
    methods = ["spawn", "fork", "forkserver"]
    option("--start-method", type=str, default="spawn", choices=methods, help="how functions are started")
    option("--event-log-handler", type=str, default="null", help="name of an event handler")
    option("--role", type=str, default="default", help="the workers' role")
    switch("-m", "--module", help="the script is a module")
    switch("--no-python", help="the script is any program")
    switch("--run-path", help="the script is run by runpy in the worker's interpreter")
    option("--log-dir", type=str, default=None, help="directory for logs")
    option("-r", "--redirects", type=str, default="0", help="streams that go to files: 0, 1, 2, 3 or 0:1,1:2")
    option("-t", "--tee", type=str, default="0", help="streams that go to files and to the console")
    option("--local-ranks-filter", type=str, default="", help="local ranks whose output is shown: 0,1")
    option(
        "--duplicate-stdout-filters",
        type=_split_torchrun_filters,
        default=[],
        help="lines of stdout to copy to a file: a,b",
    )
    option(
        "--duplicate-stderr-filters",
        type=_split_torchrun_filters,
        default=[],
        help="lines of stderr to copy to a file: a,b",
    )
    option("--node-rank", type=int, default=0, help="this node's rank, for static")
    option("--master-addr", type=str, default="127.0.0.1", help="address of node 0, for static")
    option("--master-port", type=int, default=None, help=f"port on node 0, for static ({MASTER_PORT})")
    option("--local-addr", type=str, default=None, help="this node's address for the others")
    option("--logs-specs", action="store", type=str, default=None, help="entry point in the group torchrun.logs_specs")
    modes = [mode.value for mode in AffinityMode]
    near = "bind each worker to processors near its GPU"
    option("--numa-binding", action="store", type=str, choices=modes, default=None, help=near)
    option("--signals-to-handle", type=str, default=SIGNALS, help="signals that stop the job")
    option("--shutdown-timeout", type=int, default=None, help="seconds from SIGTERM to SIGKILL (30)")
    switch("--virtual-local-rank", help="each worker sees only its GPU, and LOCAL_RANK is 0 for all")
    parser.add_argument("training_script", type=str, help="the program")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _split_torchrun_filters(text: str) -> list[str]:
    """`a,b`; a comma inside a text is written twice."""
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    return get_args_parser().parse_args(args)


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """`N` or `MIN:MAX`."""
    parts = nnodes.split(":")
    if len(parts) > 2:
        raise RuntimeError(f'nnodes={nnodes} is not in "MIN:MAX" format; write 4 or 2:4')
    return int(parts[0]), int(parts[-1])


def determine_local_world_size(nproc_per_node: str) -> int:
    """The number of workers on this node: as given, or one for each processor or GPU."""
    match nproc_per_node:
        case "cpu":
            return usable_cpu_count()
        case "gpu" | "auto":
            if found := visible_gpu_count(os.environ):
                return found
            if nproc_per_node == "gpu":
                raise ValueError("nproc_per_node=gpu: Cuda is not available; give a number, or cpu")
            return usable_cpu_count()
    try:
        return int(nproc_per_node)
    except ValueError:
        raise ValueError(
            f"Unsupported nproc_per_node value: {nproc_per_node}; give a number, auto, gpu or cpu"
        ) from None


def get_rdzv_endpoint(args: argparse.Namespace) -> str:
    """The endpoint; for static the default is the master's address."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{args.master_port}"
    return str(args.rdzv_endpoint)


def get_use_env(args: argparse.Namespace) -> bool:
    """Whether scripts get their local rank only from the environment; False is possible only with `launch`."""
    return bool(getattr(args, "use_env", True))


def config_from_args(args: argparse.Namespace) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """From the parser's namespace: the configuration, what to run, and its arguments."""
    min_nodes, max_nodes = parse_min_max_nnodes(args.nnodes)
    if not 0 < min_nodes <= max_nodes:
        raise AssertionError(f"nnodes={args.nnodes}: the minimum is above 0 and not above the maximum; write 2:4")
    if args.max_restarts < 0:
        raise AssertionError(f"max_restarts={args.max_restarts}: must be >= 0")
    if args.node_rank != 0 and args.rdzv_backend != "static":
        log.warning("--node-rank has no effect with --rdzv-backend=%s: it is for static", args.rdzv_backend)
    config = LaunchConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=determine_local_world_size(args.nproc_per_node),
        logs_specs=_torchrun_logs_specs(args),
        run_id=args.rdzv_id,
        rdzv_endpoint=get_rdzv_endpoint(args),
        rdzv_configs=_torchrun_rdzv_configs(args),
        log_line_prefix_template=os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        numa_options=NumaOptions(AffinityMode(args.numa_binding)) if args.numa_binding else None,
        **{name: getattr(args, name) for name in SAME_NAMES},
    )
    command, arguments = _torchrun_command(args)
    if not get_use_env(args):
        arguments.append(f"--local-rank={macros.local_rank}")
    return config, command, [*arguments, *args.training_script_args]


def _torchrun_command(args: argparse.Namespace) -> tuple[Callable[..., Any] | str, list[str]]:
    if args.run_path:
        return run_script_path, [args.training_script]
    if args.no_python:
        if args.module:
            raise ValueError("--no-python and --module: a module needs python; leave one of them out")
        return str(args.training_script), []
    module = ["-m"] if args.module else []
    return os.environ.get("PYTHON_EXEC", sys.executable), ["-u", *module, args.training_script]


def _torchrun_rdzv_configs(args: argparse.Namespace) -> dict[str, Any]:
    configs: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in args.rdzv_conf.split(","))):
        key, _, value = (piece.strip() for piece in pair.partition("="))
        if not key or not value:
            raise ValueError(f"rdzv_conf={args.rdzv_conf}: {pair!r} is not in <key>=<value> format")
        configs[key] = value
    return configs | ({"rank": args.node_rank} if args.rdzv_backend == "static" else {})


def _torchrun_logs_specs(args: argparse.Namespace) -> LogsSpecs:
    ranks = None
    if args.local_ranks_filter:
        try:
            ranks = {int(rank) for rank in args.local_ranks_filter.split(",")}
        except ValueError:
            raise ValueError(
                f"--local_ranks_filter must be a comma-separated list of integers, and is {args.local_ranks_filter}; "
                "write --local_ranks_filter=0,1,2"
            ) from None
    return _get_logs_specs_class(args.logs_specs)(
        log_dir=args.log_dir,
        redirects=Std.from_str(args.redirects),
        tee=Std.from_str(args.tee),
        local_ranks_filter=ranks,
    )


def _get_logs_specs_class(logs_specs_name: str | None) -> type[LogsSpecs]:
    """The class of an entry point in the group `torchrun.logs_specs`."""
    if logs_specs_name is None:
        return DefaultLogsSpecs
    from importlib.metadata import entry_points

    for point in entry_points(group="torchrun.logs_specs", name=logs_specs_name):
        found: type[LogsSpecs] = point.load()
        return found
    raise ValueError(f"Could not find entrypoint under 'torchrun.logs_specs[{logs_specs_name}]' key")


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script as `__main__` in this interpreter."""
    import runpy

    sys.argv = [training_script, *training_script_args]
    runpy.run_path(training_script, run_name="__main__")


def run(args: argparse.Namespace) -> None:
    """Launch from the parser's namespace; raises `ChildFailedError` when the job fails."""
    alone = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (alone and parse_min_max_nnodes(args.nnodes)[1] == 1):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", ANY_LOCAL_PORT, str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = MASTER_PORT
    config, command, arguments = config_from_args(args)
    elastic_launch(config, command)(*arguments)


@record
def main(args: Sequence[str] | None = None) -> None:
    run(parse_args(args))


if __name__ == "__main__":
    main()
