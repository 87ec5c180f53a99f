"""`ripstop run`: torchrun's words, and a few of our own, to a `RunConfig`.

Rules: a wrong word is refused before anything is started; a word that changes nothing is named in the notes.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ripstop.cli.options import handlers
from ripstop.cli.options.flags import Flag, Given, read
from ripstop.cli.options.health import health
from ripstop.cli.options.job import JOB_FLAGS, budget, certificates, open_door, tracing_if_asked
from ripstop.cli.options.output import event_handler, logs
from ripstop.cli.options.program import entry, preload, start
from ripstop.cli.options.rendezvous import RendezvousOptions, meeting, ranking
from ripstop.cli.options.timers import timer_pipe
from ripstop.model.config import API_PORT, MAX_SLOTS, STOP_SIGNALS, Backend, Binding, Etcd, Numa, RunConfig, Tls
from ripstop.model.errors import UsageError
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
      --rdzv-backend=c10d --rdzv-endpoint=node0:29400 train.py          on every machine, one to four of them
  ripstop run --nnodes=2 --node-rank=0 --master-addr=node0 train.py     fixed ranks; --node-rank=1 on the other
  ripstop run --config=job.toml --dry-run                               from a file; say what it would do

what to run
  SCRIPT [ARGS]               run `python -u SCRIPT ARGS`; everything after SCRIPT is the script's
  -m, --module                SCRIPT is a module: `python -u -m SCRIPT ARGS`
  --no-python                 SCRIPT is any program
  --run-path                  SCRIPT is a script, whatever --module and --no-python say
  --nproc-per-node N          workers on this node: a number, auto, gpu or cpu (1)
  --start-method HOW          zygote: fork workers from a process that has imported what they need;
                              exec: start each anew (zygote).  torch's fork, forkserver, spawn are understood
  --preload MODULE,…          what the zygote imports (what the script imports); none for nothing
  --role NAME                 the workers' role (default)
  --numa-binding MODE         bind each worker to processors near its GPU: node, socket, exclusive or core-complex
  --virtual-local-rank        each worker sees its GPU alone, and LOCAL_RANK is 0 for all
  --config FILE               read flags from a TOML file; those on the command line and in variables win
  --dry-run                   say what would be run, and each worker's environment; start nothing

where nodes meet
  --standalone                here, on one node
  --nnodes N | MIN:MAX        how many nodes (1)
  --rdzv-backend NAME         c10d: our coordinator at the endpoint; etcd: on a node that etcd elects, and another when
                              that one is lost; static: fixed ranks (static); or one of another package's, an entry
                              point torchrun.handlers: the endpoint and the settings are its own then
  --rdzv-endpoint HOST[:PORT] the coordinator's address, the same on all nodes (port 29400); etcd's: HOST[:PORT],…
  --rdzv-id NAME              the job's name, the same on all nodes (none; a new one on a single node)
  --rdzv-conf KEY=VALUE,…     settings, see below
  --node-rank N               this node's rank for static; otherwise the one it would like
  --node-label NAME           where this node stands, as a rack or switch, for rank_by=label
  --master-addr HOST, --master-port PORT                              for static (port 29500)
  --local-addr HOST           this node's address for the others
  --api HOST[:PORT]           steer a job on one node over the network, too, with RIPSTOP_TOKEN (port 29480); a job of
                              several nodes is steered at its coordinator's port

when a worker fails
  --max-restarts N            failures that are healed, in the whole job (0)
  --restart-window TIME       count them in any such time, and not in the whole run
  --restart-backoff TIME      longest pause before a restart when rounds keep dying young (30)
  --hang-timeout TIME         diagnose and restart workers that make no progress for so long (0: never)
  --max-infra-restarts N      hangs that are healed in any hour, counted apart from failures (3)
  --shutdown-timeout TIME     from SIGTERM to SIGKILL (30)
  --signals-to-handle NAME,…  signals that end this node's part; workers get the same (SIGTERM,SIGINT,SIGHUP,SIGQUIT)
  --monitor-interval TIME     taken for torchrun's sake, without effect: a worker's death is noticed at once

when a node is bad
  --health-check COMMAND      run before this node joins, and again and again; anything but exit code 0 in time keeps
                              the node out, or has its place given to another.  No shell: write sh -c '…' for one
  --health-interval TIME      how often it and ripstop's own checks are run, and how long it may take (30)

output
  --log-dir DIR               where logs go (a new directory below the temporary one); /dev/null keeps none
  -r, --redirects WHICH       to files: 0 nothing, 1 stdout, 2 stderr, 3 both, or by local rank: 0:3,1:2 (0)
  -t, --tee WHICH             to files and to the console (0)
  --local-ranks-filter RANK,…            show only these workers on the console
  --duplicate-stdout-filters WORD,…      what is teed and holds a word also goes to filtered_stdout.log
  --duplicate-stderr-filters WORD,…      the same for stderr, to filtered_stderr.log
  --logs-specs NAME           have a plugin (entry point torchrun.logs_specs) say where output goes
  --event-log-handler NAME    tell torch's events to a handler: console, or a plugin (entry point
                              torchrun.event_handlers); null for none (null)

in a container
  --probe-port PORT           answer GET /livez (200 while this agent is alive) and /readyz (200 while it is of use)
  --linger                    when the job is over, stay until a signal comes; for pods that are started over and over

settings: --rdzv-conf KEY=VALUE,…
  join_timeout=600            time for enough nodes to come
  last_call_timeout=30        time for more of them, before the first round; 0: none
  lease=3                     after which a silent node is lost
  coordinator_timeout=600     time for a coordinator that went away to come back
  is_host=1|0                 the coordinator is here, or is not (whoever can bind the endpoint)
  rank_by=join                what first ranks go by: join, address, slot or label; the same on all nodes
  target=MAX                  nodes that the job has at first, of --nnodes=MIN:MAX; more of them are spares
  min_disk=32M                room for logs and temporary files on a good node; 0: any
  max_clock_skew=60           how far its clock may be off when it joins; 0: any
  quarantine_failures=3       of a node within quarantine_window=600 keep it out for quarantine_cooldown=600, if the
                              job can do without it; 0: never
  tls_cert, tls_key, tls_ca   PEM files, to encrypt what agents and coordinator say
  for etcd                    protocol=https, cacert=, cert=, key=, etcd_prefix=/ripstop, coordinator_port=0

TIME is seconds, or has a unit: 90s, 10m, 1h.  Flags may be written with underscores.
Every flag can be given as a variable: PET_NNODES=2.  Others that count:
  RIPSTOP_TOKEN, RIPSTOP_TOKEN_FILE             the job's secret, or a file that holds it; the same on all nodes
  RIPSTOP_ETCD_USER, RIPSTOP_ETCD_PASSWORD      for an etcd that asks
  RIPSTOP_TERMINATION_LOG                       a file for how the job ended, as JSON
  TORCHELASTIC_ENABLE_FILE_TIMER=1              workers set timers (on the pipe TORCHELASTIC_TIMER_FILE), and are killed
                                                at a miss
  OTEL_EXPORTER_OTLP_ENDPOINT                   a collector for traces of recoveries, as in http://collector:4318
`ripstop completion bash|zsh|fish` prints what makes a shell complete all this.
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
    given = _read(argv, os.environ)
    if "--help" in given:
        print(HELP, end="")
        return 0
    config = _configuration(given, os.environ)
    if "--dry-run" in given:
        from ripstop.cli.dry_run import describe

        print(describe(config, os.environ), end="")
        return 0
    if config.handler is not None:
        return with_handler(config) if with_handler is not None else handlers.run(argv)
    from ripstop import launch

    return launch.run(config)


def configure(argv: Sequence[str], environ: Mapping[str, str], registered: Collection[str] = ()) -> RunConfig | None:
    """The configuration that these words mean, None when they ask for help; `registered` are backends beside ours."""
    given = _read(argv, environ)
    return None if "--help" in given else _configuration(given, environ, registered)


def _read(argv: Sequence[str], environ: Mapping[str, str]) -> Given:
    given = read(FLAGS, argv, environ)
    if "--config" not in given or "--help" in given:
        return given
    from ripstop.cli.options.job_file import behind  # most jobs have none

    return behind(given, FLAGS)


def _configuration(given: Given, environ: Mapping[str, str], registered: Collection[str] = ()) -> RunConfig:
    notes: list[str] = []
    _idle_words(given, notes)
    program = entry(given, environ, notes)
    how = start(given, program, notes)
    slots = _slots(given, environ)
    _threads(environ, slots, notes)
    conf_name = given.label("--rdzv-conf")
    plugin = handlers.handler(given, registered)
    conf = key_values(conf_name, given.text("--rdzv-conf", "")) if plugin is None else {}
    min_nodes, max_nodes = node_range(given.label("--nnodes"), given.text("--nnodes", "1"))
    if plugin is None:
        place = meeting(given, min_nodes, max_nodes, conf.get("is_host"), notes)
    else:
        place = handlers.meeting(given, notes)
    rank = ranking(given, conf, place, environ, os.uname().nodename, notes)
    elector: Etcd | None = None
    if place.backend is Backend.ETCD:
        where = given.label("--rdzv-endpoint"), given.text("--rdzv-endpoint", "")
        elector, conf = etcd(*where, conf_name, conf, environ)
    waits, about_waits = timing(conf_name, conf, _shutdown(given, environ))
    tls = certificates(conf_name, conf, notes)
    if elector is not None and tls is not None and tls.cert is None:
        raise UsageError(
            f"{conf_name} tls_ca={tls.ca}: with etcd any node may become the coordinator, and needs a certificate "
            "of its own; add tls_cert=FILE,tls_key=FILE"
        )
    alone = place.endpoint is None and elector is None
    token, about_token = job_secret(environ)
    api = _api(given, token, tls, local=place.backend is Backend.LOCAL, notes=notes)
    if tls is not None and alone and api is None:
        notes.append(f"{conf_name} tls_… has no effect on a single node: nothing leaves it")
    if not token and not alone and (max_nodes > 1 or elector is not None):  # else one is made where it is hosted
        about_token = open_door(place.endpoint or "the nodes", tls)
    return RunConfig(
        entry=program,
        run_id=_run_id(given, local=place.backend is Backend.LOCAL),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        target=_target(conf_name, conf, place, min_nodes, max_nodes, notes),
        slots=slots,
        role=identifier(given.label("--role"), given.text("--role", "default")),
        backend=place.backend,
        endpoint=place.endpoint,
        etcd=elector,
        handler=plugin,
        is_host=place.is_host,
        local_addr=place.local_addr,
        node_rank=place.node_rank,
        rank_by=rank.by,
        node_number=rank.number,
        node_label=rank.label,
        store_port=place.store_port,
        budget=budget(given, notes),
        timing=waits,
        health=health(given, conf_name, conf, alone=alone),
        quarantine=quarantine(conf_name, conf),
        hang_timeout=_hang_timeout(given, notes),
        start=how,
        preload=preload(given, how, notes),
        logs=logs(given, environ, slots, notes),
        bindings=_bindings(given, environ, slots, notes),
        virtual_local_rank=_virtual(given, environ, slots),
        signals=_signals(given),
        event_handler=event_handler(given),
        timer_pipe=timer_pipe(environ, notes),
        tracing=tracing_if_asked(environ, notes, coordinated=place.backend is not Backend.HANDLER),
        token=token or (_made_up() if place.backend is Backend.LOCAL and api is None else ""),
        tls=tls,
        api=api,
        probe_port=_probe_port(given, environ),
        termination_log=Path(file) if (file := environ.get("RIPSTOP_TERMINATION_LOG")) else None,
        linger="--linger" in given,
        notes=(*notes, *about_waits, *about_token),
    )


def _target(
    name: str, conf: Mapping[str, str], place: RendezvousOptions, min_nodes: int, max_nodes: int, notes: list[str]
) -> int | None:
    if "target" in conf and place.backend in (Backend.LOCAL, Backend.STATIC):
        why = "on a single node" if place.backend is Backend.LOCAL else "with static: all nodes have a rank"
        notes.append(f"{name} target has no effect {why}")
        return None
    return target(name, conf, min_nodes, max_nodes)


def _api(given: Given, token: str, tls: Tls | None, *, local: bool, notes: list[str]) -> Address | None:
    if "--api" not in given:
        return None
    name = given.label("--api")
    if not local:
        notes.append(f"{name} has no effect on a job of several nodes: it is steered at its coordinator's port")
        return None
    where = address(name, given.text("--api", ""), default_port=API_PORT)
    if not token and (tls is None or tls.ca is None):
        raise UsageError(
            f"{name}={where}: whoever steers a job over the network shows a token made of its secret, and it has none; "
            "set RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE"
        )
    if tls is not None:
        from ripstop.transport.tls import check_coordinator_certificate

        check_coordinator_certificate(tls, where.host)
    return where


def _idle_words(given: Given, notes: list[str]) -> None:
    if "--monitor-interval" in given:
        duration(name := given.label("--monitor-interval"), given.text("--monitor-interval", ""))
        notes.append(f"{name} has no effect: nothing polls, a worker's death is noticed at once")


def _hang_timeout(given: Given, notes: list[str]) -> float:
    timeout = duration(given.label("--hang-timeout"), given.text("--hang-timeout", "0"))
    if not timeout and "--max-infra-restarts" in given:
        notes.append(f"{given.label('--max-infra-restarts')} has no effect without --hang-timeout: no hang is noticed")
    return timeout


def _threads(environ: Mapping[str, str], slots: int, notes: list[str]) -> None:
    """The rule itself is in `workers/environment.py`."""
    if slots > 1 and "OMP_NUM_THREADS" not in environ:
        notes.append(f"OMP_NUM_THREADS is not set: 1 for each of the {slots} workers, or they would crowd the node")


def _slots(given: Given, environ: Mapping[str, str]) -> int:
    name, text = given.label("--nproc-per-node"), given.text("--nproc-per-node", "1")
    if text not in ("auto", "gpu", "cpu"):
        if text == "xpu":
            raise UsageError(f"{name}=xpu: ripstop cannot count XPUs in this version; give their number")
        return integer(name, text, minimum=1, maximum=MAX_SLOTS, remedy="give a number above 0, or auto, gpu or cpu")
    from ripstop.cli.options.devices import cpus, gpus

    found = 0 if text == "cpu" else gpus(environ)
    if text == "gpu" and not found:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        why = "no NVIDIA GPU here" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} leaves none of this node's"
        raise UsageError(f"{name}=gpu: {why}; give a number, or {name}=cpu")
    return found or cpus()


def _bindings(given: Given, environ: Mapping[str, str], slots: int, notes: list[str]) -> tuple[Binding, ...]:
    if "--numa-binding" not in given:
        return ()
    name, text = given.label("--numa-binding"), given.text("--numa-binding", "")
    modes = {mode.value: mode for mode in Numa}
    if text not in modes:
        raise UsageError(f"{name}={text}: there is no such way to bind; write {', '.join(modes)}")
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"{name}={text}: this system cannot bind a process to processors; leave {name} out")
    from ripstop.system.linux import memory_policy_call
    from ripstop.system.numa import bindings
    from ripstop.system.topology import read_topology, visible_gpus

    gpus = visible_gpus(environ)
    found = bindings(name, modes[text], read_topology(), gpus.nodes, slots)
    if gpus.note:
        notes.append(f"{name}={text}: {gpus.note}")
    if memory_policy_call() is None:
        notes.append(f"{name}={text}: memory comes from wherever it does: the kernel or container allows no policy")
    return found


def _virtual(given: Given, environ: Mapping[str, str], slots: int) -> bool:
    if "--virtual-local-rank" not in given:
        return False
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(visible.split(",")) < slots:
        name = given.label("--virtual-local-rank")
        raise UsageError(
            f"{name}: {slots} workers need a GPU each, and CUDA_VISIBLE_DEVICES={visible} has fewer; "
            f"name more there, or leave {name} out"
        )
    return True


def _signals(given: Given) -> tuple[str, ...]:
    if "--signals-to-handle" not in given:
        return STOP_SIGNALS
    return signals(given.label("--signals-to-handle"), given.text("--signals-to-handle", ""))


def _run_id(given: Given, *, local: bool) -> str:
    if local and "--rdzv-id" not in given:
        return _made_up()
    return identifier(given.label("--rdzv-id"), given.text("--rdzv-id", "none"))


def _probe_port(given: Given, environ: Mapping[str, str]) -> int | None:
    name, variable = "--probe-port", "TORCHELASTIC_HEALTH_CHECK_PORT"
    if name not in given and environ.get(variable):
        return port(variable, environ[variable])
    return port(given.label(name), given.text(name, "")) if name in given else None


def _made_up() -> str:
    return os.urandom(16).hex()


def _shutdown(given: Given, environ: Mapping[str, str]) -> float:
    name, variable = "--shutdown-timeout", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    if name not in given and environ.get(variable):
        return duration(variable, environ[variable])
    return duration(given.label(name), given.text(name, "30"))
