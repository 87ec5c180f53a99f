"""The commands of `ripstop kube` to a cluster, as the user of KUBECONFIG or as the pod's service account.

A command that changes an object reads it first, and rejects an invalid change without trying it.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ripstop.cli.options.flags import ParsedArguments
from ripstop.kubernetes import deploy
from ripstop.kubernetes.crd import supports_rules
from ripstop.kubernetes.kube_client import (
    Conflict,
    KubeClient,
    KubePodClient,
    NotFound,
    kube_collection_path,
    kube_core_path,
    kube_jobs_path,
)
from ripstop.kubernetes.manifests import HOME, JOB, SLOT, to_yaml
from ripstop.kubernetes.pods import pod_waiting_reason, trainer_container_name
from ripstop.kubernetes.spec import KIND
from ripstop.model.errors import RipstopError, UsageError
from ripstop.model.parsers import integer, read_bounded_for_parser, read_file_for_parser
from ripstop.model.text_formatting import format_table

Json = Mapping[str, Any]
POLL_INTERVAL_S = 2.0  # between two looks for new pods
MAX_TAIL_LINES = 1_000_000
INSTALL_TIMEOUT_S, MAX_TIMEOUT_S = 120, 86_400
FINAL_PHASES = ("Succeeded", "Failed")
KINDS = (  # of objects that ripstop creates
    *(KIND, "CustomResourceDefinition", "Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role"),
    *("RoleBinding", "Deployment", "Service", "Secret", "StatefulSet", "Job"),
)
POD_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def _require_cluster_packages(*packages: str) -> None:
    from importlib.util import find_spec

    for package in packages:
        if find_spec(package) is None:
            raise UsageError(f"the package {package} is not installed; pip install 'ripstop[kubernetes]'")


def _connect_to_cluster(args: ParsedArguments) -> tuple[str, KubeClient]:
    """The namespace and the cluster that a command is about."""
    _require_cluster_packages("kubernetes")
    return _cluster_namespace(args), KubeClient(args.text("--context") or None)


def _cluster_namespace(args: ParsedArguments) -> str:
    """The namespace of --namespace, of this pod, or kubectl's current one."""
    if "--namespace" in args:
        return args.text("--namespace")
    if POD_NAMESPACE_FILE.exists():
        return POD_NAMESPACE_FILE.read_text().strip()
    from kubernetes import config

    try:
        contexts, active = config.list_kube_config_contexts()
    except config.ConfigException as error:
        raise UsageError(f"no cluster is configured ({error}); set KUBECONFIG") from None
    wanted = args.text("--context")
    chosen = next((context for context in contexts if context["name"] == wanted), None) if wanted else active
    if chosen is None:
        names = ", ".join(context["name"] for context in contexts)
        raise UsageError(f"--context={wanted}: unknown context; the contexts are {names}")
    return str(chosen["context"].get("namespace") or "default")


# create, scale, delete ------------------------------------------------------------------------------------------------


def load_file_for_cluster_command(name: str) -> list[dict[str, Any]]:
    """Read the objects of a YAML or JSON file."""
    _require_cluster_packages("kubernetes")  # which needs yaml too
    import yaml

    try:
        text = (read_bounded_for_parser(sys.stdin.buffer) if name == "-" else read_file_for_parser(name)).decode()
        documents = [document for document in yaml.safe_load_all(text) if document]
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UsageError(
            f"--file={name}: cannot be read: {why}; name a file with the output of `ripstop kube render`"
        ) from None
    found: list[Any] = []
    for document in documents:
        is_list = isinstance(document, dict) and document.get("kind") == "List"
        found += (document.get("items") or ()) if is_list else (document,)
    for item in found:
        if not isinstance(item, dict) or item.get("kind") not in KINDS or not item.get("metadata", {}).get("name"):
            raise UsageError(
                f"--file={name}: contains an object without a name, or of another kind than {', '.join(KINDS)}; "
                "use kubectl apply"
            )
    if not found:
        raise UsageError(f"--file={name}: is empty; name a file with the output of `ripstop kube render`")
    return found


