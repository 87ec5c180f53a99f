"""`ripstop run`: torchrun's words, and a few of our own, to a `RunConfig`.

Rules: a wrong word is refused before anything is started; a word that changes nothing is named in the notes; a word of
torchrun's that we do not have is refused, unless it only says what torchrun does anyway.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ripstop.cli.flags import Flag, Given, read
from ripstop.cli.job import JOB_FLAGS, budget, open_door
from ripstop.cli.meeting import meeting
from ripstop.config import (
    MOST_SLOTS,
    Backend,
    Command,
    Entry,
    Logs,
    Module,
    RunConfig,
    Script,
    Start,
    duration,
    nodes,
    pairs,
    secret,
    streams,
    timing,
    whole,
    word,
)
from ripstop.errors import UsageError

HELP = """\
usage: ripstop run [FLAGS] SCRIPT [ARGS]

  ripstop run --standalone --nproc-per-node=8 train.py --lr 0.1         one machine
  ripstop run --nnodes=1:4 --nproc-per-node=8 --max-restarts=3 --rdzv-id=job7 \\
      --rdzv-backend=c10d --rdzv-endpoint=node0:29400 train.py          on every machine, one to four of them
  ripstop run --nnodes=2 --node-rank=0 --master-addr=node0 train.py     fixed ranks; --node-rank=1 on the other

what to run
  SCRIPT [ARGS]               run `python -u SCRIPT ARGS`; everything after SCRIPT is the script's
  -m, --module                SCRIPT is a module: `python -u -m SCRIPT ARGS`
  --no-python                 SCRIPT is any program
  --nproc-per-node N          workers on this node: a number, auto, gpu or cpu (1)
  --start-method HOW          zygote: fork workers from a process that has imported what they need;
                              exec: start each anew (zygote).  torch's fork, forkserver, spawn are understood
  --preload MODULE,…          what the zygote imports (what the script imports); none for nothing
  --role NAME                 the workers' role (default)

where nodes meet
  --standalone                here, on one node
  --nnodes N | MIN:MAX        how many nodes (1)
  --rdzv-backend NAME         c10d: our coordinator at the endpoint; static: fixed ranks (static)
  --rdzv-endpoint HOST[:PORT] the coordinator's address, the same on all nodes (port 29400)
  --rdzv-id NAME              the job's name, the same on all nodes (none; a new one on a single node)
  --rdzv-conf KEY=VALUE,…     join_timeout=600 for enough nodes; last_call_timeout=2 for more of them; lease=3 for a
                              silent node; coordinator_timeout=600 for a coordinator that is away; is_host=1|0
  --node-rank N, --master-addr HOST, --master-port PORT               for static (port 29500)
  --local-addr HOST           this node's address for the others

when a worker fails
  --max-restarts N            failures that are healed, in the whole job (0)
  --restart-window TIME       count them in any such time, as 90s, 10m, 1h, and not in the whole run
  --restart-backoff SECONDS   longest pause before a restart when rounds keep dying young (30)
  --shutdown-timeout SECONDS  from SIGTERM to SIGKILL (30)
  --monitor-interval SECONDS  taken for torchrun's sake: nothing polls here

output
  --log-dir DIR               where logs go (a new directory below the temporary one)
  -r, --redirects WHICH       to files: 0 nothing, 1 stdout, 2 stderr, 3 both, or by local rank: 0:3,1:2
  -t, --tee WHICH             to files and to the console

