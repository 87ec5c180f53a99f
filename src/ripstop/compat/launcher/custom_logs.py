"""A `LogsSpecs` of the program as the source of a launch's log files.

`DefaultLogsSpecs`, ripstop's and torch's, are only settings.  Any other class has a `reify` method, which the engine
calls in the program's process for the files of every round.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ripstop.logs.plugin import PluginLogs
from ripstop.model.config import Logs
from ripstop.model.errors import StartError
from ripstop.model.round import Place

DEFAULT = "DefaultLogsSpecs"
FILES = ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files")


def is_custom(specs: Any) -> bool:
    """Whether it has its own `reify`; a subclass of the default counts as custom."""
    return type(specs).__name__ != DEFAULT


class CustomLogs:
    """Calls `reify` and converts its result for the engine."""

    def __init__(self, specs: Any, logs: Logs, role: str) -> None:
        self._specs = specs
        self._logs = logs
        self._role = role

    async def round_logs(self, job: Path, place: Place, envs: Mapping[int, Mapping[str, str]]) -> PluginLogs:
        variables = {rank: dict(env) for rank, env in envs.items()}
        try:
            dest = self._specs.reify(variables)
        except Exception as error:
            name = type(self._specs).__name__
            raise StartError(f"{name}.reify failed: {type(error).__name__}: {error}; mend it") from error
        reply: dict[str, Any] = {
            name: {str(rank): path for rank, path in getattr(dest, name).items()} for name in FILES
        }
        reply |= {"filtered_stdout": dest.filtered_stdout, "filtered_stderr": dest.filtered_stderr}
        reply["envs"] = {str(rank): {key: str(value) for key, value in env.items()} for rank, env in variables.items()}
        return PluginLogs(job, self._logs, place, self._role, reply)

    def close(self) -> None:
        """There is nothing to free."""
