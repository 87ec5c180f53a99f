"""What the zygote imports before it forks workers, and whether workers can be forked afterwards.

Every module that this file imports at the top is imported in every worker, so these are few and low-level.
"""

# Pathlib is slow to import, and every worker would import it.
# ruff: noqa: PTH109, PTH112, PTH115, PTH120, PTH123, PTH208

from __future__ import annotations

import os
import sys


class Preload:
    """The imports of one zygote: of these modules, or of those that the entrypoint imports (None)."""

    def __init__(self, home: str, entry: tuple[str, str], wanted: tuple[str, ...] | None) -> None:
        self.home = home  # this folder
        self.kind, self.target = entry
        self.wanted = wanted
        self.loaded: list[str] = []

    def run(self) -> str:
        """Import; return why workers must not be forked from here, or an empty text."""
        return self._import_all() or self._check_fork_safety()

    def _import_all(self) -> str:
        """Import the preload list with the script's sys.path; return an error text."""
        first = self._first_path()
        if first is not None:
            sys.path.insert(0, first)
        try:
            for name in self._scan() if self.wanted is None else self.wanted:
                try:
                    __import__(name)
                    self.loaded.append(name)
                except ModuleNotFoundError as error:
                    guessed = self.wanted is None and error.name is not None and f"{name}.".startswith(f"{error.name}.")
                    if not guessed:
                        return f"preloading {name} failed: {error}"
                except BaseException as error:
                    return f"preloading {name} failed: {type(error).__name__}: {error}"
        finally:
            if first is not None:
                sys.path.remove(first)
                sys.path_importer_cache.pop(first, None)  # the worker scans the directory again
        return ""

    def _first_path(self) -> str | None:
        """The script's sys.path[0]."""
        if sys.flags.safe_path:
            return None
        if self.kind != "script":
            return os.getcwd()
        path: str = os.path.realpath(self.target)
        return path if os.path.isdir(path) else os.path.dirname(path)

    def _scan(self) -> list[str]:
        """Read the imports of the script, in a separate process: the scanner's modules must not stay here."""
        if self.kind not in ("script", "module"):
            return []
        read_end, write_end = os.pipe()
        scanner = os.fork()
        if scanner == 0:
            try:
                sys.path.insert(0, self.home)
                import imports  # type: ignore[import-not-found]

                names = imports.worth_preloading(imports.imported_by(self.kind, self.target, sys.path[1:]))
                os.write(write_end, "\n".join(names).encode())
            finally:  # Python reports a script that cannot be read or parsed
                os._exit(0)
        os.close(write_end)
        with open(read_end, encoding="utf-8") as file:
            names = file.read().split()
        os.waitpid(scanner, 0)
        return names

    def _check_fork_safety(self) -> str:
        """Return why workers must not be forked from here, or an empty text (rule 1)."""
        # BLAS libraries start threads when imported and stop them at a fork, until they are used again.
        trial = os.fork()
        if trial == 0:
            os._exit(0)
        os.waitpid(trial, 0)
        threads = len(os.listdir("/proc/self/task")) - 1
        if threads:
            return f"what was imported left {threads} thread{'s' * (threads > 1)} running"
        for fd in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia"):
                    return "what was imported has initialised the GPU driver"
            except OSError:  # the descriptor of the listing itself
                continue
        return ""
