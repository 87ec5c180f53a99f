"""`ripstop run`: torchrun's flags, and ripstop's own, to a `RunConfig`.

Rules: a wrong value is rejected before anything is started; a flag without effect is named in the notes.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ripstop.cli.options import handlers
from ripstop.cli.options.flags import Flag, ParsedArguments, parse
from ripstop.cli.options.health import health
from ripstop.cli.options.job import JOB_FLAGS, budget, certificates, no_secret_warning, tracing_if_configured
from ripstop.cli.options.output import event_handler, logs
from ripstop.cli.options.program import entrypoint, preload, start_method
from ripstop.cli.options.rendezvous import RendezvousOptions, ranking, rendezvous_options
from ripstop.cli.options.timers import timer_pipe
from ripstop.model.config import API_PORT, MAX_SLOTS, STOP_SIGNALS, Backend, Binding, Etcd, Numa, RunConfig, Tls
from ripstop.model.errors import HelpRequested, UsageError
from ripstop.model.parsers import (
    address,
    duration,
    etcd,
    identifier,
    integer,
    job_secret,
    key_values,
    node_range,
    port,
    quarantine,
    signals,
    target,
    timing,
)
from ripstop.model.round import Address

HELP = """\
usage: ripstop run [FLAGS] SCRIPT [ARGS]

  ripstop run --standalone --nproc-per-node=8 train.py --lr 0.1         one machine
  ripstop run --nnodes=1:4 --nproc-per-node=8 --max-restarts=3 --rdzv-id=job7 \\
      --rdzv-backend=c10d --rdzv-endpoint=node0:29400 train.py          one to four machines; run it on each
  ripstop run --nnodes=2 --node-rank=0 --master-addr=node0 train.py     fixed ranks; --node-rank=1 on the other
  ripstop run --config=job.toml --dry-run                               show what a file of flags would run

program
  SCRIPT [ARGS]               run `python -u SCRIPT ARGS`; all arguments after SCRIPT are the script's
  -m, --module                SCRIPT is a module: `python -u -m SCRIPT ARGS`
  --no-python                 SCRIPT is an executable
  --run-path                  SCRIPT is a script; overrides --module and --no-python
  --nproc-per-node N          workers on this node: a number, auto, gpu or cpu (1)
  --start-method HOW          zygote: fork workers from a process with their imports; exec: start a new interpreter for
                              each (zygote).  torch's fork, forkserver and spawn are accepted
  --preload MODULE,…          modules that the zygote imports, or none (the script's imports)
  --role NAME                 the workers' role (default)
  --numa-binding MODE         bind each worker to CPUs near its GPU: node, socket, exclusive or core-complex
  --virtual-local-rank        each worker sees only its own GPU, and LOCAL_RANK is 0
  --config FILE               read flags from a TOML file; the command line and variables override it
  --dry-run                   print the configuration and each worker's environment; start nothing

rendezvous
  --standalone                a job of this node only
  --nnodes N | MIN:MAX        number of nodes (1)
  --rdzv-backend NAME         c10d: a coordinator at the endpoint; etcd: a coordinator that etcd elects, with failover;
                              static: fixed ranks (static); or an entry point torchrun.handlers of another package
  --rdzv-endpoint HOST[:PORT] the coordinator's address, the same on all nodes (port 29400); etcd's: HOST[:PORT],…
  --rdzv-id NAME              the job's id, the same on all nodes (none; random for a job of one node)
  --rdzv-conf KEY=VALUE,…     settings, see below
  --node-rank N               static: this node's rank; other backends: its preferred rank
  --node-label NAME           this node's rack or switch, for rank_by=label
  --master-addr HOST, --master-port PORT                              static: the address of node 0 (port 29500)
  --local-addr HOST           this node's address for other nodes
  --api HOST[:PORT]           serve the API of a one-node job over the network; needs RIPSTOP_TOKEN (port 29480)

failures
  --max-restarts N            restarts after failures, for the whole job (0)
  --restart-window TIME       count only the restarts within this time (the whole run)
  --restart-backoff TIME      longest delay before a restart when rounds fail early (30)
  --hang-timeout TIME         diagnose and restart workers without progress for this time (0: never)
  --max-infra-restarts N      restarts after hangs within an hour, counted separately (3)
  --shutdown-timeout TIME     time between SIGTERM and SIGKILL (30)
  --signals-to-handle NAME,…  signals that stop this node and its workers (SIGTERM,SIGINT,SIGHUP,SIGQUIT)
  --monitor-interval TIME     accepted for torchrun's sake; no effect: worker exits are detected without polling

node health
  --health-check COMMAND      run before this node joins and periodically; a failure or timeout excludes the node.
                              There is no shell; write sh -c '…' for one
  --health-interval TIME      interval of the health checks, and timeout of the command (30)

output
  --log-dir DIR               directory for logs (a new temporary one); /dev/null keeps none
  -r, --redirects WHICH       write to files: 0 nothing, 1 stdout, 2 stderr, 3 both, or by local rank: 0:3,1:2 (0)
  -t, --tee WHICH             write to files and to the console (0)
  --local-ranks-filter RANK,…            show only these workers on the console
  --duplicate-stdout-filters WORD,…      also write teed lines with one of these words to filtered_stdout.log
  --duplicate-stderr-filters WORD,…      the same for stderr, to filtered_stderr.log
  --logs-specs NAME           a plugin that chooses the log files (entry point torchrun.logs_specs)
  --event-log-handler NAME    a handler for torch's events: null, console, or a plugin (entry point
                              torchrun.event_handlers) (null)

