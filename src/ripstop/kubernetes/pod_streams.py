"""What comes out of a pod for as long as it likes: its log, and a command that is run in it.

Through the `kubernetes` package's own client, since a command's output comes over a WebSocket.  A call blocks a thread;
a client is for one of them at a time.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ripstop.kubernetes.client import ApiUnreachable


class PodStreams:
    """One pod's streams at a time."""

    def __init__(self, context: str | None = None) -> None:
        from kubernetes import client, config

        self._configuration = client.Configuration()
        try:
            config.load_config(client_configuration=self._configuration, context=context)
        except config.ConfigException as error:
            raise ApiUnreachable(f"no cluster is known ({error}); set KUBECONFIG, or run in a pod") from error
        self._core = client.CoreV1Api(client.ApiClient(self._configuration))

    def log(self, namespace: str, pod: str, container: str, *, tail: int, follow: bool) -> Iterator[str]:
        """The lines of a container's log; those to come, too, if followed."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            answer = self._core.read_namespaced_pod_log(
                pod, namespace, container=container, tail_lines=tail, follow=follow, _preload_content=False
            )
            rest = b""
            for piece in answer.stream(amt=None):
                *lines, rest = (rest + piece).split(b"\n")
                yield from (line.decode("utf-8", "replace") for line in lines)
            if rest:
                yield rest.decode("utf-8", "replace")
        except (ApiException, HTTPError, OSError) as error:
            raise ApiUnreachable(f"pod {pod}: {_why(error)}") from error

    def execute(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> tuple[int, str, str]:
        """Run a command in a container: exit code, what it wrote, what it complained of."""
        from kubernetes.client.exceptions import ApiException
        from kubernetes.stream import stream
        from urllib3.exceptions import HTTPError

        out, err = [], []
        try:
            said = stream(
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
            while said.is_open():
                said.update(timeout=5)
                out.append(said.read_stdout() if said.peek_stdout() else "")
                err.append(said.read_stderr() if said.peek_stderr() else "")
            return int(said.returncode or 0), "".join(out), "".join(err)
        except (ApiException, HTTPError, OSError, ValueError) as error:
            raise ApiUnreachable(f"pod {pod}: {_why(error)}") from error


def _why(error: Any) -> str:
    return str(getattr(error, "reason", "") or error)
