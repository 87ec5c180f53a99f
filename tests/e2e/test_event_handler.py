"""`--event-log-handler` with a real job."""

import json
from pathlib import Path

from tests.e2e.harness import Job

FLAGS = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", "--no-python", "sh", "-c")
SCRIPT = "if [ $RANK$TORCHELASTIC_RESTART_COUNT = 10 ]; then exit 3; else sleep 0.1; fi"
UNTIL_GO = f"{SCRIPT}; while [ ! -e $TRAIN_LOG.go ]; do sleep 0.1; done"


def test_the_console_handler_shows_the_events_of_torchs_agent(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        agent = job.run("--event-log-handler=console", *FLAGS, UNTIL_GO)
        agent.wait_for_log('"agent_restarts": 1')  # the handler has started
        Path(f"{job.log}.go").touch()
        assert agent.wait() == 0
    events = [json.loads(line) for line in agent.err.splitlines() if line.startswith('{"name"')]
    states = [(event["source"], event["metadata"]["state"], event["metadata"]["global_rank"]) for event in events]
    assert states[:3] == [("WORKER", "START", 0), ("WORKER", "START", 1), ("WORKER", "FAILED", 1)]
    assert states[-3:] == [("WORKER", "SUCCEEDED", 0), ("WORKER", "SUCCEEDED", 1), ("AGENT", "SUCCEEDED", None)]
    assert {event["metadata"]["agent_restarts"] for event in events} == {0, 1}


def test_a_handler_that_blocks_does_not_delay_the_job(tmp_path: Path) -> None:
    plugin = tmp_path / "site"
    info = plugin / "blocking-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: blocking\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torchrun.event_handlers]\nblocking = blocking:Handler\n")
    source = "import logging, time\nclass Handler(logging.Handler):\n    def emit(self, record): time.sleep(600)\n"
    (plugin / "blocking.py").write_text(source)
    with Job(tmp_path) as job:
        path = f"{plugin}:{job.env.get('PYTHONPATH', '')}".rstrip(":")
        agent = job.run("--event-log-handler=blocking", *FLAGS, SCRIPT, env={"PYTHONPATH": path})
        assert agent.wait() == 0
    assert "the event handler blocking had not finished 2 s after the end; the job continues" in agent.err
