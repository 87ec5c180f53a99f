"""What the zygote imports before it forks workers, and whether workers can be forked afterwards.

With `--preload`, these are the user's modules.  If an import fails, starts a thread or uses a GPU, the zygote is unfit.

Otherwise they follow from the script (`imports.py`), and the zygote finds out which of them can be imported before a
fork (`import_observer.py`).

Rules
1.  An unfit import changes the process, so the zygote is replaced by one that leaves it out.  The workers import it.
2.  What is left out is a whole package.  What it imports from other packages is still preloaded, as separate steps.
3.  If the culprit is unknown, the next zygote tries every further step in a forked process first.
4.  The resulting plan is remembered (`preload_cache.py`).  The next start imports by that plan, and still observes.
5.  Workers must not be forked from modules whose files have changed: `changed_file`.

A plan: `steps` is a list of (name, modules).  A step imports the modules, or `name` as a script does: `a.b` may be a
module, or an attribute that is loaded lazily.  `left_out` has the reason by package, `variables` what those packages
set.  The first `fit` steps are known to be fit; the others are tried in a forked process if the plan is `careful`.

Every module that this file imports at the top is imported in every worker, so these are few and low-level.
"""

# Pathlib is slow to import, and every worker would import it.
# ruff: noqa: PTH109, PTH112, PTH116, PTH120, PTH123

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import marshal
import os
import sys

