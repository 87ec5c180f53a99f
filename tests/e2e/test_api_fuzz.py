"""Replies to random requests match the API's description, and the workers are not disturbed."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from ripstop.api.http_api import ROUTES, Api
from ripstop.api.routes import ApiRoute
from ripstop.protocol.secret import api_token_from_secret
from tests.e2e.harness import SCRIPTS, Job, wait_until

TOKEN = "the job's own"
HEADERS = {"Authorization": f"Bearer {api_token_from_secret(TOKEN, 'fuzz')}"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job that writes output as long as the tests last."""
    folder = tmp_path_factory.mktemp("fuzz")
    with Job(folder, XDG_RUNTIME_DIR=str(folder), TMPDIR=str(folder), RIPSTOP_TOKEN=TOKEN) as job:
        where = f"--api=127.0.0.1:{job.port}"
        agent = job.run("--standalone", where, "--rdzv-id=fuzz", "--tee=3", str(SCRIPTS / "chatty.py"))
        agent.wait_for_log("round=1")
        yield job


@pytest.fixture(scope="module")
def described(job: Job) -> Any:
    """The API, from its own description."""
    import schemathesis  # seconds: only where it is used

    return schemathesis.openapi.from_url(f"http://127.0.0.1:{job.port}/api/v1/openapi.json", headers=HEADERS)


def fuzz(described: Any, route: ApiRoute, examples: int) -> None:
    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(case=described[route.path][route.method].as_strategy())
    def send(case: Any) -> None:
        if str((case.query or {}).get("follow", "false")).lower() in ("true", "1", ""):
            case.query.pop("follow", None)  # the stream would not end
        case.call_and_validate(headers=HEADERS, timeout=20)

    send()


HARMLESS = [route for route in ROUTES if route.handler not in (Api.restart, Api.stop)]
(RESTART,) = (route for route in ROUTES if route.handler is Api.restart)


def name(route: ApiRoute) -> str:
    return route.handler.__name__


@pytest.mark.parametrize("route", HARMLESS, ids=name)
def test_random_requests_get_replies_as_described(described: Any, route: ApiRoute) -> None:
    fuzz(described, route, 8)


@pytest.mark.long
@pytest.mark.parametrize("route", HARMLESS, ids=name)
def test_many_random_requests_get_replies_as_described(described: Any, route: ApiRoute) -> None:
    fuzz(described, route, 500)


def test_the_worker_is_not_disturbed(job: Job) -> None:
    """It still writes, and was not restarted."""
    (agent,) = job.agents
    before = agent.out.count("out 0 ")
    wait_until(lambda: True if agent.out.count("out 0 ") > before else None, why=job.describe)
    assert "round=2" not in agent.err, job.describe()


def test_restarts_get_replies_as_described_and_the_job_continues(described: Any, job: Job) -> None:
    fuzz(described, RESTART, 3)
    (agent,) = job.agents
    agent.wait_for_log("pause_ms=")  # quick restarts may pass over a round
    assert agent.process.poll() is None
    assert "Traceback" not in agent.err, job.describe()
