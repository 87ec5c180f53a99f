"""`ripstop slurm`: job scripts for sbatch."""

import shlex
import subprocess
from pathlib import Path

import pytest

from ripstop.cli import main
from ripstop.cli.commands.run import FLAGS as RUN_FLAGS
from ripstop.cli.options.flags import parse_flags
from ripstop.cli.slurm.job_script import job_script, parse_job_script_arguments
from ripstop.model.errors import UsageError

SECRET = "export RIPSTOP_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')  # the job's secret, new at each start"


def render(*argv: str) -> str:
    return job_script(parse_job_script_arguments(argv))


def test_a_torchrun_line_is_a_readable_job_script() -> None:
    line = (
        "--nnodes=2:4 --gpus=8 --time=12:00:00 --drain=2m --requeue --partition=a100 --max-restarts=3 train.py --lr 0.1"
    )
    script = render(*line.split(), "a b")
    assert script == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=train\n"
        "#SBATCH --nodes=2-4\n"
        "#SBATCH --partition=a100\n"
        "#SBATCH --time=12:00:00\n"
        "#SBATCH --gpus-per-node=8\n"
        "#SBATCH --exclusive\n"
        "#SBATCH --mem=0\n"
        "#SBATCH --signal=TERM@120\n"
        "#SBATCH --no-kill\n"
        "#SBATCH --requeue\n"
        "#SBATCH --open-mode=append\n"
        "\n"
        f"{SECRET}\n"
        "\n"
        "srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 \\\n"
        "    ripstop run --nnodes=2:4 --max-restarts=3 \\\n"
        "    train.py --lr 0.1 'a b' || code=$?\n"
        "# exit code 143: the job was preempted, or is near its time limit. Slurm does not requeue it, so do it here\n"
        '[ "${code:-0}" != 143 ] || scontrol requeue "$SLURM_JOB_ID"\n'
        'exit "${code:-0}"\n'
    )


def test_a_fixed_number_of_nodes_and_a_part_of_each() -> None:
    script = render("--nnodes=2", "--cpus=16", "--memory=64G", "--setup=source venv/bin/activate", "-m", "pkg.train")
    assert script == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=pkg.train\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --cpus-per-task=16\n"
        "#SBATCH --mem=64G\n"
        "#SBATCH --open-mode=append\n"
        "\n"
        "source venv/bin/activate\n"
        "\n"
        f"{SECRET}\n"
        "\n"
        "exec srun --ntasks-per-node=1 --cpus-per-task=16 \\\n"
        "    ripstop run --nnodes=2 --module \\\n"
        "    pkg.train\n"
    )


def test_the_secret_of_a_script_is_made_by_the_shell_and_differs_in_every_run() -> None:
    line = f'{SECRET}\necho "$RIPSTOP_TOKEN"'
    made = {subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(made) == 2
    assert all(len(each.strip()) == 64 and int(each, 16) for each in made)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("-- --flag", "flag"),
        ("--nnodes=2 -- -x.py a", "x"),
        ("train.py -- -- a", "train"),
        ("-- train.py -- a", "train"),
        ("train.py a -- b", "train"),
    ],
)
def test_ripstop_run_in_the_script_gets_the_same_program(line: str, name: str) -> None:
    given = parse_job_script_arguments(line.split())
    script = job_script(given)
    _, _, command = script.replace("\\\n", "").rpartition("ripstop run ")
    assert parse_flags(RUN_FLAGS, shlex.split(command), {}).program == given.program
    assert f"#SBATCH --job-name={name}\n" in script


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "no script; write it after the flags"),
        ("--nnodes=4:2 train.py", "the minimum .4. is above the maximum"),
        ("--rdzv-endpoint=h train.py", "--rdzv-endpoint: not available here: .* leave it out"),
        ("--standalone train.py", "--standalone: not available here"),
        ("--time=soon train.py", "--time=soon: not a time for sbatch; write minutes, 2:30:00 or 1-12"),
        ("--memory=lots train.py", "--memory=lots: not a size for sbatch; write 64G"),
        ("--gpus=0 train.py", "below the minimum"),
        ("--partition=a/b train.py", "--partition=a/b: no spaces"),
        ("--drain=2m train.py", "--drain: a time before the time limit, and there is none; add one"),
        ("--drain=1d --time=60 train.py", "sbatch allows 1 to 65535 seconds"),
        ("--speed=9 train.py", "unknown flag"),
    ],
)
def test_a_wrong_line_is_an_error(argv: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        render(*argv.split())


def test_render_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "render", "--nnodes=2", "train.py"]) == 0
    assert capsys.readouterr().out == render("--nnodes=2", "train.py")


def test_submit_passes_the_script_to_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\ncat; exit 3\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["slurm", "submit", "--nnodes=2", "train.py"]) == 3
    assert capfd.readouterr().out == render("--nnodes=2", "train.py")


def test_submit_without_slurm_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["slurm", "submit", "train.py"]) == 2
    assert "there is no sbatch on this machine; submit from a login node" in capsys.readouterr().err
    assert main(["slurm", "cancel"]) == 2
    assert "slurm cancel: unknown command; write render or submit" in capsys.readouterr().err
