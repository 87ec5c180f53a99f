"""Runs a `LogsSpecs` plugin in its own process: plugins import torch, and the agent must not.

Run as `python -P plugin_process.py FD`.  Requests and replies are lines of JSON on that socket.  The first request has
the plugin's settings, each later one the environments of a round's workers.  A reply has the plugin's result or an
error.  This file is executed, not imported, and imports nothing of ripstop.
"""

import json
import socket
import sys
from importlib import metadata
from typing import Any

GROUP = "torchrun.logs_specs"


def run_plugin(fd: int) -> None:
    with socket.socket(fileno=fd) as channel, channel.makefile("rw", encoding="utf-8") as lines:
        specs: Any = None
        for line in lines:
            request = json.loads(line)
            reply: dict[str, Any] = {}
            try:
                if specs is None:
                    specs = load_plugin_in_process(request)
                else:
                    reply = reify_in_plugin_process(specs, request)
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            lines.write(json.dumps(reply) + "\n")
            lines.flush()


def load_plugin_in_process(settings: dict[str, Any]) -> Any:
    """An instance of the plugin's class, with the arguments that torchrun passes."""
    (entry, *_) = metadata.entry_points(group=GROUP, name=settings["name"])
    plugin = entry.load()
    std = plugin_process_std(plugin)
    return plugin(
        log_dir=settings["log_dir"],
        redirects=plugin_process_std_choice(std, settings["redirects"]),
        tee=plugin_process_std_choice(std, settings["tee"]),
        local_ranks_filter=None if settings["shown"] is None else set(settings["shown"]),
    )


def plugin_process_std(plugin: type) -> Any:
    """The `Std` class of the module that defines the plugin's `LogsSpecs`."""
    for base in plugin.__mro__:
        if std := getattr(sys.modules[base.__module__], "Std", None):
            return std
    raise TypeError(f"{plugin.__name__} is not derived from LogsSpecs")


def plugin_process_std_choice(std: Any, streams: dict[str, Any]) -> Any:
    """A `Std` for each rank, or one for all workers."""
    return {int(rank): std(value) for rank, value in streams["by_rank"]} or std(streams["default"])


def reify_in_plugin_process(specs: Any, request: dict[str, Any]) -> dict[str, Any]:
    envs = {int(rank): env for rank, env in request["envs"].items()}
    dest = specs.reify(envs)
    names = ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files", "filtered_stdout", "filtered_stderr")
    texts = {rank: {name: str(value) for name, value in env.items()} for rank, env in envs.items()}
    return {name: getattr(dest, name) for name in names} | {"envs": texts}


if __name__ == "__main__":
    run_plugin(int(sys.argv[1]))