containers
  --probe-port PORT           serve GET /livez (the agent is alive) and /readyz (its workers run or can start)
  --linger                    after the job has ended, wait for a signal; for pods that restart when they exit

settings: --rdzv-conf KEY=VALUE,…
  join_timeout=600            time for the minimum number of nodes to join
  last_call_timeout=30        additional time for more nodes before the first round
  lease=3                     a node without heartbeats for this time is lost
  coordinator_timeout=600     time to wait for a lost coordinator
  is_host=1|0                 whether this node runs the coordinator (the node that can bind the endpoint)
  rank_by=join                order of first ranks: join, address, slot or label; the same on all nodes
  target=MAX                  initial number of nodes, within --nnodes=MIN:MAX; further nodes are spares
  min_disk=32M                free disk space that a healthy node needs for logs and temporary files; 0: any
  max_clock_skew=60           largest clock difference of a joining node; 0: any
  quarantine_failures=3       failures of a node within quarantine_window=600 that exclude it for
                              quarantine_cooldown=600, if the job has enough other nodes; 0: never
  tls_cert, tls_key, tls_ca   PEM files for TLS between agents and coordinator
  etcd only                   protocol=https, cacert=, cert=, key=, etcd_prefix=/ripstop, coordinator_port=0

TIME is in seconds, or has a unit: 90s, 10m, 1h.  Flags may be written with underscores.
Every flag has an environment variable: PET_NNODES=2.  Other variables:
  RIPSTOP_TOKEN, RIPSTOP_TOKEN_FILE             the job's secret, or a file with it; the same on all nodes
  RIPSTOP_ETCD_USER, RIPSTOP_ETCD_PASSWORD      credentials for etcd
  RIPSTOP_TERMINATION_LOG                       file for the result of the job, as JSON
  TORCHELASTIC_ENABLE_FILE_TIMER=1              let workers set timers (on the pipe TORCHELASTIC_TIMER_FILE); a worker
                                                with an expired timer is killed
  OTEL_EXPORTER_OTLP_ENDPOINT                   collector for traces, such as http://collector:4318
