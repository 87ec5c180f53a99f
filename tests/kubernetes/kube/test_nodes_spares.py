"""Real nodes, and a job with a spare: it waits, and takes a lost pod's place at once.

How long each took is printed: `pytest -s`.
"""

import time
from collections.abc import Iterator

import pytest

from ripstop.kubernetes.kube_client import KubeClient
from tests.kubernetes.kube.lab import eventually
from tests.kubernetes.kube.nodes import WAIT_TIMEOUT_S, Training, a_training, needs_nodes, tell

needs_nodes()

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def training(
    cluster: KubeClient, operators_pod: str, kubectl: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Training]:
    with a_training(cluster, kubectl, tmp_path_factory.mktemp("spares")) as training:
        training.submit(minReplicas=2, maxReplicas=4, replicas=2, spares=1)
        yield training


def everybody_is_ready(training: Training, pods: int) -> None:
    eventually(lambda: training.place.job()["status"]["readyReplicas"] == pods, WAIT_TIMEOUT_S)


def trainers(training: Training, world: int) -> set[str]:
    """Who takes the next steps; all of them must be of a round of that size."""
    since = time.time()
    last = training.first(since, lambda step: step.world == world).number
    training.first(since, lambda step: step.number >= last + 5)
    steps = [step for step in training.steps() if step.at > since]
    assert {step.world for step in steps} == {world}
    return {step.pod for step in steps}


def test_as_many_train_as_replicas_says_although_there_is_room(training: Training) -> None:
    everybody_is_ready(training, 3)
    assert len(trainers(training, 2)) == 2
    training.goes_on()


def test_a_spare_takes_a_lost_pods_place_at_once(training: Training) -> None:
    before = trainers(training, 2)
    (spare,) = {"train-0", "train-1", "train-2"} - before
    victim = max(before)  # not slot 0, which has the coordinator
    uid, began = training.place.uids()[victim], time.time()
    training.kill(victim)()
    step = training.first(began, lambda step: step.pod == spare)
    tell("pod killed, spare in its place", until_all_step=step.at - began)
    training.running(victim, instead=uid)
    everybody_is_ready(training, 3)
    assert trainers(training, 2) == (before - {victim}) | {spare}, "who replaces it is the spare"
    training.goes_on()


@pytest.mark.parametrize("replicas", [3, 2])
def test_the_job_is_scaled_and_keeps_its_spare(training: Training, replicas: int) -> None:
    began = time.time()
    training.do("scale", "elasticjob/train", f"--replicas={replicas}")
    step = training.first(began, lambda step: step.world == replicas)
    tell(f"with a spare, scaled to {replicas}", until_all_step=step.at - began)
    everybody_is_ready(training, replicas + 1)
    assert len(trainers(training, replicas)) == replicas
    training.goes_on()
