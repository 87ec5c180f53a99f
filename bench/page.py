#!/usr/bin/env python3
"""How fast the page of a job is, in Debian's chromium.  Needs requirements/test.txt.

  python bench/page.py [--nodes 500] [--slots 8] [--events 10000] [--kills 10] [--minutes 1] [--json F]

first paint     navigation                         -> the first content is painted
ranks           navigation                         -> all ranks of the simulated job are drawn
samples         navigation                         -> their step times and heartbeats are drawn
filter          a key in the filter of the ranks   -> the grid is drawn again
round           a worker of a real job is killed   -> the page shows the next round; median and worst
growth          the JavaScript heap after --minutes less the heap after the first ones, both after a collection
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ripstop.protocol.secret import api_token_from_secret
from tests.page import simulated_job, test_page
from tests.page.browser import launched, playwright, tab

SETTLE_S = 15.0
FILTER = """async (text) => {
    const input = document.getElementById("rank-filter");
    const start = performance.now();
    input.value = text;
    input.dispatchEvent(new Event("input"));
    await new Promise((resolve) => requestAnimationFrame(resolve));
    return performance.now() - start;
}"""
FIRST_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
expect = playwright.expect


def heap_mb(page: Any) -> float:
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    return float(session.send("Runtime.getHeapUsage")["usedSize"]) / 1e6


def large_job(browser: Any, args: argparse.Namespace) -> dict[str, float]:
    with simulated_job.simulated(args.nodes, args.slots, args.events) as address, tab(browser, address) as opened:
        token = api_token_from_secret(simulated_job.TOKEN, simulated_job.RUN_ID)
        start = time.monotonic()
        page = opened.open(token)
        expect(page.locator("#rank-count")).to_have_text(f"{args.nodes * args.slots:,}")
        ranks = time.monotonic() - start
        expect(page.locator("#problems")).to_contain_text("no heartbeat")
        samples = time.monotonic() - start
        filters = [page.evaluate(FILTER, text) for text in ("gpu01", "gpu01 8-900", "silent", "17", "")]
        time.sleep(SETTLE_S)
        before = heap_mb(page)
        time.sleep(60 * args.minutes)
        after = heap_mb(page)
        return {
            "first_paint_s": page.evaluate(FIRST_PAINT) / 1000,
            "ranks_s": ranks,
            "samples_s": samples,
            "filter_ms": max(filters),
            "heap_mb": after,
            "growth_mb": after - before,
        }


def rounds(browser: Any, kills: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, test_page.job_in(Path(folder)) as job:
        test_page.add_node(job, f"--max-restarts={2 * kills}")
        found = []
        with tab(browser, test_page.origin(job)) as opened:
            test_page.until_running(job, 2)
            page = opened.open(test_page.TOKEN)
            for _ in range(kills):
                status = test_page.until_running(job, 2)
                expect(page.locator(test_page.ROUND)).to_have_text(str(status["round"]))
                os.kill(status["nodes"][0]["pids"][1], signal.SIGKILL)
                start = time.monotonic()
                expect(page.locator(test_page.ROUND)).to_have_text(str(status["round"] + 1))
                found.append(time.monotonic() - start)
                time.sleep(4)  # a round that ran for three seconds is restarted at once
    return {"round_s": statistics.median(found), "worst_round_s": max(found)}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"nodes": 500, "slots": 8, "events": 10_000, "kills": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with launched() as browser:
        figures = large_job(browser, args) | rounds(browser, args.kills)
    for name, value in figures.items():
        print(f"{name:14} {value:8.3f}")
    if args.json:
        args.json.write_text(json.dumps({name: round(value, 3) for name, value in figures.items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
