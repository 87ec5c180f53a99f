"""The command as a process: help, version, imports."""

import subprocess
import sys

import pytest

from ripstop.cli import JOB_COMMANDS, main
from ripstop.cli.commands import kube, slurm
from ripstop.cli.commands.completion import completion_flags
from ripstop.cli.commands.run import HELP
from ripstop.cli.help_text import fit_help_text
from ripstop.cli.options.flags import Flag
from ripstop.protocol.secret import api_token_from_secret

HEAVY = {"torch", "aiohttp", "asyncio", "argparse", "importlib.metadata", "logging", "subprocess", "ssl"}
SUBCOMMANDS = {"kube": kube.COMMANDS, "slurm": slurm.COMMANDS}


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=120, check=False)


def test_reading_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys; from ripstop.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    result = python("-c", code, "run", "--help")
    assert result.stdout == fit_help_text(HELP, 80)
    assert set(result.stderr.split()) & HEAVY == set()


def test_a_mistake_starts_nothing_and_exits_with_2() -> None:
    wrong = python("-m", "ripstop", "run", "--nnodes=4:2", __file__)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("ripstop run: error: --nnodes=4:2: ")


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_the_version_is_one_line(arguments: list[str]) -> None:
    result = python("-m", "ripstop", *arguments)
    assert result.returncode == 0
    assert result.stdout.startswith("ripstop 0.")


@pytest.mark.parametrize(
    ("arguments", "beginning"),
    [
        ([], "ripstop launches"),
        (["--help"], "ripstop launches"),
        (["run", "-h"], "usage: ripstop run"),
        (["run", "--nnodes=2", "--help"], "usage: ripstop run"),
        (["coordinator", "--help"], "usage: ripstop coordinator"),
        (["version", "--help"], "usage: ripstop version"),
        (["completion", "--help"], "usage: ripstop completion"),
        *(([command, "-h"], f"usage: ripstop {command}") for command in JOB_COMMANDS),
    ],
)
def test_help_is_printed_on_stdout_with_exit_code_0(
    arguments: list[str], beginning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(beginning)


@pytest.mark.parametrize(("command", "flags"), completion_flags().items())
def test_a_commands_help_has_every_flag_an_example_and_the_exit_codes_in_80_columns(
    command: str, flags: tuple[Flag, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in [[command, each] for each in SUBCOMMANDS[command]] if command in SUBCOMMANDS else [[command]]:
        assert main([*arguments, "--help"]) == 0
    help = capsys.readouterr().out
    assert [flag.name for flag in flags if flag.name != "--help" and flag.name not in help] == []
    assert max(map(len, help.splitlines())) < 80
    assert "\nexamples\n" in help and "\nexit codes" in help.lower()


def test_a_token_is_derived_without_a_request_so_endpoint_is_an_unknown_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIPSTOP_TOKEN", "secret")
    assert main(["token", "--endpoint=head"]) == 2
    assert capsys.readouterr().err.startswith("ripstop token: error: --endpoint=head: unknown flag; ")
    assert main(["token", "--job=job7"]) == 0
    assert capsys.readouterr().out == f"{api_token_from_secret('secret', 'job7')}\n"
