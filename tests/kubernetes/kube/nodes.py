"""Real nodes for tests: the operator in a pod of its own, a name service, and a job that trains and notes every step.

RIPSTOP_TEST_NODES names a command that does to a node what happens to machines: `COMMAND cut N`, `heal N`, `kill N`
and `start N`, N being the number in the node's name.  There are three nodes, on this machine: their pods run its own
Python, from its file system.  What the tests themselves need (operator, name service, etcd) is on the first node, which
stays.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ripstop.kubernetes import deploy
from ripstop.kubernetes.kube_client import KubeClient, kube_core_path
from tests.kubernetes.kube.lab import HERE, Place, eventually, needs_a_cluster

ROOT = HERE.parents[2]
IMAGE = os.environ.get("RIPSTOP_TEST_IMAGE", "lab.invalid/busybox:1")
WAIT_TIMEOUT_S = 120.0  # torch starts slowly where three nodes share a machine
EVERY = 5  # steps: a checkpoint


def needs_nodes() -> None:
    """For the top of a test file: without nodes, it skips as a whole."""
    needs_a_cluster()
    if not os.environ.get("RIPSTOP_TEST_NODES"):
        pytest.skip(
            "no RIPSTOP_TEST_NODES: it needs three real nodes, and a command to take one away", allow_module_level=True
        )


def happens(what: str, node: str) -> None:
    """To a node: cut, heal, kill, start."""
    number = node.lstrip("abcdefghijklmnopqrstuvwxyz-")
    subprocess.run([os.environ["RIPSTOP_TEST_NODES"], what, number], check=True)


def tell(what: str, **seconds: float) -> None:
    print(f"\n{what}: " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()), flush=True)


# pods -----------------------------------------------------------------------------------------------------------------


def a_pod(command: list[str], more: dict[str, bool] | None = None) -> dict[str, Any]:
    """A pod with this machine's Python; paths that it sees besides, and whether only to read."""
    paths = dict.fromkeys(("/usr", sys.prefix, sys.base_prefix, str(ROOT)), True) | (more or {})
    volumes = [{"name": f"v{i}", "hostPath": {"path": path}} for i, path in enumerate(paths)]
    mounts = [{"name": f"v{i}", "mountPath": path, "readOnly": paths[path]} for i, path in enumerate(paths)]
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": command,
        "env": [{"name": "PYTHONPATH", "value": f"{ROOT}/src"}],
        "volumeMounts": [*mounts, {"name": "tmp", "mountPath": "/tmp"}],
    }
    return {"volumes": [*volumes, {"name": "tmp", "emptyDir": {}}], "containers": [container]}


def on(node: str) -> dict[str, Any]:
    return {"nodeSelector": {"kubernetes.io/hostname": node}}


def first_node(cluster: KubeClient) -> str:
    return min(item["metadata"]["name"] for item in cluster.list("/api/v1/nodes"))


def operators_deployment(home: str, node: str) -> dict[str, Any]:
    """What `deploy/` holds, with this machine's Python for an image; all else, rights and restrictions, as there."""
    deployment = deploy.deployment(IMAGE, home)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ours = a_pod([sys.executable, "-m", *container["command"]])
    (main,) = ours["containers"]
    container |= {
        "imagePullPolicy": "Never",
        "command": main["command"],
        "env": [*container["env"], *main["env"]],
        "volumeMounts": [mount for mount in main["volumeMounts"] if mount["name"] != "tmp"],
    }
    pod |= on(node) | {"volumes": [volume for volume in ours["volumes"] if volume["name"] != "tmp"]}
    return deployment


def helper(place: Place, name: str, command: list[str], node: str) -> str:
    """A pod for the tests' own needs; its address."""
    place.create("Pod", name, spec=a_pod(command) | on(node))
    path = kube_core_path(place.name, "pods", name)
    eventually(lambda: place.cluster.get(path)["status"]["phase"] == "Running", WAIT_TIMEOUT_S)
    return str(place.cluster.get(path)["status"]["podIP"])


def name_service(place: Place, node: str) -> str:
    """For a cluster that has none; its address."""
    rights = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "names", "namespace": place.name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": place.name}],
    }
    place.cluster.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{place.name}/rolebindings", rights)
    return helper(place, "names", [sys.executable, str(HERE / "names.py"), place.name], node)


def template(folder: Path, names: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "ripstop", "run", str(HERE / "steps.py"), str(folder)]
    spec = a_pod(command, {str(folder): False})
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"ripstop.dev/job": "train"}}}
    wish = [{"weight": 100, "podAffinityTerm": apart}]
    spec["affinity"] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": wish}}
    return {"spec": spec | {"dnsPolicy": "None", "dnsConfig": {"nameservers": [names]}}}


# a job ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    at: float
    pod: str
    rank: int
    world: int
    number: int


