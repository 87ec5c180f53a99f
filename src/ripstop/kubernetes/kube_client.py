"""Requests to a Kubernetes API server: objects as plain JSON, a pod's log, and commands in a pod.

The `kubernetes` package handles credentials.  Requests for objects do not use its types, so they work with any version
of that package and of the cluster.  Calls block.  A `KubeClient` may be used from any thread, a `KubePodClient` from
one.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlencode

from ripstop.kubernetes.spec import GROUP, PLURAL, VERSION, Json
from ripstop.model.errors import RipstopError

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 30.0
MAX_THREADS = 16
PAGE_SIZE = "500"  # objects
CLUSTER_WIDE = frozenset({"CustomResourceDefinition", "Namespace", "ClusterRole", "ClusterRoleBinding"})
Query = Mapping[str, str] | None
P = ParamSpec("P")
T = TypeVar("T")


class ApiError(RipstopError):
    """The server rejected a request; `code` is the HTTP status."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class NotFound(ApiError):
    """The object does not exist."""


class Conflict(ApiError):
    """The object exists already, or changed since it was read."""


class Invalid(ApiError):
    """The object breaks a rule of its definition."""


class ApiUnreachable(RipstopError):
    """The server did not reply."""


class KubeClient:
    """A cluster, accessed as the user of KUBECONFIG or as the pod's service account."""

    def __init__(self, context: str | None = None, kubeconfig: str | None = None) -> None:
        from kubernetes.client.rest import RESTClientObject

        self._configuration = _client_configuration(context, kubeconfig)
        self._configuration.connection_pool_maxsize = MAX_THREADS
        self._pool = RESTClientObject(self._configuration).pool_manager

    def credentials(self) -> dict[str, Any]:
        """The connection settings for kopf."""
        scheme, _, token = self._headers("GET").get("authorization", "").rpartition(" ")
        return {
            "server": self._configuration.host,
            "ca_path": self._configuration.ssl_ca_cert,
            "insecure": not self._configuration.verify_ssl,
            "scheme": scheme or None,
            "token": token or None,
            "certificate_path": self._configuration.cert_file,
            "private_key_path": self._configuration.key_file,
        }

    def get(self, path: str, **query: str) -> dict[str, Any]:
        return self.request("GET", path, query=query)

    def list(self, path: str, **query: str) -> list[dict[str, Any]]:
        """All objects at a path, read in pages."""
        items: list[dict[str, Any]] = []
        more = {"limit": PAGE_SIZE}
        while True:
            page = self.get(path, **query, **more)
            items += page["items"]
            if not (token := page["metadata"].get("continue")):
                return items
            more = {"limit": PAGE_SIZE, "continue": token}

    def create(self, path: str, body: Json) -> dict[str, Any]:
        return self.request("POST", path, body)

    def patch(self, path: str, body: Json) -> dict[str, Any]:
        """Apply a merge patch: null removes a field, lists are replaced."""
        return self.request("PATCH", path, body)

    def delete(self, path: str, body: Json | None = None) -> dict[str, Any]:
        return self.request("DELETE", path, body)

    def request(self, method: str, path: str, body: Json | None = None, *, query: Query = None) -> dict[str, Any]:
        from urllib3 import Timeout
        from urllib3.exceptions import HTTPError

        url = self._configuration.host + path + (f"?{urlencode(query)}" if query else "")
        try:
            response = self._pool.request(
                method,
                url,
                body=None if body is None else json.dumps(body).encode(),
                headers=self._headers(method),
                timeout=Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
                retries=False,
                redirect=False,
            )
        except (HTTPError, OSError) as error:
            raise ApiUnreachable(f"{method} {path}: {error}") from error
        if response.status >= 300:
            kind = {404: NotFound, 409: Conflict, 422: Invalid}.get(response.status, ApiError)
            raise kind(
                response.status, _kube_error_message(response.data) or f"{method} {path}: HTTP {response.status}"
            )
        found: dict[str, Any] = json.loads(response.data)
        return found

    def _headers(self, method: str) -> dict[str, str]:
        auth_settings = self._configuration.auth_settings().values()  # renews expired tokens
        auth = {each["key"]: each["value"] for each in auth_settings if each["in"] == "header" and each["value"]}
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        return {"Accept": "application/json", "Content-Type": content_type, "User-Agent": "ripstop"} | auth


