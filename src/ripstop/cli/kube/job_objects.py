"""Translate a torchrun command line to the Kubernetes objects of a job: an ElasticJob, or a StatefulSet or Job.

Flags about the job's size and its rendezvous become fields of the spec.  Flags about a pod's own processes go into the
pod's command.  Flags that the operator sets for each pod are rejected.  Defaults are those of `ripstop run`.  Pure.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ripstop.cli.commands.run import FLAGS as RUN_FLAGS
from ripstop.cli.options.flags import HELP_FLAG, Flag, ParsedArguments, parse_flags
from ripstop.cli.options.job import MAX_RESTARTS
from ripstop.kubernetes import spec
from ripstop.kubernetes.manifests import KINDS_WITHOUT_OPERATOR, manifests_without_operator
from ripstop.kubernetes.spec import GROUP, KIND, VERSION, Spec
from ripstop.model.config import MAX_SLOTS
from ripstop.model.errors import UsageError
from ripstop.model.parsers import duration, integer, key_values, node_range
from ripstop.model.rendezvous_conf import ETCD_CONF, IGNORED_CONF, RDZV_CONF

HELP = """\
job
  --name NAME                 the job's name (the name of the script)
  -n, --namespace NAMESPACE   the job's namespace (kubectl's current one)
  --image IMAGE               the container image, with ripstop and the script
  --gpus N                    NVIDIA GPUs of each pod; also sets --nproc-per-node
  --cpus N, --memory SIZE     resources of each pod, as Kubernetes quantities: 8, 500m, 64Gi
  --shared-memory SIZE        size of /dev/shm in each pod; NCCL and data loaders may need more (64 MiB)
  --env NAME=VALUE,…          environment variables of the script
  --replicas N                pods at the start (the maximum of --nnodes)
  --spares N                  additional pods that wait to replace a lost one (0)
  --secret-name NAME          the Secret whose key `token` holds the job's secret (a new one)
  --without-operator KIND     create a `statefulset` or an indexed `job` and a service instead of an ElasticJob

These flags of ripstop run become fields of the job: --nnodes, --nproc-per-node, --max-restarts, --restart-window,
--shutdown-timeout, --rdzv-conf, --standby, --standby-until, --rdzv-backend=etcd with --rdzv-endpoint.  Flags about the
script and its output go into the command of the pods.
"""
OWN_FLAGS = (
    Flag("--name", "NAME"),
    Flag("--namespace", "NAMESPACE", short="-n"),
    Flag("--image", "IMAGE"),
    Flag("--gpus", "N"),
    Flag("--cpus", "N"),
    Flag("--memory", "SIZE"),
    Flag("--shared-memory", "SIZE"),
    Flag("--env", "NAME=VALUE,…"),
    Flag("--replicas", "N"),
    Flag("--spares", "N"),
    Flag("--secret-name", "NAME"),
    Flag("--without-operator", "KIND", choices=KINDS_WITHOUT_OPERATOR),
)
SPEC_FLAGS = (
    *("--nnodes", "--nproc-per-node", "--max-restarts", "--restart-window", "--shutdown-timeout"),
    *("--standby", "--standby-until"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf"),
)
REJECTED_FLAGS = (
    *("--standalone", "--node-rank", "--master-addr", "--master-port", "--local-addr", "--rdzv-id"),
    *("--probe-port", "--linger", "--config", "--dry-run"),
)
SET_BY_SLOT = frozenset({"is_host", "rank_by"})
SET_BY_OPERATOR = frozenset({"target", "coordinator_port"})
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")


def parse_job_objects_arguments(argv: Sequence[str], more: Sequence[Flag] = ()) -> ParsedArguments:
    """Parse the command line, without this shell's variables: pods do not have them."""
    return parse_flags((*OWN_FLAGS, *more, HELP_FLAG, *(flag for flag in RUN_FLAGS if flag.name != "--help")), argv, {})


def job_objects(args: ParsedArguments, token: str) -> list[dict[str, Any]]:
    """The objects to create; `token` is the secret of a job that names no Secret."""
    if not args.program or not args.program[0]:
        raise UsageError("no script; write it after the flags: … --image=IMAGE train.py")
    name = _kube_job_name(args)
    metadata = {"name": name} | ({"namespace": args.text("--namespace")} if "--namespace" in args else {})
    fields = _kube_job_spec(args)
    found = spec.read_spec(name, fields)
    if not isinstance(found, Spec):
        raise UsageError("; ".join(f"{problem.where.removeprefix('spec.')} {problem.text}" for problem in found))
    if "--without-operator" not in args:
        return [{"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": metadata, "spec": fields}]
    kind = args.text("--without-operator")
    if kind not in KINDS_WITHOUT_OPERATOR:
        raise UsageError(f"--without-operator={kind}: unknown kind; write {' or '.join(KINDS_WITHOUT_OPERATOR)}")
    return manifests_without_operator(kind, metadata, found, token)


def _kube_job_name(args: ParsedArguments) -> str:
    if "--name" in args:
        return args.text("--name")
    return args.program[0].rpartition("/")[2].removesuffix(".py").replace("_", "-").replace(".", "-").lower()


