"""Requests to a Kubernetes API server: one at a time, plain objects in and out.

The `kubernetes` package handles credentials.  The requests are plain JSON, so they work with any version of that
package and of the cluster.  Calls block and may come from any thread.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlencode

from ripstop.kubernetes.spec import GROUP, PLURAL, VERSION, Json
from ripstop.model.errors import RipstopError

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 30.0
MAX_THREADS = 16
PAGE_SIZE = "500"  # objects
P = ParamSpec("P")
T = TypeVar("T")

MERGE_PATCH = "application/merge-patch+json"


class ApiError(RipstopError):
    """The server rejected a request; `code` is the HTTP status."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class NotFound(ApiError):
    """The object does not exist."""


class Conflict(ApiError):
    """The object exists already, or changed since it was read."""


class ApiUnreachable(RipstopError):
    """The server did not reply."""


class Cluster:
    """A cluster, accessed as the user of KUBECONFIG or as the pod's service account."""

    def __init__(self, context: str | None = None, kubeconfig: str | None = None) -> None:
        from kubernetes import client, config
        from kubernetes.client.rest import RESTClientObject

        self._configuration = client.Configuration()
        self._configuration.connection_pool_maxsize = MAX_THREADS
        try:
            try:
                config.load_kube_config(kubeconfig, context, client_configuration=self._configuration)
            except config.ConfigException:
                if kubeconfig or context:
                    raise
                config.load_incluster_config(client_configuration=self._configuration)
        except config.ConfigException as error:
            raise ApiUnreachable(f"no cluster is configured ({error}); set KUBECONFIG, or run in a pod") from error
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

    def request(
        self, method: str, path: str, body: Json | None = None, *, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
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
            kind = {404: NotFound, 409: Conflict}.get(response.status, ApiError)
            raise kind(response.status, _message(response.data) or f"{method} {path}: HTTP {response.status}")
        found: dict[str, Any] = json.loads(response.data)
        return found

    def _headers(self, method: str) -> dict[str, str]:
        auth_settings = self._configuration.auth_settings().values()  # renews expired tokens
        headers = {
            "Accept": "application/json",
            "Content-Type": MERGE_PATCH if method == "PATCH" else "application/json",
            "User-Agent": "ripstop",
        }
        return headers | {
            auth["key"]: auth["value"] for auth in auth_settings if auth["in"] == "header" and auth["value"]
        }


async def in_thread(threads: Executor, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run a blocking call in one of these threads."""
    return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *args, **options))


def jobs_path(namespace: str | None, name: str = "", *, part: str = "") -> str:
    """The path of ElasticJobs; `part` is a subresource."""
    where = f"/namespaces/{namespace}" if namespace else ""
    return "/".join(filter(None, (f"/apis/{GROUP}/{VERSION}{where}/{PLURAL}", name, part)))


def core_path(namespace: str, kind: str, name: str = "") -> str:
    """The path of pods, services, secrets or events."""
    return "/".join(filter(None, (f"/api/v1/namespaces/{namespace}/{kind}", name)))


def budgets_path(namespace: str, version: str) -> str:
    return f"/apis/{version}/namespaces/{namespace}/poddisruptionbudgets"


def _message(data: bytes) -> str:
    try:
        body = json.loads(data)
    except ValueError:
        return data.decode(errors="replace").strip()[:300]
    return str(body.get("message", "")) if isinstance(body, dict) else ""
