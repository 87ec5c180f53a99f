"""`ripstop kube`: jobs on Kubernetes.

`render` needs no cluster.  The other commands send requests to one through the `kubernetes` package
(`cli/kube/cluster_commands.py`).  A wrong command line is rejected before the first request.
"""

import json
import secrets
from collections.abc import Callable, Sequence

from msgspec import Struct

from ripstop.cli.kube import cluster_commands
from ripstop.cli.kube.job_objects import HELP, OWN_FLAGS, job_objects, parse_job_objects_arguments
from ripstop.cli.options.flags import HELP_FLAG, Flag, ParsedArguments, parse_flags_and_positionals
from ripstop.kubernetes.manifests import to_yaml
from ripstop.model.errors import HelpRequested, UsageError

USAGE = """\
usage: ripstop kube COMMAND …

Runs training jobs on Kubernetes: as ElasticJobs, which an operator keeps alive and resizes, or as plain objects.

examples
  ripstop kube install --image=registry/ripstop-operator:0.1.0
  ripstop kube submit --image=registry/train:1 --nnodes=2:4 --gpus=8 train.py
  ripstop kube logs train -f

commands
  render --image=IMAGE [FLAGS] train.py [ARGS]    print a job's manifests; needs no cluster
  submit --image=IMAGE [FLAGS] train.py [ARGS]    create a job; or submit --file FILE (-f) with rendered manifests
  status [NAME]                                   list all jobs, or show one with its pods and events
  logs NAME [SLOT] [-f|--follow] [--tail N]       print the output of its pods, each line with the pod's name
  stacks NAME [RANK]                              print the stacks of its workers
  scale NAME N                                    set its number of pods
  delete NAME                                     delete the job and its pods
  install [--image=IMAGE] [--timeout S] [--dry-run]   install the ElasticJob resource and its operator, and wait at most
                                                      S seconds until the operator runs; 0: do not wait (120)
  operator [--home NAMESPACE] [--health HOST:PORT]   run the operator, for one namespace or all; --home holds its key

cluster and output
  -n, --namespace NAMESPACE   the job's namespace (kubectl's current one)
  --context NAME              the context in KUBECONFIG (the current one)
  --json                      print JSON instead of YAML or a table

Defaults are in parentheses.  All commands except render --json need: pip install 'ripstop[kubernetes]'.
`ripstop kube render --help` has the flags of render and submit.

Exit codes: 0 done; 1 the cluster cannot be reached or rejected the request; 2 the command line is wrong.
"""
RENDER = f"""\
usage: ripstop kube render|submit --image=IMAGE [FLAGS] SCRIPT [ARGS]

Translates a command line of ripstop run to the objects of a job on Kubernetes.  render prints them, and submit creates
them in the cluster.

examples
  ripstop kube render --image=registry/train:1 --nnodes=2:4 --gpus=8 \\
      --max-restarts=3 train.py --lr 0.1
  ripstop kube submit --file=job.yaml

{HELP}
output and cluster
  --json                      render: print a JSON list instead of YAML
  -f, --file FILE             submit: create the objects of this file instead
  --context NAME              submit: the context in KUBECONFIG (the current one)

Defaults are in parentheses.

Exit codes: 0 done; 1 the cluster cannot be reached or rejected the objects; 2 the command
line is wrong.
"""
CONTEXT = Flag("--context", "NAME")
CLUSTER_FLAGS = (HELP_FLAG, Flag("--namespace", "NAMESPACE", short="-n"), CONTEXT)
JSON = Flag("--json")
FILE = Flag("--file", "FILE", short="-f")


class Subcommand(Struct, frozen=True):
    """A command to a cluster: its function, its flags, and how many names it takes."""

    run: Callable[[ParsedArguments, tuple[str, ...]], int]
    flags: tuple[Flag, ...] = ()
    least: int = 0
    most: int = 0


SUBCOMMANDS = {
    "status": Subcommand(cluster_commands.print_cluster_status, (JSON,), most=1),
    "logs": Subcommand(
        cluster_commands.print_cluster_logs, (Flag("--follow", short="-f"), Flag("--tail", "N")), least=1, most=2
    ),
    "stacks": Subcommand(cluster_commands.print_cluster_stacks, least=1, most=2),
    "scale": Subcommand(cluster_commands.scale_on_cluster, least=2, most=2),
    "delete": Subcommand(cluster_commands.delete_from_cluster, least=1, most=1),
    "install": Subcommand(
        cluster_commands.install_on_cluster, (Flag("--image", "IMAGE"), Flag("--dry-run"), Flag("--timeout", "SECONDS"))
    ),
    "operator": Subcommand(
        cluster_commands.run_cluster_operator, (Flag("--home", "NAMESPACE"), Flag("--health", "HOST:PORT"))
    ),
}
COMMANDS = ("render", "submit", *SUBCOMMANDS)
_ALL = (*CLUSTER_FLAGS, *OWN_FLAGS, JSON, FILE, *(flag for each in SUBCOMMANDS.values() for flag in each.flags))
FLAGS = tuple({flag.name: flag for flag in _ALL}.values())  # of all subcommands, for completion


def main(argv: Sequence[str]) -> int:
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        raise HelpRequested(USAGE)
    if name == "render":
        return _run_kube_render(rest)
    if name == "submit":
        return _run_kube_submit(rest)
    if name not in SUBCOMMANDS:
        raise UsageError(f"kube {name}: unknown command; write one of {', '.join(COMMANDS)}")
    command = SUBCOMMANDS[name]
    args, names = parse_flags_and_positionals((*CLUSTER_FLAGS, *command.flags), rest)
    if "--help" in args:
        raise HelpRequested(USAGE)
    if not command.least <= len(names) <= command.most:
        usage = next(line.strip() for line in USAGE.splitlines() if line.startswith(f"  {name} "))
        is_surplus = len(names) > command.most
        problem = f"{names[command.most]}: unexpected argument" if is_surplus else "an argument is missing"
        raise UsageError(f"kube {name}: {problem}; write ripstop kube {usage.partition('  ')[0]}")
    return command.run(args, names)


def _run_kube_render(argv: Sequence[str]) -> int:
    args = parse_job_objects_arguments(argv, (JSON,))
    if "--help" in args:
        raise HelpRequested(RENDER)
    objects = job_objects(args, secrets.token_urlsafe(32))
    if "--json" in args:
        content = objects[0] if len(objects) == 1 else {"apiVersion": "v1", "kind": "List", "items": objects}
        print(json.dumps(content, indent=2))
    else:
        print(to_yaml(objects), end="")
    return 0


def _run_kube_submit(argv: Sequence[str]) -> int:
    args = parse_job_objects_arguments(argv, (FILE, CONTEXT))
    if "--help" in args:
        raise HelpRequested(RENDER)
    if "--file" not in args:
        return cluster_commands.submit_to_cluster(args, job_objects(args, secrets.token_urlsafe(32)))
    if args.program or args.texts.keys() - {"--file", "--namespace", "--context"}:
        raise UsageError("--file and a command line both describe a job; remove one of them")
    return cluster_commands.submit_to_cluster(args, cluster_commands.load_file_for_cluster_command(args.text("--file")))
