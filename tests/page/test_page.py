"""The page of a job in a real browser, on real jobs; a simulated one where thousands of ranks are needed."""

import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ripstop.protocol.secret import api_token_from_secret
from tests.e2e.harness import SCRIPTS, Agent, Job, wait_until
from tests.page import simulated_job
from tests.page.browser import launched, playwright, tab

expect = playwright.expect
SECRET = "the job's own"
RUN_ID = "page"
SCRIPT = SCRIPTS / "reporting.py"
TOKEN = api_token_from_secret(SECRET, RUN_ID)
HOSTILE = '<img src=x onerror="window.attacked=1"><script>window.attacked=1</script>'
ROUND = "#tiles .tile:nth-child(2) .value"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@contextmanager
def job_in(folder: Path, **env: str) -> Iterator[Job]:
    own = {"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder), "RIPSTOP_TOKEN": SECRET}
    with Job(folder, **own | env) as job:
        yield job


def add_node(job: Job, *flags: str, workers: int = 2, run_id: str = RUN_ID, nnodes: str = "1:3") -> Agent:
    return job.run(
        *(f"--nnodes={nnodes}", f"--nproc-per-node={workers}", "--rdzv-backend=c10d", f"--rdzv-id={run_id}"),
        *(f"--rdzv-endpoint={origin(job)[7:]}", "--rdzv-conf=last_call_timeout=1", "--max-restarts=20", *flags),
        str(SCRIPT),
    )


def origin(job: Job) -> str:
    return f"http://127.0.0.1:{job.port}"


def ask(job: Job, path: str, token: str = TOKEN) -> Any:
    request = urllib.request.Request(f"{origin(job)}/api/v1{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def until_running(job: Job, world: int, token: str = TOKEN) -> dict[str, Any]:
    def running() -> dict[str, Any] | None:
        try:
            status: dict[str, Any] = ask(job, "/status", token)
        except OSError:
            return None
        started = all(len(node["pids"]) == node["slots"] for node in status["nodes"])
        return status if status["world_size"] == world and started else None

    return wait_until(running, why=job.describe)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two nodes with two workers each, which run as long as the tests last."""
    with job_in(tmp_path_factory.mktemp("shared")) as job:
        add_node(job)
        add_node(job)
        until_running(job, 4)
        yield job


@pytest.fixture
def page(browser: Any, shared: Job) -> Iterator[Any]:
    with tab(browser, origin(shared)) as opened:
        found = opened.open(TOKEN)
        expect(found.locator("#rank-count")).to_have_text("4")
        yield found


def attacked(page: Any) -> bool:
    return bool(page.evaluate("() => window.attacked === 1"))


def serious_faults(page: Any) -> list[str]:
    """What axe-core finds serious or critical."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    options = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations"]}
    results = axe.Axe().run(page, options=options).response
    return [
        f"{found['id']}: {[node['target'] for node in found['nodes']][:3]}"
        for found in results["violations"]
        if found["impact"] in ("serious", "critical")
    ]


# a running job --------------------------------------------------------------------------------------------------------


def test_the_page_shows_whether_the_job_is_fine_its_ranks_nodes_and_plots(page: Any) -> None:
    expect(page.locator("#answer")).to_have_text(re.compile("Running"))
    expect(page.locator("#job")).to_have_text(RUN_ID)
    expect(page.locator("#tiles")).to_contain_text(re.compile(r"Steps per second\d"))
    expect(page.locator("#nodes tbody tr")).to_have_count(2)
    expect(page.locator("#plots figure").first).to_contain_text(re.compile(r"p50 \d+ ms"))
    assert page.url.endswith("/"), "the token stays out of the address"


def test_a_killed_worker_becomes_a_new_round(page: Any, shared: Job) -> None:
    before = until_running(shared, 4)
    os.kill(before["nodes"][0]["pids"][1], signal.SIGKILL)
    expect(page.locator(ROUND)).to_have_text(str(before["round"] + 1))
    expect(page.locator("#events")).to_contain_text(re.compile(r"worker failed.*SIGKILL"))
    expect(page.locator("#answer")).to_have_text("Running again")


