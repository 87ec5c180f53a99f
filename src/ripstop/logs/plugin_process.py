"""Asks a `LogsSpecs` plugin where workers' output goes, in a process of its own: plugins import torch, agents never do.

Run as `python -P reify_logs.py FD`.  On that socket come and go lines of JSON: first what the plugin is made with, then
the environments of each round's workers; every line is answered, with what the plugin said or with what went wrong.
Executed, not imported: the plugin finds nothing of ours but this.
"""

import json
import socket
import sys
from importlib import metadata
from typing import Any

GROUP = "torchrun.logs_specs"


def main(fd: int) -> None:
    with socket.socket(fileno=fd) as channel, channel.makefile("rw", encoding="utf-8") as lines:
        specs: Any = None
        for line in lines:
            asked = json.loads(line)
            answer: dict[str, Any] = {}
            try:
                if specs is None:
                    specs = make(asked)
                else:
                    answer = ask(specs, asked)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


def make(settings: dict[str, Any]) -> Any:
    """The plugin's class, made as torchrun makes it."""
    (entry, *_) = metadata.entry_points(group=GROUP, name=settings["name"])
    plugin = entry.load()
    std = std_of(plugin)
    return plugin(
        log_dir=settings["log_dir"],
        redirects=choice(std, settings["redirects"]),
        tee=choice(std, settings["tee"]),
        local_ranks_filter=None if settings["shown"] is None else set(settings["shown"]),
    )


def std_of(plugin: type) -> Any:
    """The `Std` that belongs to the `LogsSpecs` the plugin derives from."""
    for base in plugin.__mro__:
        if std := getattr(sys.modules[base.__module__], "Std", None):
            return std
    raise TypeError(f"{plugin.__name__} is not derived from LogsSpecs")


def choice(std: Any, streams: dict[str, Any]) -> Any:
    """One choice for all workers, or one for some."""
    return {int(rank): std(value) for rank, value in streams["by_rank"]} or std(streams["default"])


def ask(specs: Any, asked: dict[str, Any]) -> dict[str, Any]:
    envs = {int(rank): env for rank, env in asked["envs"].items()}
    dest = specs.reify(envs)
    names = ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files", "filtered_stdout", "filtered_stderr")
    texts = {rank: {name: str(value) for name, value in env.items()} for rank, env in envs.items()}
    return {name: getattr(dest, name) for name in names} | {"envs": texts}


if __name__ == "__main__":
    main(int(sys.argv[1]))