`ripstop completion bash|zsh|fish` prints a completion script for your shell.
"""

FLAGS = (
    *JOB_FLAGS,
    Flag("--nproc-per-node", "N", choices=("auto", "gpu", "cpu")),
    Flag("--rdzv-backend", "NAME", choices=("c10d", "etcd", "static")),
    Flag("--standalone"),
    Flag("--node-rank", "N"),
    Flag("--node-label", "NAME", ours=True),
    Flag("--master-addr", "HOST"),
    Flag("--master-port", "PORT"),
    Flag("--local-addr", "HOST"),
    Flag("--api", "HOST[:PORT]", ours=True),
    Flag("--module", short="-m"),
    Flag("--no-python"),
    Flag("--run-path"),
    Flag("--start-method", "HOW", choices=("zygote", "exec")),
    Flag("--preload", "MODULE,…", ours=True),
    Flag("--role", "NAME"),
    Flag("--numa-binding", "MODE", choices=tuple(mode.value for mode in Numa)),
    Flag("--virtual-local-rank"),
    Flag("--config", "FILE", ours=True),
    Flag("--dry-run", ours=True),
    Flag("--health-check", "COMMAND", ours=True),
    Flag("--health-interval", "TIME", ours=True),
    Flag("--hang-timeout", "TIME", ours=True),
    Flag("--shutdown-timeout", "TIME"),
    Flag("--signals-to-handle", "NAME,…"),
    Flag("--monitor-interval", "TIME"),
    Flag("--log-dir", "DIR"),
    Flag("--redirects", "WHICH", short="-r", choices=("0", "1", "2", "3")),
    Flag("--tee", "WHICH", short="-t", choices=("0", "1", "2", "3")),
    Flag("--local-ranks-filter", "RANK,…"),
    Flag("--duplicate-stdout-filters", "WORD,…"),
    Flag("--duplicate-stderr-filters", "WORD,…"),
    Flag("--logs-specs", "NAME"),
    Flag("--probe-port", "PORT", ours=True),
    Flag("--linger", ours=True),
    Flag("--event-log-handler", "NAME", choices=("null", "console")),
)


def main(argv: Sequence[str], with_handler: Callable[[RunConfig], int] | None = None) -> int:
    args = _parse(argv, os.environ)
    if "--help" in args:
        raise HelpRequested(HELP)
    config = _configuration(args, os.environ)
    if "--dry-run" in args:
        from ripstop.cli.dry_run import describe

        print(describe(config, os.environ), end="")
        return 0
    if config.handler is not None:
        return with_handler(config) if with_handler is not None else handlers.replace_process(argv)
    from ripstop import launch

    return launch.run(config)


def configure(argv: Sequence[str], environ: Mapping[str, str], registered: Collection[str] = ()) -> RunConfig | None:
    """The configuration of a command line, None if it asks for help; `registered` are additional backends."""
    args = _parse(argv, environ)
    return None if "--help" in args else _configuration(args, environ, registered)


def _parse(argv: Sequence[str], environ: Mapping[str, str]) -> ParsedArguments:
    args = parse(FLAGS, argv, environ)
    if "--config" not in args or "--help" in args:
        return args
    from ripstop.cli.options.job_file import with_job_file  # rarely needed

    return with_job_file(args, FLAGS)


def _configuration(args: ParsedArguments, environ: Mapping[str, str], registered: Collection[str] = ()) -> RunConfig:
    notes: list[str] = []
    _monitor_interval(args, notes)
    program = entrypoint(args, environ, notes)
    start = start_method(args, program, notes)
    slots = _slots(args, environ)
    _note_omp_threads(environ, slots, notes)
    conf_name = args.label("--rdzv-conf")
    handler = handlers.handler(args, registered)
    conf = key_values(conf_name, args.text("--rdzv-conf")) if handler is None else {}
    min_nodes, max_nodes = node_range(*args.labelled("--nnodes", "1"))
    if handler is None:
        rdzv = rendezvous_options(args, min_nodes, max_nodes, conf.get("is_host"), notes)
    else:
        rdzv = handlers.rendezvous_options(args, notes)
    rank_order = ranking(args, conf, rdzv, environ, os.uname().nodename, notes)
    elector: Etcd | None = None
    if rdzv.backend is Backend.ETCD:
        elector, conf = etcd(*args.labelled("--rdzv-endpoint"), conf_name, conf, environ)
    timeouts, timeout_notes = timing(conf_name, conf, _shutdown_timeout(args, environ))
    tls = certificates(conf_name, conf, notes)
    if elector is not None and tls is not None and tls.cert is None:
        raise UsageError(
            f"{conf_name} tls_ca={tls.ca}: with etcd any node can become the coordinator, which needs a certificate; "
            "add tls_cert=FILE,tls_key=FILE"
        )
    alone = rdzv.endpoint is None and elector is None
    token, token_notes = job_secret(environ)
    api = _api(args, token, tls, local=rdzv.backend is Backend.LOCAL, notes=notes)
    if tls is not None and alone and api is None:
        notes.append(f"{conf_name} tls_… has no effect on a single node: there are no connections to encrypt")
    if not token and not alone and (max_nodes > 1 or elector is not None):  # else the coordinator's node creates one
        token_notes = no_secret_warning(rdzv.endpoint or "the nodes", tls)
    return RunConfig(
        entry=program,
        run_id=_run_id(args, local=rdzv.backend is Backend.LOCAL),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        target=_target(conf_name, conf, rdzv, min_nodes, max_nodes, notes),
        slots=slots,
        role=identifier(*args.labelled("--role", "default")),
        backend=rdzv.backend,
        endpoint=rdzv.endpoint,
        etcd=elector,
        handler=handler,
        is_host=rdzv.is_host,
        local_addr=rdzv.local_addr,
        node_rank=rdzv.node_rank,
        rank_by=rank_order.by,
        node_number=rank_order.number,
        node_label=rank_order.label,
        store_port=rdzv.store_port,
        budget=budget(args, notes),
        timing=timeouts,
        health=health(args, conf_name, conf, alone=alone),
        quarantine=quarantine(conf_name, conf),
        hang_timeout=_hang_timeout(args, notes),
        start=start,
        preload=preload(args, start, notes),
        logs=logs(args, environ, slots, notes),
        bindings=_bindings(args, environ, slots, notes),
        virtual_local_rank=_virtual_local_rank(args, environ, slots),
        signals=signals(*args.labelled("--signals-to-handle")) if "--signals-to-handle" in args else STOP_SIGNALS,
        event_handler=event_handler(args),
        timer_pipe=timer_pipe(environ, notes),
        tracing=tracing_if_configured(environ, notes, coordinated=rdzv.backend is not Backend.HANDLER),
        token=token or (_random_name() if rdzv.backend is Backend.LOCAL and api is None else ""),
        tls=tls,
        api=api,
        probe_port=_probe_port(args, environ),
        termination_log=Path(file) if (file := environ.get("RIPSTOP_TERMINATION_LOG")) else None,
        linger="--linger" in args,
        notes=(*notes, *timeout_notes, *token_notes),
    )


def _target(
    conf_name: str, conf: Mapping[str, str], rdzv: RendezvousOptions, min_nodes: int, max_nodes: int, notes: list[str]
) -> int | None:
    if "target" in conf and rdzv.backend in (Backend.LOCAL, Backend.STATIC):
        why = "on a single node" if rdzv.backend is Backend.LOCAL else "with static: all nodes have a rank"
        notes.append(f"{conf_name} target has no effect {why}")
        return None
    return target(conf_name, conf, min_nodes, max_nodes)


def _api(args: ParsedArguments, token: str, tls: Tls | None, *, local: bool, notes: list[str]) -> Address | None:
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


def _monitor_interval(args: ParsedArguments, notes: list[str]) -> None:
    if "--monitor-interval" in args:
        duration(*args.labelled("--monitor-interval"))
        notes.append(f"{args.label('--monitor-interval')} has no effect: worker exits are detected without polling")


def _hang_timeout(args: ParsedArguments, notes: list[str]) -> float:
    timeout = duration(*args.labelled("--hang-timeout", "0"))
    if not timeout and "--max-infra-restarts" in args:
        label = args.label("--max-infra-restarts")
        notes.append(f"{label} has no effect without --hang-timeout: hangs are not detected")
    return timeout


def _note_omp_threads(environ: Mapping[str, str], slots: int, notes: list[str]) -> None:
    """`workers/environment.py` sets the variable."""
    if slots > 1 and "OMP_NUM_THREADS" not in environ:
        notes.append(f"OMP_NUM_THREADS is not set: using 1 for each of the {slots} workers, to avoid overload")


def _slots(args: ParsedArguments, environ: Mapping[str, str]) -> int:
    name, text = args.labelled("--nproc-per-node", "1")
    if text not in ("auto", "gpu", "cpu"):
        if text == "xpu":
            raise UsageError(f"{name}=xpu: ripstop cannot count XPUs in this version; give their number")
        return integer(name, text, minimum=1, maximum=MAX_SLOTS, remedy="give a number above 0, or auto, gpu or cpu")
    from ripstop.cli.options.devices import cpus, gpus

    found = 0 if text == "cpu" else gpus(environ)
    if text == "gpu" and not found:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        why = "this node has no NVIDIA GPU" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} selects no GPU"
        raise UsageError(f"{name}=gpu: {why}; give a number, or {name}=cpu")
    return found or cpus()


def _bindings(args: ParsedArguments, environ: Mapping[str, str], slots: int, notes: list[str]) -> tuple[Binding, ...]:
    if "--numa-binding" not in args:
        return ()
    name, text = args.labelled("--numa-binding")
    modes = {mode.value: mode for mode in Numa}
    if text not in modes:
        raise UsageError(f"{name}={text}: unknown mode; write {', '.join(modes)}")
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"{name}={text}: this system cannot bind a process to CPUs; leave {name} out")
    from ripstop.system.linux import memory_policy_call
    from ripstop.system.numa import bindings
    from ripstop.system.numa_topology import read_topology, visible_gpus

    gpus = visible_gpus(environ)
    found = bindings(name, modes[text], read_topology(), gpus.nodes, slots)
    if gpus.note:
        notes.append(f"{name}={text}: {gpus.note}")
    if memory_policy_call() is None:
        notes.append(f"{name}={text}: memory is not bound: the kernel or the container forbids memory policies")
    return found


def _virtual_local_rank(args: ParsedArguments, environ: Mapping[str, str], slots: int) -> bool:
    if "--virtual-local-rank" not in args:
        return False
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(visible.split(",")) < slots:
        name = args.label("--virtual-local-rank")
        raise UsageError(
            f"{name}: each of the {slots} workers needs a GPU, and CUDA_VISIBLE_DEVICES={visible} has fewer; "
            f"add GPUs to it, or leave {name} out"
        )
    return True


def _run_id(args: ParsedArguments, *, local: bool) -> str:
    if local and "--rdzv-id" not in args:
        return _random_name()
    return identifier(*args.labelled("--rdzv-id", "none"))


def _probe_port(args: ParsedArguments, environ: Mapping[str, str]) -> int | None:
    variable = "TORCHELASTIC_HEALTH_CHECK_PORT"
    if "--probe-port" in args:
        return port(*args.labelled("--probe-port"))
    return port(variable, environ[variable]) if environ.get(variable) else None


def _shutdown_timeout(args: ParsedArguments, environ: Mapping[str, str]) -> float:
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    if "--shutdown-timeout" not in args and environ.get(variable):
        return duration(variable, environ[variable])
    return duration(*args.labelled("--shutdown-timeout", "30"))


def _random_name() -> str:
    return os.urandom(16).hex()
