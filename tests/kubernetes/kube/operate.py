"""An operator that kills itself, as kill -9 would, right after its Nth change to the cluster.

operate.py NAMESPACE HOME N; NAMESPACE "" is all of them, N 0 is an ordinary operator.  Jobs at `TALKATIVE` say how they
are doing.
"""

import os
import signal
import sys
from typing import Any

from ripstop.kubernetes.job_poller import PolledJobApi
from ripstop.kubernetes.kube_client import KubeClient
from ripstop.kubernetes.operator import run_operator
from tests.kubernetes.kube.lab import SAYS, TALKATIVE

namespace, home, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
request = KubeClient.request
changes = 0


def counting(self: KubeClient, method: str, *words: Any, **options: Any) -> dict[str, Any]:
    global changes
    answer = request(self, method, *words, **options)
    changes += method != "GET"
    if changes == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer


class Talkative(PolledJobApi):
    """All jobs at that address."""

    def __init__(self) -> None:
        self._nodes = SAYS["target"]

    def status(self, address: str, token: str, run_id: str) -> dict[str, Any]:
        if address != TALKATIVE or len(token) != 64 or not run_id.startswith("train-"):
            raise ConnectionRefusedError(address)
        return SAYS | {"target": self._nodes}

    def scale(self, address: str, token: str, run_id: str, nodes: int) -> None:
        self.status(address, token, run_id)
        self._nodes = nodes
        print(f"{run_id.rpartition('-')[2]}: {nodes} nodes", flush=True)


if last:
    KubeClient.request = counting  # type: ignore[method-assign]
run_operator(namespace or None, Talkative(), home=home)
