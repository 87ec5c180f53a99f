"""`ripstop kube`: jobs on Kubernetes.

`render` needs no cluster.  The other commands send requests to one through the `kubernetes` package
(`cli/kube/cluster.py`).  A wrong command line is rejected before the first request.
"""

import json
import secrets
from collections.abc import Callable, Sequence

from ripstop.cli.kube import cluster, job
from ripstop.cli.options.flags import HELP_FLAG, Flag, ParsedArguments, parse_mixed
from ripstop.kubernetes.to_yaml import to_yaml
from ripstop.model.errors import HelpRequested, UsageError
from ripstop.model.parsers import integer

USAGE = """\
usage: ripstop kube COMMAND …

  render --image=IMAGE [FLAGS] train.py [ARGS]    print a job's manifests; needs no cluster
  submit --image=IMAGE [FLAGS] train.py [ARGS]    create a job; or submit --file FILE (-f) with rendered manifests
  status [NAME]                                   list all jobs, or show one with its pods and events
  logs NAME [SLOT] [-f|--follow] [--tail N]       print the output of its pods, each line with the pod's name
  stacks NAME [RANK]                              print the stacks of its workers
  scale NAME N                                    set its number of pods
  delete NAME                                     delete the job and its pods
  install [--image=IMAGE] [--timeout S] [--dry-run]  install the ElasticJob resource and its operator, and wait up to
                                                  S seconds until it runs (120; 0: do not wait)
  operator [--home NAMESPACE] [--health HOST:PORT]  run the operator, for one namespace or all; --home holds its key

  -n, --namespace NAMESPACE   the job's namespace (kubectl's current one)
  --context NAME              the context in KUBECONFIG (the current one)
  --json                      print JSON instead of YAML or a table

All commands except render need the kubernetes package: pip install 'ripstop[kubernetes]'.
"""
RENDER = f"""\
usage: ripstop kube render|submit --image=IMAGE [FLAGS] SCRIPT [ARGS]

  ripstop kube render --image=registry/train:1 --nnodes=2:4 --gpus=8 --max-restarts=3 train.py --lr 0.1

{job.HELP}\
  --json                      print a JSON list instead of YAML
"""
CONTEXT = Flag("--context", "NAME")
CLUSTER_FLAGS = (HELP_FLAG, Flag("--namespace", "NAMESPACE", short="-n"), CONTEXT)
JSON = Flag("--json")
FILE = Flag("--file", "FILE", short="-f")
FOLLOW = Flag("--follow", short="-f")
TAIL = Flag("--tail", "N")
IMAGE = Flag("--image", "IMAGE")
HOME = Flag("--home", "NAMESPACE")
HEALTH = Flag("--health", "HOST:PORT")
DRY_RUN = Flag("--dry-run")
TIMEOUT = Flag("--timeout", "SECONDS")
_ALL = (*CLUSTER_FLAGS, *job.OWN_FLAGS, JSON, FILE, FOLLOW, TAIL, HOME, HEALTH, DRY_RUN, TIMEOUT)
FLAGS = tuple({flag.name: flag for flag in _ALL}.values())  # of all subcommands, for completion
MAX_TAIL_LINES = 1_000_000
INSTALL_TIMEOUT_S, MAX_TIMEOUT_S = 120, 86_400


def main(argv: Sequence[str]) -> int:
    command, *rest = argv or ["--help"]
    if command in ("-h", "--help", "help"):
        raise HelpRequested(USAGE)
    if command not in COMMANDS:
        raise UsageError(f"kube {command}: unknown command; write one of {', '.join(COMMANDS)}")
    return COMMANDS[command](rest)


def _render(argv: Sequence[str]) -> int:
    args = job.parse_arguments(argv, (JSON,))
    if "--help" in args:
        raise HelpRequested(RENDER)
    objects = job.objects(args, secrets.token_urlsafe(32))
    if "--json" in args:
        content = objects[0] if len(objects) == 1 else {"apiVersion": "v1", "kind": "List", "items": objects}
        print(json.dumps(content, indent=2))
    else:
        print(to_yaml(objects), end="")
    return 0


