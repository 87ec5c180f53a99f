"""`ripstop run`: torchrun's flags, and ripstop's own, to a `RunConfig`.

Rules: a wrong value is rejected before anything is started; a flag without effect is named in the notes.
"""

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from msgspec.structs import asdict

from ripstop.cli.options.certificates import certificates, no_secret_or_certificates_warning
from ripstop.cli.options.devices import (
    device_numa_binding_option,
    device_virtual_local_rank_option,
    note_device_omp_threads_option,
    workers_per_node,
)
from ripstop.cli.options.flags import Flag, ParsedArguments, note_unused_option_flags, parse_flags
from ripstop.cli.options.job import JOB_FLAGS, job_allow_chaos_option, job_restart_budget_options
from ripstop.cli.options.monitoring import (
    monitoring_api_address_option,
    monitoring_hang_timeout_option,
    monitoring_health_options,
    monitoring_notify_url_option,
    monitoring_preemption_notice_option,
    monitoring_probe_port_option,
    monitoring_straggler_options,
    monitoring_timer_pipe_option,
)
from ripstop.cli.options.output import output_event_handler_option, output_logs_options, output_own_log_options
from ripstop.cli.options.program import (
    program_entrypoint_options,
    program_inprocess_timeout_option,
    program_preload_option,
    program_shutdown_timeout_option,
    program_standby_options,
    program_start_method_option,
)
from ripstop.cli.options.rendezvous import (
    BACKENDS,
    rendezvous_options,
    rendezvous_options_from_handler_flags,
    rendezvous_options_with_ranking,
    rendezvous_target_nodes_option,
)
from ripstop.cli.options.starters import STARTERS, with_starter
from ripstop.cli.options.state import state_checkpoint_options, state_replication_options
from ripstop.cli.options.tracing import tracing
from ripstop.model import parsers
from ripstop.model.config import (
    DRAIN_TIMEOUT_S,
    STOP_SIGNALS,
    Backend,
    Etcd,
    Handler,
    Numa,
    RunConfig,
    StandbyUntil,
    UserKey,
)
from ripstop.model.errors import HelpRequested, UsageError
from ripstop.model.rendezvous_conf import rendezvous_conf_etcd, rendezvous_conf_quarantine, rendezvous_conf_timing

