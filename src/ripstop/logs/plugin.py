"""`--logs-specs`: a torch log plugin (entry point `torchrun.logs_specs`) chooses the log files of workers.

`plugin_process.py` runs the plugin in one process for the whole run, as torchrun does.  The plugin's reply for a round
becomes a `PluginLogs`: a `RoundLogs` with the plugin's files.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ripstop.logs.console import LineFilter
from ripstop.logs.directory import OutputRoute, RoundLogs
from ripstop.model.config import ConfiguredStreams, Logs, OutputStreams
from ripstop.model.errors import StartError
from ripstop.model.round import Place
from ripstop.system.safe_files import (
    check_own_directory,
    make_own_directory,
    no_follow,
    open_to_append,
    rename_existing,
)
from ripstop.workers.processes import Children, process_start_error

PROGRAM = Path(__file__).with_name("plugin_process.py")
NULL = Path(os.devnull)


class LogsPlugin:
    """The plugin's process.  It loads the plugin while the agent starts."""

    def __init__(self, logs: Logs, role: str, environ: Mapping[str, str], children: Children) -> None:
        self._children = children
        self._logs = logs
        self._role = role
        self._socket, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(True)
            # -P: the plugin must not import modules of our directory
            argv = [sys.executable, "-P", str(PROGRAM), str(theirs.fileno())]
            try:
                self._pid = os.posix_spawn(sys.executable, argv, dict(environ), setsid=True)
            except OSError as error:
                self._socket.close()
                raise process_start_error(f"--logs-specs={logs.specs}", error) from error
        children.claim(self._pid)
        self._socket.setblocking(False)
        self._loaded = False

    async def round_logs(self, job: Path, place: Place, envs: Mapping[int, Mapping[str, str]]) -> "PluginLogs":
        """The log files of this round's workers.  Raises StartError with the plugin's error."""
        if not self._loaded:
            await self._request(self._settings())
            self._loaded = True
        return PluginLogs(job, self._logs, place, self._role, await self._request({"envs": envs}))

    def close(self) -> None:
        self._socket.close()
        os.kill(self._pid, signal.SIGKILL)
        self._children.reap(self._pid)

    def _settings(self) -> dict[str, Any]:
        logs = self._logs
        return {
            "name": logs.specs,
            "log_dir": (None if logs.kept else os.devnull) if logs.directory is None else str(logs.directory),
            "redirects": _plugin_streams(logs.redirects),
            "tee": _plugin_streams(logs.tee),
            "shown": None if logs.shown is None else sorted(logs.shown),
        }

    async def _request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        line = b""
        try:
            await loop.sock_sendall(self._socket, json.dumps(message).encode() + b"\n")
            while not line.endswith(b"\n") and (part := await loop.sock_recv(self._socket, 1 << 16)):
                line += part
        except OSError:
            line = b""
        reply: dict[str, Any] = json.loads(line) if line else {"error": "its process has ended"}
        if "error" in reply:
            raise StartError(
                f"--logs-specs={self._logs.specs}: the plugin failed: {reply['error']}; fix it, or omit --logs-specs"
            )
        return reply


class PluginLogs(RoundLogs):
    """The log files of one round's workers, as a plugin named them.

    An empty name is the console.  If the plugin names no error file, or /dev/null, the error file is at its default
    path, so that failures have evidence.
    """

    def __init__(self, job: Path, logs: Logs, place: Place, role: str, reply: Mapping[str, Any]) -> None:
        super().__init__(job, logs, place, role, terminal=True)
        self._reply = reply

    def environment(self, local_rank: int) -> Mapping[str, str]:
        env: dict[str, str] = self._reply["envs"][str(local_rank)]
        return env

    def directory(self, local_rank: int) -> Path:
        return self.error_file(local_rank).parent

    def error_file(self, local_rank: int) -> Path:
        return self._named_error_file(local_rank) or super().directory(local_rank) / "error.json"

    def earlier(self, round: int, rank: int, stream: OutputStreams) -> Path | None:
        """Unknown: the plugin's replies for other rounds are not kept."""
        return None

    def prepare(self) -> None:
        """Create directories and files that the plugin has not created; change no existing file."""
        try:
            for local_rank in self.started:
                if self._named_error_file(local_rank) is None:
                    self.make_round_directory()
                    make_own_directory(self.directory(local_rank))
                    rename_existing(self.error_file(local_rank))
                for path in self.files(local_rank):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if path.is_relative_to(self._job):
                        for directory in (path.parent, *path.parent.parents):
                            if directory == self._job:
                                break
                            check_own_directory(directory)
                    os.close(open_to_append(path))
        except OSError as error:
            raise StartError(
                f"--logs-specs={self._logs.specs}: {error.filename} cannot be used ({error.strerror}); fix the plugin"
            ) from error

    def _named_error_file(self, local_rank: int) -> Path | None:
        name = self._reply["error_files"].get(str(local_rank))
        return Path(name) if name and Path(name) != NULL else None

    def _file(self, local_rank: int, stream: OutputStreams) -> Path | None:
        name = self._reply["stdouts" if stream is OutputStreams.OUT else "stderrs"].get(str(local_rank))
        return self._target(name) if name else None

    def _target(self, name: str) -> Path:
        """Resolve the plugin's symbolic links.  Links below the job's directory are not followed."""
        path = Path(name).absolute()
        if path.is_relative_to(self._job) or not no_follow(path):
            return path
        return Path(os.path.realpath(path))

    def _route(self, local_rank: int, stream: OutputStreams) -> OutputRoute:
        path = self._file(local_rank, stream)
        if path is None:
            return OutputRoute.CONSOLE
        teed = self._reply["tee_stdouts" if stream is OutputStreams.OUT else "tee_stderrs"].get(str(local_rank))
        return OutputRoute.TEE if teed and path != NULL else OutputRoute.FILE

    def _line_filter(self, stream: OutputStreams) -> LineFilter | None:
        line_filter = super()._line_filter(stream)
        name = self._reply["filtered_stdout" if stream is OutputStreams.OUT else "filtered_stderr"]
        return LineFilter(self._target(name), line_filter.words) if line_filter and name else None


def _plugin_streams(streams: ConfiguredStreams) -> dict[str, Any]:
    return {"default": int(streams.default), "by_rank": [(rank, int(choice)) for rank, choice in streams.by_rank]}
