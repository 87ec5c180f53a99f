"""What no test may leave behind for the next one in its process."""

from collections.abc import Iterator

import pytest

from ripstop.workers import linux


@pytest.fixture(autouse=True)
def _adopts_nobody() -> Iterator[None]:
    """An agent's parts make their process a subreaper; later tests would find other tests' orphans among their own."""
    yield
    if linux.is_subreaper():
        linux.stop_being_subreaper()
