"""Runs an experiment on a job: follows its events in a thread, injects faults and reads samples through its API.

After a lost connection the job is looked for again, because its coordinator may have moved.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue

from ripstop.cli.chaos.experiment import (
    Experiment,
    Finish,
    Inject,
    Injected,
    Input,
    Report,
    Sample,
    Sampled,
    Tick,
)
from ripstop.cli.chaos.plan import Plan, ScheduledFault, find_planned_target, make_fault_schedule
from ripstop.cli.chaos.results import Result
from ripstop.cli.event_stream import RETRY_S, follow_job_events
from ripstop.cli.job_client import JobClient
from ripstop.model.errors import RipstopError
from ripstop.model.event_json import from_json


def drive_experiment(
    find_job: Callable[[], JobClient], plan: Plan, seed: int, on_result: Callable[[Result], None]
) -> list[Result]:
    """Inject the faults of the plan, one after the other; `on_result` is called for each as soon as it has healed."""
    driver = _ChaosDriver(
        find_job, Experiment(make_fault_schedule(plan, seed), plan.heal_within, time.monotonic()), on_result
    )
    return driver.run()


class _ChaosDriver:
    def __init__(
        self, find_job: Callable[[], JobClient], experiment: Experiment, on_result: Callable[[Result], None]
    ) -> None:
        self._find_job = find_job
        self._job = find_job()
        self._experiment = experiment
        self._on_result = on_result
        self._results: list[Result] = []
        self._inputs: Queue[Input] = Queue()
        self._is_finished = False

    def run(self) -> list[Result]:
        threading.Thread(target=self._follow_events, daemon=True).start()
        while not self._is_finished:
            deadline = self._experiment.deadline()
            try:
                event = self._inputs.get(timeout=max(0.0, (deadline or 0.0) - time.monotonic()))
            except Empty:
                event = Tick()
            self._feed(event)
        return self._results

    def _feed(self, event: Input) -> None:
        for command in self._experiment.on(event, time.monotonic()):
            match command:
                case Inject(fault):
                    self._feed(self._inject(fault))
                case Sample():
                    if (sample := self._sample()) is not None:
                        self._inputs.put(sample)
                case Report(result):
                    self._results.append(result)
                    self._on_result(result)
                case Finish():
                    self._is_finished = True

    def _follow_events(self) -> None:
        while not self._is_finished:
            with suppress(RipstopError):  # the experiment has a time limit
                for event in follow_job_events(self._find_again, 0):
                    if (record := from_json(json.dumps(event))) is not None:
                        self._inputs.put(record)
            time.sleep(RETRY_S)

    def _find_again(self) -> JobClient:
        self._job = self._find_job()
        return self._job

    def _inject(self, fault: ScheduledFault) -> Injected:
        spec = fault.spec
        try:
            target = find_planned_target(fault, self._job.get("/status")["nodes"], self._experiment.coordinator)
            if target.why_none:
                return Injected(skipped=target.why_none)
            where = {"rank": target.rank} if spec.kind.has_rank else {"node": target.node}
            reply = self._job.post("/faults", kind=spec.kind, **where, **spec.options)
        except RipstopError as error:
            return Injected(skipped=str(error))
        return Injected(reply["id"], reply["node"], target.rank, reply["round"], reply["skipped"])

    def _sample(self) -> Sampled | None:
        try:
            status, usage = self._job.get("/status"), self._job.get("/usage")
        except RipstopError:
            with suppress(RipstopError):
                self._find_again()
            return None
        ranks = usage["ranks"]
        return Sampled(
            usage["round"],
            tuple(node["name"] for node in status["nodes"] if node["first_rank"] >= 0),
            usage["at"],
            dict(zip(ranks["rank"], zip(ranks["step"], ranks["age"], strict=True), strict=True)),
            is_complete=len(ranks["rank"]) == status["world_size"] > 0 and usage["round"] == status["round"],
        )
