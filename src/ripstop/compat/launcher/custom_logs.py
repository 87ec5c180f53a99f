"""Log files that a program chooses with its own `LogsSpecs`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ripstop.logs.plugin import PluginLogs
from ripstop.model.config import Logs
from ripstop.model.errors import StartError
from ripstop.model.round import Place


def is_custom(specs: Any) -> bool:
    """Whether it has its own `reify`.  `DefaultLogsSpecs`, ripstop's and torch's, are only settings."""
    return type(specs).__name__ != "DefaultLogsSpecs"  # a subclass is custom


class CustomLogs:
    """The program's own `LogsSpecs` as the source of log files: calls `reify` in this process for every round."""

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
            raise StartError(f"{name}.reify failed: {type(error).__name__}: {error}; correct it") from error
        reply: dict[str, Any] = {
            name: {str(rank): path for rank, path in getattr(dest, name).items()}
            for name in ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files")
        }
        reply |= {"filtered_stdout": dest.filtered_stdout, "filtered_stderr": dest.filtered_stderr}
        reply["envs"] = {str(rank): {key: str(value) for key, value in env.items()} for rank, env in variables.items()}
        return PluginLogs(job, self._logs, place, self._role, reply)

    def close(self) -> None:
        """There is nothing to free."""