def test_a_worker_s_log_is_followed_and_searched(page: Any) -> None:
    page.get_by_role("button", name="Table").click()
    page.locator("#rank-view").get_by_role("button", name="Open rank 3").click()
    page.get_by_role("tab", name="Log").click()
    log = page.get_by_role("log")
    expect(log).to_contain_text(re.compile(r"\[rank 3\] step \d+"))
    lines = log.locator(".line").count()
    expect(log.locator(".line").nth(lines + 5)).to_be_visible()  # it goes on
    last = log.locator(".line").last.inner_text()
    page.get_by_role("searchbox", name="Search the log").fill(last)
    expect(log.locator("mark").first).to_have_text(last)


def test_stacks_of_one_worker_and_of_all(page: Any) -> None:
    page.get_by_role("button", name="Table").click()
    page.locator("#rank-view").get_by_role("button", name="Open rank 1").click()
    page.get_by_role("tab", name="Stack").click()
    expect(page.locator("#panel .stack")).to_contain_text("train_step")
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()
    page.get_by_role("button", name="Stacks").click()
    expect(page.locator("#dialog")).to_contain_text("4 workers")
    expect(page.locator("#dialog")).to_contain_text("train_step")


def test_the_grid_and_the_timeline_are_used_by_keyboard(page: Any) -> None:
    page.locator("canvas.grid").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#panel-title")).to_have_text("Rank 1")
    page.keyboard.press("Escape")
    assert page.evaluate("() => document.activeElement.className") == "grid", "the focus returns"
    page.locator("canvas.timeline").focus()
    for key in ("+", "ArrowLeft", "0", "]", "]"):
        page.keyboard.press(key)
    expect(page.locator("#timeline-detail")).to_be_visible()


def test_a_reload_keeps_the_token_and_the_history(page: Any) -> None:
    page.reload()
    expect(page.locator("#rank-count")).to_have_text("4")
    expect(page.locator("#events")).to_contain_text("node joined")


