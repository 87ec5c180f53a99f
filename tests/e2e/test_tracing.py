"""Traces of real jobs, received by a real collector."""

import os
import signal
import socket
from contextlib import closing
from pathlib import Path

from tests.collector import Collector, Received
from tests.e2e.harness import SCRIPTS, Job

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CRASHES_ONCE = """\
import os, time
from ripstop.train import heartbeat
for step in range(20):
    time.sleep(0.01)
    heartbeat(step)
    if step == 10 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(7)
"""


def children(collector: Collector, of: Received) -> list[Received]:
    found = [span for span in collector.spans if (span.trace, span.parent) == (of.trace, of.id)]
    return sorted(found, key=lambda span: span.start)


def test_the_recovery_from_a_killed_worker_is_one_trace(tmp_path: Path) -> None:
    with Collector() as collector, Job(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint) as job:
        nodes = [job.node("--max-restarts=1", nnodes="2", script=SCRIPTS / "steps.py") for _ in range(2)]
        job.steps(2)
        os.kill(job.wait_for(event="step", rank=1)["pid"], signal.SIGKILL)
        recovery = collector.wait_for_span("recovery")
        for node in nodes:
            node.signal(signal.SIGTERM)
        for node in nodes:
            node.wait()
            assert "Traceback" not in node.err, node.err
    assert not collector.errors
    about = {name.removeprefix("ripstop."): value for name, value in recovery.attributes.items()}
    assert (about["run_id"], about["round"], about["next_round"]) == ("e2e", 1, 2)
    assert (about["cause"], about["rank"], about["restarts_used"], about["restarts_limit"]) == ("application", 1, 1, 1)
    assert [name for name, _ in recovery.events][:3] == ["worker_failed", "budget_charged", "round_ended"]
    assert "SIGKILL" in recovery.events[0][1]["ripstop.why"]
    parts = children(collector, recovery)
    assert [part.name for part in parts] == ["node", "node"]
    phases = {part.attributes["ripstop.node"]: [span.name for span in children(collector, part)] for part in parts}
    assert set(phases.pop(about["node"])) - {"wait"} == {"detect", "decide", "stop", "start"}
    (other_node,) = phases.values()
    assert {"stop", "start"} <= set(other_node)
    assert "detect" not in other_node  # its own workers did not fail
    for part in parts:
        assert recovery.start <= part.start <= part.end <= recovery.end
    assert recovery.error == ""
    (first,) = (span for span in collector.named("round") if span.attributes["ripstop.round"] == 1)
    assert first.links == [(recovery.trace, recovery.id)]
    assert recovery.links == [(first.trace, first.parent)]


def test_traceparent_makes_the_job_part_of_that_trace(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CRASHES_ONCE)
    environ = {"TRACEPARENT": f"00-{TRACE}-{SPAN}-01", "OTEL_SERVICE_NAME": "mine"}
    with Collector() as collector:
        environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = f"{collector.endpoint}/own/path"
        with Job(tmp_path, **environ) as job:
            agent = job.run("--standalone", "--max-restarts=1", "--rdzv-id=job7", str(script))
            assert agent.wait() == 0, agent.err
    assert {path for path, _ in collector.requests} == {"/own/path"}
    (root,) = collector.named("job")
    assert (root.trace, root.parent, root.resource["service.name"]) == (TRACE, SPAN, "mine")
    assert root.attributes["ripstop.outcome"] == "succeeded"
    assert 0 < root.attributes["ripstop.goodput"] < 1
    assert [span.name for span in children(collector, root)] == ["round", "recovery", "round"]
    (part,) = children(collector, children(collector, root)[1])
    names = [span.name for span in children(collector, part)]
    assert (names[0], names[-1]) == ("detect", "first_step")
    assert set(names) - {"wait"} == {"detect", "decide", "stop", "start", "first_step"}


def test_a_collector_that_never_replies_does_not_delay_the_job(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Job(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint) as job:
            agent = job.run("--standalone", "--no-python", "sh", "-c", "exit 1")
            assert agent.wait() == 1
    assert f"2 spans of the job's traces were not sent to {endpoint}" in agent.err
    assert "Traceback" not in agent.err
