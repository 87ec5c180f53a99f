"""An unmodified script with torch's timers: a worker that hangs is killed and restarted."""

import json
import re
from pathlib import Path

from tests.e2e.harness import SCRIPTS, Job


def test_a_worker_whose_timer_expires_is_restarted_and_the_report_names_the_scope(tmp_path: Path) -> None:
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TMPDIR": str(tmp_path)}
    with Job(tmp_path, **env) as job:
        agent = job.run("--standalone", "--nproc-per-node=2", "--max-restarts=1", str(SCRIPTS / "timers.py"))
        assert agent.wait() == 1
    assert [f"round={n} rank=1" in agent.err for n in (1, 2)] == [True, True]
    assert "restart 1 of 1" in agent.err and "a quick part" not in agent.err
    (path,) = job.logs.glob("*/report.json")
    cause = json.loads(path.read_text())["root_cause"]
    assert (cause["rank"], cause["signal"]) == (1, "SIGKILL")
    assert re.fullmatch(r"timer expired: 'the part that hangs' \(0\.\d s\); ripstop sent SIGKILL", cause["message"])
    assert "timers.py" in cause["traceback"], "where it was just before the kill"
    assert not list(tmp_path.glob("watchdog_timer_*")), "the pipe is removed at the end of the job"