from ripstop.workers.zygote.import_observer import (
    ImportObserver,
    Unfit,
    observed_children,
    observed_descriptors,
    root_package,
    threads_left_by_observed_imports,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Plan = dict[str, Any]

PR_SET_PDEATHSIG = 1
MODULE, FUNCTION = type(sys), type(lambda: None)


class Preload:
    """The imports of one zygote."""

    def __init__(self, home: str, settings: dict[str, Any], prctl: Callable[..., Any]) -> None:
        self.home = home  # this folder
        self.prctl = prctl
        self.kind, self.target = settings["entry"]
        self.wanted: tuple[str, ...] | None = settings["preload"]  # None: what the entrypoint imports
        self.plan: Plan | None = settings["plan"]  # of the zygote that this one replaces
        self.loaded: list[str] = []
        self.left_out: dict[str, str] = {}
        self.added: dict[str, str] = {}  # variables that the imports have added, for the workers
        self.names: list[str] = []
        self.texts: list[str] = []  # files that were read to find the names, and not imported
        self.files: dict[str, tuple[int, int, int]] = {}

    def run(self) -> dict[str, Any]:
        """Import.  Return the reason why this zygote must end: `unfit`, or `again` with a plan for the next one."""
        before = set(sys.modules)
        first = self.first_path()
        if first is not None:
            sys.path.insert(0, first)
        self._set_main_file()
        try:
            result = self._import_script() if self.wanted is None else self._import_wanted(self.wanted)
        finally:
            sys.modules["__main__"].__dict__.pop("__file__", None)
            if first is not None:
                sys.path.remove(first)
                sys.path_importer_cache.pop(first, None)  # the worker scans the directory again
        if not result and (unfit := check_fork_safety()):
            result = {"unfit": unfit}
        if not result:
            self._note_files(name for name in sys.modules if name not in before)
        return result

    def packages(self) -> tuple[str, ...]:
        """The imports of this list, or those of the script without Python's own modules."""
        own = sys.stdlib_module_names if self.wanted is None else ()
        return tuple(name for name in self.loaded if root_package(name) not in own)

    def changed_file(self) -> str:
        """A file that has changed since it was imported, or the script if it has other imports now; or an empty text.

        Call it before workers are forked.  If a file has changed, this zygote must be replaced.
        """
        for path, identity in self.files.items():
            if preloaded_file_identity(path) != identity and (path not in self.texts or self._scan()[1] != self.names):
                return path
        return ""

    # the script's imports -------------------------------------------------------------------------------------------

    def _import_script(self) -> dict[str, Any]:
        self.key, self.names, self.texts, scanned = self._scan()
        plan = scanned | (self.plan or {})
        self.left_out = dict(plan["left_out"])
        with ImportObserver(set(plan["variables"])) as observer:
            again = self._follow(plan, observer)
        self.added = observer.added
        if not again and self.plan:
            self._remember({**plan, "careful": False})
        return {"again": again} if again else {}

    def _follow(self, plan: Plan, observer: ImportObserver) -> Plan | None:
        """Import by this plan.  Return the plan for the next zygote if something was unfit."""
        read_by: dict[str, str] = {}  # a package that read a variable, and why that is unfit
        brought: dict[str, list[str]] = {}  # what the steps with such packages have loaded
        clean: set[str] = set()  # what was loaded before the first of them
        queue, done = list(plan["steps"]), 0
        while queue:
            step = queue.pop(0)
            package = root_package(step[0])
            before = set(sys.modules)
            if plan["careful"] and done >= plan["fit"]:
                why, variables, modules = self._try(step, observer)
                if why:
                    if not step[1]:  # the script's own import
                        self.left_out[step[0]] = why
                        others = [other for other in queue if root_package(other[0]) != package]
                        queue = preload_steps(modules, {package}) + others
                    observer.variables.update(variables)
                    plan["steps"] = plan["steps"][:done] + queue
                    plan["left_out"], plan["variables"] = dict(self.left_out), sorted(observer.variables)
                    continue
            try:
                observer.run(lambda: self._do(*step))  # noqa: B023
            except Unfit as unfit:
                if not unfit.readers:
                    end_preload_children()
                    new = preload_plan_without(plan, read_by, brought, clean)
                    return {**new, "careful": True, "fit": min(done, common_preload_steps(plan, new))}
                clean = clean or before
                read_by |= dict.fromkeys((*unfit.readers, package), str(unfit))
                brought[step[0]] = [module for module in sys.modules if module not in before]
            done += 1
        return preload_plan_without(plan, read_by, brought, clean) if read_by else None

    def _do(self, name: str, modules: list[str]) -> None:
        """One step.  A module that does not exist is the script's business."""
        for module in modules or (name,):
            parent, _, last = module.rpartition(".")
            try:
                if modules or not parent:
                    __import__(module)
                else:
                    __import__(parent, fromlist=[last])
            except ModuleNotFoundError as error:
                if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                    raise
            else:
                if not modules:
                    self.loaded.append(name)

    def _try(self, step: tuple[str, list[str]], observer: ImportObserver) -> tuple[str, tuple[str, ...], list[str]]:
        """Import in a forked process.  Return why this is unfit, the variables it sets, and the modules it loads."""
        before = set(sys.modules)

        def trial() -> tuple[str, tuple[str, ...], list[str]]:
            self.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
            try:
                observer.run(lambda: self._do(*step))
            except Unfit as unfit:
                return str(unfit), unfit.variables, [name for name in sys.modules if name not in before]
            finally:
                end_preload_children()
            return "", (), []

        verdict = run_in_preload_fork(trial)
        return ("it ends the process", (), []) if verdict is None else verdict

    # files ----------------------------------------------------------------------------------------------------------

    def _scan(self) -> tuple[str, list[str], list[str], Plan]:
        """The key of the script's imports, the imports, the files they were read from, and a plan, perhaps remembered.

        In a separate process: the scanner's modules must not stay here.
        """

        def scan() -> tuple[str, list[str], list[str], Plan]:
            first = self.first_path()
            path = sys.path if first is None else [first, *sys.path]
            sys.path = [self.home, *sys.path]
            import imports  # type: ignore[import-not-found]
            import preload_cache  # type: ignore[import-not-found]

            names, sources = imports.imports_to_preload(self.kind, self.target, path, sys.argv[1:])
            key = preload_cache.cache_key(names, sources, path)
            return key, names, list(sources), preload_cache.recall_from_cache(key) or new_preload_plan(names)

        result = run_in_preload_fork(scan) if self.kind in ("script", "module") else None
        return result or ("", [], [], new_preload_plan([]))  # Python reports a script that cannot be read or parsed

    def _remember(self, plan: Plan) -> None:
        def remember() -> None:
            sys.path.insert(0, self.home)
            import preload_cache

            preload_cache.remember_in_cache(self.key, plan)

        if self.key:
            run_in_preload_fork(remember)

    def _note_files(self, modules: Iterable[str]) -> None:
        """Keep the identity of the files behind these modules."""
        paths = {getattr(sys.modules.get(name), "__dict__", {}).get("__file__") for name in modules}
        self.texts = [path for path in self.texts if path not in paths]
        for path in (*self.texts, *paths):
            if isinstance(path, str):
                self.files[path] = preloaded_file_identity(path)

    def first_path(self) -> str | None:
        """The script's sys.path[0]."""
        if sys.flags.safe_path:
            return None
        if self.kind != "script":
            return os.getcwd()
        path: str = os.path.realpath(self.target)
        return path if os.path.isdir(path) else os.path.dirname(path)

    def _set_main_file(self) -> None:
        """Some packages take a process without `__main__.__file__` for an interactive one."""
        if self.kind == "script" and not os.path.isdir(self.target):
            sys.modules["__main__"].__dict__["__file__"] = self.target

    # the user's list ------------------------------------------------------------------------------------------------

    def _import_wanted(self, names: tuple[str, ...]) -> dict[str, Any]:
        for name in names:
            try:
                __import__(name)
                self.loaded.append(name)
            except ModuleNotFoundError as error:
                return {"unfit": f"preloading {name} failed: {error}"}
            except BaseException as error:
                return {"unfit": f"preloading {name} failed: {type(error).__name__}: {error}"}
        return {}


# plans ----------------------------------------------------------------------------------------------------------------


def new_preload_plan(names: Iterable[str]) -> Plan:
    steps: list[tuple[str, list[str]]] = [(name, []) for name in names]
    return {"steps": steps, "left_out": {}, "variables": [], "careful": False, "fit": 0}


def preload_plan_without(plan: Plan, read_by: dict[str, str], brought: dict[str, list[str]], clean: set[str]) -> Plan:
    """The plan without these packages and those that depend on them, but with what they bring from others."""
    loaded = {root_package(module) for module in sys.modules if module not in clean}
    dependents = preloaded_dependents(set(read_by), loaded)
    unfit = read_by | {package: f"it imports {of}" for package, of in dependents.items()}
    steps: list[tuple[str, list[str]]] = []
    left_out = dict(plan["left_out"])
    for name, modules in plan["steps"]:
        if root_package(name) in unfit:
            left_out[root_package(name)] = unfit[root_package(name)]
            steps += preload_steps(brought.get(name, ()), set(unfit))
        else:
            steps.append((name, modules))
    return {**plan, "steps": steps, "left_out": left_out}


def common_preload_steps(one: Plan, other: Plan) -> int:
    """How many steps at the beginning are the same."""
    pairs = enumerate(zip(one["steps"], other["steps"], strict=False))
    return next((number for number, (a, b) in pairs if a != b), len(other["steps"]))


def preload_steps(modules: Iterable[str], unfit: set[str]) -> list[tuple[str, list[str]]]:
    """These modules as one step for each package, without the unfit ones."""
    groups: dict[str, list[str]] = {}
    for name in modules:
        if root_package(name) not in unfit and not name.startswith("__"):  # __mp_main__ is the script
            groups.setdefault(root_package(name), []).append(name)
    return list(groups.items())


def preloaded_dependents(packages: set[str], among: set[str]) -> dict[str, str]:
    """Which of the others import from one of these packages, directly or not, and from which.

    Python's own modules do not.  A function under another name was not imported: a package has replaced one of theirs.
    """
    found: dict[str, str] = {}
    among = among - packages - sys.stdlib_module_names
    size = -1
    while size < len(found):
        size = len(found)
        for name, module in list(sys.modules.items()):
            if root_package(name) not in among or root_package(name) in found:
                continue
            for key, value in list(getattr(module, "__dict__", {}).items()):
                owner = None
                if isinstance(value, MODULE):
                    owner = value.__dict__.get("__name__")
                elif isinstance(value, type) or (isinstance(value, FUNCTION) and value.__name__ == key):
                    owner = value.__module__
                if isinstance(owner, str) and (root_package(owner) in packages or root_package(owner) in found):
                    found[root_package(name)] = root_package(owner)
                    break
    return found


# processes ------------------------------------------------------------------------------------------------------------


def run_in_preload_fork(function: Callable[[], Any]) -> Any:
    """The function's result from a forked process; None if it failed."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            with open(write_end, "wb") as file:
                marshal.dump(function(), file)
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return marshal.loads(data) if data else None


def end_preload_children() -> None:
    """Kill the processes that an import has started."""
    for pid in observed_children().split():
        os.kill(int(pid), _signal.SIGKILL)
        os.waitpid(int(pid), 0)


def check_fork_safety() -> str:
    """Return why workers must not be forked from here, or an empty text."""
    if threads := threads_left_by_observed_imports():
        return f"what was imported left {threads} thread{'s' * (threads > 1)} running"
    if any(path.startswith("/dev/nvidia") for path in observed_descriptors().values()):
        return "what was imported has initialised the GPU driver"
    return ""


def preloaded_file_identity(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size, found.st_ino
    except OSError:
        return 0, 0, 0