Flags may be written with underscores.  Every flag can be given as a variable: PET_NNODES=2.
RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE: the job's secret, the same on all nodes.
"""

FLAGS = (
    *JOB_FLAGS,
    Flag("--nproc-per-node", "N"),
    Flag("--rdzv-backend", "NAME"),
    Flag("--standalone"),
    Flag("--node-rank", "N"),
    Flag("--master-addr", "HOST"),
    Flag("--master-port", "PORT"),
    Flag("--local-addr", "HOST"),
    Flag("--module", short="-m"),
    Flag("--no-python"),
    Flag("--start-method", "HOW"),
    Flag("--preload", "MODULE,…"),
    Flag("--role", "NAME"),
    Flag("--shutdown-timeout", "SECONDS"),
    Flag("--monitor-interval", "SECONDS"),
    Flag("--log-dir", "DIR"),
    Flag("--redirects", "WHICH", short="-r"),
    Flag("--tee", "WHICH", short="-t"),
)

# torchrun's flags that we do not have, and the value of each that asks for nothing (None: there is none).
NOT_YET: Mapping[Flag, str | None] = {
    Flag("--duplicate-stderr-filters", "WORD,…"): None,
    Flag("--duplicate-stdout-filters", "WORD,…"): None,
    Flag("--event-log-handler", "NAME"): "null",
    Flag("--local-ranks-filter", "RANK,…"): None,
    Flag("--logs-specs", "NAME", from_environment=False): None,
    Flag("--numa-binding", "MODE", from_environment=False): None,
    Flag("--run-path"): None,
    Flag("--signals-to-handle", "NAME,…"): "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    Flag("--virtual-local-rank"): None,
}


def main(argv: Sequence[str]) -> int:
    if (config := configure(argv, os.environ)) is None:
        print(HELP, end="")
        return 0
    from ripstop import launch

    return launch.run(config)


def configure(argv: Sequence[str], environ: Mapping[str, str]) -> RunConfig | None:
    """The configuration that these words mean, None when they ask for help."""
    given = read((*FLAGS, *NOT_YET), argv, environ)
    if "--help" in given:
        return None
    _refuse_what_we_do_not_have(given)
    notes = _notes_on_idle_words(given, environ)
    entry = _entry(given, environ)
    start = _start(given, entry, notes)
    slots = _slots(given, environ)
    conf_name = given.label("--rdzv-conf")
    conf = pairs(conf_name, given.text("--rdzv-conf", ""))
    waits, about_waits = timing(conf_name, conf, _shutdown(given, environ))
    min_nodes, max_nodes = nodes(given.label("--nnodes"), given.text("--nnodes", "1"))
    place = meeting(given, min_nodes, max_nodes, conf.get("is_host"), notes)
    token, about_token = secret(environ)
    if not token and place.endpoint is not None:
        about_token = [open_door(place.endpoint)]
    return RunConfig(
        entry=entry,
        run_id=_run_id(given, local=place.backend is Backend.LOCAL),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        slots=slots,
        role=word(given.label("--role"), given.text("--role", "default")),
        backend=place.backend,
        endpoint=place.endpoint,
        is_host=place.is_host,
        local_addr=place.local_addr,
        node_rank=place.node_rank,
        store_port=place.store_port,
        budget=budget(given, notes),
        timing=waits,
        start=start,
        preload=_preload(given, start, notes),
        logs=_logs(given, slots),
        token=token or (_made_up() if place.backend is Backend.LOCAL else ""),
        notes=(*notes, *about_waits, *about_token),
    )


def _refuse_what_we_do_not_have(given: Given) -> None:
    for flag, harmless in NOT_YET.items():
        if flag.name in given and given.text(flag.name, "") != harmless:
            raise UsageError(f"{given.label(flag.name)}: torchrun has it, ripstop not in this version; leave it out")


def _notes_on_idle_words(given: Given, environ: Mapping[str, str]) -> list[str]:
    notes = []
    if "--monitor-interval" in given:
        duration(name := given.label("--monitor-interval"), given.text("--monitor-interval", ""))
        notes.append(f"{name} has no effect: nothing polls, a worker's death is noticed at once")
    if "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE" in environ:
        notes.append("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE has no effect in this version")
    return notes


def _entry(given: Given, environ: Mapping[str, str]) -> Entry:
    if not given.program or not given.program[0]:
        raise UsageError("nothing to run; name the script after the flags: ripstop run … train.py")
    name, *args = given.program
    if "--no-python" in given:
        if "--module" in given:
            raise UsageError("-m and --no-python: a module needs python; leave one of them out")
        return Command((_program("--no-python", name, environ), *args))
    if "--module" not in given and not os.path.exists(name):  # noqa: PTH110 - does not raise on a name too long
        remedy = "give the script's path, -m for a module, or --no-python for another program"
        raise UsageError(f"{name}: no such file in {Path.cwd()}; {remedy}")
    if python := environ.get("PYTHON_EXEC"):
        module = ("-m",) if "--module" in given else ()
        return Command((_program("PYTHON_EXEC", python, environ), "-u", *module, name, *args))
    return Module(name, tuple(args)) if "--module" in given else Script(name, tuple(args))


def _program(source: str, name: str, environ: Mapping[str, str]) -> str:
    from shutil import which  # not needed to run a Python script, and slow to import

    if which(name, path=environ.get("PATH")) is None:
        raise UsageError(f"{source} {name}: no such program, here or on PATH; give the path of an executable file")
    return name


def _start(given: Given, entry: Entry, notes: list[str]) -> Start:
    match given.text("--start-method", "zygote"):
        case "zygote" | "fork" | "forkserver":
            start = Start.ZYGOTE
        case "exec" | "spawn":
            start = Start.EXEC
        case other:
            name = given.label("--start-method")
            raise UsageError(f"{name}={other}: there is no such way to start workers; write zygote or exec")
    if isinstance(entry, Command) and start is Start.ZYGOTE:
        if "--start-method" in given:
            notes.append(f"{given.label('--start-method')} has no effect: {entry.argv[0]} can only be started by exec")
        return Start.EXEC
    return start


def _preload(given: Given, start: Start, notes: list[str]) -> tuple[str, ...] | None:
    if "--preload" not in given:
        return None
    name, text = given.label("--preload"), given.text("--preload", "")
    if start is Start.EXEC:
        notes.append(f"{name} has no effect: workers are started by exec, nothing is imported for them")
    if text == "none":
        return ()
    modules = tuple(module.strip() for module in text.split(","))
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise UsageError(f"{name}={text}: {module!r} is no module's name; write {name}=torch,numpy or {name}=none")
    return modules


def _slots(given: Given, environ: Mapping[str, str]) -> int:
    name, text = given.label("--nproc-per-node"), given.text("--nproc-per-node", "1")
    if text not in ("auto", "gpu", "cpu"):
        if text == "xpu":
            raise UsageError(f"{name}=xpu: ripstop cannot count XPUs in this version; give their number")
        return whole(name, text, least=1, most=MOST_SLOTS, remedy="give a number above 0, or auto, gpu or cpu")
    from ripstop.cli.devices import cpus, gpus

    found = 0 if text == "cpu" else gpus(environ)
    if text == "gpu" and not found:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        why = "no NVIDIA GPU here" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} leaves none of this node's"
        raise UsageError(f"{name}=gpu: {why}; give a number, or {name}=cpu")
    return found or cpus()


def _run_id(given: Given, *, local: bool) -> str:
    if local and "--rdzv-id" not in given:
        return _made_up()
    return word(given.label("--rdzv-id"), given.text("--rdzv-id", "none"))


def _made_up() -> str:
    return os.urandom(16).hex()


def _shutdown(given: Given, environ: Mapping[str, str]) -> float:
    name, variable = "--shutdown-timeout", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    if name not in given and environ.get(variable):
        return duration(variable, environ[variable])
    return duration(given.label(name), given.text(name, "30"))


def _logs(given: Given, slots: int) -> Logs:
    directory = Path(given.text("--log-dir", "")) if given.text("--log-dir", "") else None
    if directory is not None and directory.exists() and not directory.is_dir():
        raise UsageError(f"{given.label('--log-dir')}={directory}: is there and no directory; name another")
    return Logs(
        directory=directory,
        redirects=streams(given.label("--redirects"), given.text("--redirects", "0"), slots),
        tee=streams(given.label("--tee"), given.text("--tee", "0"), slots),
    )