def _submit(argv: Sequence[str]) -> int:
    args = job.parse_arguments(argv, (FILE, CONTEXT))
    if "--help" in args:
        raise HelpRequested(RENDER)
    if "--file" in args and (args.program or args.texts.keys() - {"--file", "--namespace", "--context"}):
        raise UsageError("--file and a command line both describe a job; remove one of them")
    objects = [] if "--file" in args else job.objects(args, secrets.token_urlsafe(32))
    _require("kubernetes")
    return cluster.submit(args, cluster.load(args.text("--file")) if "--file" in args else objects)


def _status(argv: Sequence[str]) -> int:
    args, names = _parse("status", argv, (JSON,), most=1)
    _require("kubernetes")
    return cluster.status(args, names[0] if names else "", as_json="--json" in args)


def _logs(argv: Sequence[str]) -> int:
    args, names = _parse("logs", argv, (FOLLOW, TAIL), least=1, most=2)
    slot = integer("SLOT", names[1], minimum=0, maximum=2**31) if len(names) > 1 else None
    tail = integer("--tail", args.text("--tail", "100"), minimum=0, maximum=MAX_TAIL_LINES)
    _require("kubernetes")
    return cluster.logs(args, names[0], slot, tail, follow="--follow" in args)


def _stacks(argv: Sequence[str]) -> int:
    args, names = _parse("stacks", argv, (), least=1, most=2)
    ranks = [str(integer("RANK", rank, minimum=0, maximum=2**31)) for rank in names[1:]]
    _require("kubernetes")
    return cluster.stacks(args, names[0], ranks)


def _scale(argv: Sequence[str]) -> int:
    args, names = _parse("scale", argv, (), least=2, most=2)
    replicas = integer("N", names[1], minimum=1, maximum=2**31 - 1)
    _require("kubernetes")
    return cluster.scale(args, names[0], replicas)


def _delete(argv: Sequence[str]) -> int:
    args, names = _parse("delete", argv, (), least=1, most=1)
    _require("kubernetes")
    return cluster.delete(args, names[0])


def _install(argv: Sequence[str]) -> int:
    args, _ = _parse("install", argv, (IMAGE, DRY_RUN, TIMEOUT))
    from ripstop.kubernetes import deploy
    from ripstop.kubernetes.manifests import HOME as HOME_NAMESPACE

    image, home = args.text("--image", deploy.IMAGE), args.text("--namespace", HOME_NAMESPACE)
    timeout = integer("--timeout", args.text("--timeout", str(INSTALL_TIMEOUT_S)), minimum=0, maximum=MAX_TIMEOUT_S)
    if "--dry-run" in args:
        print(to_yaml(deploy.objects(image, home)), end="")
        return 0
    _require("kubernetes")
    return cluster.install(args, image, home, timeout)


def _operator(argv: Sequence[str]) -> int:
    args, _ = _parse("operator", argv, (HOME, HEALTH))
    _require("kubernetes", "kopf")
    return cluster.operate(args)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "render": _render,
    "submit": _submit,
    "status": _status,
    "logs": _logs,
    "stacks": _stacks,
    "scale": _scale,
    "delete": _delete,
    "install": _install,
    "operator": _operator,
}


def _require(*packages: str) -> None:
    from importlib.util import find_spec

    for package in packages:
        if find_spec(package) is None:
            raise UsageError(f"the package {package} is not installed; pip install 'ripstop[kubernetes]'")


def _parse(
    command: str, argv: Sequence[str], flags: Sequence[Flag], least: int = 0, most: int = 0
) -> tuple[ParsedArguments, tuple[str, ...]]:
    """Flags and names in any order."""
    args, names = parse_mixed((*CLUSTER_FLAGS, *flags), argv)
    if "--help" in args:
        raise HelpRequested(USAGE)
    if not least <= len(names) <= most:
        usage = next(line.strip() for line in USAGE.splitlines() if line.startswith(f"  {command} "))
        problem = f"{names[most]}: unexpected argument" if len(names) > most else "an argument is missing"
        raise UsageError(f"kube {command}: {problem}; write ripstop kube {usage.partition('  ')[0]}")
    return args, names
