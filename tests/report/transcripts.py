"""Event records of made-up jobs, for the tests of the report."""

from ripstop.model import events
from ripstop.model.events import Event, EventRecord

BEGAN = 1_794_800_000.0


class Transcript:
    """Records of a job; `add(seconds, event)` is the coordinator's, `add(seconds, event, node)` a node's."""

    def __init__(self, run_id: str = "job7", nodes: tuple[str, ...] = ("a", "b"), max_restarts: int = 3) -> None:
        self.records: list[EventRecord] = []
        self._seq: dict[str, int] = {}
        self.nodes = nodes
        self.add(0.0, events.JobStarted(run_id, "0.1.0", nodes[0], 1, len(nodes), max_restarts))
        for node in nodes:
            started = events.AgentStarted(run_id, "0.1.0", "3.11.7", "2.9.0", "6.1", f"host-{node}", "train.py", ())
            self.add(0.1, started, node)
            self.add(0.2, events.NodeJoined(node, f"host-{node}", 1))

    def add(self, seconds: float, event: Event, node: str = "") -> None:
        self._seq[node] = self._seq.get(node, 0) + 1
        self.records.append(EventRecord(self._seq[node], BEGAN + seconds, node, event))

    def round(self, seconds: float, number: int, *, first_step: int | None = None, pause: float = 0.0) -> None:
        """A round forms; its workers run 0.1 s later and make their first step 0.4 s after that."""
        world = len(self.nodes)
        self.add(seconds, events.RoundFormed(number, self.nodes, world, "a:1", number - 1, "first round"))
        for rank, node in enumerate(self.nodes):
            started = events.WorkersStarted(number, rank, world, number - 1, (100 + rank,), 0.1, pause, "first round")
            self.add(seconds + 0.1, started, node)
            if pause:
                self.add(seconds + 0.1, events.Recovered(number, 0.1, 0.2, 0.3, 0.1, wait=max(0.0, pause - 0.7)), node)
            if first_step is not None:
                self.add(seconds + 0.5, events.FirstStep(number, rank, first_step, 0.4), node)

    def steps(self, seconds: float, number: int, first: int, last: int, duration: float) -> None:
        for rank, node in enumerate(self.nodes):
            self.add(seconds, events.StepsDone(number, rank, first, last, duration), node)

    def failure(self, seconds: float, number: int, rank: int, message: str, traceback: str = "") -> None:
        node = self.nodes[rank]
        self.add(seconds, events.WorkerFailed(number, rank, 100 + rank, message), node)
        self.add(seconds, evidence(number, rank, BEGAN + seconds, message, traceback), node)

    def restart(self, seconds: float, number: int, cause: str = "application", why: str = "a worker failed") -> None:
        if cause == "application":
            self.add(seconds, events.BudgetCharged(number, cause, number, 3, True, why))
        self.add(seconds, events.RoundEnded(number, cause, why, 0.0))

    def close(self, seconds: float, outcome: str = "succeeded", why: str = "all workers exited 0") -> None:
        self.add(seconds, events.JobClosed(outcome, why, 1, 0))


def evidence(
    round: int, rank: int, at: float, message: str, traceback: str = "", **more: object
) -> events.WorkerEvidence:
    values: dict[str, object] = {
        "round": round, "rank": rank, "local_rank": 0, "pid": 100 + rank, "host": f"host-{rank}", "failed_at": at,
        "exitcode": 1, "signal": "", "message": message, "traceback": traceback, "oom": "", "log_tail": (), "files": (),
        "hangs": False, "sign": "", "seconds": 0.0, "call": "", "where": "", "waits": False, "state": "",
        "collectives": "",
    }  # fmt: skip
    return events.WorkerEvidence(**{**values, **more})  # type: ignore[arg-type]
