"""Translate a torchrun command line to a job script for sbatch.  Pure.

Flags about resources become #SBATCH lines; flags of `ripstop run` go into its command.  Flags that name nodes or their
ranks are rejected: srun's variables have them.  The script makes the job's secret itself, when it runs: the file has no
secret, and no directory needs to be shared.
"""

import re
from collections.abc import Sequence
from shlex import join, quote

from ripstop.cli.commands.run import FLAGS as RUN_FLAGS
from ripstop.cli.options.flags import HELP_FLAG, Flag, ParsedArguments, parse_flags
from ripstop.model.config import MAX_SLOTS
from ripstop.model.errors import UsageError
from ripstop.model.parsers import duration, identifier, integer, parse_node_range

HELP = """\
  --name NAME                 the job's name (the name of the script)
  --partition NAME, --account NAME, --qos NAME     where the job runs, and who pays (the cluster's defaults)
  --time TIME                 time limit, as in sbatch: minutes, H:MM:SS or D-HH (the partition's)
  --gpus N                    GPUs of each node; each gets a worker
  --cpus N                    CPUs of each node (whole nodes: --exclusive)
  --memory SIZE               memory of each node, as in sbatch: 64G (with --cpus: the cluster's default; else all)
  --drain TIME                send SIGTERM this long before the time limit, so that the job can save (off)
  --requeue                   start the job again after a preemption; with --drain, also after its time; with one number
                              in --nnodes, also after a lost node
  --setup COMMAND             a shell command before the job, such as 'source .venv/bin/activate'

The other flags are those of ripstop run, except those about the rendezvous.  --nnodes=2:4 becomes --nodes=2-4, and the
job continues when a node other than the first is lost.
"""
OWN_FLAGS = (
    Flag("--name", "NAME"),
    Flag("--partition", "NAME"),
    Flag("--account", "NAME"),
    Flag("--qos", "NAME"),
    Flag("--time", "TIME"),
    Flag("--gpus", "N"),
    Flag("--cpus", "N"),
    Flag("--memory", "SIZE"),
    Flag("--drain", "TIME"),
    Flag("--requeue"),
    Flag("--setup", "COMMAND"),
)
REJECTED_FLAGS = (
    *("--standalone", "--rdzv-backend", "--rdzv-endpoint", "--node-rank", "--master-addr", "--master-port"),
    *("--local-addr", "--api", "--config", "--dry-run"),
)
MAX_CPUS = 65_536
MAX_DRAIN_S = 65_535  # sbatch's own limit
TIME = re.compile(r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}")
SIZE = re.compile(r"[0-9]+[KMGT]?")
REQUEUE = """\
# exit code 143: the job was preempted, or is near its time limit. Slurm does not requeue it, so do it here
[ "${code:-0}" != 143 ] || scontrol requeue "$SLURM_JOB_ID"
exit "${code:-0}\""""
SECRET = "export RIPSTOP_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')  # the job's secret, new at each start"


def parse_job_script_arguments(argv: Sequence[str]) -> ParsedArguments:
    """Parse the command line, without this shell's variables: sbatch passes them on itself."""
    return parse_flags((*OWN_FLAGS, HELP_FLAG, *(flag for flag in RUN_FLAGS if flag.name != "--help")), argv, {})


def job_script(args: ParsedArguments) -> str:
    for flag in REJECTED_FLAGS:
        if flag in args:
            raise UsageError(f"{flag}: not available here: every node gets its own settings from srun; leave it out")
    if not args.program or not args.program[0]:
        raise UsageError("no script; write it after the flags: ripstop slurm render --nnodes=2 train.py")
    least, most = parse_node_range(*args.labelled("--nnodes", "1"))
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _sbatch_options(args, least, most)), ""]
    if "--setup" in args:
        lines += [args.text("--setup"), ""]
    command = " \\\n    ".join(_srun_command(args, is_elastic=least < most))
    lines += [SECRET, ""]
    if "--requeue" in args:
        lines += [f"{command} || code=$?", REQUEUE]
    else:
        lines.append(f"exec {command}")  # a signal to the batch script reaches srun, which passes it on
    return "\n".join(lines) + "\n"


def _sbatch_options(args: ParsedArguments, least: int, most: int) -> list[str]:
    """The options of sbatch.  Without --ntasks-per-node: with it, Slurm would give the job the minimum of nodes."""
    options = [f"--job-name={_sbatch_job_name(args)}", f"--nodes={least}-{most}" if least < most else f"--nodes={most}"]
    named = (flag for flag in ("--partition", "--account", "--qos") if flag in args)
    options += [f"{flag}={identifier(flag, args.text(flag))}" for flag in named]
    if "--time" in args:
        options.append(
            f"--time={_sbatch_text(args, '--time', TIME, 'a time for sbatch; write minutes, 2:30:00 or 1-12')}"
        )
    if "--gpus" in args:
        options.append(f"--gpus-per-node={_sbatch_number(args, '--gpus', MAX_SLOTS)}")
    if "--cpus" in args:
        options.append(f"--cpus-per-task={_sbatch_number(args, '--cpus', MAX_CPUS)}")
    else:
        options.append("--exclusive")
    if "--memory" in args:
        options.append(f"--mem={_sbatch_text(args, '--memory', SIZE, 'a size for sbatch; write 64G or 512M')}")
    elif "--cpus" not in args:
        options.append("--mem=0")  # all of it
    if "--drain" in args:
        options.append(_sbatch_signal_option(args))
    if least < most:
        options.append("--no-kill")
    if "--requeue" in args:
        options.append("--requeue")
    return [*options, "--open-mode=append"]


def _srun_command(args: ParsedArguments, *, is_elastic: bool) -> list[str]:
    """The lines of the command."""
    srun = ["srun", "--ntasks-per-node=1"]
    if "--cpus" in args:
        srun.append(f"--cpus-per-task={_sbatch_number(args, '--cpus', MAX_CPUS)}")  # srun does not take it from sbatch
    if is_elastic:
        srun += ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]  # a cluster may have other defaults
    flags = [flag for flag in RUN_FLAGS if flag.name in args]
    texts = [f"{flag.name}={args.text(flag.name)}" if flag.metavar else flag.name for flag in flags]
    return [" ".join(srun), " ".join(["ripstop run", *map(quote, texts)]), join(args.program_words_after_flags())]


def _sbatch_job_name(args: ParsedArguments) -> str:
    if "--name" in args:
        return identifier("--name", args.text("--name"))
    name = args.program[0].rpartition("/")[2].removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip("-.") or "ripstop"


def _sbatch_number(args: ParsedArguments, flag: str, most: int) -> int:
    return integer(flag, args.text(flag), minimum=1, maximum=most)


def _sbatch_text(args: ParsedArguments, flag: str, pattern: re.Pattern[str], form: str) -> str:
    text = args.text(flag)
    if not pattern.fullmatch(text):
        raise UsageError(f"{flag}={text}: not {form}")
    return text


def _sbatch_signal_option(args: ParsedArguments) -> str:
    seconds = duration("--drain", args.text("--drain"), positive=True)
    if not 1 <= seconds <= MAX_DRAIN_S:
        raise UsageError(f"--drain={args.text('--drain')}: sbatch allows 1 to {MAX_DRAIN_S} seconds; write --drain=2m")
    if "--time" not in args:
        raise UsageError("--drain: a time before the time limit, and there is none; add one, such as --time=4:00:00")
    return f"--signal=TERM@{int(seconds)}"
