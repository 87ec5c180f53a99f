"""A real Prometheus reads the metrics of a real job."""

import json
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ripstop.protocol.secret import api_token_from_secret
from tests.docs.test_alerts import RULES
from tests.docs.test_tables import DASHBOARD, queries
from tests.e2e.harness import SCRIPTS, Job, free_port, wait_until

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here: apt install prometheus")

TOKEN = "s3cret"
CRASH_AT = 45
CONFIG = """\
global:
  evaluation_interval: 1s
rule_files: [{rules}]
scrape_configs:
  - job_name: ripstop
    scrape_interval: 1s
    authorization:
      credentials_file: {token}
    static_configs:
      - targets: ["127.0.0.1:{port}"]
"""


class Prometheus:
    """The HTTP API of Prometheus."""

    def __init__(self, port: int, log: Path) -> None:
        self._api = f"http://127.0.0.1:{port}/api/v1"
        self._log = log

    def query(self, what: str) -> dict[tuple[str, ...], float]:
        """The values of an expression by the values of its labels, in the order of their names."""
        try:
            with urllib.request.urlopen(
                f"{self._api}/query?{urllib.parse.urlencode({'query': what})}", timeout=10
            ) as response:
                found = json.load(response)["data"]["result"]
        except urllib.error.HTTPError as error:
            assert error.code == 503, f"{what}: {error.read().decode()}"
            return {}  # it is starting
        except (urllib.error.URLError, ConnectionError):
            return {}  # it does not even listen
        hidden = ("__name__", "instance", "job")
        return {
            tuple(value for name, value in sorted(one["metric"].items()) if name not in hidden): float(one["value"][1])
            for one in found
        }

    def rules(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self._api}/rules", timeout=120) as response:
            groups = json.load(response)["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def until(self, what: str) -> dict[tuple[str, ...], float]:
        """Wait until an expression has values."""
        return wait_until(lambda: self.query(what) or None, why=lambda: f"{what} has no value\n{self.describe()}")

    def describe(self) -> str:
        with urllib.request.urlopen(f"{self._api}/targets", timeout=120) as response:
            targets = json.load(response)["data"]["activeTargets"]
        return f"{self._log.read_text()}\n" + "\n".join(f"{one['health']}: {one['lastError']}" for one in targets)


def is_up(process: subprocess.Popen[bytes], port: int) -> bool | None:
    """None: not yet."""
    if process.poll() is not None:
        return False
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=120):
            return True
    except OSError:
        return None