def _kube_job_spec(args: ParsedArguments) -> dict[str, Any]:
    for flag in REJECTED_FLAGS:
        if flag in args:
            raise UsageError(f"{flag}: not available on Kubernetes: every pod gets its own settings; leave it out")
    least, most = node_range("--nnodes", args.text("--nnodes", "1"))
    fields: dict[str, Any] = {"minReplicas": least, "maxReplicas": most}
    fields["replicas"] = _job_objects_integer_flag(args, "--replicas", least, most, default=most)
    if "--spares" in args:
        fields["spares"] = _job_objects_integer_flag(args, "--spares", 0, 1000)
    fields["nprocPerNode"] = _kube_workers_per_pod(args)
    fields["maxRestarts"] = _job_objects_integer_flag(args, "--max-restarts", 0, MAX_RESTARTS, default=0)
    if "--restart-window" in args:
        duration("--restart-window", args.text("--restart-window"))
        fields["restartWindow"] = args.text("--restart-window")
    if "--shutdown-timeout" in args:
        fields["shutdownTimeout"] = _job_objects_integer_flag(args, "--shutdown-timeout", 0, 86_400)
    if "--standby" in args:
        fields["standby"] = args.text("--standby")
    if "--standby-until" in args:
        fields["standbyUntil"] = args.text("--standby-until")
    if "--secret-name" in args:
        fields["secretName"] = args.text("--secret-name")
    if rendezvous := _kube_job_rendezvous(args):
        fields["rendezvous"] = rendezvous
    fields["template"] = {"spec": _kube_job_pod(args)}
    return fields


def _job_objects_integer_flag(args: ParsedArguments, flag: str, least: int, most: int, default: int = 0) -> int:
    return integer(flag, args.text(flag, str(default)), minimum=least, maximum=most)


def _kube_workers_per_pod(args: ParsedArguments) -> str:
    if "--nproc-per-node" not in args:
        return str(_job_objects_integer_flag(args, "--gpus", 1, MAX_SLOTS, default=1))
    text = args.text("--nproc-per-node")
    if text not in ("auto", "gpu", "cpu"):
        integer(
            "--nproc-per-node", text, minimum=1, maximum=MAX_SLOTS, remedy="give a number above 0, or auto, gpu or cpu"
        )
    return text


def _kube_job_rendezvous(args: ParsedArguments) -> dict[str, Any]:
    found: dict[str, Any] = {}
    backend, endpoint = args.text("--rdzv-backend", "c10d"), args.text("--rdzv-endpoint")
    if backend not in ("c10d", "etcd"):
        raise UsageError(f"--rdzv-backend={backend}: not available on Kubernetes; write c10d or etcd")
    if backend == "c10d" and endpoint:
        raise UsageError(
            f"--rdzv-endpoint={endpoint}: with c10d the endpoint is the first pod; leave it out, "
            "or write --rdzv-backend=etcd"
        )
    if backend == "etcd":
        if not endpoint:
            raise UsageError("--rdzv-backend=etcd: the address of etcd is missing; write --rdzv-endpoint=HOST:PORT,…")
        found |= {"backend": "etcd", "endpoints": endpoint.split(",")}
    conf = key_values("--rdzv-conf", text := args.text("--rdzv-conf"))
    for key in conf:
        if key in SET_BY_SLOT:
            raise UsageError(f"--rdzv-conf {key}: derived from the pod's number; leave it out")
        if key in SET_BY_OPERATOR:
            raise UsageError(f"--rdzv-conf {key}: set by the operator; leave it out")
        if key not in RDZV_CONF | IGNORED_CONF | ETCD_CONF.keys():
            raise UsageError(f"--rdzv-conf {key}: unknown key; the keys are {', '.join(sorted(RDZV_CONF))}")
    return found | ({"conf": text} if conf else {})


# the pod --------------------------------------------------------------------------------------------------------------


def _kube_job_pod(args: ParsedArguments) -> dict[str, Any]:
    if not args.text("--image"):
        raise UsageError("--image is missing; write --image=REGISTRY/NAME:TAG")
    trainer: dict[str, Any] = {
        "name": "trainer",
        "image": args.text("--image"),
        "command": ["ripstop", "run", *_kube_pod_command_flags(args), *args.program_words_after_flags()],
    }
    if variables := key_values("--env", args.text("--env")):
        trainer["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    if resources := _kube_pod_resources(args):
        trainer["resources"] = resources
    pod: dict[str, Any] = {"containers": [trainer]}
    if "--shared-memory" in args:
        trainer["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
        memory = {"medium": "Memory", "sizeLimit": _job_object_quantity(args, "--shared-memory")}
        pod["volumes"] = [{"name": "shared-memory", "emptyDir": memory}]
    return pod


def _kube_pod_command_flags(args: ParsedArguments) -> list[str]:
    """The flags that go into the pod's command."""
    ours = {flag.name for flag in OWN_FLAGS} | {*SPEC_FLAGS}
    flags = [flag for flag in RUN_FLAGS if flag.name in args and flag.name not in ours]
    return [f"{flag.name}={args.text(flag.name, '')}" if flag.metavar else flag.name for flag in flags]


def _kube_pod_resources(args: ParsedArguments) -> Mapping[str, Any]:
    limits: dict[str, Any] = {}
    if "--gpus" in args:
        limits["nvidia.com/gpu"] = _job_objects_integer_flag(args, "--gpus", 1, MAX_SLOTS)
    for flag, resource in (("--cpus", "cpu"), ("--memory", "memory")):
        if flag in args:
            limits[resource] = _job_object_quantity(args, flag)
    return {"limits": limits, "requests": dict(limits)} if limits else {}


def _job_object_quantity(args: ParsedArguments, flag: str) -> str:
    text = args.text(flag)
    if not QUANTITY.fullmatch(text):
        raise UsageError(f"{flag}={text}: not a Kubernetes quantity; write 8, 500m or 64Gi")
    return text