def submit_to_cluster(args: ParsedArguments, objects: Sequence[dict[str, Any]]) -> int:
    here, server = _connect_to_cluster(args)
    for item in objects:
        item["metadata"].setdefault("namespace", here)
        kind, name = item["kind"], item["metadata"]["name"]
        try:
            server.create(kube_collection_path(item), item)
        except Conflict:
            raise UsageError(
                f"{kind} {name} exists already; choose another --name, or run `ripstop kube delete {name}` first"
            ) from None
        except NotFound as error:
            raise UsageError(
                f"{kind} {name}: {error}; run `ripstop kube install` once in a cluster, and create the namespace"
            ) from None
        print(f"{kind} {item['metadata']['namespace']}/{name} created")
    return 0


def scale_on_cluster(args: ParsedArguments, names: Sequence[str]) -> int:
    name, replicas = names[0], integer("N", names[1], minimum=1, maximum=2**31 - 1)
    here, server = _connect_to_cluster(args)
    spec = _get_cluster_job(server, here, name)["spec"]
    least, most = spec.get("minReplicas", 1), spec["maxReplicas"]
    if not least <= replicas <= most:
        raise UsageError(f"{name} has {least} to {most} nodes, not {replicas}; choose a number in this range")
    server.patch(kube_jobs_path(here, name, part="scale"), {"spec": {"replicas": replicas}})
    print(f"{here}/{name} scaled to {replicas} pods, from {spec.get('replicas', most)}")
    return 0


def delete_from_cluster(args: ParsedArguments, names: Sequence[str]) -> int:
    name = names[0]
    here, server = _connect_to_cluster(args)
    _get_cluster_job(server, here, name)
    server.delete(kube_jobs_path(here, name), {"propagationPolicy": "Background"})
    print(f"deleting {here}/{name} and its pods")
    return 0


def _get_cluster_job(server: KubeClient, namespace: str, name: str) -> dict[str, Any]:
    try:
        return server.get(kube_jobs_path(namespace, name))
    except NotFound:
        raise RipstopError(f"no ElasticJob {name} in namespace {namespace}; `ripstop kube status` lists them") from None


# status, logs, stacks -------------------------------------------------------------------------------------------------


def print_cluster_status(args: ParsedArguments, names: Sequence[str]) -> int:
    here, server = _connect_to_cluster(args)
    if not names:
        jobs = server.list(kube_jobs_path(here))
        print(
            json.dumps(jobs, indent=2)
            if "--json" in args
            else format_table([*map(_cluster_job_row, jobs)], JOB_COLUMNS)
        )
        return 0
    name = names[0]
    job = _get_cluster_job(server, here, name)
    pods = _list_cluster_pods(server, here, name)
    about = f"involvedObject.kind={KIND},involvedObject.name={name}"
    events = server.list(kube_core_path(here, "events"), fieldSelector=about)
    report: dict[str, Any] = {"job": job, "pods": pods, "events": events}
    print(json.dumps(report, indent=2) if "--json" in args else describe_cluster_job(**report))
    return 0


JOB_COLUMNS = ("NAME", "PHASE", "NODES", "WANTED", "ROUND", "RESTARTS", "GOODPUT")
POD_COLUMNS = ("POD", "PHASE", "READY", "NODE", "REASON")
EVENT_COLUMNS = ("TIME", "EVENT", "COUNT", "MESSAGE")


def _cluster_job_row(job: Json) -> tuple[str, ...]:
    state: Json = job.get("status") or {}
    wanted = job["spec"].get("replicas", job["spec"].get("maxReplicas", "-"))
    keys = ("phase", "readyReplicas", "round", "restarts", "goodput")
    phase, nodes, *others = (str(state.get(key, "-")) for key in keys)
    return (job["metadata"]["name"], phase, nodes, str(wanted), *others)


