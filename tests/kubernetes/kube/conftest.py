"""A real API server, which KUBECONFIG names; one on this machine, lest it be one that people need."""

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ripstop.kubernetes import deploy
from ripstop.kubernetes.kube_client import KubeClient, kube_core_path
from tests.kubernetes.kube.lab import Operators, Place, apply, collection, eventually, exists, service_account_config
from tests.kubernetes.kube.nodes import first_node, operators_deployment

HOME = "ripstop-test-system"


@pytest.fixture(scope="session")
def admin() -> dict[str, Any]:
    """The kubeconfig that we were given."""
    import yaml

    config: dict[str, Any] = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    host = urlsplit(config["clusters"][0]["cluster"]["server"]).hostname
    if host not in ("127.0.0.1", "::1", "localhost") and not os.environ.get("RIPSTOP_TEST_CLUSTER"):
        pytest.skip(f"KUBECONFIG is of a cluster elsewhere ({host}); RIPSTOP_TEST_CLUSTER=1 if it is for tests")
    return config


@pytest.fixture(scope="session")
def cluster(admin: dict[str, Any]) -> Iterator[KubeClient]:
    """The cluster, with our definition and rights."""
    cluster = KubeClient()
    # without the definition's rules, so that the operator sees what an older cluster would let through
    brought = [item for item in deploy.objects_to_deploy(home=HOME, rules=False) if item["kind"] != "Deployment"]
    ours = [item for item in brought if apply(cluster, item)]
    definition = f"{collection(brought[0])}/{brought[0]['metadata']['name']}"
    eventually(lambda: "Established" in json.dumps(cluster.get(definition)["status"]["conditions"]))
    try:
        yield cluster
    finally:
        for item in reversed(ours):
            cluster.delete(f"{collection(item)}/{item['metadata']['name']}")
        eventually(lambda: not any(exists(cluster, item) for item in ours), 90)  # lest the next session find it going


@pytest.fixture
def place(cluster: KubeClient) -> Iterator[Place]:
    name = f"ripstop-test-{secrets.token_hex(4)}"
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    cluster.create("/api/v1/namespaces", space)
    place = Place(cluster, name)
    eventually(lambda: not place.gone("serviceaccounts", "default"))  # without it no pod can be made
    try:
        yield place
    finally:
        cluster.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture(scope="session")
def account(admin: dict[str, Any], cluster: KubeClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's own kubeconfig."""
    path = tmp_path_factory.mktemp("kube") / "operator.json"
    return eventually(lambda: service_account_config(cluster, admin, HOME, path))


@pytest.fixture
def operators(account: Path, tmp_path: Path) -> Iterator[Operators]:
    """Operators of this test alone."""
    operators = Operators(account, tmp_path / "operator.log", HOME)
    try:
        yield operators
    finally:
        operators.kill()
        print(operators.log.read_text() if operators.log.exists() else "no operator")


@pytest.fixture(scope="module")
def _operator_of_the_file(account: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operators]:
    operators = Operators(account, tmp_path_factory.mktemp("operator") / "operator.log", HOME)
    try:
        operators.watching(operators.start())
        yield operators
    finally:
        operators.kill()
        print(operators.log.read_text())


@pytest.fixture
def operator(_operator_of_the_file: Operators) -> Iterator[subprocess.Popen[bytes]]:
    """One operator for all tests of a file; it has to live through them all, or the rest fails without waiting."""
    (operator,) = _operator_of_the_file.running
    assert operator.poll() is None, "the operator has ended; an earlier test shows why"
    yield operator
    assert operator.poll() is None, _operator_of_the_file.log.read_text()


@pytest.fixture(scope="module")
def operators_pod(cluster: KubeClient, kubectl: str) -> Iterator[str]:
    """An operator in a pod, from what `deploy/` holds, for all tests of a file; the pod's name, to begin with."""
    deployment = operators_deployment(HOME, first_node(cluster))
    path = f"{collection(deployment)}/{deployment['metadata']['name']}"
    cluster.create(collection(deployment), deployment)
    try:
        eventually(lambda: cluster.get(path)["status"]["readyReplicas"] == 1, 60)
        pods = cluster.list(kube_core_path(HOME, "pods"), labelSelector=f"app.kubernetes.io/name={deploy.NAME}")
        (pod,) = [p for p in pods if p["status"].get("phase") == "Running" and "deletionTimestamp" not in p["metadata"]]
        yield pod["metadata"]["name"]
    finally:
        logs = [kubectl, "logs", "--namespace", HOME, f"deployment/{deploy.NAME}", "--tail=200"]
        print(subprocess.run(logs, capture_output=True, text=True, check=False).stdout)
        cluster.delete(path, {"propagationPolicy": "Foreground"})
        eventually(lambda: not exists(cluster, deployment), 90)


@pytest.fixture(scope="session")
def kubectl(admin: dict[str, Any]) -> str:
    found = shutil.which(os.environ.get("KUBECTL", "kubectl"))
    if found is None:
        pytest.skip("no kubectl on PATH, nor named by KUBECTL")
    return found
