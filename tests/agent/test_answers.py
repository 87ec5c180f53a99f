"""Questions to an agent, with workers and without."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from ripstop.agent.answers import QUESTIONS, Node, Workers, answer
from ripstop.config import Logs, StreamMap, Streams
from ripstop.errors import NoAnswer
from ripstop.observe.progress import Pace
from ripstop.observe.sample import GpuSample
from ripstop.round import Address, Place
from ripstop.workers.gpus import Gpus
from ripstop.workers.logs import RoundLogs

PLACE = Place(2, 0, 1, 4, 6, 2, 0, 2, Address("127.0.0.1", 1), 0)
ONE = (GpuSample(0, memory_used=7),)


def told(question: str, workers: Workers | None = None, **details: object) -> Any:
    return json.loads(asyncio.run(answer(question, json.dumps(details), Node(Gpus(lambda: ONE), workers))))


@pytest.mark.parametrize("question", sorted(set(QUESTIONS) - {"sample"}))
def test_what_is_about_workers_has_no_answer_without_them(question: str) -> None:
    with pytest.raises(NoAnswer, match="no workers run on this node now"):
        told(question)


def test_a_node_without_workers_can_be_sampled() -> None:
    sample = told("sample")
    assert (sample["ranks"], sample["gpus"][0]["memory_used"]) == ([], 7)


def test_a_worker_that_reports_tells_its_step_and_others_say_that_they_do_not(tmp_path: Path) -> None:
    logs = RoundLogs(tmp_path, Logs(tmp_path), PLACE, "default", terminal=False)
    workers = Workers(PLACE, (1, 2), logs, {1: Pace(7, 1.0, 100.0, 8)})
    before = time.time()
    seen = told("step", workers, rank=5)
    assert (seen["round"], seen["step"]) == (2, 7)
    assert before - 100.0 <= seen["at"] <= time.time() - 100.0
    with pytest.raises(NoAnswer, match="rank 4 reports no steps now"):
        told("step", workers, rank=4)


def test_an_unknown_question_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(NoAnswer, match="'meaning'; it answers log, sample, stacks, step, workers"):
        told("meaning")


def test_the_log_of_an_earlier_round_is_read_to_its_end_and_then_the_present_one(tmp_path: Path) -> None:
    logs = RoundLogs(tmp_path, Logs(tmp_path, redirects=StreamMap(Streams.ALL)), PLACE, "default", terminal=False)
    logs.prepare()
    before = tmp_path / "round_1" / "5" / "stdout.log"
    before.parent.mkdir(parents=True)
    before.write_text("one\n")
    (tmp_path / "round_2" / "5" / "stdout.log").write_text("two\n")
    workers = Workers(PLACE, (1, 2), logs, {})
    first = told("log", workers, rank=5, stream="stdout", round=1, offset=0)
    second = told("log", workers, rank=5, stream="stdout", round=1, offset=first["next"])
    assert [(piece["round"], piece["text"]) for piece in (first, second)] == [(1, "one\n"), (2, "two\n")]
    assert told("log", workers, rank=5, stream="stderr", round=1, offset=9)["round"] == 2
