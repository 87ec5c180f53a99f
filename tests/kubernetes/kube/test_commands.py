"""`ripstop kube` against a real API server."""

import json

import pytest

from ripstop.cli import main
from ripstop.kubernetes import deploy
from ripstop.kubernetes.kube_client import KubeClient, NotFound, kube_core_path
from ripstop.kubernetes.manifests import JOB, SLOT
from tests.kubernetes.kube.conftest import HOME
from tests.kubernetes.kube.lab import Place, eventually, needs_a_cluster

needs_a_cluster()

IMAGE = "--image=registry.example/train:7"


def kube(place: Place, *words: str) -> int:
    return main(["kube", words[0], f"--namespace={place.name}", *words[1:]])


def said(capsys: pytest.CaptureFixture[str]) -> str:
    both = capsys.readouterr()
    return both.out + both.err


def test_a_job_is_submitted_looked_at_scaled_and_deleted(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert kube(place, "submit", IMAGE, "--nnodes=1:4", "--replicas=2", "--name=t", "train.py") == 0
    assert said(capsys) == f"ElasticJob {place.name}/t created\n"
    assert place.job("t")["spec"]["template"]["spec"]["containers"][0]["command"] == ["ripstop", "run", "train.py"]
    assert kube(place, "scale", "t", "3") == 0
    assert said(capsys) == f"{place.name}/t scaled to 3 pods, from 2\n"
    assert kube(place, "status") == 0
    assert said(capsys).splitlines()[1].split() == ["t", "-", "-", "3", "-", "-", "-"]
    assert kube(place, "delete", "t") == 0
    assert place.forgotten("t")


def test_rendered_manifests_can_be_submitted(
    place: Place, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("job") / "job.yaml"
    main(["kube", "render", IMAGE, "--without-operator=statefulset", "--nnodes=2", "--name=t", "train.py"])
    file.write_text(said(capsys))
    assert kube(place, "submit", "-f", str(file)) == 0
    assert said(capsys).splitlines() == [f"{kind} {place.name}/{name} created" for kind, name in MADE]
    made = place.cluster.get(f"/apis/apps/v1/namespaces/{place.name}/statefulsets/t")
    assert made["spec"]["replicas"] == 2


MADE = [("Service", "t"), ("Secret", "t-token"), ("StatefulSet", "t")]


def test_one_job_is_shown_with_its_pods_and_events(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.submit("t")
    container = {"name": "main", "image": "x:1"}
    metadata = {"name": "t-0", "namespace": place.name, "labels": {JOB: "t", SLOT: "0"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
    eventually(
        lambda: place.cluster.create(kube_core_path(place.name, "pods"), pod)
    )  # the account's token may come late
    assert kube(place, "status", "t") == 0
    assert "t-0  Pending  no" in said(capsys)
    assert kube(place, "status", "t", "--json") == 0
    assert json.loads(said(capsys))["pods"][0]["metadata"]["name"] == "t-0"
    assert kube(place, "logs", "t") == 1
    assert "no pod of" in said(capsys)
    assert kube(place, "stacks", "t") == 1
    assert "is running; see `ripstop kube status t`" in said(capsys)


@pytest.mark.parametrize(
    ("words", "code", "word"),
    [
        (["status", "nobody"], 1, "no ElasticJob nobody in namespace"),
        (["scale", "t", "9"], 2, "t has 1 to 4 nodes, not 9; choose a number in this range"),
        (["submit", IMAGE, "--name=t", "train.py"], 2, "ElasticJob t exists already; choose another --name"),
        (["submit", "-f", "/no/such/file"], 2, "--file=/no/such/file: cannot be read: No such file or directory"),
        (["submit", "-f", "/dev/zero"], 2, "--file=/dev/zero: cannot be read: it is larger than 1 MiB"),
        (["status", "--context=moon"], 1, "moon"),
    ],
)
def test_a_mistake_changes_nothing(
    place: Place, capsys: pytest.CaptureFixture[str], words: list[str], code: int, word: str
) -> None:
    place.submit("t")
    before = place.job("t")
    assert kube(place, *words) == code
    assert word in said(capsys)
    assert place.job("t") == before


def test_an_operator_is_installed_and_again(cluster: KubeClient, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"/apis/apps/v1/namespaces/{HOME}/deployments/{deploy.NAME}"
    try:
        assert main(["kube", "install", f"--namespace={HOME}", "--image=x:1", "--timeout=0"]) == 0
        assert f"Deployment {deploy.NAME} created" in said(capsys)
        assert main(["kube", "install", f"--namespace={HOME}", "--image=x:2", "--timeout=0"]) == 0
        assert f"Deployment {deploy.NAME} updated" in said(capsys)
        assert cluster.get(path)["spec"]["template"]["spec"]["containers"][0]["image"] == "x:2"
    finally:
        cluster.delete(path)


def test_an_operator_that_does_not_run_is_not_reported_as_installed(
    cluster: KubeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"/apis/apps/v1/namespaces/{HOME}/deployments/{deploy.NAME}"
    try:
        assert main(["kube", "install", f"--namespace={HOME}", "--image=lab.invalid/none:1", "--timeout=2"]) == 1
        words = said(capsys)
        assert "waiting for the operator: " in words
        assert "the operator does not run after 2 s: " in words
    finally:
        cluster.delete(path)


def test_a_missing_namespace_is_reported(cluster: KubeClient, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kube", "submit", "--namespace=ripstop-nowhere", IMAGE, "train.py"]) == 2
    assert "create the namespace" in said(capsys)
    with pytest.raises(NotFound):
        cluster.get("/api/v1/namespaces/ripstop-nowhere")
