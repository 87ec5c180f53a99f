"""Event files that are cut, damaged, of another version, empty, not ours, or large."""

import subprocess
import sys
from pathlib import Path

from ripstop.model import events
from ripstop.model.event_json import to_json
from ripstop.model.events import EventRecord
from ripstop.report.builder import build_report
from ripstop.report.model import JobResult
from ripstop.report.reader import Skipped, event_files_for_report, read_events_for_report
from tests.report.transcripts import Transcript

MAX_RSS_MIB = 200
MEASURE = """
import re, sys
from pathlib import Path
from ripstop.report.builder import build_report
from ripstop.report.html import render
from ripstop.report.reader import Skipped, read_events_for_report
page = render(build_report(read_events_for_report([Path(sys.argv[1])], Skipped())))
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
print(int(peak) // 1024, len(page))
"""


def lines(job: Transcript) -> list[str]:
    return [to_json(record) for record in job.records]


def a_job() -> Transcript:
    job = Transcript()
    job.round(1.0, 1)
    job.failure(5.0, 1, 1, "ValueError: x")
    job.restart(5.1, 1)
    job.round(5.2, 2, pause=0.5)
    job.close(9.0)
    return job


def read(*paths: Path) -> tuple[list[EventRecord], Skipped]:
    skipped = Skipped()
    return list(read_events_for_report(list(paths), skipped)), skipped


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    job = a_job()
    (tmp_path / "x").write_text("\n".join(lines(job)) + "\n")
    found, skipped = read(tmp_path / "x")
    assert [(r.seq, r.at, r.node, events.event_kind(r.event)) for r in found] == [
        (r.seq, r.at, r.node, events.event_kind(r.event)) for r in job.records
    ]
    assert skipped == Skipped()
    assert build_report(found) == build_report(job.records)


def test_a_file_that_was_cut_anywhere_gives_a_report(tmp_path: Path) -> None:
    text = "\n".join(lines(a_job())) + "\n"
    path = tmp_path / "job-events.jsonl"
    results = set()
    for end in range(300, len(text), 97):
        path.write_text(text[:end])
        found, skipped = read(path)
        report = build_report(found, skipped.notes())
        results.add(report.summary.result)
        is_cut = not text[:end].endswith(("}", "\n"))
        assert any("incomplete" in note for note in report.notes) == is_cut
    assert results == {JobResult.UNFINISHED}


def test_damaged_lines_and_unknown_kinds_are_skipped_and_counted(tmp_path: Path) -> None:
    good = lines(a_job())
    unknown = '{"v":1,"seq":1,"at":1,"node":"","kind":"x"}'
    bad = ["", "\x00\xff\x1b[31m", "{", "[1]", '{"v":1}', unknown, "x" * 3_000_000]
    (tmp_path / "x").write_text("\n".join([*bad, *good, *bad]), errors="surrogateescape")
    found, skipped = read(tmp_path / "x")
    assert len(found) == len(good)
    assert skipped.lines >= 2 * len(bad[1:])
    assert len(list(skipped.notes())) == 1


def test_another_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    text = "\n".join(lines(a_job())).replace('"v":1,', '"v":2,"zone":{"x":[1]},')
    (tmp_path / "x").write_text(text)
    found, skipped = read(tmp_path / "x")
    assert build_report(found).summary.result is JobResult.SUCCEEDED
    assert any("version 2" in note for note in skipped.notes())


def test_files_that_are_not_ours_have_no_events(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "empty").touch()
    (tmp_path / "deep").write_text("[" * 100_000)
    for name in ("binary", "empty", "deep"):
        found, skipped = read(tmp_path / name)
        assert found == [] and (skipped.lines > 0) == (name != "empty")


def test_a_record_is_read_once_from_the_files_of_a_run(tmp_path: Path) -> None:
    job = a_job()
    late = EventRecord(99, job.records[-1].at + 1, "b", events.AgentEnded(0, ""))
    of_nodes = [to_json(record) for record in (*job.records, late) if record.node]
    again = [to_json(record) for record in job.records if record.node == "a"]  # by a new coordinator
    (tmp_path / "job-events.jsonl").write_text("\n".join([*lines(job), *again]))
    (tmp_path / "events.jsonl").write_text("\n".join(of_nodes))
    found, _ = read(*event_files_for_report(tmp_path))
    assert len(found) == len(job.records) + 1
    assert (found[-1].seq, found[-1].node) == (99, "b")


def test_a_million_events_need_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    nodes = tuple(f"node-{number}" for number in range(50))
    with path.open("w") as file:
        file.writelines(f"{line}\n" for line in lines(Transcript(nodes=nodes)))
        for round in range(1, 2_001):
            job = Transcript(nodes=nodes)
            job.records.clear()
            job.round(10.0 * round, round, first_step=round, pause=1.0)
            job.failure(10.0 * round + 9, round, round % 50, "ValueError: x", "Traceback\n  x\n" * 20)
            job.restart(10.0 * round + 9, round)
            later = (EventRecord(10 * round + r.seq, r.at, r.node, r.event) for r in job.records)
            file.writelines(f"{to_json(record)}\n" for record in later)
        saved = to_json(EventRecord(0, 1.0, "node-1", events.CheckpointSaved(2_000, 1, 7, "/checkpoints/step-7")))
        head, _, tail = saved.partition('"seq":0')
        file.writelines(f'{head}"seq":{number}{tail}\n' for number in range(1_000_000, 1_700_000))
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], check=True, capture_output=True, text=True, timeout=110
    )
    rss, page = map(int, run.stdout.split())
    assert rss < MAX_RSS_MIB
    assert page < 4 << 20
