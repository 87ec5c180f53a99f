"""A real Prometheus reads a real job."""

import json
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ripstop.observe.events import read_lines
from ripstop.rendezvous.secret import api_token
from tests.e2e.harness import SCRIPTS, Job, free_port, wait_until

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here: apt install prometheus")

TOKEN = "s3cret"
CRASH_AT = 45
CONFIG = """\
scrape_configs:
  - job_name: ripstop
    scrape_interval: 1s
    authorization:
      credentials_file: {token}
    static_configs:
      - targets: ["127.0.0.1:{port}"]
"""


class Prometheus:
    """Its HTTP API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"

    def query(self, what: str) -> dict[tuple[str, ...], float]:
        """The values of an expression by the values of its labels, in the order of their names."""
        try:
            with urllib.request.urlopen(self._url + urllib.parse.urlencode({"query": what}), timeout=10) as response:
                found = json.load(response)["data"]["result"]
        except (urllib.error.URLError, ConnectionError):
            return {}  # it is starting
        hidden = ("__name__", "instance", "job")
        return {
            tuple(value for name, value in sorted(one["metric"].items()) if name not in hidden): float(one["value"][1])
            for one in found
        }

    def until(self, what: str) -> dict[tuple[str, ...], float]:
        """Waits until an expression has values."""
        return wait_until(lambda: self.query(what) or None, why=lambda: f"{what} has no value")


@contextmanager
def prometheus(folder: Path, job: Job) -> Iterator[Prometheus]:
    """Scrapes the job; gone when the test is over."""
    token, config, port = folder / "token", folder / "prometheus.yml", free_port()
    token.write_text(api_token(TOKEN, "e2e"))
    config.write_text(CONFIG.format(token=token, port=job.port))
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield Prometheus(port)
    finally:
        process.kill()
        process.wait()


@contextmanager
def crashing_job(folder: Path, **env: str) -> Iterator[Job]:
    """Two workers on a node, and a coordinator by itself; one of the workers crashes, and they go on for ever."""
    state = {"STATE": str(folder / "state"), "CRASH_AT": str(CRASH_AT), "RIPSTOP_TOKEN": TOKEN}
    with Job(folder, **state, **env) as job:
        endpoint = f"--rdzv-endpoint=127.0.0.1:{job.port}"
        coordinator = job.ripstop(
            "coordinator", endpoint, "--rdzv-id=e2e", "--max-restarts=3", f"--log-dir={folder / 'coordinator'}"
        )
        coordinator.says("coordinator of job=e2e")
        node = job.node("--rdzv-conf=is_host=0", "--nproc-per-node=2", nnodes="1", script=SCRIPTS / "counting.py")
        yield job
        node.signal(signal.SIGTERM)
        node.wait()
        coordinator.signal(signal.SIGTERM)
        coordinator.wait()


def test_prometheus_reads_the_story_of_a_crash(tmp_path: Path) -> None:
    with crashing_job(tmp_path) as job, prometheus(tmp_path, job) as read:
        read.until('ripstop_restarts_total{cause="application"} == 1')
        read.until("ripstop_round == 2")
        assert read.until("ripstop_worker_memory_bytes > 1e6").keys() == {
            (*node, rank) for rank in "01" for node in read.query("ripstop_agent_memory_bytes")
        }
        phases = read.until("ripstop_recovery_seconds_count > 0")
        assert {("detect",), ("decide",), ("stop",), ("start",)} <= phases.keys()
        assert (
            0 < read.until('histogram_quantile(0.9, ripstop_recovery_seconds_bucket{phase="start"})')[("start",)] < 60
        )
        assert read.query("up") == {(): 1.0}
        assert set(read.query("ripstop_node_up").values()) == {1.0}
        assert read.query("ripstop_worker_failures_total >= 1")
        read.until("rate(ripstop_worker_cpu_seconds_total[10s]) > 0")
    with (tmp_path / "coordinator" / "e2e" / "job-events.jsonl").open() as lines:
        kinds = {record["kind"] for record in read_lines(lines)}
    assert {"node_joined", "round_formed", "worker_failed", "recovered", "round_ended"} <= kinds


def test_prometheus_reads_steps_and_goodput(tmp_path: Path) -> None:
    pytest.importorskip("ripstop.train")
    with crashing_job(tmp_path, REPORT="1") as job, prometheus(tmp_path, job) as read:
        read.until(f"ripstop_worker_step > {CRASH_AT} and on() ripstop_round == 2")
        assert read.until("ripstop_checkpoint_step") == {(): 40.0}
        assert read.until("ripstop_lost_steps_total")[()] == pytest.approx(
            CRASH_AT - 40, abs=15
        )  # beats are 0.25 s apart
        assert 0 < read.until("ripstop_goodput_ratio")[()] < 1
        assert read.until('ripstop_recovery_seconds_count{phase="first_step"} > 0')
        assert all(0 < rate < 60 for rate in read.until("ripstop_worker_steps_per_second > 0").values())