def test_axe_finds_no_serious_fault(page: Any) -> None:
    expect(page.locator("#plots figure").first).to_contain_text("p50")
    assert serious_faults(page) == []
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="Table").click()
    page.locator("#rank-view").get_by_role("button", name="Open rank 0").click()
    expect(page.locator("#panel")).to_contain_text("Heartbeat")
    assert serious_faults(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Stop").click()
    assert serious_faults(page) == []


def test_nothing_overflows_a_phone(browser: Any, shared: Job) -> None:
    with tab(browser, origin(shared), viewport={"width": 390, "height": 844}) as opened:
        page = opened.open(TOKEN)
        expect(page.locator("#plots figure").first).to_contain_text("p50")
        assert page.evaluate("() => document.scrollingElement.scrollWidth") <= 390
        page.get_by_role("button", name="Table").click()
        page.locator("#rank-view").get_by_role("button", name="Open rank 0").click()
        expect(page.locator("#panel")).to_contain_text("Heartbeat")
        assert page.evaluate("() => document.getElementById('panel').scrollWidth") <= 390


def test_a_wrong_token_is_refused_and_the_right_one_opens_the_job(browser: Any, shared: Job) -> None:
    with tab(browser, origin(shared)) as opened:
        page = opened.open()
        page.locator("#token").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#dialog")).to_contain_text("Not accepted: the token is not this job's")
        expect(page.locator("#ranks")).to_be_hidden()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Enter the token").click()
        page.locator("#token").fill(TOKEN)
        page.keyboard.press("Enter")
        expect(page.locator("#rank-count")).to_have_text("4")


def test_a_command_says_what_will_happen_and_then_happens(page: Any, shared: Job) -> None:
    before = until_running(shared, 4)["round"]
    page.get_by_role("button", name="Restart").click()
    dialog = page.locator("#dialog")
    expect(dialog).to_contain_text("All 4 workers on 2 nodes get SIGTERM")
    expect(dialog).to_contain_text(f"They start again as round {before + 1}")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_be_hidden()
    assert ask(shared, "/status")["round"] == before
    page.get_by_role("button", name="Restart").click()
    dialog.get_by_role("button", name="Restart").click()
    expect(page.locator("#toasts")).to_contain_text(f"replacing round {before}")
    expect(page.locator(ROUND)).to_have_text(str(before + 1))
    page.get_by_role("button", name="Scale").click()
    dialog.get_by_label("Number of nodes").fill("2")
    dialog.get_by_role("button", name="Scale").click()
    expect(page.locator("#events")).to_contain_text("scale to 2")


# jobs of their own ----------------------------------------------------------------------------------------------------


def test_a_drained_node_leaves_the_page(browser: Any, tmp_path: Path) -> None:
    with job_in(tmp_path) as job, tab(browser, origin(job)) as opened:
        agents = [add_node(job, workers=1), add_node(job, workers=1)]
        status = until_running(job, 2)
        page = opened.open(TOKEN)
        name = status["nodes"][1]["name"]
        page.get_by_role("button", name=f"Drain node {name}").click()
        expect(page.locator("#dialog")).to_contain_text(f"Node {name} stops its 1 worker")
        page.locator("#dialog").get_by_role("button", name="Drain the node").click()
        expect(page.locator("#nodes tbody tr")).to_have_count(1)
        expect(page.locator("#rank-count")).to_have_text("1")
        page.get_by_role("button", name="Stop").click()
        page.get_by_label("Reason").fill("enough")
        page.locator("#dialog").get_by_role("button", name="End the job").click()
        expect(page.locator("#answer")).to_have_text("Job stopped")
        expect(page.locator("#reason")).to_contain_text("enough")
        for agent in agents:
            agent.wait()


def test_the_page_reconnects_to_a_restarted_coordinator(browser: Any, tmp_path: Path) -> None:
    def coordinator(job: Job) -> Agent:
        conf = "--rdzv-conf=last_call_timeout=1"
        return job.ripstop(
            "coordinator", "--nnodes=1:2", f"--rdzv-endpoint={origin(job)[7:]}", f"--rdzv-id={RUN_ID}", conf
        )

    with job_in(tmp_path) as job, tab(browser, origin(job)) as opened:
        first = coordinator(job)
        add_node(job, "--rdzv-conf=is_host=false", nnodes="1:2")
        until_running(job, 2)
        page = opened.open(TOKEN)
        expect(page.locator("#rank-count")).to_have_text("2")
        first.process.kill()
        first.wait()
        expect(page.locator("#link")).to_have_text("reconnecting")
        expect(page.locator("#answer")).to_have_text("No connection")
        coordinator(job)
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#answer")).to_have_text(re.compile("^Running"))
        expect(page.locator("#events")).to_contain_text("round found")
        expect(page.locator("#events")).to_contain_text("round formed")  # known from the first coordinator


def test_html_of_the_job_is_shown_and_never_run(browser: Any, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run_id = "<b><script>window.attacked=1<\\script>"
    token = api_token_from_secret(SECRET, run_id)
    env = {"SAYS": f"\x1b[31m{HOSTILE}\x1b[0m\x07\n{'y' * 100_000}", "RAISE": "0", "WHEN": str(go)}
    with job_in(tmp_path, **env) as job, tab(browser, origin(job)) as opened:
        add_node(job, "--max-restarts=1", workers=1, run_id=run_id)
        until_running(job, 1, token)
        page = opened.open(token)
        expect(page.locator("#job")).to_have_text(run_id)
        page.locator("canvas.grid").focus()
        page.keyboard.press("Enter")
        page.get_by_role("tab", name="Log").click()
        expect(page.get_by_role("log")).to_contain_text(f"{HOSTILE}·")
        expect(page.get_by_role("log")).to_contain_text("yyy … (cut)")
        page.get_by_role("searchbox", name="Search the log").fill("<img")
        expect(page.get_by_role("log").locator("mark").first).to_have_text("<img")
        go.touch()
        expect(page.locator("#events")).to_contain_text("RuntimeError")
        page.keyboard.press("Escape")
        page.locator("canvas.timeline").focus()
        page.keyboard.press("[")
        expect(page.locator("#timeline-detail")).to_be_visible()
        assert page.locator("main img, #panel img, main script, #panel script, h1 b").count() == 0
        assert not attacked(page)


@pytest.mark.long
def test_a_rank_that_hangs_jumps_out_with_its_stack_and_then_becomes_a_round(browser: Any, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with job_in(tmp_path, HANG="1", WHEN=str(go)) as job, tab(browser, origin(job)) as opened:
        add_node(job, "--hang-timeout=45")
        until_running(job, 2)
        page = opened.open(TOKEN)
        expect(page.locator("#rank-count")).to_have_text("2")
        go.touch()
        expect(page.locator("#problems")).to_contain_text("Rank 1: no heartbeat for")
        page.get_by_role("searchbox", name="Filter ranks").fill("silent")
        expect(page.locator("#rank-count")).to_have_text("1 of 2")
        page.get_by_role("button", name="Table").click()
        page.locator("#rank-view").get_by_role("button", name="Open rank 1").click()
        expect(page.locator("#panel")).to_contain_text("silent")
        page.get_by_role("tab", name="Stack").click()
        expect(page.locator("#panel .stack")).to_contain_text("load_batch")
        page.keyboard.press("Escape")
        expect(page.locator("#events")).to_contain_text(
            re.compile(r"rank 1 \(pid \d+\) hangs: no heartbeat"), timeout=60_000
        )
        expect(page.locator(ROUND)).to_have_text("2")
        page.locator("canvas.timeline").focus()
        detail = page.locator("#timeline-detail")
        wait_until(
            lambda: page.keyboard.press("[") or "rank 1 hangs" in detail.inner_text() or None, why=detail.inner_text
        )


def test_ripstop_page_serves_a_job_without_a_port(browser: Any, tmp_path: Path) -> None:
    with job_in(tmp_path) as job:
        job.env.pop("RIPSTOP_TOKEN")
        job.run("--nproc-per-node=2", "--rdzv-id=alone", str(SCRIPT))
        wait_until(lambda: next(iter((tmp_path / "ripstop").glob("*.sock")), None), why=job.describe)
        browse = tmp_path / "browse"
        browse.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
        browse.chmod(0o755)
        command = job.ripstop("page", "--job=alone", env={"BROWSER": f"{browse} %s"})
        url = wait_until(lambda: re.search(r"(http://\S+)/#token=(\S+)\n", command.out), why=lambda: command.err)
        with tab(browser, url[1]) as opened:
            given = tmp_path / "opened"
            file = wait_until(lambda: (given.exists() and given.read_text().strip()) or None)
            assert url[2] not in file  # other users can read the browser's command line, but not the file
            assert Path(file.removeprefix("file://")).stat().st_mode & 0o777 == 0o600
            page = opened.page
            page.goto(file)
            assert opened.faults.pop(0) == f"a request to {file}"
            expect(page.locator("#rank-count")).to_have_text("2")
            wait_until(lambda: not Path(file.removeprefix("file://")).exists() or None)
            expect(page.locator("#link")).to_have_text("live")
            page.get_by_role("button", name="Stop").click()
            expect(page.locator("#dialog")).to_contain_text("All 2 workers on 1 node")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url[1]}/api/v1/status", timeout=120)
        command.signal(signal.SIGINT)
        assert command.wait() == 0


# thousands of ranks ---------------------------------------------------------------------------------------------------


def test_4000_ranks_are_shown_filtered_and_opened(browser: Any) -> None:
    with simulated_job.simulated(nodes=500, slots=8) as address, tab(browser, address) as opened:
        page = opened.open(api_token_from_secret(simulated_job.TOKEN, simulated_job.RUN_ID))
        count = page.locator("#rank-count")
        expect(count).to_have_text("4,000")
        expect(page.locator("#problems")).to_contain_text(f"Rank {simulated_job.SILENT_RANK}: no heartbeat")
        expect(page.locator("#problems")).to_contain_text(f"Rank {simulated_job.SLOW_RANK} takes")
        search = page.get_by_role("searchbox", name="Filter ranks")
        for query, found in {
            "gpu0002": 8,
            "100-299": 200,
            "gpu01 0-900": 101,
            "17": 1,
            "silent": 1,
            "nowhere": 0,
        }.items():
            search.fill(query)
            expect(count).to_have_text(f"{found} of 4,000")
        search.fill("")
        page.get_by_role("button", name="straggler").click()
        expect(count).to_have_text("1 of 4,000")
        page.get_by_role("button", name="Table").click()
        page.locator("#rank-view").get_by_role("button", name=f"Open rank {simulated_job.SLOW_RANK}").click()
        expect(page.locator("#panel")).to_contain_text("times the median step time")
        expect(page.locator("#panel")).to_contain_text("70.0 GiB of 80.0 GiB")
