"""Real nodes, real pods, the operator in one of them: a job trains through all that happens to it.

How long each took is printed: `pytest -s`.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ripstop.kubernetes import deploy
from ripstop.kubernetes.kube_client import KubeClient, kube_core_path
from tests.kubernetes.kube.conftest import HOME
from tests.kubernetes.kube.lab import eventually
from tests.kubernetes.kube.nodes import WAIT_TIMEOUT_S, Training, a_training, happens, needs_nodes, tell, template

needs_nodes()

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("operators_pod")]


@pytest.fixture(scope="module")
def training(
    cluster: KubeClient, operators_pod: str, kubectl: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Training]:
    with a_training(cluster, kubectl, tmp_path_factory.mktemp("nodes")) as training:
        training.submit(minReplicas=1, maxReplicas=3, replicas=2)
        yield training


def test_the_operators_pod_is_nobody_and_can_write_nothing(operators_pod: str, kubectl: str) -> None:
    command = [kubectl, "exec", f"--namespace={HOME}", operators_pod, "--", "/bin/sh", "-c"]
    assert subprocess.run([*command, "id -u"], capture_output=True, text=True, check=True).stdout.strip() == "65532"
    for path in ("/x", "/tmp/x"):
        touched = subprocess.run([*command, f"touch {path}"], capture_output=True, text=True, check=False)
        assert touched.returncode != 0 and "Read-only file system" in touched.stderr, touched


def test_a_job_trains_on_two_nodes(training: Training) -> None:
    began = time.time()
    ran = max(training.running("train-0"), training.running("train-1"))
    step = training.first(0.0, lambda step: step.world == 2)
    tell("submitted", until_the_pods_run=ran - began, then_until_a_step=step.at - ran)
    training.steady(2)
    assert training.node("train-0") != training.node("train-1")
    training.healthy()


def test_its_status_is_what_its_coordinator_says(training: Training) -> None:
    eventually(lambda: training.place.job()["status"]["round"] >= 1, WAIT_TIMEOUT_S)
    eventually(lambda: 0 < training.place.job()["status"]["goodput"] < 1, WAIT_TIMEOUT_S)
    assert training.place.phase() == "Running"


def test_no_pod_has_to_guess_its_number(training: Training) -> None:
    assert "rank_by=slot: this node's number" not in training.do("logs", "train-1")


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
    eventually(lambda: "train-2" not in training.place.pods(), WAIT_TIMEOUT_S)
    training.steady(2)
    training.healthy()


def test_a_pod_that_is_deleted_comes_back_with_its_rank(training: Training) -> None:
    training.do("scale", "elasticjob/train", "--replicas=3")
    training.steady(3)
    take = ("delete", "pod", "train-1", "--wait=false")
    training.loses("pod deleted", "train-1", lambda: training.do(*take), of=3)


def test_a_pod_that_is_killed_comes_back_with_its_rank(training: Training) -> None:
    training.steady(3)
    training.loses("pod deleted by force", "train-2", training.kill("train-2"), of=3)


def test_a_pod_whose_agent_is_killed_is_replaced(training: Training) -> None:
    training.steady(3)
    agent = training.agent("train-1")
    training.loses("agent killed", "train-1", lambda: os.kill(agent, signal.SIGKILL), of=3)


def test_the_coordinators_pod_comes_back_and_the_job_goes_on(training: Training) -> None:
    training.steady(3)
    take = ("delete", "pod", "train-0", "--wait=false")
    training.loses("pod of slot 0 deleted", "train-0", lambda: training.do(*take), of=3)


def test_the_coordinators_agent_is_killed_and_the_job_goes_on(training: Training) -> None:
    training.steady(3)
    agent = training.agent("train-0")
    training.loses("agent of slot 0 killed", "train-0", lambda: os.kill(agent, signal.SIGKILL), of=3)


def test_a_pod_lost_together_with_the_operator_is_replaced_by_the_next_operator(
    training: Training, operators_pod: str, cluster: KubeClient
) -> None:
    training.steady(3)
    before = training.place.uids()
    selector = f"app.kubernetes.io/name={deploy.NAME}"

    def take() -> None:
        for pod in cluster.list(kube_core_path(HOME, "pods"), labelSelector=selector):
            cluster.delete(kube_core_path(HOME, "pods", pod["metadata"]["name"]), {"gracePeriodSeconds": 0})
        training.kill("train-2")()

    training.loses("pod and operator killed", "train-2", take, of=3)
    after = training.place.uids()
    assert (after["train-0"], after["train-1"]) == (before["train-0"], before["train-1"])


def test_logs_and_stacks_come_from_the_pods(training: Training) -> None:
    training.steady(3)
    ours = [sys.executable, "-m", "ripstop", "kube"]
    where = [f"--namespace={training.place.name}"]
    logs = subprocess.run([*ours, "logs", "train", *where], capture_output=True, text=True, check=True).stdout
    assert all(f"[train-{slot}]" in logs for slot in range(3)), logs
    stacks = subprocess.run([*ours, "stacks", "train", *where], capture_output=True, text=True, check=True).stdout
    assert "steps.py" in stacks and "rank 2" in stacks, stacks


def test_an_image_that_does_not_exist_is_a_condition_and_disturbs_no_other_job(training: Training) -> None:
    wrong = template(training.folder, training.names)
    wrong["spec"]["terminationGracePeriodSeconds"] = 1
    wrong["spec"]["containers"][0] |= {"image": "lab.invalid/no-such-image:1", "imagePullPolicy": "IfNotPresent"}
    began = time.time()
    training.place.submit("wrong", maxReplicas=1, replicas=1, template=wrong)
    try:
        eventually(lambda: training.place.condition("CannotStart", "wrong")["status"] == "True", WAIT_TIMEOUT_S)
        message = training.place.condition("CannotStart", "wrong")["message"]
        assert "no-such-image" in message and "correct the image" in message
        uids = training.place.uids("wrong")
        training.steady(3)
        assert training.place.uids("wrong") == uids
        assert {step.world for step in training.steps() if step.at > began} == {3}
    finally:
        training.do("delete", "elasticjob/wrong")
        eventually(lambda: not training.place.pods("wrong"), WAIT_TIMEOUT_S)  # a node that is drained would wait for it


def test_a_command_that_is_not_in_the_image_is_a_condition_and_is_tried_ever_more_slowly(training: Training) -> None:
    wrong = template(training.folder, training.names)
    wrong["spec"]["containers"][0]["command"] = ["/no/such/command"]
    training.place.submit("wrong", maxReplicas=1, replicas=1, template=wrong)
    try:
        eventually(lambda: training.place.condition("CannotStart", "wrong")["status"] == "True", WAIT_TIMEOUT_S)
        message = training.place.condition("CannotStart", "wrong")["message"]
        assert "/no/such/command" in message and "correct the command or the image" in message
        eventually(lambda: "CannotStart" in training.place.events("wrong"), WAIT_TIMEOUT_S)
        eventually(lambda: training.place.job("wrong")["status"]["losses"][0]["times"] >= 3, WAIT_TIMEOUT_S)
        assert training.place.condition("CannotStart", "wrong")["status"] == "True"
    finally:
        training.do("delete", "elasticjob/wrong")
        eventually(lambda: not training.place.pods("wrong"), WAIT_TIMEOUT_S)


def test_a_node_that_is_drained_is_left_in_order(training: Training) -> None:
    pod = training.spread()
    node = training.node(pod)
    drain = ("drain", node, "--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=60s")
    try:
        training.loses("node drained", pod, lambda: training.do(*drain), of=3)
        assert training.node(pod) != node
    finally:
        training.do("uncordon", node)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("loss", "remedy"), [("cut", "heal"), ("kill", "start")])
def test_a_node_that_is_lost_is_done_without(training: Training, loss: str, remedy: str) -> None:
    pod = training.spread()
    node = training.node(pod)
    try:
        training.loses(f"node lost: {loss}", pod, lambda: happens(loss, node), of=3)
        assert training.node(pod) != node
    finally:
        happens(remedy, node)
    back = time.time()
    eventually(lambda: training.ready(node), WAIT_TIMEOUT_S)
    training.steady(3)
    assert {step.world for step in training.steps() if step.at > back} == {3}
    training.healthy()


def test_it_ends_when_it_is_done(training: Training) -> None:
    training.steady(3)
    (training.folder / "end").touch()
    eventually(lambda: training.place.phase() == "Succeeded", WAIT_TIMEOUT_S)
    training.healthy()
