"""The page: complete, self-contained, and safe for any text."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ripstop.model import events
from ripstop.model.events import EventRecord
from ripstop.model.text_formatting import duration, percent
from ripstop.report.builder import build_report
from ripstop.report.html import POLICY, render
from ripstop.report.moments import moment
from tests.model.test_events import every_event
from tests.report.transcripts import BEGAN, Transcript, evidence

NASTY = "</pre><script>alert(1)</script>\x1b[31mred\x1b[0m \x00\x07 <img src=x onerror=alert(2)> \"'& \u202egnp\ud800"
VOID = {"meta", "br", "img", "link"}


class Page(HTMLParser):
    """Collects elements, attributes and text, and checks that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open[-1:] != ["style"] else ""


def nasty_job() -> Transcript:
    job = Transcript(run_id=NASTY, nodes=(NASTY, "b"))
    job.round(1.0, 1, first_step=0)
    job.add(2.0, events.NodeUnhealthy(NASTY, (NASTY,)))
    job.add(3.0, events.OperatorAction(NASTY, NASTY, NASTY))
    job.add(5.0, events.WorkerFailed(1, 0, 100, NASTY), NASTY)
    nasty = {"log_tail": (NASTY,), "files": (NASTY,), "oom": NASTY, "collectives": NASTY, "host": NASTY}
    job.add(5.0, evidence(1, 0, BEGAN + 5, NASTY, f"Traceback\n{NASTY}", **nasty), NASTY)
    job.add(5.1, events.WorkerFailed(1, 1, 101, NASTY), "b")
    job.add(5.2, events.RoundEnded(1, NASTY, NASTY, 0.0))
    job.round(5.3, 2, first_step=0, pause=0.5)
    job.add(6.0, events.AgentStarted(NASTY, NASTY, NASTY, NASTY, NASTY, NASTY, NASTY, (f"{NASTY}={NASTY}",)), "b")
    job.close(9.0, "failed", NASTY)
    return job


def test_any_text_is_shown_and_never_run() -> None:
    source = render(build_report(nasty_job().records, [NASTY]))
    page = Page(source)
    assert {tag for tag, _ in page.elements} & {"script", "img", "iframe", "object", "link", "form", "input"} == set()
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#")[:1] == "#" and "src" not in attributes
    assert page.text.count("<script>alert(1)</script>red") > 15
    assert "\\u202egnp" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800]", source)


def test_the_page_forbids_scripts_and_requests() -> None:
    source = render(build_report(nasty_job().records))
    metas = [attributes for tag, attributes in Page(source).elements if tag == "meta"]
    policy = next(meta["content"] for meta in metas if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy == POLICY and policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert not re.search(r"https?://|url\((?!#)|@import", source)


def test_the_page_has_every_part_of_a_failed_job() -> None:
    job = Transcript()
    job.round(2.0, 1, first_step=0)
    job.steps(12.5, 1, 0, 100, 10.0)
    job.failure(12.5, 1, 1, "ValueError: bad shard", "Traceback (most recent call last):\nValueError: bad shard")
    job.add(12.6, events.BudgetCharged(1, "application", 3, 3, False, "spent"))
    job.close(13.0, "failed", "rank 1 exited with code 1")
    page = Page(render(build_report(job.records)))
    for text in (
        "✕ failed", "Goodput76.9%", "Timeline", "rank 1 on host-1: ValueError: bad shard", "Traceback (most",
        "not restarted; 3 of 3 restarts are used", "Time lost, by cause and phase", "start-up", "Rounds", "Nodes",
        "Configuration and versions", "train.py", "2.9.0",
    ):  # fmt: skip
        assert text in page.text, text


def test_a_failure_that_comes_back_is_counted_and_old_failures_are_folded() -> None:
    job = Transcript()
    for round in range(1, 9):
        job.round(10.0 * round, round)
        job.failure(10.0 * round + 5, round, round % 2, f"ValueError: shard-{round}")
        job.restart(10.0 * round + 5, round)
    page = Page(render(build_report(job.records)))
    assert "8×rank 0 on host-0: ValueError: shard-82" in page.text  # the cells: times, title, nodes
    cards = [tag for tag, attributes in page.elements if (attributes.get("id") or "").startswith("failure-")]
    assert cards == ["article"] * 5 + ["details"] * 3


def test_a_job_of_4000_ranks_that_all_fail_is_bounded() -> None:
    job = Transcript(nodes=tuple(f"node-{number}" for number in range(500)))
    job.round(1.0, 1, first_step=0)
    for rank in range(4000):
        failed = events.WorkerFailed(1, rank, rank, "RuntimeError: NCCL communicator was aborted")
        job.add(5.0, failed, f"node-{rank // 8}")
    job.add(5.1, evidence(1, 7, BEGAN + 5, "ValueError: bad shard", "Traceback"), "node-0")
    job.close(6.0, "failed", "x")
    report = build_report(job.records)
    assert report.incidents[0].victim_count == 3999
    assert report.incidents[0].title == "rank 7 on host-7: ValueError: bad shard"
    source = render(report)
    assert "3,999 other failures" in source and len(source) < 1 << 20


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (0.038, "38 ms"), (4.21, "4.2 s"), (59.9, "1 min"), (200, "3 min 20 s"), (4320, "1 h 12 min")],
)  # fmt: skip
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_times_out_of_range_and_almost_whole_shares_are_honest() -> None:
    assert moment(1e18) == "1e+18"
    assert (percent(0.9999), percent(1.0), percent(0.0)) == ("99.9%", "100%", "0%")


records = st.builds(
    EventRecord,
    st.integers(1, 2**62),
    st.one_of(st.floats(0, 2e9), st.floats(-1e18, 9e18)),
    st.sampled_from(["", "", "a", "b", NASTY]),
    every_event(),
)


@given(st.lists(records, min_size=1, max_size=40))
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_a_report_of_any_events_is_a_valid_page(found: list[EventRecord]) -> None:
    Page(render(build_report(found)))
