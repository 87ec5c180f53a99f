"""Streams from a pod: its log, and the output of a command in it.

Uses the client of the `kubernetes` package, because command output arrives over a WebSocket.  Calls block; use one
client per thread.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ripstop.kubernetes.client import ApiUnreachable


class PodStreams:
    """The streams of one pod at a time."""

    def __init__(self, context: str | None = None) -> None:
        from kubernetes import client, config

        self._configuration = client.Configuration()
        try:
            config.load_config(client_configuration=self._configuration, context=context)
        except config.ConfigException as error:
            raise ApiUnreachable(f"no cluster is configured ({error}); set KUBECONFIG, or run in a pod") from error
        self._core = client.CoreV1Api(client.ApiClient(self._configuration))

    def log(self, namespace: str, pod: str, container: str, *, tail: int, follow: bool) -> Iterator[str]:
        """The lines of a container's log; with `follow`, also new ones."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            response = self._core.read_namespaced_pod_log(
                pod, namespace, container=container, tail_lines=tail, follow=follow, _preload_content=False
            )
            rest = b""
            for piece in response.stream(amt=None):
                *lines, rest = (rest + piece).split(b"\n")
                yield from (line.decode("utf-8", "replace") for line in lines)
            if rest:
                yield rest.decode("utf-8", "replace")
        except (ApiException, HTTPError, OSError) as error:
            raise ApiUnreachable(f"pod {pod}: {_reason(error)}") from error

    def execute(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> tuple[int, str, str]:
        """Run a command in a container.  Returns exit code, stdout and stderr."""
        from kubernetes.client.exceptions import ApiException
        from kubernetes.stream import stream
        from urllib3.exceptions import HTTPError

        out, err = [], []
        try:
            session = stream(
                self._core.connect_get_namespaced_pod_exec,
                *(pod, namespace),
                command=list(command),
                container=container,
                stdin=False,
                stdout=True,
                stderr=True,
                tty=False,
                _preload_content=False,
            )
            while session.is_open():
                session.update(timeout=5)
                out.append(session.read_stdout() if session.peek_stdout() else "")
                err.append(session.read_stderr() if session.peek_stderr() else "")
            return int(session.returncode or 0), "".join(out), "".join(err)
        except (ApiException, HTTPError, OSError, ValueError) as error:
            raise ApiUnreachable(f"pod {pod}: {_reason(error)}") from error


def _reason(error: Any) -> str:
    return str(getattr(error, "reason", "") or error)
