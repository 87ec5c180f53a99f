"""Makes the pictures of docs/page.md, from a real job and a simulated one.

python -m tests.page.screenshots docs/images
"""

import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from ripstop.protocol.secret import api_token_from_secret
from tests.page import simulated_job
from tests.page.browser import launched, playwright, tab
from tests.page.test_page import SECRET, add_node, job_in, origin, until_running

expect = playwright.expect
RUN_ID = "llm-7b-pretrain"
WIDE = {"width": 1360, "height": 900}


def real_job(browser: object, folder: Path) -> None:
    token = api_token_from_secret(SECRET, RUN_ID)
    with tempfile.TemporaryDirectory() as place, job_in(Path(place), SLOW="5", STEP_S="0.1") as job:
        add_node(job, workers=4, run_id=RUN_ID)
        add_node(job, workers=4, run_id=RUN_ID)
        status = until_running(job, 8, token)
        with tab(browser, origin(job), viewport=WIDE) as opened:
            page = opened.open(token)
            expect(page.locator("#problems")).to_contain_text("Rank 5 takes")
            os.kill(status["nodes"][1]["pids"][1], signal.SIGKILL)
            expect(page.locator("#events")).to_contain_text("recovered")
            add_node(job, workers=4, run_id=RUN_ID)
            expect(page.locator("#rank-count")).to_have_text("12")
            expect(page.locator("#problems")).to_contain_text("Rank 5 takes")
            page.wait_for_timeout(60_000)  # something to plot
            page.screenshot(path=folder / "page.png", full_page=True)
            page.locator("canvas.timeline").focus()
            page.keyboard.press("]")
            while "Round 2" not in page.locator("#timeline-detail").inner_text():
                page.keyboard.press("]")
            page.locator("section", has=page.locator("#timeline")).screenshot(path=folder / "page-timeline.png")
            page.emulate_media(color_scheme="dark")
            page.get_by_role("button", name="Open rank 5").first.click()
            page.get_by_role("tab", name="Log").click()
            expect(page.get_by_role("log")).to_contain_text("step")
            page.get_by_role("searchbox", name="Search the log").fill("0: loss")
            expect(page.locator("mark").first).to_be_visible()
            page.screenshot(path=folder / "page-rank.png")
            page.keyboard.press("Escape")
            page.emulate_media(color_scheme="light")
            page.get_by_role("button", name=re.compile("^Drain node")).first.click()
            page.locator("#dialog").screenshot(path=folder / "page-drain.png")
        with tab(browser, origin(job), viewport={"width": 390, "height": 844}) as opened:
            page = opened.open(token)
            expect(page.locator("#problems")).to_contain_text("Rank 5 takes")
            page.screenshot(path=folder / "page-phone.png")


def large_job(browser: object, folder: Path) -> None:
    with simulated_job.simulated(500, 8) as address, tab(browser, address, viewport=WIDE) as opened:
        page = opened.open(api_token_from_secret(simulated_job.TOKEN, simulated_job.RUN_ID))
        expect(page.locator("#problems")).to_contain_text("no heartbeat")
        page.locator("#rank-mode").select_option("step")
        page.locator("#ranks").screenshot(path=folder / "page-ranks.png")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with launched() as browser:
        real_job(browser, folder)
        large_job(browser, folder)
