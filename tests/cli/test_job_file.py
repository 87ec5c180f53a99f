"""`--config job.toml`: values for absent flags and variables."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ripstop.cli import main
from ripstop.cli.commands.run import configure_run
from ripstop.model.config import ConfiguredStreams, Module, OutputStreams, RunConfig, Script, Timing

Read = Callable[..., RunConfig]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads a command line in a directory that holds train.py and a job.toml with this text."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)

    def read(text: str, arguments: str = "train.py", environ: dict[str, str] | None = None) -> RunConfig:
        (tmp_path / "job.toml").write_text(text)
        return configure_run(["--config=job.toml", *arguments.split()], environ or {})

    return read


def test_a_file_can_set_all_flags(read: Read) -> None:
    text = """
        script = "train.py"
        args = ["--lr", "0.1"]
        nproc-per-node = 4
        max_restarts = 3
        restart-window = "1h"
        shutdown-timeout = 2.5
        tee = "0:3"
        local-ranks-filter = [0, 1]
        duplicate-stdout-filters = ["loss", "a,b"]
        signals-to-handle = ["SIGTERM", "SIGUSR1"]
        virtual-local-rank = true
        no-python = false
        [rdzv-conf]
        join_timeout = 60
        lease = 1.5
    """
    config = read(text, arguments="")
    assert config.entry == Script("train.py", ("--lr", "0.1"))
    assert (config.slots, config.budget.max_restarts, config.budget.window) == (4, 3, 3600.0)
    assert config.timing == Timing(join=60.0, lease=1.5, shutdown=2.5)
    assert config.logs.tee == ConfiguredStreams(OutputStreams.NONE, ((0, OutputStreams.ALL),))
    assert config.logs.shown == {0, 1}
    assert config.logs.stdout_filters == ("loss", "a,b")
    assert config.signals == ("SIGTERM", "SIGUSR1")
    assert config.virtual_local_rank


def test_a_module_can_be_the_program(read: Read) -> None:
    assert read('module = true\nscript = "pkg.train"', arguments="").entry == Module("pkg.train")


def test_flags_win_over_variables_and_these_over_the_file(read: Read) -> None:
    text = "nproc-per-node = 2\nmax-restarts = 2\nrole = 'file'"
    environ = {"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "3"}
    config = read(text, "--max-restarts=4 train.py", environ)
    assert (config.role, config.slots, config.budget.max_restarts) == ("file", 3, 4)


def test_a_variable_that_turns_a_switch_off_wins_over_the_file(read: Read) -> None:
    text = "virtual-local-rank = true"
    assert read(text).virtual_local_rank
    assert not read(text, environ={"PET_VIRTUAL_LOCAL_RANK": "0"}).virtual_local_rank
    assert read(text, environ={"PET_VIRTUAL_LOCAL_RANK": ""}).virtual_local_rank
    assert read(text, "--virtual-local-rank train.py", {"PET_VIRTUAL_LOCAL_RANK": "0"}).virtual_local_rank


def test_a_script_on_the_command_line_replaces_the_files_and_its_arguments(read: Read) -> None:
    assert read('script = "other.py"\nargs = ["-x"]').entry == Script("train.py")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nprok-per-node = 2", "job.toml nprok-per-node: unknown key; did you mean nproc-per-node?"),
        ("xyzzy = 2", "job.toml xyzzy: unknown key; the keys are the flags of ripstop run --help"),
        ("dry-run = true", "job.toml dry-run: allowed only on the command line; remove it"),
        (
            "max-restarts = 1\nmax_restarts = 2",
            "job.toml max_restarts: given twice, with dashes and with underscores; remove one",
        ),
        ("standalone = 1", "job.toml standalone=1: neither true nor false; write standalone = true"),
        ("nnodes = '4:2'", "job.toml nnodes=4:2: the minimum (4) is above the maximum (2); write job.toml nnodes=2:4"),
        ("nnodes = [2, 4]", "job.toml nnodes=[2, 4]: a list is not allowed here; write a string or a number"),
        ("role = 2001-01-01", "job.toml role=2001-01-01: a date is not allowed here; write a string or a number"),
        ("script = 7", 'job.toml script=7: not a string; write script = "train.py"'),
        ("args = ['a']", "job.toml args=['a']: there is no script for these arguments; add script = \"train.py\""),
        ("script = 'a'\nargs = 'b'", 'job.toml args=b: not a list of strings; write args = ["--lr", "0.1"]'),
    ],
)
def test_a_mistake_in_the_file_is_named_by_file_and_key(
    read: Read, capsys: pytest.CaptureFixture[str], text: str, line: str
) -> None:
    Path("job.toml").write_text(text)
    assert main(["run", "--config=job.toml", "train.py"]) == 2
    assert capsys.readouterr().err == f"ripstop run: error: {line}\n"


@pytest.mark.parametrize(
    ("content", "why"), [(None, "No such file or directory"), (b"= 1", "not TOML"), (b"\xff", "not TOML")]
)
def test_a_file_that_cannot_be_read_is_one_line(
    read: Read, capsys: pytest.CaptureFixture[str], content: bytes | None, why: str
) -> None:
    if content is not None:
        Path("job.toml").write_bytes(content)
    assert main(["run", "--config=job.toml", "train.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ripstop run: error: --config=job.toml: cannot be read: {why}")
    assert error.count("\n") == 1
