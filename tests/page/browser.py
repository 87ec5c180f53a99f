"""Chromium for the tests of the page, driven by Playwright.

Every page is watched: a request that leaves the page's origin, an uncaught exception, or a violation of the content
security policy fails the test.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (requirements/test.txt)")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
TIMEOUT_MS = 120_000


def chromium() -> str:
    if (path := shutil.which("chromium")) is None:
        pytest.skip("chromium is not installed (Debian: apt install chromium)")
    return path


@contextmanager
def launched() -> Iterator[Any]:
    path = chromium()
    with playwright.sync_playwright() as driver:
        playwright.expect.set_options(timeout=TIMEOUT_MS)
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page of the browser, and what went wrong in it."""

    def __init__(self, browser: Any, origin: str, **options: Any) -> None:
        self.origin = origin
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        self.context.set_default_timeout(TIMEOUT_MS)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.page.on("request", lambda request: self._check(request.url))
        self.page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))
        self.page.on("console", lambda message: self._console(message.text))

    def _check(self, url: str) -> None:
        if not url.startswith((f"{self.origin}/", "data:")):
            self.faults.append(f"a request to {url}")

    def _console(self, text: str) -> None:
        if "Content Security Policy" in text:
            self.faults.append(text)

    def open(self, token: str = "") -> Any:
        self.page.goto(f"{self.origin}/{f'#token={token}' if token else ''}")
        return self.page


@contextmanager
def tab(browser: Any, origin: str, **options: Any) -> Iterator[Tab]:
    opened = Tab(browser, origin, **options)
    try:
        yield opened
        assert not opened.faults
    finally:
        opened.context.close()
