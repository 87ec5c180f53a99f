"""What is said to a Kubernetes API server: one request at a time, plain objects in and out.

Who we are (kubeconfig, service account, their renewal) is the `kubernetes` package's business; what is on the wire is
plain JSON, so that neither the version of that package nor the cluster's matters.  Calls block and may come from any
thread.
"""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from ripstop.kubernetes.spec import GROUP, PLURAL, VERSION, Json
from ripstop.model.errors import RipstopError

CONNECT, READ = 5.0, 30.0  # seconds
THREADS = 16  # that may call at a time
PAGE = "500"  # objects in one answer
MERGE_PATCH = "application/merge-patch+json"


class ApiError(RipstopError):
    """The server said no; `code` is HTTP's."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class NotFound(ApiError):
    """There is no such thing."""


class Conflict(ApiError):
    """It is there already, or not as it was read."""


class ApiUnreachable(RipstopError):
    """There was no answer."""


class Cluster:
    """A cluster, seen as the user of KUBECONFIG or as the pod's service account."""

    def __init__(self, context: str | None = None, kubeconfig: str | None = None) -> None:
        from kubernetes import client, config
        from kubernetes.client.rest import RESTClientObject

        self._configuration = client.Configuration()
        self._configuration.connection_pool_maxsize = THREADS
        try:
            try:
                config.load_kube_config(kubeconfig, context, client_configuration=self._configuration)
            except config.ConfigException:
                if kubeconfig or context:
                    raise
                config.load_incluster_config(client_configuration=self._configuration)
        except config.ConfigException as error:
            raise ApiUnreachable(f"no cluster is known ({error}); set KUBECONFIG, or run in a pod") from error
        self._pool = RESTClientObject(self._configuration).pool_manager

    def credentials(self) -> dict[str, Any]:
        """How to connect, as kopf wants to be told."""
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
        """All of a kind, in pages."""
        items: list[dict[str, Any]] = []
        more = {"limit": PAGE}
        while True:
            page = self.get(path, **query, **more)
            items += page["items"]
            if not (token := page["metadata"].get("continue")):
                return items
            more = {"limit": PAGE, "continue": token}

    def create(self, path: str, body: Json) -> dict[str, Any]:
        return self.request("POST", path, body)

    def patch(self, path: str, body: Json) -> dict[str, Any]:
        """A merge patch: what is null goes, lists are whole."""
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
            answer = self._pool.request(
                method,
                url,
                body=None if body is None else json.dumps(body).encode(),
                headers=self._headers(method),
                timeout=Timeout(connect=CONNECT, read=READ),
                retries=False,
                redirect=False,
            )
        except (HTTPError, OSError) as error:
            raise ApiUnreachable(f"{method} {path}: {error}") from error
        if answer.status >= 300:
            kind = {404: NotFound, 409: Conflict}.get(answer.status, ApiError)
            raise kind(answer.status, _message(answer.data) or f"{method} {path}: HTTP {answer.status}")
        found: dict[str, Any] = json.loads(answer.data)
        return found

    def _headers(self, method: str) -> dict[str, str]:
        shown = self._configuration.auth_settings().values()  # renews what has expired
        ours = {
            "Accept": "application/json",
            "Content-Type": MERGE_PATCH if method == "PATCH" else "application/json",
            "User-Agent": "ripstop",
        }
        return ours | {auth["key"]: auth["value"] for auth in shown if auth["in"] == "header" and auth["value"]}


def jobs_path(namespace: str | None, name: str = "", *, part: str = "") -> str:
    """Of ElasticJobs; `part` is a subresource."""
    where = f"/namespaces/{namespace}" if namespace else ""
    return "/".join(filter(None, (f"/apis/{GROUP}/{VERSION}{where}/{PLURAL}", name, part)))


def core_path(namespace: str, kind: str, name: str = "") -> str:
    """Of pods, services, secrets, events."""
    return "/".join(filter(None, (f"/api/v1/namespaces/{namespace}/{kind}", name)))


def budgets_path(namespace: str, version: str) -> str:
    return f"/apis/{version}/namespaces/{namespace}/poddisruptionbudgets"


def _message(data: bytes) -> str:
    try:
        said = json.loads(data)
    except ValueError:
        return data.decode(errors="replace").strip()[:300]
    return str(said.get("message", "")) if isinstance(said, dict) else ""
