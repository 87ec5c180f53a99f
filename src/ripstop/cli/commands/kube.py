"""`ripstop kube`: jobs on Kubernetes.

`render` needs nothing but itself; the others speak to a cluster, through the `kubernetes` package (`kube_cluster.py`).
Wrong words are refused before the cluster hears of them.
"""

import json
import secrets
from collections.abc import Callable, Sequence

from ripstop.cli.kube import job
from ripstop.cli.options.flags import Flag, Given, read_mixed
from ripstop.cli.options.job import HELP as HELP_FLAG
from ripstop.kubernetes.to_yaml import to_yaml
from ripstop.model.errors import UsageError
from ripstop.model.parsers import integer

USAGE = """\
usage: ripstop kube COMMAND …

  render --image=IMAGE [FLAGS] train.py [ARGS]    print a job's manifests; no cluster is needed
  submit --image=IMAGE [FLAGS] train.py [ARGS]    create the job; or submit --file FILE (-f), as render prints it
  status [NAME]                                   all jobs, or one with its pods and what happened to it
  logs NAME [SLOT] [-f|--follow] [--tail N]       what its pods write, each line with the pod's name before it
  stacks NAME [RANK]                              where its workers are in their code
  scale NAME N                                    have N pods
  delete NAME                                     end it, and remove all that is its
  install [--image=IMAGE] [--timeout S] [--dry-run]  bring ElasticJob and its operator into a cluster, and wait up to
                                                  S seconds until it runs (120; 0: do not wait)
  operator [--home NAMESPACE] [--health HOST:PORT]  be that operator: of one namespace or of all; --home has its key

  -n, --namespace NAMESPACE   the job's (the one of kubectl)
  --context NAME              the cluster's, in the file that KUBECONFIG names (the current one)
  --json                      JSON and not YAML, or not a table

All but render need the kubernetes package: pip install 'ripstop[kubernetes]'.
"""
RENDER = f"""\
usage: ripstop kube render|submit --image=IMAGE [FLAGS] SCRIPT [ARGS]

  ripstop kube render --image=registry/train:1 --nnodes=2:4 --gpus=8 --max-restarts=3 train.py --lr 0.1

{job.HELP}\
  --json                      a list in JSON, not YAML
"""
CONTEXT = Flag("--context", "NAME", from_environment=False)
CLUSTER_FLAGS = (HELP_FLAG, Flag("--namespace", "NAMESPACE", short="-n", from_environment=False), CONTEXT)
JSON = Flag("--json", from_environment=False)
FILE = Flag("--file", "FILE", short="-f", from_environment=False)
FOLLOW = Flag("--follow", short="-f", from_environment=False)
TAIL = Flag("--tail", "N", from_environment=False)
IMAGE = Flag("--image", "IMAGE", from_environment=False)
HOME = Flag("--home", "NAMESPACE", from_environment=False)
HEALTH = Flag("--health", "HOST:PORT", from_environment=False)
DRY_RUN = Flag("--dry-run", from_environment=False)
TIMEOUT = Flag("--timeout", "SECONDS", from_environment=False)
_ALL = (*CLUSTER_FLAGS, *job.OWN_FLAGS, JSON, FILE, FOLLOW, TAIL, HOME, HEALTH, DRY_RUN, TIMEOUT)
FLAGS = tuple({flag.name: flag for flag in _ALL}.values())  # of all commands, for completion
MOST_TAIL = 1_000_000
INSTALL_TIMEOUT_S, MOST_TIMEOUT_S = 120, 86_400


def main(argv: Sequence[str]) -> int:
    command, *rest = argv or ["--help"]
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if command not in COMMANDS:
        raise UsageError(f"kube {command}: there is no such command; there are {', '.join(COMMANDS)}")
    return COMMANDS[command](rest)


def _render(argv: Sequence[str]) -> int:
    given = job.words(argv, (JSON,))
    if "--help" in given:
        print(RENDER, end="")
        return 0
    found = job.objects(given, secrets.token_urlsafe(32))
    if "--json" in given:
        content = found[0] if len(found) == 1 else {"apiVersion": "v1", "kind": "List", "items": found}
        print(json.dumps(content, indent=2))
    else:
        print(to_yaml(found), end="")
    return 0


