"""`ripstop slurm`: jobs on Slurm.  `render` needs no Slurm; `submit` calls sbatch."""

import subprocess
from collections.abc import Sequence

from ripstop.cli.options.flags import HELP_FLAG
from ripstop.cli.slurm.job_script import HELP, OWN_FLAGS, job_script, parse_job_script_arguments
from ripstop.model.errors import HelpRequested, UsageError

USAGE = f"""\
usage: ripstop slurm render|submit [FLAGS] SCRIPT [ARGS]

Makes a Slurm job script of a command line of `ripstop run`.  `render` prints it, and `submit` passes it to sbatch.

examples
  Print a job script, and start the job:
    ripstop slurm render --nnodes=2:4 --gpus=8 --time=12:00:00 train.py >job.sh
    sbatch job.sh
  Without this command, in a job script of your own:
    srun --ntasks-per-node=1 ripstop run train.py

{HELP}\
Defaults are in parentheses.

exit codes
  0  the script was printed, or sbatch has accepted it
  2  the flags are wrong, or there is no sbatch; with submit, also sbatch's own exit codes
"""
COMMANDS = ("render", "submit")
FLAGS = (HELP_FLAG, *OWN_FLAGS)


def main(argv: Sequence[str]) -> int:
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        raise HelpRequested(USAGE)
    if name not in COMMANDS:
        raise UsageError(f"slurm {name}: unknown command; write {' or '.join(COMMANDS)}")
    args = parse_job_script_arguments(rest)
    if "--help" in args:
        raise HelpRequested(USAGE)
    script = job_script(args)
    if name == "submit":
        return _submit_slurm_script(script)
    print(script, end="")
    return 0


def _submit_slurm_script(script: str) -> int:
    try:
        return subprocess.run(["sbatch"], input=script, text=True, check=False).returncode
    except FileNotFoundError:
        raise UsageError(
            "slurm submit: there is no sbatch on this machine; submit from a login node, or use ripstop slurm render"
        ) from None