@contextmanager
def prometheus(folder: Path, job: Job) -> Iterator[Prometheus]:
    """A Prometheus that reads the job's metrics until the test ends."""
    token, config, log = folder / "token", folder / "prometheus.yml", folder / "prometheus.log"
    token.write_text(api_token_from_secret(TOKEN, "e2e"))
    config.write_text(CONFIG.format(token=token, port=job.port, rules=RULES))
    for attempt in range(5):  # another process may take the port first
        port = free_port()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [
                    "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / f'tsdb{attempt}'}",
                    f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip
        try:
            if wait_until(partial(is_up, process, port), why=log.read_text):
                yield Prometheus(port, log)
                return
        finally:
            process.kill()
            process.wait()


@contextmanager
def crashing_job(folder: Path) -> Iterator[Job]:
    """Two workers on a node and a separate coordinator; one worker crashes once; they run until they are stopped."""
    env = {"STATE": str(folder / "state"), "CRASH_AT": str(CRASH_AT), "RIPSTOP_TOKEN": TOKEN}
    with Job(folder, **env, REPORT="1") as job:
        endpoint = f"--rdzv-endpoint=127.0.0.1:{job.port}"
        coordinator = job.ripstop(
            "coordinator", endpoint, "--rdzv-id=e2e", "--max-restarts=1", f"--log-dir={folder / 'coordinator'}"
        )
        coordinator.wait_for_log("coordinator of job=e2e")
        node = job.node("--rdzv-conf=is_host=0", "--nproc-per-node=2", nnodes="1", script=SCRIPTS / "counting.py")
        yield job
        node.signal(signal.SIGTERM)
        node.wait()
        coordinator.signal(signal.SIGTERM)
        coordinator.wait()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with crashing_job(tmp_path_factory.mktemp("job")) as running:
        yield running


@pytest.fixture(scope="module")
def read(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Shared by all tests: Prometheus needs five seconds to find its targets."""
    with prometheus(tmp_path_factory.mktemp("prometheus"), job) as running:
        yield running


def test_prometheus_reads_the_counts_of_a_crash(read: Prometheus) -> None:
    read.until('ripstop_restarts_total{cause="application"} == 1')
    read.until("ripstop_round == 2")
    phases = read.until("ripstop_recovery_seconds_count > 0")
    assert {("detect",), ("decide",), ("stop",), ("start",)} <= phases.keys()
    slowest = read.until("histogram_quantile(0.9, ripstop_recovery_seconds_bucket)")
    assert 0 < slowest[("start",)] < 60
    assert read.until("ripstop_worker_failures_total >= 1")
    assert read.until("up == 1") == {(): 1.0}


def test_prometheus_reads_the_usage_of_every_rank(read: Prometheus) -> None:
    read.until("count(ripstop_worker_memory_bytes > 1e6) == 2 and on() ripstop_round == 2")
    memory = read.until("ripstop_worker_memory_bytes > 1e6")
    (node,) = read.until("ripstop_agent_memory_bytes > 1e6")
    assert memory.keys() == {(*node, "0"), (*node, "1")}
    assert read.until("ripstop_worker_cpu_seconds_total >= 0").keys() == memory.keys()
    assert list(read.until("ripstop_node_up == 1").values()) == [1.0]


def test_prometheus_reads_steps_and_goodput(read: Prometheus) -> None:
    read.until(f"ripstop_worker_step > {CRASH_AT} and on() ripstop_round == 2")
    assert read.until("ripstop_checkpoint_step") == {(): 40.0}
    unreported = 15  # steps between two heartbeats
    assert read.until("ripstop_lost_steps_total")[()] == pytest.approx(CRASH_AT - 40, abs=unreported)
    assert 0 < read.until("ripstop_goodput_ratio")[()] < 1
    assert read.until('ripstop_recovery_seconds_count{phase="first_step"} > 0')
    assert all(0 < rate < 60 for rate in read.until("ripstop_worker_steps_per_second > 0").values())


def test_prometheus_accepts_every_query_of_the_dashboard(read: Prometheus) -> None:
    read.until("ripstop_round == 2")
    results = {query: read.query(query) for query in map(filled_in, queries(DASHBOARD["panels"]))}
    (restarts,) = (panel for panel in DASHBOARD["panels"] if panel["title"] == "Restarts")
    assert results[filled_in(*queries(restarts))] == {(): 1.0}


def test_prometheus_evaluates_every_alert_rule_on_the_metrics_of_a_job(read: Prometheus) -> None:
    read.until("ripstop_round == 2")
    read.until('ALERTS{alertstate="firing"}')
    rules = read.rules()
    assert {rule["health"] for rule in rules} == {"ok"} and len(rules) == 13
    firing = {rule["name"] for rule in rules if any(alert["state"] == "firing" for alert in rule["alerts"])}
    assert firing == {"RipstopRestartBudgetLow"}  # 1 of 1 restarts are used


def filled_in(question: str) -> str:
    """The query with values for the dashboard's variables."""
    return question.replace("$__rate_interval", "10s").replace("$job", ".*").replace("$instance", ".*")


def test_a_separate_coordinator_writes_an_event_file(job: Job) -> None:
    file = job.folder / "coordinator" / "e2e" / "job-events.jsonl"

    def events_written() -> bool | None:
        kinds = {json.loads(line)["kind"] for line in file.read_text().rpartition("\n")[0].splitlines()}
        return {"node_joined", "round_formed", "worker_failed", "round_ended", "recovered"} <= kinds or None

    wait_until(lambda: file.exists() or None)
    wait_until(events_written)
