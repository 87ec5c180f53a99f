"""Several nodes in one test: the agents' memory for state is served by threads, workers are real processes.

A round is a function that every rank runs, in a process of its own, with the environment that an agent gives it.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from torch.distributed import TCPStore

from ripstop.workers.state_memory import WorkerIdentity
from tests.train.conftest import Agent

TIMEOUT_S = 100.0
KEY = "5e" * 32  # of all rounds
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "torch.distributed.tensor", "ripstop.train.state"])


class Node(Agent):
    """The agent of one node, which knows its workers by pid."""

    def __init__(self, path: str) -> None:
        self.workers: dict[int, WorkerIdentity] = {}
        super().__init__(path)

    def _identify(self, pid: int) -> WorkerIdentity | None:
        return self.workers.get(pid)


class Cluster:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._round = 0
        self._made = 0
        self._processes: list[BaseProcess] = []
        self.nodes: dict[str, Node] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for name in list(self.nodes):
            self.lose(name)

    def lose(self, name: str) -> None:
        """The node's memory is gone; a node of this name may come back."""
        self.nodes.pop(name).close()

    def node(self, name: str) -> Node:
        """The node of this name, which is made if there is none."""
        if name not in self.nodes:
            self._made += 1
            self.nodes[name] = Node(str(self._folder / f"{name}{self._made}"))
        return self.nodes[name]

    def start(self, function: Callable[..., Any], nodes: Sequence[str], *args: Any) -> "Round":
        """Start one worker for each name of a node; consecutive equal names are workers of one node."""
        self._round += 1
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        round = Round(store, len(nodes))
        groups = list(dict.fromkeys(nodes))
        for rank, name in enumerate(nodes):
            node = self.node(name)
            env = {
                "RIPSTOP_SOCKET": node.path, "TORCHELASTIC_RUN_ID": "test", "RANK": str(rank),
                "WORLD_SIZE": str(len(nodes)), "GROUP_RANK": str(groups.index(name)), "OMP_NUM_THREADS": "1",
                "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            }  # fmt: skip
            ours, theirs = _processes.Pipe()
            process = _processes.Process(target=_work, args=(theirs, env, function, args))
            process.start()
            theirs.close()
            assert process.pid
            local_ranks = range(nodes.index(name), nodes.index(name) + nodes.count(name))
            node.workers[process.pid] = WorkerIdentity(self._round, rank, len(nodes), local_ranks, KEY)
            self._processes.append(process)
            round.workers.append((process, ours))
        return round

    def run(self, function: Callable[..., Any], nodes: Sequence[str], *args: Any) -> list[Any]:
        """What each rank returned."""
        return self.start(function, nodes, *args).results()


class Round:
    def __init__(self, store: TCPStore, size: int) -> None:
        self._store = store  # lives as long as the round
        self.workers: list[tuple[BaseProcess, Any]] = []

    def results(self) -> list[Any]:
        found = []
        for rank, (process, pipe) in enumerate(self.workers):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} did not end; ranks before it: {found}"
            try:
                result, error = pipe.recv()
            except EOFError:
                result, error = None, "killed"
            process.join()
            found.append(result if error is None else error)
        return found


def _work(pipe: Any, env: dict[str, str], function: Callable[..., Any], args: Sequence[Any]) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(env)
    torch.set_num_threads(1)
    try:
        result, error = function(*args), None
    except BaseException as raised:  # the test looks at it
        result, error = None, raised
    pipe.send((result, error))
    pipe.close()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
