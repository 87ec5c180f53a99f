"""A torchrun-like command line to the objects of a job on Kubernetes: an ElasticJob, or what does without an operator.

Flags that say how large the job is and where it meets become fields of the spec; those that are a pod's own affair go
into its command; those that only the operator can answer are refused.  No cluster is asked, nothing is read or written.
What no flag says is as with `ripstop run`: one node, one worker, no restarts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ripstop.cli.commands.run import FLAGS as RUN_FLAGS
from ripstop.cli.options.flags import Flag, Given, read
from ripstop.cli.options.job import HELP as HELP_FLAG
from ripstop.cli.options.job import MOST_RESTARTS
from ripstop.kubernetes import plain, spec
from ripstop.kubernetes.spec import GROUP, KIND, VERSION, Spec, SpecProblem
from ripstop.model.config import MAX_SLOTS
from ripstop.model.errors import UsageError
from ripstop.model.parsers import ETCD_CONF, IGNORED_CONF, RDZV_CONF, duration, integer, key_values, node_range

HELP = """\
  --name NAME                 the job's name (the script's)
  -n, --namespace NAMESPACE   where it runs (the one of kubectl)
  --image IMAGE               the container's image; it has ripstop and the script
  --gpus N                    of NVIDIA, for each pod; also --nproc-per-node unless that is given
  --cpus N, --memory SIZE     for each pod, as Kubernetes writes them: 8, 500m, 64Gi
  --shared-memory SIZE        /dev/shm of each pod; 64 MiB otherwise, which NCCL and data loaders may find small
  --env NAME=VALUE,…          variables for the script
  --replicas N                pods to begin with (the most of --nnodes)
  --spares N                  pods besides that wait, warm, for one to be lost (0)
  --secret-name NAME          a Secret with the key `token`, the job's secret (one is made)
  --without-operator KIND     no ElasticJob, but a `statefulset` or an indexed `job`, and a service
  and ripstop run's: --nnodes, --nproc-per-node, --max-restarts, --restart-window, --shutdown-timeout, --rdzv-conf;
  --rdzv-backend=etcd with --rdzv-endpoint; what is said of the script or of output goes into the pod's command
"""
OWN_FLAGS = (
    Flag("--name", "NAME", from_environment=False),
    Flag("--namespace", "NAMESPACE", short="-n", from_environment=False),
    Flag("--image", "IMAGE", from_environment=False),
    Flag("--gpus", "N", from_environment=False),
    Flag("--cpus", "N", from_environment=False),
    Flag("--memory", "SIZE", from_environment=False),
    Flag("--shared-memory", "SIZE", from_environment=False),
    Flag("--env", "NAME=VALUE,…", from_environment=False),
    Flag("--replicas", "N", from_environment=False),
    Flag("--spares", "N", from_environment=False),
    Flag("--secret-name", "NAME", from_environment=False),
    Flag("--without-operator", "KIND", choices=plain.KINDS, from_environment=False),
)
IN_THE_SPEC = (
    *("--nnodes", "--nproc-per-node", "--max-restarts", "--restart-window", "--shutdown-timeout"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf"),
)
NOT_THE_USERS = (
    *("--standalone", "--node-rank", "--master-addr", "--master-port", "--local-addr", "--rdzv-id"),
    *("--probe-port", "--linger", "--config", "--dry-run"),
)
GIVEN_BY_SLOT = frozenset({"is_host", "rank_by"})
GIVEN_BY_THE_OPERATOR = frozenset({"target", "coordinator_port"})
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")


def words(argv: Sequence[str], more: Sequence[Flag] = ()) -> Given:
    """What the user wrote.  Variables of this shell are not the pods'."""
    return read((*OWN_FLAGS, *more, HELP_FLAG, *(flag for flag in RUN_FLAGS if flag.name != "--help")), argv, {})


def objects(given: Given, token: str) -> list[dict[str, Any]]:
    """All that there is to apply; `token` is for a job that makes its own secret."""
    name = _name(given)
    metadata = {"name": name} | ({"namespace": given.text("--namespace", "")} if "--namespace" in given else {})
    fields = _spec(given)
    found = spec.read(name, fields)
    if not isinstance(found, Spec):
        raise UsageError(_said(found))
    if "--without-operator" not in given:
        return [{"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": metadata, "spec": fields}]
    kind = given.text("--without-operator", "")
    if kind not in plain.KINDS:
        raise UsageError(f"--without-operator={kind}: there is no such way; write {' or '.join(plain.KINDS)}")
    return plain.objects(kind, metadata, found, token)


def _said(problems: Sequence[SpecProblem]) -> str:
    return "; ".join(f"{problem.where.removeprefix('spec.')} {problem.text}" for problem in problems)


def _name(given: Given) -> str:
    if "--name" in given:
        return given.text("--name", "")
    script = _program(given)[0]
    return script.rpartition("/")[2].removesuffix(".py").replace("_", "-").replace(".", "-").lower()


def _program(given: Given) -> tuple[str, ...]:
    if not given.program or not given.program[0]:
        raise UsageError("nothing to run; name the script after the flags: … --image=IMAGE train.py")
    return given.program


