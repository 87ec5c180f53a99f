"""Hands for the tests: jobs, the pods of a kubelet that is not there, and operators."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ripstop.kubernetes import deploy
from ripstop.kubernetes.kube_client import ApiError, Conflict, KubeClient, NotFound, kube_core_path, kube_jobs_path
from ripstop.kubernetes.manifests import JOB
from ripstop.kubernetes.spec import GROUP, KIND, VERSION

WAIT_TIMEOUT_S = 30.0
HERE = Path(__file__).parent
NOWHERE = {"ripstop.dev/test": "nowhere"}  # no real node takes our pods
TALKATIVE = "10.1.2.3"  # the address of a coordinator that answers
SAYS = {"round": 7, "restarts": 2, "goodput": 0.97, "lastFailure": "rank 3 was killed", "target": 4}
T = TypeVar("T")


def needs_a_cluster() -> None:
    """For the top of a test file: without a cluster, it skips as a whole."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no KUBECONFIG: `make test-kube` says how to get one", allow_module_level=True)
    for package in ("kopf", "kubernetes", "yaml"):
        pytest.importorskip(package, reason=f"{package} is not installed: requirements/kube.txt")


def eventually(look: Callable[[], T], seconds: float = WAIT_TIMEOUT_S) -> T:
    """What `look` returns, once that is something; it may fail until then."""
    deadline = time.monotonic() + seconds
    while True:
        late = time.monotonic() > deadline
        try:
            if found := look():
                return found
            assert not late, f"still {found!r} after {seconds:.0f} s"
        except (ApiError, KeyError, IndexError):
            if late:
                raise
        time.sleep(0.05)


def stamp(ago: float = 0.0) -> str:
    return datetime.fromtimestamp(time.time() - ago, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def collection(item: dict[str, Any]) -> str:
    """Where objects of this kind are."""
    version, metadata = item["apiVersion"], item["metadata"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    place = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
    return f"{root}{place}/{item['kind'].lower()}s"


def apply(cluster: KubeClient, item: dict[str, Any]) -> bool:
    """Create it, or bring it up to date; whether it is new."""
    try:
        cluster.create(collection(item), item)
    except Conflict:
        cluster.patch(f"{collection(item)}/{item['metadata']['name']}", item)
        return False
    return True


def exists(cluster: KubeClient, item: dict[str, Any]) -> bool:
    try:
        cluster.get(f"{collection(item)}/{item['metadata']['name']}")
    except NotFound:
        return False
    return True


def service_account_config(cluster: KubeClient, admin: dict[str, Any], home: str, path: Path) -> Path:
    """A kubeconfig of the operator's service account."""
    account = kube_core_path(home, "serviceaccounts", f"{deploy.NAME}/token")
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 7200}}
    token = cluster.create(account, request)["status"]["token"]
    users = [{"name": "operator", "user": {"token": token}}]
    contexts = [{"name": "test", "context": {"cluster": admin["clusters"][0]["name"], "user": "operator"}}]
    path.write_text(json.dumps(admin | {"users": users, "contexts": contexts, "current-context": "test"}))
    return path


