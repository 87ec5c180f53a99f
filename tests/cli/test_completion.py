"""Completion in real shells."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ripstop.cli import COMMANDS, main
from ripstop.cli.commands.completion import SHELLS, completion_flags, completion_script

BIN = str(Path(sys.executable).parent)
BASH = """
eval "$(python -m ripstop completion bash)"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_ripstop
printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """
zmodload zsh/zpty
zpty -b z zsh -f -i
zpty -w z 'PS1=; autoload -Uz compinit; compinit -u -D; eval "$(python -m ripstop completion zsh)"; print RE""ADY'
zpty -r -m z out '*READY*'
zpty -w -n z "$1"$'\\t'
zpty -r -m z out "*$2*" && print found
zpty -d z
"""


def shell(name: str) -> str:
    if (path := shutil.which(name)) is None:
        pytest.skip(f"{name} is not installed")
    return path


def run(argv: list[str], cwd: Path) -> str:
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "dumb"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=env)
    assert done.stderr == ""
    return done.stdout


CASES = [
    ("ripstop ", set(COMMANDS)),
    ("ripstop run --numa", {"--numa-binding"}),
    ("ripstop run --numa-binding ", {"node", "socket", "exclusive", "core-complex"}),
    ("ripstop run --nproc-per-node 2 --rdzv-backend c", {"c10d"}),
    ("ripstop coordinator --nn", {"--nnodes"}),
    ("ripstop coordinator --log", {"--log-dir", "--log-level", "--log-format"}),
    ("ripstop run --log-format ", {"text", "json"}),
    ("ripstop completion z", {"zsh"}),
    ("ripstop kube re", {"render"}),
    ("ripstop kube logs --fo", {"--follow"}),
]

BASH_CASES = [
    ("ripstop run --standalone train.py --numa", {""}),
    ("ripstop run --numa_b", {"--numa-binding"}),
    ("ripstop run --nproc_per_node 2 --rdzv_backend c", {"c10d"}),
]


@pytest.mark.parametrize(("line", "expected"), [*CASES, *BASH_CASES])
def test_bash_completes(line: str, expected: set[str], tmp_path: Path) -> None:
    out = run([shell("bash"), "--norc", "-c", BASH, "bash", *line.split(" ")], tmp_path)
    assert set(out.rstrip("\n").split("\n")) == expected


def test_bash_completes_after_an_equals_sign(tmp_path: Path) -> None:
    typed = ["ripstop", "run", "--start-method", "=", "z"]  # as bash splits it
    assert run([shell("bash"), "--norc", "-c", BASH, "bash", *typed], tmp_path) == "zygote\n"


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_fish_completes(line: str, expected: set[str], tmp_path: Path) -> None:
    out = run([shell("fish"), "-c", f"python -m ripstop completion fish | source; complete -C '{line}'"], tmp_path)
    assert {found.split("\t")[0] for found in out.split()} == expected


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ripstop run --numa-b", "--numa-binding"),
        ("ripstop run --numa-binding=co", "core-complex"),
        ("ripstop run --standalone tra", "train.py"),
        ("ripstop kube rend", "render"),
    ],
)
def test_zsh_completes(line: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert run([shell("zsh"), "-f", "-c", ZSH, "zsh", line, found], tmp_path) == "found\n"


@pytest.mark.parametrize("name", SHELLS)
def test_every_flag_is_known_to_every_shell(name: str) -> None:
    text = completion_script(name)
    flags = {flag.name.removeprefix("--") for own in completion_flags().values() for flag in own}
    assert [word for word in (*COMMANDS, *flags) if word not in text] == []


def test_completion_without_a_shell_prints_its_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 0
    assert "~/.bashrc" in capsys.readouterr().out
    assert main(["completion", "tcsh"]) == 2
    assert capsys.readouterr().err == ("ripstop: error: completion tcsh: unknown shell; write bash, zsh, fish\n")