HELP = """\
usage: ripstop run [FLAGS] SCRIPT [ARGS]

Starts the workers of one node and keeps them running: restarts them after a failure, and adds and removes nodes.  For
a job on several machines, run the same command on each.  Flags, variables and their meaning are torchrun's.

examples
  One machine with eight workers:
    ripstop run --standalone --nproc-per-node=8 train.py --lr 0.1
  One to four machines; run this on each:
    ripstop run --nnodes=1:4 --nproc-per-node=8 --max-restarts=3 \\
        --rdzv-id=job7 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 train.py
  Two machines with fixed ranks; on the other, --node-rank=1:
    ripstop run --nnodes=2 --node-rank=0 --master-addr=node0 train.py
  All nodes of a Slurm job:
    srun --ntasks-per-node=1 ripstop run train.py
  Show what a file of flags would run:
    ripstop run --config=job.toml --dry-run

program
  SCRIPT [ARGS]               run `python -u SCRIPT ARGS`; all arguments after SCRIPT go to the script
  -m, --module                SCRIPT is a module: `python -u -m SCRIPT ARGS`
  --no-python                 SCRIPT is an executable, not a Python script
  --run-path                  SCRIPT is a Python script, even with --module or --no-python
  --nproc-per-node N          number of workers on this node; gpu or cpu: one for each; auto: gpu if there are any (1)
  --start-method HOW          zygote: fork workers from a process with their imports; exec: start a new interpreter for
                              each (zygote).  torch's fork, forkserver and spawn are accepted
  --preload MODULE,…          modules that the zygote imports, or none (the script's imports)
  --standby N|auto|off        keep processes that have warmed up and replace failed workers: for N local ranks, or for
                              all where GPU memory is left (off)
  --standby-until POINT       where standbys wait: script: before the script starts; elastic: after running it up to its
                              function with @train.elastic (script)
  --standby-warmup MOD:FUNC   a function that standbys call with their local rank, after the built-in warm-up
  --role NAME                 the role of this node's workers (default)
  --numa-binding MODE         bind each worker to CPUs near its GPU: node, socket, exclusive or core-complex
  --virtual-local-rank        each worker sees only its own GPU, and LOCAL_RANK is 0
  --config FILE               read flags from a TOML file; flags and variables override it
  --dry-run                   print the configuration and each worker's environment; start nothing

rendezvous
  --standalone                the job has only this node
  --nnodes N | MIN:MAX        number of nodes (1)
  --rdzv-backend NAME         c10d: a coordinator listens at the endpoint; etcd: etcd elects the coordinator's node;
                              static: fixed ranks; slurm, mpi or aws-batch: read the nodes from the variables of srun,
                              mpirun or AWS Batch; or a handler that another package registers as entry point
                              torchrun.handlers (static; slurm in a step of srun)
  --rdzv-endpoint HOST[:PORT]  the coordinator's address, the same on all nodes (port 29400); HOST[:PORT],…: nodes that
                               may become the coordinator; with etcd, the addresses of its members
  --rdzv-id NAME              the job's id, the same on all nodes (none; random for a job of one node)
  --rdzv-conf KEY=VALUE,…     settings, see below
  --node-rank N               with static: this node's rank; with other backends: the rank it prefers
  --node-label NAME           this node's rack or switch, for rank_by=label
  --master-addr HOST          with static: the address of node 0
  --master-port PORT          with static: the port of the coordinator on node 0; on one node, of the store (29500)
  --local-addr HOST           address at which other nodes reach this node
  --api HOST[:PORT]           serve the API of a one-node job over the network; needs RIPSTOP_TOKEN (port 29480)

failures
  --max-restarts N            how often the whole job may restart after a failed worker (0)
  --restart-window TIME       count only the restarts within this time (the whole run)
  --restart-backoff TIME      longest delay before a restart if workers fail again within seconds; 0: no delay (30)
  --hang-timeout TIME         if a worker makes no progress for this time, diagnose the hang and restart; 0: never (0)
  --max-infra-restarts N      how often per hour the job may restart after a hang; not counted by --max-restarts (3)
  --straggler HOW             if the other ranks wait for a slow one: report it; replace its node by a spare, if one is
                              ready; or off (report)
  --straggler-factor NUMBER   a rank is a straggler if steps take this many times as long as without its delay (1.5)
  --straggler-time TIME       how long a rank must be slow until it is reported (2m)
  --notify-url URL            send a message to this webhook (Slack or other) when the job ends, hangs, has a straggler
                              or few restarts left; the coordinator's node sends it
  --allow-chaos               let operators inject faults into this node (ripstop chaos)
  --drain-timeout TIME        how long a node that leaves with notice (SIGTERM, ripstop drain, a preemption) waits for a
                              commit of all ranks, so that no step is repeated; 0: it leaves at once (20)
  --preemption-notice WHERE   leave when this file exists, or this http:// URL answers with a text other than FALSE or
                              NONE
  --shutdown-timeout TIME     time between SIGTERM and SIGKILL when workers are stopped (30)
  --inprocess-timeout TIME    in-place recovery (@train.elastic): after a fault, a worker that runs code of the old
                              round for longer than this is replaced; 0: no in-place recovery (5)
  --signals-to-handle NAME,…  signals that stop this node and its workers (SIGTERM,SIGINT,SIGHUP,SIGQUIT)
  --monitor-interval TIME     accepted, because torchrun has it; no effect: worker exits are detected without polling

training state (ripstop.train.State)
  --replicate WHEN            auto: each node keeps copies of another node's commits; off: it does not (auto)
  --replicate-bandwidth SIZE  limit of each node's copies per second, such as 2GB/s; 0: none (0)
  --checkpoint-dir DIR        save commits to this directory, which all nodes share; a new job continues from there
  --checkpoint-interval TIME  time between two checkpoints (10m)

node health
  --health-check COMMAND      command that checks this node before it joins and while it trains; any exit code but 0, or
                              a timeout, means unhealthy.  It runs without a shell; for shell syntax: sh -c '…'
  --health-interval TIME      time between two health checks, and timeout of the command (30)

output
  --log-dir DIR               directory for logs; /dev/null keeps none (a new temporary directory)
  -r, --redirects WHICH       streams that go to files: 0 none, 1 stdout, 2 stderr, 3 both; by local rank: 0:3,1:2 (0)
  -t, --tee WHICH             streams that go to files and to the console, in the same form (0)
  --local-ranks-filter RANK,…  show only these workers on the console
  --duplicate-stdout-filters WORD,…  also write lines of --tee with one of these words to filtered_stdout.log
  --duplicate-stderr-filters WORD,…  the same for stderr, to filtered_stderr.log
  --logs-specs NAME           a plugin that chooses the log files (entry point torchrun.logs_specs)
  -q, --quiet                 of ripstop's own lines, write only warnings and errors; no live line at a terminal
  --log-level LEVEL           ripstop's own lines: debug (every event), info, warning or error (info)
  --log-format FORMAT         ripstop's own lines: text, or json, one object a line (text)
  --event-log-handler NAME    a handler for torch's events: null, console, or a plugin (entry point
                              torchrun.event_handlers) (null)

containers
  --probe-port PORT           serve GET /livez (the agent is alive) and /readyz (its workers run or can start)
  --linger                    after the job has ended, wait for a signal: for pods that are restarted when they exit

settings: --rdzv-conf KEY=VALUE,…
  join_timeout=600            how long to wait for the minimum number of nodes, and at the start for a coordinator
  last_call_timeout=30        how long the first round waits for more nodes after the minimum is ready
  lease=3                     a node that sends nothing for this time is lost
  coordinator_timeout=600     how long an agent without running workers waits for a lost coordinator
  is_host=1|0                 whether this node hosts the coordinator (the first node that can bind the endpoint)
  rank_by=join                how new nodes are sorted: join, address, slot or label; the same on all nodes
  target=MAX                  number of nodes at first, within --nnodes=MIN:MAX; further nodes are spares
  min_disk=32M                free disk space that a healthy node needs for logs and temporary files; 0: no check
  max_clock_skew=60           largest clock difference of a joining node; 0: no check
  quarantine_failures=3       a node with this many faults within quarantine_window=600 is excluded for
                              quarantine_cooldown=600, if the job has enough other nodes; 0: never
  tls_cert, tls_key, tls_ca   PEM files for TLS between agents and coordinator
  etcd only                   protocol=https, cacert=, cert=, key=, etcd_prefix=/ripstop, coordinator_port=0

Defaults are in parentheses.  TIME is in seconds, or has a unit: 90s, 10m, 1h.  Flags may have underscores.
Every flag has an environment variable: PET_NNODES=2.  Other variables:
  RIPSTOP_TOKEN, RIPSTOP_TOKEN_FILE             the job's secret, or a file with it; the same on all nodes
  RIPSTOP_ETCD_USER, RIPSTOP_ETCD_PASSWORD      credentials for etcd
  RIPSTOP_TERMINATION_LOG                       file for the result of the job, as JSON
  TORCHELASTIC_ENABLE_FILE_TIMER=1              let workers set timers (through the pipe TORCHELASTIC_TIMER_FILE); if a
                                                timer expires, its worker is killed
  NO_COLOR                                      no colours at a terminal
  OTEL_EXPORTER_OTLP_ENDPOINT                   collector for traces, such as http://collector:4318

exit codes
  0       the job succeeded, or an operator removed this node
  1       the job failed or was stopped, or this node could not take part in it
  2       the command line is wrong, or the coordinator rejected this node
  128+N   signal N stopped this agent

`ripstop completion bash|zsh|fish` prints a completion script for your shell.
"""

