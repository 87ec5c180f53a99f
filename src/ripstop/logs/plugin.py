"""`--logs-specs`: a plugin of torch's kind (entry point `torchrun.logs_specs`) says where workers' output goes.

`reify_logs.py` is the process that holds the plugin, one for the whole run, as with torchrun.  What the plugin said of
a round becomes a `PluginLogs`: the same as `RoundLogs`, with the plugin's files in place of ours.
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

from ripstop.logs.console import Kept
from ripstop.logs.directory import OutputRoute, RoundLogs, move_aside, open_log
from ripstop.model.config import Logs, OutputStreams, StreamMap
from ripstop.model.errors import StartError
from ripstop.model.round import Place
from ripstop.system.own_directory import check_own_directory, make_own_directory, no_follow
from ripstop.workers.processes import Children, cannot_start

PROGRAM = Path(__file__).with_name("plugin_process.py")
NULL = Path(os.devnull)


class LogsPlugin:
    """The plugin's process; it loads while the rest of the agent gets ready."""

    def __init__(self, logs: Logs, role: str, environ: Mapping[str, str], children: Children) -> None:
        self._children = children
        self._logs = logs
        self._role = role
        self._socket, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(True)
            argv = [sys.executable, "-P", str(PROGRAM), str(theirs.fileno())]  # -P: our modules are not the plugin's
            try:
                self._pid = os.posix_spawn(sys.executable, argv, dict(environ), setsid=True)
            except OSError as error:
                self._socket.close()
                raise cannot_start(f"--logs-specs={logs.specs}", error) from error
        children.claim(self._pid)
        self._socket.setblocking(False)
        self._loaded = False

    async def round_logs(self, job: Path, place: Place, envs: Mapping[int, Mapping[str, str]]) -> "PluginLogs":
        """Where the output of this round's workers goes; StartError with the plugin's own words if it cannot say."""
        if not self._loaded:
            await self._ask(self._settings())
            self._loaded = True
        return PluginLogs(job, self._logs, place, self._role, await self._ask({"envs": envs}))

    def close(self) -> None:
        self._socket.close()
        os.kill(self._pid, signal.SIGKILL)
        self._children.reap(self._pid)

    def _settings(self) -> dict[str, Any]:
        logs = self._logs
        return {
            "name": logs.specs,
            "log_dir": (None if logs.kept else os.devnull) if logs.directory is None else str(logs.directory),
            "redirects": _streams(logs.redirects),
            "tee": _streams(logs.tee),
            "shown": None if logs.shown is None else sorted(logs.shown),
        }

    async def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        line = b""
        try:
            await loop.sock_sendall(self._socket, json.dumps(question).encode() + b"\n")
            while not line.endswith(b"\n") and (part := await loop.sock_recv(self._socket, 1 << 16)):
                line += part
        except OSError:
            line = b""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process has ended"}
        if "error" in answer:
            raise StartError(
                f"--logs-specs={self._logs.specs}: the plugin failed: {answer['error']}; mend it, or leave it out"
            )
        return answer


class PluginLogs(RoundLogs):
    """The files of one round's workers, as a plugin named them.

    An empty name is the console.  An error file that it does not name, or names /dev/null, is where it would be without
    the plugin: a plugin's worker may leave evidence too.
    """

    def __init__(self, job: Path, logs: Logs, place: Place, role: str, said: Mapping[str, Any]) -> None:
        super().__init__(job, logs, place, role, terminal=True)
        self._said = said

    def environment(self, local_rank: int) -> Mapping[str, str]:
        env: dict[str, str] = self._said["envs"][str(local_rank)]
        return env

    def directory(self, local_rank: int) -> Path:
        return self.error_file(local_rank).parent

    def error_file(self, local_rank: int) -> Path:
        return self._named_error_file(local_rank) or super().directory(local_rank) / "error.json"

    def earlier(self, round: int, rank: int, stream: OutputStreams) -> Path | None:
        """What the plugin said of another round is not kept."""
        return None

    def prepare(self) -> None:
        """The plugin has made directories, or has not: nothing of what is there is touched."""
        try:
            for local_rank in range(self._place.slots):
                if self._named_error_file(local_rank) is None:
                    make_own_directory(self._round)
                    make_own_directory(self.directory(local_rank))
                    move_aside(self.error_file(local_rank))
                for path in self.files(local_rank):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if path.is_relative_to(self._job):
                        for directory in (path.parent, *path.parent.parents):
                            if directory == self._job:
                                break
                            check_own_directory(directory)
                    os.close(open_log(path))
        except OSError as error:
            raise StartError(
                f"--logs-specs={self._logs.specs}: {error.filename} cannot be used ({error.strerror}); mend the plugin"
            ) from error

    def _named_error_file(self, local_rank: int) -> Path | None:
        name = self._said["error_files"].get(str(local_rank))
        return Path(name) if name and Path(name) != NULL else None

    def _file(self, local_rank: int, stream: OutputStreams) -> Path | None:
        name = self._said["stdouts" if stream is OutputStreams.OUT else "stderrs"].get(str(local_rank))
        return self._target(name) if name else None

    def _target(self, name: str) -> Path:
        """Where the plugin's own links lead; links below the run's directory are nobody's, and are not followed."""
        path = Path(name).absolute()
        if path.is_relative_to(self._job) or not no_follow(path):
            return path
        return Path(os.path.realpath(path))

    def _route(self, local_rank: int, stream: OutputStreams) -> OutputRoute:
        path = self._file(local_rank, stream)
        if path is None:
            return OutputRoute.CONSOLE
        teed = self._said["tee_stdouts" if stream is OutputStreams.OUT else "tee_stderrs"].get(str(local_rank))
        return OutputRoute.TEE if teed and path != NULL else OutputRoute.FILE

    def _kept(self, stream: OutputStreams) -> Kept | None:
        kept = super()._kept(stream)
        name = self._said["filtered_stdout" if stream is OutputStreams.OUT else "filtered_stderr"]
        return Kept(self._target(name), kept.words) if kept and name else None


def _streams(streams: StreamMap) -> dict[str, Any]:
    return {"default": int(streams.default), "by_rank": [(rank, int(choice)) for rank, choice in streams.by_rank]}