@dataclass
class Place:
    """A namespace of a test's own."""

    cluster: KubeClient
    name: str

    # jobs

    def submit(self, name: str = "train", **spec: Any) -> dict[str, Any]:
        return self.cluster.create(kube_jobs_path(self.name), a_job(name, **spec))

    def job(self, name: str = "train") -> dict[str, Any]:
        return self.cluster.get(kube_jobs_path(self.name, name))

    def forgotten(self, name: str = "train") -> bool:
        metadata = {"name": name, "namespace": self.name}
        return not exists(self.cluster, a_job(name) | {"metadata": metadata})

    def change(self, name: str = "train", **spec: Any) -> None:
        self.cluster.patch(kube_jobs_path(self.name, name), {"spec": spec})

    def scale(self, replicas: int, name: str = "train") -> None:
        self.cluster.patch(kube_jobs_path(self.name, name, part="scale"), {"spec": {"replicas": replicas}})

    def phase(self, name: str = "train") -> str:
        return str(self.job(name).get("status", {}).get("phase", ""))

    def condition(self, kind: str, name: str = "train") -> dict[str, Any]:
        conditions = self.job(name).get("status", {}).get("conditions", ())
        return next((each for each in conditions if each["type"] == kind), {"status": "", "message": ""})

    def events(self, name: str = "train") -> list[str]:
        """Reasons, with their numbers of times."""
        items = self.cluster.list(kube_core_path(self.name, "events"), fieldSelector=f"involvedObject.name={name}")
        return sorted(item["reason"] for item in items if item["involvedObject"]["kind"] == KIND)

    # pods, as a kubelet would see to them

    def pods(self, name: str = "train") -> dict[str, dict[str, Any]]:
        items = self.cluster.list(kube_core_path(self.name, "pods"), labelSelector=f"{JOB}={name}")
        return {item["metadata"]["name"]: item for item in items}

    def uids(self, name: str = "train") -> dict[str, str]:
        return {pod: item["metadata"]["uid"] for pod, item in self.pods(name).items()}

    def there(self, *names: str, job: str = "train") -> dict[str, str]:
        """Wait until exactly these pods are there; their uids."""
        eventually(lambda: set(self.uids(job)) == set(names))
        return self.uids(job)

    def start(self, *pods: str) -> None:
        for pod in pods:
            self.set_status(pod, phase="Running", conditions=[{"type": "Ready", "status": "True"}])

    def end(self, pod: str, code: int, message: str = "") -> None:
        state = {"terminated": {"exitCode": code, "message": message, "finishedAt": stamp()}}
        status = {"name": "main", "state": state, "ready": False, "restartCount": 0, "image": "x:1", "imageID": ""}
        self.set_status(pod, phase="Succeeded" if code == 0 else "Failed", containerStatuses=[status], conditions=[])

    def set_status(self, pod: str, **status: Any) -> None:
        self.cluster.patch(kube_core_path(self.name, "pods", f"{pod}/status"), {"status": status})

    def bind(self, pod: str, node: str) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        self.cluster.create(kube_core_path(self.name, "pods", f"{pod}/binding"), binding)

    # anything

    def create(self, kind: str, name: str, **body: Any) -> None:
        metadata = {"name": name, "namespace": self.name}
        self.cluster.create(
            kube_core_path(self.name, f"{kind.lower()}s"),
            {"apiVersion": "v1", "kind": kind, "metadata": metadata} | body,
        )

    def gone(self, kind: str, name: str) -> bool:
        try:
            self.cluster.get(kube_core_path(self.name, kind, name))
        except NotFound:
            return True
        return False


def a_job(name: str, **spec: Any) -> dict[str, Any]:
    template = {"spec": {"nodeSelector": NOWHERE, "containers": [{"name": "main", "image": "x:1"}]}}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {"maxReplicas": 4, "replicas": 2, "template": template} | spec,
    }


@dataclass
class Operators:
    """Operators that are ours to start and to kill."""

    config: Path
    log: Path
    home: str
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, namespace: str = "", *, last: int = 0, config: Path | None = None) -> subprocess.Popen[bytes]:
        """An operator; it kills itself right after its change of number `last`."""
        with self.log.open("ab") as log:
            operator = subprocess.Popen(
                [sys.executable, "-m", "tests.kubernetes.kube.operate", namespace, self.home, str(last)],
                cwd=HERE.parents[2],
                env=os.environ | {"KUBECONFIG": str(config or self.config)},
                stdout=log,
                stderr=log,
            )
        self.running.append(operator)
        return operator

    def watching(self, operator: subprocess.Popen[bytes]) -> None:
        """Wait until the watching namespace=; one that has ended fails the test with what it said."""
        eventually(lambda: operator.poll() is not None or "watching namespace=" in self.log.read_text())
        assert operator.poll() is None, self.log.read_text()

    def kill(self) -> None:
        for operator in self.running:
            operator.kill()
            operator.wait()
        self.running.clear()
