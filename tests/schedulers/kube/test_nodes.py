"""Real nodes, real pods: a job trains through all that happens to it.  How long each took is printed: `pytest -s`.

RIPSTOP_TEST_NODES names a command that cuts a node off and heals it again (`COMMAND cut N`, N being the number in the
node's name).  There are three nodes, on this machine: their pods run its own Python, from its file system.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ripstop.schedulers.kubernetes.client import Cluster, core_path
from tests.schedulers.kube.lab import HERE, Place, eventually, needs_a_cluster

needs_a_cluster()
if not os.environ.get("RIPSTOP_TEST_NODES"):
    pytest.skip(
        "no RIPSTOP_TEST_NODES: it needs three real nodes, and a command to cut one off", allow_module_level=True
    )

pytestmark = pytest.mark.long
ROOT = HERE.parents[2]
IMAGE = os.environ.get("RIPSTOP_TEST_IMAGE", "lab.invalid/busybox:1")
PATIENCE = 120.0  # seconds: torch is long in coming where three nodes share a machine
EVERY = 5  # steps: a checkpoint


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
    names: str  # the node of the name service: it has to stay

    def steps(self) -> list[Step]:
        lines = (self.folder / "steps").read_text().splitlines() if (self.folder / "steps").exists() else []
        words = [line.split() for line in lines]
        return [Step(float(at), pod, int(rank), int(world), int(n)) for at, pod, rank, world, n in words]

    def first(self, since: float, fits: Callable[[Step], bool]) -> Step:
        """The first step after a time that is as wanted, once there is one."""
        return eventually(
            lambda: next((step for step in self.steps() if step.at > since and fits(step)), None), PATIENCE
        )  # type: ignore[return-value]

    def running(self, pod: str, *, instead: str = "") -> float:
        """When the pod was seen to run first; not the one of that uid."""

        def runs() -> bool:
            item = self.place.pods().get(pod)
            return item is not None and item["metadata"]["uid"] != instead and item["status"]["phase"] == "Running"

        eventually(runs, PATIENCE)
        return time.time()

    def steady(self, world: int) -> None:
        """Wait until all of so many train."""
        now = time.time()
        for slot in range(world):
            self.first(now, lambda step, slot=slot: (step.world, step.pod) == (world, f"train-{slot}"))  # type: ignore[misc]

    def node(self, pod: str) -> str:
        return str(self.place.pods()[pod]["spec"]["nodeName"])

    def spread(self) -> str:
        """See to it that every pod has a node of its own; one to lose, whose node is not the name service's."""
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
        return next(pod for pod in ("train-2", "train-1") if nodes[pod] != self.names)

    def do(self, *words: str) -> str:
        command = [self.kubectl, "--namespace", self.place.name, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def healthy(self) -> None:
        """No step went back behind a checkpoint, and ranks went by slots all along."""
        mine = [step for step in self.steps() if step.rank == 0]
        for before, after in pairwise(mine):
            assert after.number > before.number - EVERY, (before, after)
        for step in self.steps():
            assert step.rank <= int(step.pod.removeprefix("train-")) and step.rank < step.world, step
            assert step.world < 3 or step.pod == f"train-{step.rank}", step


def tell(what: str, **seconds: float) -> None:
    print(f"\n{what}: " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()), flush=True)


@pytest.fixture(scope="module")
def training(
    cluster: Cluster, operator: Any, kubectl: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Training]:
    name = f"ripstop-test-nodes-{os.getpid()}"
    cluster.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    place = Place(cluster, name)
    eventually(lambda: not place.gone("serviceaccounts", "default"))
    folder = tmp_path_factory.mktemp("nodes")
    try:
        node, address = name_service(place)
        training = Training(place, folder, kubectl, node)
        sizes = {"minReplicas": 1, "maxReplicas": 3, "replicas": 2}
        place.submit(nprocPerNode=1, shutdownTimeout=5, template=template(folder, address), **sizes)
        yield training
    finally:
        cluster.delete(f"/api/v1/namespaces/{name}")
        eventually(lambda: not place.pods(), 90)


def name_service(place: Place) -> tuple[str, str]:
    """Its node and its address."""
    rights = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "names", "namespace": place.name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": place.name}],
    }
    place.cluster.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{place.name}/rolebindings", rights)
    place.create("Pod", "names", spec=a_pod([str(HERE / "names.py"), place.name], {}))
    path = core_path(place.name, "pods", "names")
    eventually(lambda: place.cluster.get(path)["status"]["phase"] == "Running")
    pod = place.cluster.get(path)
    return pod["spec"]["nodeName"], pod["status"]["podIP"]


def template(folder: Path, names: str) -> dict[str, Any]:
    spec = a_pod(["-m", "ripstop", "run", str(HERE / "steps.py"), str(folder)], {str(folder): False})
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"ripstop.dev/job": "train"}}}
    wish = [{"weight": 100, "podAffinityTerm": apart}]
    spec["affinity"] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": wish}}
    return {"spec": spec | {"dnsPolicy": "None", "dnsConfig": {"nameservers": [names]}}}


