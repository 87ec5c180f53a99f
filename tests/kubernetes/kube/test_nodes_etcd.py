"""Real nodes, and a job whose coordinator etcd elects: any pod may be lost, and the job is still known from outside.

How long each took is printed: `pytest -s`.
"""

import os
import shutil
import signal
from collections.abc import Iterator

import pytest

from ripstop.kubernetes.kube_client import KubeClient
from tests.kubernetes.kube.lab import eventually
from tests.kubernetes.kube.nodes import WAIT_TIMEOUT_S, Training, a_training, helper, needs_nodes

needs_nodes()
ETCD = shutil.which("etcd")
if ETCD is None:
    pytest.skip("no etcd here: apt install etcd-server", allow_module_level=True)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def training(
    cluster: KubeClient, operators_pod: str, kubectl: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Training]:
    with a_training(cluster, kubectl, tmp_path_factory.mktemp("etcd")) as training:
        listen = "--listen-client-urls=http://0.0.0.0:2379"
        command = [str(ETCD), "--data-dir=/tmp/etcd", listen, "--advertise-client-urls=http://0.0.0.0:2379"]
        address = helper(training.place, "etcd", command, training.base)
        where = {"backend": "etcd", "endpoints": [f"{address}:2379"]}
        training.submit(minReplicas=2, maxReplicas=3, replicas=3, rendezvous=where)
        yield training


def coordinator(training: Training) -> str:
    """The pod that was elected last; of those that are there, one in which nobody stepped down since."""

    def elected() -> str | None:
        for pod in training.place.pods():
            said = [
                line for line in training.do("logs", pod).splitlines() if "elected: " in line or "steps down" in line
            ]
            if said and "elected: " in said[-1]:
                return pod
        return None

    found = eventually(elected, WAIT_TIMEOUT_S)
    assert found is not None
    return found


def known_round(training: Training) -> int:
    """As the status says."""
    return int(training.place.job()["status"].get("round", 0))


def test_the_status_comes_from_the_elected_coordinator(training: Training) -> None:
    training.steady(3)
    eventually(lambda: known_round(training) >= 1, WAIT_TIMEOUT_S)
    training.healthy()


def test_the_elected_pod_is_killed_without_notice(training: Training) -> None:
    training.steady(3)
    before, pod = known_round(training), coordinator(training)
    agent = training.agent(pod)
    training.loses("coordinator's agent killed, with etcd", pod, lambda: os.kill(agent, signal.SIGKILL), of=3)
    eventually(lambda: known_round(training) > before, WAIT_TIMEOUT_S)


def test_the_pod_of_rank_0_is_deleted_by_force(training: Training) -> None:
    training.steady(3)
    training.loses("rank 0's pod deleted by force, with etcd", "train-0", training.kill("train-0"), of=3)


def test_it_ends_when_it_is_done(training: Training) -> None:
    training.steady(3)
    (training.folder / "end").touch()
    eventually(lambda: training.place.phase() == "Succeeded", WAIT_TIMEOUT_S)
    training.healthy()