FLAGS = (
    *JOB_FLAGS,
    Flag("--nproc-per-node", "N", choices=("auto", "gpu", "cpu")),
    Flag("--rdzv-backend", "NAME", choices=("c10d", "etcd", "static", *STARTERS)),
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
    Flag("--standby", "N|auto|off", choices=("auto", "off"), ours=True),
    Flag("--standby-until", "POINT", choices=tuple(until.value for until in StandbyUntil), ours=True),
    Flag("--standby-warmup", "MODULE:FUNCTION", ours=True),
    Flag("--role", "NAME"),
    Flag("--numa-binding", "MODE", choices=tuple(mode.value for mode in Numa)),
    Flag("--virtual-local-rank"),
    Flag("--config", "FILE", ours=True),
    Flag("--dry-run", ours=True),
    Flag("--health-check", "COMMAND", ours=True),
    Flag("--health-interval", "TIME", ours=True),
    Flag("--checkpoint-dir", "DIR", ours=True),
    Flag("--checkpoint-interval", "TIME", ours=True),
    Flag("--hang-timeout", "TIME", ours=True),
    Flag("--replicate", "WHEN", choices=("auto", "off"), ours=True),
    Flag("--replicate-bandwidth", "SIZE", ours=True),
    Flag("--inprocess-timeout", "TIME", ours=True),
    Flag("--drain-timeout", "TIME", ours=True),
    Flag("--preemption-notice", "FILE|URL", ours=True),
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
HANDLER_PROGRAM = (
    "import sys; sys.path.append({root!r}); from ripstop.compat.launcher.handler_link import main; sys.exit(main())"
)


def main(argv: Sequence[str], with_handler: Callable[[RunConfig], int] | None = None) -> int:
    args = _parse_run_arguments(argv, os.environ)
    config = _run_config(args, os.environ)
    if "--dry-run" in args:
        from ripstop.cli.dry_run import describe_dry_run

        print(describe_dry_run(config, os.environ), end="")
        return 0
    if config.handler is not None:
        return with_handler(config) if with_handler is not None else _continue_run_command_with_handler(argv)
    from ripstop.launch import launch_node

    return launch_node(config)


def configure_run(argv: Sequence[str], environ: Mapping[str, str], registered: Collection[str] = ()) -> RunConfig:
    """The configuration of a command line; `registered` are additional backends."""
    return _run_config(_parse_run_arguments(argv, environ), environ, registered)


def _parse_run_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> ParsedArguments:
    args = parse_flags(FLAGS, argv, environ)
    if "--help" in args:
        raise HelpRequested(HELP)
    if "--config" not in args:
        return args
    from ripstop.cli.options.job_file import with_job_file  # rarely needed

    return with_job_file(args, FLAGS)


def _run_config(args: ParsedArguments, environ: Mapping[str, str], registered: Collection[str] = ()) -> RunConfig:
    notes: list[str] = []
    args, start = with_starter(args, environ, os.uname().nodename, notes)
    if "--monitor-interval" in args:
        parsers.duration(*args.labelled("--monitor-interval"))
        notes.append(f"{args.label('--monitor-interval')} has no effect: worker exits are detected without polling")
    program = program_entrypoint_options(args, environ, notes)
    method = program_start_method_option(args, program, notes)
    slots = workers_per_node(args, environ)
    note_device_omp_threads_option(environ, slots, notes)
    conf_name = args.label("--rdzv-conf")
    handler = _handler_of_run_command(args, registered)
    conf = parsers.key_values(conf_name, args.text("--rdzv-conf")) if handler is None else {}
    min_nodes, max_nodes = parsers.parse_node_range(*args.labelled("--nnodes", "1"))
    if handler is None:
        rdzv = rendezvous_options(args, conf, min_nodes, max_nodes, notes)
    else:
        rdzv = rendezvous_options_from_handler_flags(args, notes)
        note_unused_option_flags(
            args, ("--notify-url", "--allow-chaos"), "with another package's rendezvous handler", notes
        )
    number = start.node_number if start is not None else None
    rdzv = rendezvous_options_with_ranking(args, conf, rdzv, environ, os.uname().nodename, notes, number)
    is_local = rdzv.backend is Backend.LOCAL
    elector: Etcd | None = None
    if rdzv.backend is Backend.ETCD:
        elector, conf = rendezvous_conf_etcd(*args.labelled("--rdzv-endpoint"), conf_name, conf, environ)
    timeouts, timeout_notes = rendezvous_conf_timing(
        conf_name, conf, program_shutdown_timeout_option(args, environ), program_inprocess_timeout_option(args)
    )
    tls = certificates(conf_name, conf, notes)
    if elector is not None and tls is not None and tls.cert is None:
        raise UsageError(
            f"{conf_name} tls_ca={tls.ca}: with etcd any node can become the coordinator, which needs a certificate; "
            "add tls_cert=FILE,tls_key=FILE"
        )
    alone = rdzv.endpoint is None and elector is None
    token, token_notes = parsers.parse_secret_variables(environ)
    api = monitoring_api_address_option(args, token, tls, local=is_local, notes=notes)
    if tls is not None and alone and api is None:
        notes.append(f"{conf_name} tls_… has no effect on a single node: there are no connections to encrypt")
    key: UserKey | None = None
    if start is not None and not token and (tls is None or tls.ca is None):
        from ripstop.starters.user_key import user_key  # imports logging

        key = user_key(start, environ)
    if not token and key is None and not alone and (max_nodes > 1 or elector is not None):
        # on one node, the coordinator creates a secret
        token_notes = no_secret_or_certificates_warning(rdzv.endpoint or "the nodes", tls)
    replicates, replication_bandwidth = state_replication_options(args, notes, max_nodes=max_nodes)
    return RunConfig(
        entry=program,
        run_id=parsers.identifier(*args.labelled("--rdzv-id", os.urandom(16).hex() if is_local else "none")),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        target=rendezvous_target_nodes_option(conf_name, conf, rdzv, min_nodes, max_nodes, notes),
        slots=slots,
        role=parsers.identifier(*args.labelled("--role", "default")),
        **asdict(rdzv),
        etcd=elector,
        handler=handler,
        budget=job_restart_budget_options(args, notes),
        timing=timeouts,
        health=monitoring_health_options(args, conf_name, conf, alone=alone),
        quarantine=rendezvous_conf_quarantine(conf_name, conf),
        replicates=replicates,
        replication_bandwidth=replication_bandwidth,
        checkpoints=state_checkpoint_options(args, notes),
        hang_timeout=monitoring_hang_timeout_option(args, notes),
        start=method,
        preload=program_preload_option(args, method, notes),
        standby=program_standby_options(args, program, method, slots, notes),
        logs=output_logs_options(args, environ, slots, notes),
        own_log=output_own_log_options(args),
        bindings=device_numa_binding_option(args, environ, slots, notes),
        virtual_local_rank=device_virtual_local_rank_option(args, environ, slots),
        signals=parsers.parse_signals(*args.labelled("--signals-to-handle", ",".join(STOP_SIGNALS))),
        event_handler=output_event_handler_option(args),
        timer_pipe=monitoring_timer_pipe_option(environ, notes),
        tracing=tracing(environ, notes, coordinated=rdzv.backend is not Backend.HANDLER),
        notify_url=monitoring_notify_url_option(args),
        token=token or (os.urandom(16).hex() if is_local and api is None else ""),
        user_key=key,
        earlier_restarts=start.earlier_restarts if start is not None else 0,
        tls=tls,
        api=api,
        probe_port=monitoring_probe_port_option(args, environ),
        termination_log=Path(file) if (file := environ.get("RIPSTOP_TERMINATION_LOG")) else None,
        stragglers=monitoring_straggler_options(args, notes),
        drain_timeout=parsers.duration(*args.labelled("--drain-timeout", f"{DRAIN_TIMEOUT_S:g}")),
        preemption_notice=monitoring_preemption_notice_option(args),
        allow_chaos=job_allow_chaos_option(args, notes),
        linger="--linger" in args,
        notes=(*notes, *timeout_notes, *token_notes),
    )


def _handler_of_run_command(args: ParsedArguments, registered: Collection[str]) -> Handler | None:
    """The other package's rendezvous handler that --rdzv-backend names, if any.  Its settings are passed on unread."""
    name = args.text("--rdzv-backend", "static")
    if name in BACKENDS or "--standalone" in args:
        return None
    from importlib.metadata import entry_points

    if name not in registered and name not in entry_points(group="torchrun.handlers").names:
        return None
    conf = parsers.key_values(*args.labelled("--rdzv-conf"))
    return Handler(name, args.text("--rdzv-endpoint"), tuple(conf.items()))


def _continue_run_command_with_handler(argv: Sequence[str]) -> int:
    """Replace this process by `compat/launcher/handler_link.py`: this layer must not import torch or the handler.

    `-P` keeps the current directory out of its module path.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    program = HANDLER_PROGRAM.format(root=str(Path(__file__).parents[3]))
    os.execv(sys.executable, [sys.executable, "-P", "-c", program, *argv])