def _submit(argv: Sequence[str]) -> int:
    given = job.words(argv, (FILE, CONTEXT))
    if "--help" in given:
        print(RENDER, end="")
        return 0
    if "--file" not in given:
        found = job.objects(given, secrets.token_urlsafe(32))
    elif given.program or given.texts.keys() - {"--file", "--namespace", "--context"}:
        raise UsageError("--file and a command line both say what to submit; leave out one of the two")
    _need("kubernetes")
    from ripstop.cli.kube import cluster

    if "--file" in given:
        found = cluster.load(given.text("--file", ""))
    return cluster.submit(given, found)


def _status(argv: Sequence[str]) -> int:
    given, names = _words("status", argv, (JSON,), most=1)
    if given is None:
        return 0
    _need("kubernetes")
    from ripstop.cli.kube import cluster

    return cluster.status(given, names[0] if names else "", as_json="--json" in given)


def _logs(argv: Sequence[str]) -> int:
    given, names = _words("logs", argv, (FOLLOW, TAIL), least=1, most=2)
    if given is None:
        return 0
    slot = integer("SLOT", names[1], minimum=0, maximum=2**31) if len(names) > 1 else None
    tail = integer("--tail", given.text("--tail", "100"), minimum=0, maximum=MOST_TAIL)
    _need("kubernetes")
    from ripstop.cli.kube import cluster

    return cluster.logs(given, names[0], slot, tail, follow="--follow" in given)


def _stacks(argv: Sequence[str]) -> int:
    given, names = _words("stacks", argv, (), least=1, most=2)
    if given is None:
        return 0
    ranks = [str(integer("RANK", rank, minimum=0, maximum=2**31)) for rank in names[1:]]
    _need("kubernetes")
    from ripstop.cli.kube import cluster

    return cluster.stacks(given, names[0], ranks)


def _scale(argv: Sequence[str]) -> int:
    given, names = _words("scale", argv, (), least=2, most=2)
    if given is None:
        return 0
    replicas = integer("N", names[1], minimum=1, maximum=2**31 - 1)
    _need("kubernetes")
    from ripstop.cli.kube import cluster

    return cluster.scale(given, names[0], replicas)


def _delete(argv: Sequence[str]) -> int:
    given, names = _words("delete", argv, (), least=1, most=1)
    if given is None:
        return 0
    _need("kubernetes")
    from ripstop.cli.kube import cluster

    return cluster.delete(given, names[0])


def _install(argv: Sequence[str]) -> int:
    given, _ = _words("install", argv, (IMAGE, DRY_RUN, TIMEOUT))
    if given is None:
        return 0
    from ripstop.kubernetes import deploy
    from ripstop.kubernetes.manifests import HOME as HOME_NAMESPACE

    image, home = given.text("--image", deploy.IMAGE), given.text("--namespace", HOME_NAMESPACE)
    timeout = integer("--timeout", given.text("--timeout", str(INSTALL_TIMEOUT_S)), minimum=0, maximum=MOST_TIMEOUT_S)
    if "--dry-run" in given:
        print(to_yaml(deploy.objects(image, home)), end="")
        return 0
    _need("kubernetes")
    from ripstop.cli.kube import cluster

    return cluster.install(given, image, home, timeout)


def _operator(argv: Sequence[str]) -> int:
    given, _ = _words("operator", argv, (HOME, HEALTH))
    if given is None:
        return 0
    _need("kubernetes", "kopf")
    from ripstop.cli.kube import cluster

    return cluster.operate(given)


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


def _need(*packages: str) -> None:
    from importlib.util import find_spec

    for package in packages:
        if find_spec(package) is None:
            raise UsageError(f"this needs the package {package}, which is not here; pip install 'ripstop[kubernetes]'")


def _words(
    command: str, argv: Sequence[str], flags: Sequence[Flag], least: int = 0, most: int = 0
) -> tuple[Given | None, tuple[str, ...]]:
    """Flags and names in any order; None when help was asked for, and given."""
    given, names = read_mixed((*CLUSTER_FLAGS, *flags), argv)
    if "--help" in given:
        print(USAGE, end="")
        return None, ()
    if not least <= len(names) <= most:
        wanted = next(line.strip() for line in USAGE.splitlines() if line.startswith(f"  {command} "))
        what = f"{names[most]}: one word too many" if len(names) > most else "a word is missing"
        raise UsageError(f"kube {command}: {what}; write ripstop kube {wanted.partition('  ')[0]}")
    return given, names