def _spec(given: Given) -> dict[str, Any]:
    for flag in NOT_THE_USERS:
        if flag in given:
            raise UsageError(f"{flag}: every pod gets its own, or has none; leave it out")
    least, most = node_range("--nnodes", given.text("--nnodes", "1"))
    fields: dict[str, Any] = {"minReplicas": least, "maxReplicas": most}
    fields["replicas"] = _whole(given, "--replicas", least, most, default=most)
    if "--spares" in given:
        fields["spares"] = _whole(given, "--spares", 0, 1000)
    fields["nprocPerNode"] = _workers(given)
    fields["maxRestarts"] = _whole(given, "--max-restarts", 0, MOST_RESTARTS, default=0)
    if "--restart-window" in given:
        duration("--restart-window", given.text("--restart-window", ""))
        fields["restartWindow"] = given.text("--restart-window", "")
    if "--shutdown-timeout" in given:
        fields["shutdownTimeout"] = _whole(given, "--shutdown-timeout", 0, 86_400)
    if "--secret-name" in given:
        fields["secretName"] = given.text("--secret-name", "")
    if rendezvous := _rendezvous(given):
        fields["rendezvous"] = rendezvous
    fields["template"] = {"spec": _pod(given)}
    return fields


def _whole(given: Given, flag: str, least: int, most: int, default: int = 0) -> int:
    return integer(flag, given.text(flag, str(default)), minimum=least, maximum=most)


def _workers(given: Given) -> str:
    if "--nproc-per-node" not in given:
        return str(_whole(given, "--gpus", 1, MAX_SLOTS, default=1))
    text = given.text("--nproc-per-node", "")
    if text not in ("auto", "gpu", "cpu"):
        integer(
            "--nproc-per-node", text, minimum=1, maximum=MAX_SLOTS, remedy="give a number above 0, or auto, gpu or cpu"
        )
    return text


def _rendezvous(given: Given) -> dict[str, Any]:
    found: dict[str, Any] = {}
    backend, endpoint = given.text("--rdzv-backend", "c10d"), given.text("--rdzv-endpoint", "")
    if backend not in ("c10d", "etcd"):
        raise UsageError(f"--rdzv-backend={backend}: pods meet at one of them, or by etcd; write c10d or etcd")
    if backend == "c10d" and endpoint:
        raise UsageError(f"--rdzv-endpoint={endpoint}: pods meet at the first of them; leave it out, or choose etcd")
    if backend == "etcd":
        if not endpoint:
            raise UsageError("--rdzv-backend=etcd: no etcd is named; write --rdzv-endpoint=HOST:PORT,…")
        found |= {"backend": "etcd", "endpoints": endpoint.split(",")}
    conf = key_values("--rdzv-conf", text := given.text("--rdzv-conf", ""))
    for key in conf:
        if key in GIVEN_BY_SLOT:
            raise UsageError(f"--rdzv-conf {key}: follows from a pod's number; leave it out")
        if key in GIVEN_BY_THE_OPERATOR:
            raise UsageError(f"--rdzv-conf {key}: is the operator's to say; leave it out")
        if key not in RDZV_CONF | IGNORED_CONF | ETCD_CONF.keys():
            raise UsageError(f"--rdzv-conf: there is no {key}; there are {', '.join(sorted(RDZV_CONF))}")
    return found | ({"conf": text} if conf else {})


# the pod --------------------------------------------------------------------------------------------------------------


def _pod(given: Given) -> dict[str, Any]:
    if not given.text("--image", ""):
        raise UsageError("no image is named, and a pod needs one; write --image=REGISTRY/NAME:TAG")
    trainer: dict[str, Any] = {
        "name": "trainer",
        "image": given.text("--image", ""),
        "command": ["ripstop", "run", *_kept(given), *_program(given)],
    }
    if variables := key_values("--env", given.text("--env", "")):
        trainer["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    if resources := _resources(given):
        trainer["resources"] = resources
    pod: dict[str, Any] = {"containers": [trainer]}
    if "--shared-memory" in given:
        trainer["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
        memory = {"medium": "Memory", "sizeLimit": _quantity(given, "--shared-memory")}
        pod["volumes"] = [{"name": "shared-memory", "emptyDir": memory}]
    return pod


def _kept(given: Given) -> list[str]:
    """The flags that are the pod's own affair, as they would be written there."""
    ours = {flag.name for flag in OWN_FLAGS} | {*IN_THE_SPEC}
    kept = [flag for flag in RUN_FLAGS if flag.name in given and flag.name not in ours]
    return [f"{flag.name}={given.text(flag.name, '')}" if flag.metavar else flag.name for flag in kept]


def _resources(given: Given) -> Mapping[str, Any]:
    limits: dict[str, Any] = {}
    if "--gpus" in given:
        limits["nvidia.com/gpu"] = _whole(given, "--gpus", 1, MAX_SLOTS)
    for flag, resource in (("--cpus", "cpu"), ("--memory", "memory")):
        if flag in given:
            limits[resource] = _quantity(given, flag)
    return {"limits": limits, "requests": dict(limits)} if limits else {}


def _quantity(given: Given, flag: str) -> str:
    text = given.text(flag, "")
    if not QUANTITY.fullmatch(text):
        raise UsageError(f"{flag}={text}: not a quantity as Kubernetes writes it; give 8, 500m or 64Gi")
    return text
