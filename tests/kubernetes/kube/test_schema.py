"""What the API server itself takes and refuses: the definition's schema, and its subresources."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from ripstop.kubernetes import crd
from ripstop.kubernetes.kube_client import ApiError, KubeClient, kube_jobs_path
from tests.kubernetes.golden import DEPLOY
from tests.kubernetes.kube.lab import Place, a_job, eventually, needs_a_cluster

needs_a_cluster()

NO_CONTAINER = {"spec": {"containers": []}}


def test_a_short_job_gets_its_defaults(place: Place) -> None:
    given = place.submit()["spec"]
    assert (given["minReplicas"], given["maxRestarts"], given["spares"], given["suspend"]) == (1, 3, 0, False)
    assert given["nprocPerNode"] == "auto"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"maxReplicas": None}, "spec.maxReplicas"),
        ({"maxReplicas": "four"}, "spec.maxReplicas"),
        ({"maxReplicas": 20_000}, "spec.maxReplicas"),
        ({"replicas": 0}, "spec.replicas"),
        ({"minReplicas": 0}, "spec.minReplicas"),
        ({"spares": -1}, "spec.spares"),
        ({"maxRestarts": -1}, "spec.maxRestarts"),
        ({"suspend": "yes"}, "spec.suspend"),
        ({"ttlSecondsAfterFinished": -1}, "spec.ttlSecondsAfterFinished"),
        ({"activeDeadlineSeconds": 0}, "spec.activeDeadlineSeconds"),
        ({"template": None}, "spec.template"),
        ({"template": {}}, "spec.template.spec"),
        ({"template": NO_CONTAINER}, "spec.template.spec.containers"),
        ({"rendezvous": {"backend": "zookeeper"}}, "spec.rendezvous.backend"),
    ],
)
def test_an_invalid_field_is_rejected(place: Place, spec: dict[str, Any], field: str) -> None:
    body = a_job("train", **spec)
    body["spec"] = {name: value for name, value in body["spec"].items() if value is not None}
    with pytest.raises(ApiError, match=field.replace(".", r"\.")) as refused:
        place.cluster.create(kube_jobs_path(place.name), body)
    assert refused.value.code == 422


@pytest.fixture
def _rules(cluster: KubeClient) -> Iterator[None]:
    """The definition with its rules, on a cluster that checks them."""
    if not crd.supports_rules(cluster.get("/version")):
        pytest.skip("this cluster is older than rules in definitions (1.25)")
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd.definition()['metadata']['name']}"
    cluster.patch(path, crd.definition())
    try:
        yield
    finally:
        cluster.patch(path, crd.definition(rules=False))


@pytest.mark.usefixtures("_rules")
def test_an_invalid_combination_or_change_of_fields_is_rejected(place: Place) -> None:
    def refusal(**spec: Any) -> str:
        try:
            place.submit("wrong", **spec)
        except ApiError as error:
            return str(error)
        place.cluster.delete(kube_jobs_path(place.name, "wrong"))
        return ""

    eventually(lambda: "minReplicas must not be above maxReplicas" in refusal(minReplicas=5))
    assert "replicas must be from minReplicas to maxReplicas" in refusal(replicas=9)
    assert "rendezvous.endpoints are required with etcd" in refusal(rendezvous={"backend": "etcd"})
    with pytest.raises(ApiError, match="must be a service name"):
        place.submit("7up")
    place.submit()
    with pytest.raises(ApiError, match="maxRestarts cannot be changed"):
        place.change(maxRestarts=9)
    with pytest.raises(ApiError, match="replicas must be from"):
        place.scale(9)
    place.scale(3)


def test_kubectl_takes_the_definition_as_it_is_in_the_repository(cluster: KubeClient, kubectl: str) -> None:
    rules = crd.supports_rules(cluster.get("/version"))
    command = [kubectl, "apply", "--dry-run=server", "-f", str(DEPLOY / "crd.yaml"), f"--validate={rules}".lower()]
    subprocess.run(command, check=True, capture_output=True)


def test_a_number_of_workers_may_be_written_as_a_number(place: Place) -> None:
    assert place.submit(nprocPerNode=8)["spec"]["nprocPerNode"] == 8


def test_kubectl_refuses_a_field_that_there_is_not(place: Place, kubectl: str) -> None:
    body = json.dumps(a_job("train", maxRestart=3))

    def refusal() -> str:  # what a field is, kubectl learns a moment after the definition
        command = [kubectl, "create", "--dry-run=server", "--namespace", place.name, "-f", "-"]
        return subprocess.run(command, input=body, capture_output=True, text=True, check=False).stderr

    assert "maxRestart" in eventually(refusal)


def test_the_status_is_written_apart_from_the_spec(place: Place) -> None:
    place.submit()
    path = kube_jobs_path(place.name, "train")
    assert "status" not in place.cluster.patch(path, {"status": {"phase": "Running"}})
    both = place.cluster.patch(f"{path}/status", {"status": {"phase": "Running"}, "spec": {"replicas": 4}})
    assert (both["status"]["phase"], both["spec"]["replicas"]) == ("Running", 2)


def test_autoscalers_see_the_size_and_the_pods(place: Place) -> None:
    place.submit()
    status = {"replicas": 1, "selector": "a=b"}
    place.cluster.patch(kube_jobs_path(place.name, "train", part="status"), {"status": status})
    scale = place.cluster.get(kube_jobs_path(place.name, "train", part="scale"))
    assert (scale["spec"], scale["status"]) == ({"replicas": 2}, status)


def test_kubectl_scales(place: Place, kubectl: str) -> None:
    place.submit()
    command = [kubectl, "scale", "elasticjob/train", "--replicas=3", "--namespace", place.name]
    subprocess.run(command, check=True, capture_output=True)
    assert place.job()["spec"]["replicas"] == 3


def test_kubectl_shows_the_state_in_columns(place: Place, kubectl: str) -> None:
    place.submit()
    status = {"phase": "Running", "readyReplicas": 2, "round": 7, "restarts": 1, "goodput": 0.97}
    place.cluster.patch(kube_jobs_path(place.name, "train", part="status"), {"status": status})
    command = [kubectl, "get", "ej", "--namespace", place.name]

    def shown(*words: str) -> tuple[list[str], list[str]]:
        head, row = subprocess.run([*command, *words], check=True, capture_output=True, text=True).stdout.splitlines()
        return head.split(), row.split()[:-1]

    columns, state = ["NAME", "PHASE", "NODES", "WANTED", "ROUND", "RESTARTS"], ["train", "Running", "2", "2", "7", "1"]
    assert shown() == ([*columns, "AGE"], state)
    assert shown("-o=wide") == ([*columns, "GOODPUT", "AGE"], [*state, "0.97"])