class KubePodClient:
    """The log of a pod, and the output of a command in it, which arrives over a WebSocket."""

    def __init__(self, context: str | None = None) -> None:
        from kubernetes import client

        self._core = client.CoreV1Api(client.ApiClient(_client_configuration(context)))

    def log(self, namespace: str, pod: str, container: str, *, tail: int, follow: bool) -> Iterator[str]:
        """The lines of a container's log; with `follow`, also new ones."""
        with _kube_pod_client_errors(pod):
            response = self._core.read_namespaced_pod_log(
                pod, namespace, container=container, tail_lines=tail, follow=follow, _preload_content=False
            )
            rest = b""
            for piece in response.stream(amt=None):
                *lines, rest = (rest + piece).split(b"\n")
                yield from (line.decode("utf-8", "replace") for line in lines)
            if rest:
                yield rest.decode("utf-8", "replace")

    def execute(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> tuple[int, str, str]:
        """Run a command in a container.  Returns exit code, stdout and stderr."""
        from kubernetes.stream import stream

        out, err = [], []
        options = {"stdin": False, "stdout": True, "stderr": True, "tty": False, "_preload_content": False}
        with _kube_pod_client_errors(pod):
            call = self._core.connect_get_namespaced_pod_exec
            session = stream(call, pod, namespace, command=list(command), container=container, **options)
            while session.is_open():
                session.update(timeout=5)
                out.append(session.read_stdout() if session.peek_stdout() else "")
                err.append(session.read_stderr() if session.peek_stderr() else "")
            return int(session.returncode or 0), "".join(out), "".join(err)


def _client_configuration(context: str | None, kubeconfig: str | None = None) -> Any:
    """The user's credentials, or else those of the pod's service account."""
    from kubernetes import client, config

    found = client.Configuration()
    try:
        try:
            config.load_kube_config(kubeconfig, context, client_configuration=found)
        except config.ConfigException:
            if kubeconfig or context:
                raise
            config.load_incluster_config(client_configuration=found)
    except config.ConfigException as error:
        raise ApiUnreachable(f"no cluster is configured ({error}); set KUBECONFIG, or run in a pod") from error
    return found


@contextmanager
def _kube_pod_client_errors(pod: str) -> Iterator[None]:
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (ApiException, HTTPError, OSError, ValueError) as error:
        raise ApiUnreachable(f"pod {pod}: {getattr(error, 'reason', '') or error}") from error


async def in_thread(threads: Executor, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run a blocking call in one of these threads."""
    return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *args, **options))


def kube_jobs_path(namespace: str | None, name: str = "", *, part: str = "") -> str:
    """The path of ElasticJobs; `part` is a subresource."""
    where = f"/namespaces/{namespace}" if namespace else ""
    return "/".join(filter(None, (f"/apis/{GROUP}/{VERSION}{where}/{PLURAL}", name, part)))


def kube_core_path(namespace: str, kind: str, name: str = "") -> str:
    """The path of pods, services, secrets or events."""
    return "/".join(filter(None, (f"/api/v1/namespaces/{namespace}/{kind}", name)))


def kube_collection_path(item: Json) -> str:
    """The API path of objects of this kind."""
    version, kind = item["apiVersion"], item["kind"]
    root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    where = "" if kind in CLUSTER_WIDE else f"/namespaces/{item['metadata']['namespace']}"
    return f"{root}{where}/{kind.lower()}s"


def kube_budgets_path(namespace: str, version: str) -> str:
    return f"/apis/{version}/namespaces/{namespace}/poddisruptionbudgets"


def _kube_error_message(data: bytes) -> str:
    try:
        body = json.loads(data)
    except ValueError:
        return data.decode(errors="replace").strip()[:300]
    return str(body.get("message", "")) if isinstance(body, dict) else ""
