"""The command as a process of its own: help, version, what it imports."""

import subprocess
import sys

import pytest

from ripstop.cli import main
from ripstop.cli.coordinator import FLAGS as COORDINATOR_FLAGS
from ripstop.cli.coordinator import HELP as COORDINATOR_HELP
from ripstop.cli.run import FLAGS, HELP

HEAVY = {"torch", "aiohttp", "asyncio", "argparse", "importlib.metadata", "logging", "subprocess", "ssl", "typing"}


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=60, check=False)


def test_reading_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys; from ripstop.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    asked = python("-c", code, "run", "--help")
    assert asked.stdout == HELP
    assert set(asked.stderr.split()) & HEAVY == set()


def test_a_mistake_starts_nothing_and_exits_with_2() -> None:
    wrong = python("-m", "ripstop", "run", "--nnodes=4:2", __file__)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("ripstop run: error: --nnodes=4:2: ")


@pytest.mark.parametrize("words", [["version"], ["--version"]])
def test_the_version_is_one_line(words: list[str]) -> None:
    asked = python("-m", "ripstop", *words)
    assert asked.returncode == 0
    assert asked.stdout.startswith("ripstop 0.")


@pytest.mark.parametrize(
    ("words", "beginning"),
    [
        ([], "ripstop launches"),
        (["--help"], "ripstop launches"),
        (["run", "-h"], "usage: ripstop run"),
        (["run", "--nnodes=2", "--help"], "usage: ripstop run"),
        (["coordinator", "--help"], "usage: ripstop coordinator"),
    ],
)
def test_help_is_on_stdout_and_no_mistake(words: list[str], beginning: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(beginning)


def test_the_help_names_every_flag_and_fits_a_wide_terminal() -> None:
    assert [flag.name for flag in FLAGS if flag.name != "--help" and flag.name not in HELP] == []
    assert [
        flag.name for flag in COORDINATOR_FLAGS if flag.name != "--help" and flag.name not in COORDINATOR_HELP
    ] == []
    assert max(map(len, (HELP + COORDINATOR_HELP).splitlines())) <= 120
