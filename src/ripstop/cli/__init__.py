"""The `ripstop` command.  The subcommands are in `commands/`; a module is imported when its command is called.

A wrong command line prints one line on stderr and exits with code 2, before anything is started.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

import ripstop
from ripstop.model.errors import HelpRequested, RipstopError, UsageError

USAGE = """\
ripstop launches, supervises, heals and resizes distributed PyTorch jobs.

start a job
  ripstop run [FLAGS] train.py [ARGS]   run this node's workers; takes torchrun's flags
  ripstop coordinator [FLAGS]           run a job's coordinator without workers

inspect a running job
  ripstop page                          open its page in the browser
  ripstop top                           show it live at the terminal
  ripstop status                        show its phase, nodes and ranks
  ripstop events [-f]                   show what happened in it
  ripstop logs [RANK] [-f]              show its workers' output
  ripstop stacks [RANK]                 show its workers' stacks
  ripstop metrics                       print its metrics in Prometheus' format
  ripstop report [RUN_DIR]              write a page: failures and their causes, time lost; also of a job that is over
  ripstop compare A B                   compare two runs

control a running job
  ripstop restart                       restart all workers
  ripstop drain NODE                    remove a node
  ripstop scale N                       change the number of nodes
  ripstop stop                          end the job
  ripstop chaos --plan FILE             inject faults and measure how the job heals; only with --allow-chaos
  ripstop token                         print the access token of its API

other commands
  ripstop kube COMMAND                  jobs on Kubernetes: render, submit, status, logs, stacks, scale, delete
  ripstop slurm render|submit           job scripts for Slurm; in one of your own: srun ripstop run …
  ripstop completion bash|zsh|fish      print the completion script for a shell
  ripstop version                       print the version

`ripstop COMMAND --help` explains a command: its flags with their defaults, examples and exit codes.
"""
VERSION_USAGE = """\
usage: ripstop version

Prints ripstop's version.  `ripstop --version` does the same.

Exit codes: 0 done; 2 the command line is wrong.
"""
JOB_COMMANDS = {  # and their modules in `commands/`
    "page": "page",
    "top": "top",
    "status": "status",
    "events": "events",
    "logs": "logs",
    "stacks": "stacks",
    "metrics": "status",
    "report": "report",
    "compare": "report",
    "chaos": "chaos",
    **dict.fromkeys(("restart", "drain", "scale", "stop"), "control"),
    "token": "token",
}
COMMANDS = ("run", "coordinator", *JOB_COMMANDS, "kube", "slurm", "completion", "version")
SELF_NAMING = ("completion", "version")  # their error messages begin with the command's name


def main(argv: Sequence[str] | None = None, with_handler: Callable[..., int] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit code.

    `with_handler` runs the configuration of a job that uses another package's rendezvous handler.
    """
    if argv is None:
        _open_missing_streams()
        _let_sigint_end_command()
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        return _dispatch_command(name, rest, with_handler)
    except HelpRequested as help:
        from shutil import get_terminal_size  # rarely needed

        from ripstop.cli.help_text import fit_help_text

        print(fit_help_text(str(help), get_terminal_size().columns), end="")
        return 0
    except RipstopError as error:
        from ripstop.model.text_formatting import one_line  # rarely needed

        prefix = f"ripstop {name}" if name in COMMANDS and name not in SELF_NAMING else "ripstop"
        print(f"{prefix}: error: {one_line(' '.join(str(error).splitlines()))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # raised after everything was stopped
        return 130
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _open_missing_streams() -> None:
    """Open file descriptors 0, 1 and 2 on /dev/null if they are closed: other files would get these numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


def _let_sigint_end_command() -> None:
    """Let SIGINT end the process until the agent handles signals: Python may lose a KeyboardInterrupt before that."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _dispatch_command(name: str, rest: Sequence[str], with_handler: Callable[..., int] | None) -> int:
    if sys.platform == "win32":
        raise UsageError("ripstop needs fork and POSIX signals, which Windows does not have; use Linux or WSL")
    if name in ("--help", "-h", "help"):
        raise HelpRequested(USAGE)
    name = "version" if name == "--version" else name
    if name not in COMMANDS:
        remedy = f"ripstop run {name} …" if name.endswith(".py") else "ripstop run …; ripstop --help lists the commands"
        raise UsageError(f"{name}: unknown command; write {remedy}")
    if name == "version":
        return _print_version(rest)
    module = import_module(f"ripstop.cli.commands.{JOB_COMMANDS.get(name, name)}")
    if name in JOB_COMMANDS:
        from ripstop.cli.job_client import run_job_client_command

        return run_job_client_command(name, module.COMMANDS[name], rest)
    code: int = module.main(rest, with_handler) if name == "run" else module.main(rest)
    return code


def _print_version(argv: Sequence[str]) -> int:
    if argv and argv[0] in ("--help", "-h"):
        raise HelpRequested(VERSION_USAGE)
    if argv:
        raise UsageError(f"version {argv[0]}: takes no arguments; write ripstop version")
    print(f"ripstop {ripstop.__version__}")
    return 0
