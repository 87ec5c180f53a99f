"""The `ripstop` command: one file a subcommand, imported when it is asked for.

A wrong command line is one line on stderr and exit code 2, before anything is started.
"""

import os
import sys
from collections.abc import Callable, Sequence

from ripstop.model.errors import RipstopError, UsageError

USAGE = """\
ripstop launches, supervises, heals and resizes distributed PyTorch jobs.

  ripstop run [FLAGS] train.py [ARGS]   run this node's part of a job; takes torchrun's flags
  ripstop coordinator [FLAGS]           run a job's coordinator by itself, without workers

  ripstop status                        what a job is at this moment
  ripstop events [-f]                   what happened in it
  ripstop logs [RANK] [-f]              what its workers wrote
  ripstop stacks [RANK]                 where they are in their code
  ripstop metrics                       a job in numbers, as Prometheus reads them
  ripstop restart                       stop them, and start them again
  ripstop drain NODE                    have a node leave
  ripstop scale N                       have another number of nodes
  ripstop stop                          end a job
  ripstop token                         print what opens its API to other programs

  ripstop kube COMMAND                  jobs on Kubernetes: render, submit, status, logs, stacks, scale, delete
  ripstop completion bash|zsh|fish      print what makes a shell complete these commands and their flags
  ripstop version                       print the version

`ripstop COMMAND --help` says more.
"""
STEERING = ("status", "events", "logs", "stacks", "metrics", "restart", "drain", "scale", "stop", "token")


def main(argv: Sequence[str] | None = None, with_handler: Callable[..., int] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit code.

    `with_handler` runs the configuration of a job that meets through a handler of another package.
    """
    if argv is None:
        _open_missing_streams()
        _end_at_once_if_interrupted()
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    known = name in ("run", "coordinator", "kube", *STEERING)  # a wrong name is in the message already
    try:
        return _dispatch(name, rest, with_handler)
    except RipstopError as error:
        line = " ".join(str(error).splitlines())
        print(f"ripstop {name}: error: {line}" if known else f"ripstop: error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # after all was stopped
        return 130
    except BrokenPipeError:  # whoever read what we say has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _open_missing_streams() -> None:
    """Whoever started us may have closed 0, 1 or 2: make them silent, or files of ours would get these numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


def _end_at_once_if_interrupted() -> None:
    """Until the agent takes signals itself there is nothing to stop, and Python may lose a KeyboardInterrupt."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _dispatch(name: str, rest: Sequence[str], with_handler: Callable[..., int] | None) -> int:
    if sys.platform == "win32":
        raise UsageError("Windows has no fork and no POSIX signals, and ripstop lives by them; use Linux or WSL")
    match name:
        case "run":
            from ripstop.cli.commands import run

            return run.main(rest, with_handler)
        case "coordinator":
            from ripstop.cli.commands import coordinator

            return coordinator.main(rest)
        case command if command in STEERING:
            from importlib import import_module

            code: int = import_module(f"ripstop.cli.commands.{command}").main(rest)
            return code
        case "kube":
            from ripstop.cli.commands import kube

            return kube.main(rest)
        case "completion":
            from ripstop.cli.commands import completion

            return completion.main(rest)
        case "version" | "--version":
            from ripstop.cli.commands import version

            return version.main(rest)
        case "--help" | "-h" | "help":
            print(USAGE, end="")
            return 0
    remedy = f"ripstop run {name} …" if name.endswith(".py") else "ripstop run …; ripstop --help lists the commands"
    raise UsageError(f"{name}: there is no such command; write {remedy}")
