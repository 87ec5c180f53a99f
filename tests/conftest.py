"""What no test may leave behind for the next one in its process."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ripstop.system import linux

# `nohup` and some CI runners start us with these ignored, and every process that a test starts would inherit that
for _signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, signal.default_int_handler if _signum is signal.SIGINT else signal.SIG_DFL)

# an example takes as long as the machine is busy
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

pytest_plugins = ["tests.coordinator_fixtures", "tests.worker_fixtures"]

# Workers of pytest-xdist take whole files in this order; short ones are last, so that no worker waits for another.
SLOW_FIRST = ("simulation", "e2e", "docs", "page", "hosts", "examples", "features", "compat", "workers", "train")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests by their directory; those of a file stay together, in their order."""

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return SLOW_FIRST.index(folder) if folder in SLOW_FIRST else len(SLOW_FIRST)

    items.sort(key=place)


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Zygotes remember what they found out about scripts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _adopts_nobody() -> Iterator[None]:
    """An agent's parts make their process a subreaper; later tests would find other tests' orphans among their own."""
    yield
    if linux.is_subreaper():
        linux.stop_being_subreaper()


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """A directory with a short path: a Unix socket's path has at most 107 bytes, and pytest's own can be long."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rs-") as folder:
        yield Path(folder)