@dataclass
class Training:
    """The job of these tests, and what it did so far."""

    place: Place
    folder: Path
    kubectl: str
    base: str  # the node that has to stay
    names: str  # the name service's address

    def submit(self, **spec: Any) -> None:
        self.place.submit(nprocPerNode=1, shutdownTimeout=5, template=template(self.folder, self.names), **spec)

    def steps(self) -> list[Step]:
        lines = (self.folder / "steps").read_text().splitlines() if (self.folder / "steps").exists() else []
        words = [line.split() for line in lines]
        return [Step(float(at), pod, int(rank), int(world), int(n)) for at, pod, rank, world, n in words]

    def first(self, since: float, fits: Callable[[Step], bool]) -> Step:
        """The first step after a time that is as wanted, once there is one."""
        return eventually(
            lambda: next((step for step in self.steps() if step.at > since and fits(step)), None), WAIT_TIMEOUT_S
        )  # type: ignore[return-value]

    def running(self, pod: str, *, instead: str = "") -> float:
        """When the pod was seen to run first; not the one of that uid."""

        def runs() -> bool:
            item = self.place.pods().get(pod)
            return item is not None and item["metadata"]["uid"] != instead and item["status"]["phase"] == "Running"

        eventually(runs, WAIT_TIMEOUT_S)
        return time.time()

    def steady(self, world: int) -> None:
        """Wait until all of so many train."""
        now = time.time()
        for slot in range(world):
            self.first(now, lambda step, slot=slot: (step.world, step.pod) == (world, f"train-{slot}"))  # type: ignore[misc]

    def node(self, pod: str) -> str:
        return str(self.place.pods()[pod]["spec"]["nodeName"])

    def spread(self) -> str:
        """See to it that every pod has a node of its own; one to lose, whose node need not stay."""
        for _ in range(3):
            self.steady(3)
            nodes = {pod: self.node(pod) for pod in ("train-0", "train-1", "train-2")}
            alone = [pod for pod, node in nodes.items() if list(nodes.values()).count(node) == 1]
            if len(alone) == 3:
                break
            pod = next(pod for pod in ("train-2", "train-1") if pod not in alone)
            uid = self.place.uids()[pod]
            self.do("delete", "pod", pod, "--wait=false")
            self.running(pod, instead=uid)
        assert len(alone) == 3, nodes
        return next(pod for pod in ("train-2", "train-1") if nodes[pod] != self.base)

    def ready(self, node: str) -> bool:
        items = self.place.cluster.list("/api/v1/nodes")
        conditions = next(item["status"]["conditions"] for item in items if item["metadata"]["name"] == node)
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def agent(self, pod: str) -> int:
        """The process of a pod's agent, as this machine numbers it."""
        for process in Path("/proc").iterdir():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                mine = str(self.folder).encode() in words and b"ripstop" in words
                if mine and f"HOSTNAME={pod}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    return int(process.name)
            except OSError:  # it is no process, or no more
                continue
        raise AssertionError(f"no agent of {pod} on this machine")

    def kill(self, pod: str) -> Callable[[], object]:
        """What deletes a pod without any grace."""
        return lambda: self.do("delete", "pod", pod, "--grace-period=0", "--force", "--wait=false")

    def do(self, *words: str) -> str:
        command = [self.kubectl, "--namespace", self.place.name, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def loses(self, what: str, pod: str, take: Callable[[], object], *, of: int) -> None:
        """Something takes a pod: the others go on; it comes back, and then all go on."""
        uid = self.place.uids()[pod]
        began = time.time()
        take()
        ran = self.running(pod, instead=uid)
        whole = self.first(ran, lambda step: (step.world, step.pod) == (of, pod))
        fewer = next((step for step in self.steps() if step.at > began and step.world < of), None)
        goes_on = {"until_the_others_step": fewer.at - began} if fewer else {}
        tell(what, **goes_on, until_the_new_pod_runs=ran - began, then_until_all_step=whole.at - ran)
        self.steady(of)
        self.healthy()

    def goes_on(self) -> None:
        """No step went back behind a checkpoint."""
        mine = [step for step in self.steps() if step.rank == 0]
        for before, after in pairwise(mine):
            assert after.number > before.number - EVERY, (before, after)

    def healthy(self) -> None:
        """The same, and ranks went by slots all along."""
        self.goes_on()
        for step in self.steps():
            assert step.rank <= int(step.pod.removeprefix("train-")) and step.rank < step.world, step
            assert step.world < 3 or step.pod == f"train-{step.rank}", step


@contextmanager
def a_training(cluster: KubeClient, kubectl: str, folder: Path) -> Iterator[Training]:
    """A namespace with a name service, for a job to be submitted."""
    name = f"ripstop-test-nodes-{os.getpid()}-{folder.name}".replace("_", "-")
    cluster.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    place, node = Place(cluster, name), first_node(cluster)
    try:
        eventually(lambda: not place.gone("serviceaccounts", "default"))
        yield Training(place, folder, kubectl, node, name_service(place, node))
    finally:
        cluster.delete(f"/api/v1/namespaces/{name}")
        eventually(lambda: not place.pods(), 90)