def describe_cluster_job(job: Json, pods: Sequence[Json], events: Sequence[Json]) -> str:
    state: Json = job.get("status") or {}
    lines = [format_table([_cluster_job_row(job)], JOB_COLUMNS)]
    conditions = [c for c in state.get("conditions", ()) if c["status"] == "True"]
    lines += [f"{c['type']} since {c['lastTransitionTime']}: {c.get('message', '')}" for c in conditions]
    if failure := state.get("lastFailure"):
        lines.append(f"last failure: {failure}")
    lines += ["", format_table([_cluster_pod_row(pod) for pod in pods], POD_COLUMNS)]
    if events:
        latest = sorted(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime")))[-10:]
        lines += ["", format_table([_cluster_event_row(event) for event in latest], EVENT_COLUMNS)]
    return "\n".join(lines)


def _cluster_pod_row(pod: Json) -> tuple[str, ...]:
    state: Json = pod.get("status") or {}
    first: Json = next(iter(state.get("containerStatuses") or ()), {})
    held: Json = next(iter((first.get("state") or {}).values()), {})
    why = state.get("reason") or held.get("reason") or ""
    where = pod["spec"].get("nodeName", "-")
    ready = "yes" if first.get("ready") else "no"
    return pod["metadata"]["name"], str(state.get("phase", "-")), ready, where, str(why)


def _cluster_event_row(event: Json) -> tuple[str, ...]:
    when = event.get("lastTimestamp") or event.get("eventTime") or ""
    return str(when), str(event.get("reason")), str(event.get("count") or 1), str(event.get("message", ""))


def _list_cluster_pods(server: KubeClient, namespace: str, name: str) -> list[dict[str, Any]]:
    """The job's pods, ordered by slot."""
    found = server.list(kube_core_path(namespace, "pods"), labelSelector=f"{JOB}={name}")
    return sorted(found, key=lambda pod: int(pod["metadata"]["labels"].get(SLOT, -1)))


def print_cluster_logs(args: ParsedArguments, names: Sequence[str]) -> int:
    name, follow = names[0], "--follow" in args
    slot = integer("SLOT", names[1], minimum=0, maximum=2**31) if len(names) > 1 else None
    tail = integer("--tail", args.text("--tail", "100"), minimum=0, maximum=MAX_TAIL_LINES)
    here, server = _connect_to_cluster(args)
    context = args.text("--context") or None
    followed: dict[str, threading.Thread] = {}
    job = _get_cluster_job(server, here, name)
    while True:
        for pod in _list_cluster_pods(server, here, name):
            uid, is_wanted = pod["metadata"]["uid"], slot is None or pod["metadata"]["labels"].get(SLOT) == str(slot)
            if is_wanted and uid not in followed and _cluster_pod_has_log(pod):
                followed[uid] = threading.Thread(
                    target=_print_cluster_pod_log, args=(context, pod, tail, follow), daemon=True
                )
                followed[uid].start()
        if not follow or (job.get("status") or {}).get("phase") in FINAL_PHASES:
            break
        time.sleep(POLL_INTERVAL_S)
        job = _get_cluster_job(server, here, name)
    if not followed:
        which = f"no pod of slot {slot}" if slot is not None else "no pod"
        raise RipstopError(f"{which} of {here}/{name} has written output yet; see `ripstop kube status {name}`")
    for thread in followed.values():
        thread.join()
    return 0


def _cluster_pod_has_log(pod: Json) -> bool:
    first: Json = next(iter((pod.get("status") or {}).get("containerStatuses") or ()), {})
    return not (first.get("state") or {"waiting": {}}).keys() & {"waiting"}


def _print_cluster_pod_log(context: str | None, pod: Json, tail: int, follow: bool) -> None:
    """A line is one write, so lines of several pods are not mixed."""
    name, where = pod["metadata"]["name"], pod["metadata"]["namespace"]
    try:
        for line in KubePodClient(context).log(where, name, trainer_container_name(pod), tail=tail, follow=follow):
            sys.stdout.write(f"[{name}] {line}\n")
            sys.stdout.flush()
    except BrokenPipeError:
        os._exit(0)  # the reader of our output has closed it
    except RipstopError as error:
        print(f"ripstop kube logs: error: {error}", file=sys.stderr)


def print_cluster_stacks(args: ParsedArguments, names: Sequence[str]) -> int:
    """Run `ripstop stacks` in a pod, which has the coordinator's address and the job's secret."""
    name, ranks = names[0], [str(integer("RANK", rank, minimum=0, maximum=2**31)) for rank in names[1:]]
    here, server = _connect_to_cluster(args)
    _get_cluster_job(server, here, name)
    running = [
        pod for pod in _list_cluster_pods(server, here, name) if (pod.get("status") or {}).get("phase") == "Running"
    ]
    if not running:
        raise RipstopError(f"no pod of {here}/{name} is running; see `ripstop kube status {name}`")
    pod = running[0]
    command = [*ripstop_command_on_cluster(pod), "stacks", *ranks]
    client = KubePodClient(args.text("--context") or None)
    code, out, err = client.execute(here, pod["metadata"]["name"], trainer_container_name(pod), command)
    sys.stdout.write(out)
    sys.stderr.write(err)
    return code


def ripstop_command_on_cluster(pod: Json) -> list[str]:
    """How to call ripstop in a pod: as the pod's own command does, since it may not be on PATH."""
    trainer = pod["spec"]["containers"][0]
    command = [*(trainer.get("command") or ()), *(trainer.get("args") or ())]
    end = command.index("run") if "run" in command else 0
    return command[:end] if end and Path(command[end - 1]).name == "ripstop" else ["ripstop"]


# the operator ---------------------------------------------------------------------------------------------------------


def install_on_cluster(args: ParsedArguments, _: Sequence[str]) -> int:
    """Create or update the operator's objects, and wait until the operator runs."""
    image, home = args.text("--image", deploy.IMAGE), args.text("--namespace", HOME)
    timeout = integer("--timeout", args.text("--timeout", str(INSTALL_TIMEOUT_S)), minimum=0, maximum=MAX_TIMEOUT_S)
    if "--dry-run" in args:
        print(to_yaml(deploy.objects_to_deploy(image, home)), end="")
        return 0
    _require_cluster_packages("kubernetes")
    server = KubeClient(args.text("--context") or None)
    for item in deploy.objects_to_deploy(image, home, rules=supports_rules(server.get("/version"))):
        kind, name = item["kind"], item["metadata"]["name"]
        try:
            server.create(kube_collection_path(item), item)
            print(f"{kind} {name} created")
        except Conflict:
            server.patch(f"{kube_collection_path(item)}/{name}", item)
            print(f"{kind} {name} updated")
    if timeout:
        await_installed_operator(server, item, timeout)
    return 0


def await_installed_operator(server: KubeClient, deployment: Json, timeout: float) -> None:
    """Wait until the latest version of the deployment runs; print what its pods wait for."""
    home, name = deployment["metadata"]["namespace"], deployment["metadata"]["name"]
    selector = ",".join(f"{key}={value}" for key, value in deployment["spec"]["selector"]["matchLabels"].items())
    deadline, printed = time.monotonic() + timeout, ""
    while not deploy.is_deployment_rolled_out(current := server.get(f"{kube_collection_path(deployment)}/{name}")):
        pods = server.list(kube_core_path(home, "pods"), labelSelector=selector)
        why = next(filter(None, map(pod_waiting_reason, pods)), "its pod is not ready yet")
        if why != printed:
            print(f"waiting for the operator: {why}", flush=True)
        printed = why
        if time.monotonic() >= deadline:
            raise RipstopError(
                f"the operator does not run after {timeout:.0f} s: {why}; correct --image and install again, or see "
                f"`kubectl describe pods --namespace={home}`"
            )
        time.sleep(min(POLL_INTERVAL_S, timeout / 10))
    print(f"the operator runs: {current['spec']['template']['spec']['containers'][0]['image']}")


def run_cluster_operator(args: ParsedArguments, _: Sequence[str]) -> int:
    _require_cluster_packages("kubernetes", "kopf")
    from ripstop.kubernetes.job_poller import PolledJobApi
    from ripstop.kubernetes.operator import run_operator
    from ripstop.protocol.secret import api_token_from_secret

    run_operator(
        args.text("--namespace") or None,
        PolledJobApi(api_token_from_secret),
        home=args.text("--home", HOME),
        health=args.text("--health") or None,
    )
    return 0