def a_pod(command: list[str], more: dict[str, bool]) -> dict[str, Any]:
    """A pod with this machine's Python; paths that it sees besides, and whether only to read."""
    paths = dict.fromkeys(("/usr", sys.prefix, sys.base_prefix, str(ROOT)), True) | more
    volumes = [{"name": f"v{i}", "hostPath": {"path": path}} for i, path in enumerate(paths)]
    mounts = [{"name": f"v{i}", "mountPath": path, "readOnly": paths[path]} for i, path in enumerate(paths)]
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": [sys.executable, *command],
        "env": [{"name": "PYTHONPATH", "value": f"{ROOT}/src"}],
        "volumeMounts": [*mounts, {"name": "tmp", "mountPath": "/tmp"}],
    }
    return {"volumes": [*volumes, {"name": "tmp", "emptyDir": {}}], "containers": [container]}


def test_a_job_trains_on_two_nodes(training: Training) -> None:
    began = time.time()
    ran = max(training.running("train-0"), training.running("train-1"))
    step = training.first(0.0, lambda step: step.world == 2)
    tell("submitted", until_the_pods_run=ran - began, then_until_a_step=step.at - ran)
    training.steady(2)
    assert training.node("train-0") != training.node("train-1")
    training.healthy()


def test_scaled_up_it_goes_on_with_three(training: Training) -> None:
    began = time.time()
    training.do("scale", "elasticjob/train", "--replicas=3")
    ran = training.running("train-2")
    step = training.first(began, lambda step: step.world == 3)
    last = max(each.at for each in training.steps() if each.world == 2)
    tell("2 to 3", until_the_pod_runs=ran - began, then_until_a_step_of_3=step.at - ran, without_a_step=step.at - last)
    training.steady(3)
    training.healthy()


def test_scaled_down_it_goes_on_with_two(training: Training) -> None:
    training.steady(3)
    began = time.time()
    training.do("scale", "elasticjob/train", "--replicas=2")
    step = training.first(began, lambda step: step.world == 2)
    tell("3 to 2", until_a_step_of_2=step.at - began)
    eventually(lambda: "train-2" not in training.place.pods(), PATIENCE)
    training.steady(2)
    training.healthy()


def loses(training: Training, what: str, pod: str, take: Callable[[], object], *, of: int) -> None:
    """Something takes a pod: the others go on; it comes back, and then all go on."""
    uid = training.place.uids()[pod]
    began = time.time()
    take()
    ran = training.running(pod, instead=uid)
    whole = training.first(ran, lambda step: (step.world, step.pod) == (of, pod))
    fewer = next((step for step in training.steps() if step.at > began and step.world < of), None)
    goes_on = {"until_the_others_step": fewer.at - began} if fewer else {}
    tell(what, **goes_on, until_the_new_pod_runs=ran - began, then_until_all_step=whole.at - ran)
    training.steady(of)
    training.healthy()


def test_a_pod_that_is_deleted_comes_back_with_its_rank(training: Training) -> None:
    training.do("scale", "elasticjob/train", "--replicas=3")
    training.steady(3)
    loses(training, "pod deleted", "train-1", lambda: training.do("delete", "pod", "train-1", "--wait=false"), of=3)


def test_a_pod_that_is_killed_comes_back_with_its_rank(training: Training) -> None:
    training.steady(3)
    kill = ("delete", "pod", "train-2", "--grace-period=0", "--force", "--wait=false")
    loses(training, "pod deleted by force", "train-2", lambda: training.do(*kill), of=3)


def test_the_coordinators_pod_comes_back_and_the_job_goes_on(training: Training) -> None:
    training.steady(3)
    take = ("delete", "pod", "train-0", "--wait=false")
    loses(training, "pod of slot 0 deleted", "train-0", lambda: training.do(*take), of=3)


def test_logs_and_stacks_come_from_the_pods(training: Training) -> None:
    training.steady(3)
    ours = [sys.executable, "-m", "ripstop", "kube"]
    where = [f"--namespace={training.place.name}"]
    logs = subprocess.run([*ours, "logs", "train", *where], capture_output=True, text=True, check=True).stdout
    assert all(f"[train-{slot}]" in logs for slot in range(3)), logs
    stacks = subprocess.run([*ours, "stacks", "train", *where], capture_output=True, text=True, check=True).stdout
    assert "steps.py" in stacks and "rank 2" in stacks, stacks


def test_a_node_that_is_drained_is_left_in_order(training: Training) -> None:
    pod = training.spread()
    node = training.node(pod)
    drain = ("drain", node, "--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=60s")
    try:
        loses(training, "node drained", pod, lambda: training.do(*drain), of=3)
        assert training.node(pod) != node
    finally:
        training.do("uncordon", node)


def test_a_node_that_is_cut_off_is_done_without(training: Training) -> None:
    pod = training.spread()
    node = training.node(pod)
    number = node.lstrip("abcdefghijklmnopqrstuvwxyz-")

    def network(do: str) -> None:
        subprocess.run([os.environ["RIPSTOP_TEST_NODES"], do, number], check=True)

    try:
        loses(training, "node cut off", pod, lambda: network("cut"), of=3)
        assert training.node(pod) != node
    finally:
        network("heal")
    healed = time.time()
    ready = f"-o=jsonpath={{.items[?(@.metadata.name=='{node}')].status.conditions[?(@.type=='Ready')].status}}"
    eventually(lambda: training.do("get", "nodes", ready) == "True", PATIENCE)
    training.steady(3)
    assert {step.world for step in training.steps() if step.at > healed} == {3}
    training.healthy()


def test_it_ends_when_it_is_done(training: Training) -> None:
    training.steady(3)
    (training.folder / "end").touch()
    eventually(lambda: training.place.phase() == "Succeeded", PATIENCE)
    training.healthy()
