"""The API of `torch.distributed.elastic` on ripstop, for programs that import torch's names.

After `install()`, the torch modules in `MODULES` resolve to ripstop's modules in this process: later imports get them,
and torch modules that were imported before are replaced.  `install()` itself imports nothing; a module is loaded when
its torch name is imported.  Names that a program has copied already (`from torch.distributed.run import main`) do not
change, so install first.

No lower layer imports this package.  Importing it imports neither torch nor any other part of it.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

__all__ = ["MODULES", "install", "installed", "uninstall"]

_ELASTIC = "torch.distributed.elastic"
_SERVER = f"{_ELASTIC}.agent.server"
_MULTIPROCESSING = f"{_ELASTIC}.multiprocessing"
_RENDEZVOUS = f"{_ELASTIC}.rendezvous"

# torch's module → ours, below `ripstop.compat`
MODULES = {
    "torch.distributed.run": "run",
    "torch.distributed.launch": "launch",
    "torch.distributed.launcher": "launcher",
    "torch.distributed.launcher.api": "launcher",
    _SERVER: "agent",
    f"{_SERVER}.api": "agent",
    f"{_SERVER}.local_elastic_agent": "agent",
    f"{_SERVER}.health_check_server": "agent.health_check",
    _MULTIPROCESSING: "multiprocessing",
    f"{_MULTIPROCESSING}.api": "multiprocessing",
    f"{_MULTIPROCESSING}.errors": "multiprocessing.errors",
    f"{_MULTIPROCESSING}.errors.error_handler": "multiprocessing.errors",
    f"{_MULTIPROCESSING}.errors.handlers": "multiprocessing.errors",
    f"{_MULTIPROCESSING}.redirects": "multiprocessing.redirects",
    f"{_MULTIPROCESSING}.subprocess_handler": "multiprocessing.subprocess_handler",
    f"{_MULTIPROCESSING}.subprocess_handler.handlers": "multiprocessing.subprocess_handler",
    f"{_MULTIPROCESSING}.subprocess_handler.subprocess_handler": "multiprocessing.subprocess_handler",
    f"{_MULTIPROCESSING}.tail_log": "multiprocessing.tail_log",
    f"{_ELASTIC}.control_plane": "control_plane",
    f"{_ELASTIC}.events": "events",
    f"{_ELASTIC}.events.api": "events",
    f"{_ELASTIC}.events.handlers": "events",
    f"{_ELASTIC}.metrics": "metrics",
    f"{_ELASTIC}.metrics.api": "metrics",
    f"{_ELASTIC}.timer": "timer",
    f"{_ELASTIC}.timer.api": "timer",
    f"{_ELASTIC}.timer.debug_info_logging": "timer",
    f"{_ELASTIC}.timer.file_based_local_timer": "timer",
    f"{_ELASTIC}.timer.local_timer": "timer",
    _RENDEZVOUS: "rendezvous",
    f"{_RENDEZVOUS}.api": "rendezvous",
    f"{_RENDEZVOUS}.c10d_rendezvous_backend": "rendezvous.c10d",
    f"{_RENDEZVOUS}.dynamic_rendezvous": "rendezvous.dynamic",
    f"{_RENDEZVOUS}.registry": "rendezvous.registry",
    f"{_RENDEZVOUS}.static_tcp_rendezvous": "rendezvous.static",
    f"{_RENDEZVOUS}.utils": "rendezvous.endpoint",
    f"{_RENDEZVOUS}.etcd_rendezvous": "rendezvous.etcd_rendezvous",
    f"{_RENDEZVOUS}.etcd_rendezvous_backend": "rendezvous.etcd_rendezvous",
    f"{_RENDEZVOUS}.etcd_server": "rendezvous.etcd_server",
    f"{_RENDEZVOUS}.etcd_store": "rendezvous.etcd_store",
    # torch's packages only re-export these
    f"{_ELASTIC}.utils.api": "utils",
    f"{_ELASTIC}.utils.data.cycling_iterator": "utils.data",
    f"{_ELASTIC}.utils.data.elastic_distributed_sampler": "utils.data",
    f"{_ELASTIC}.utils.distributed": "utils.store",
    f"{_ELASTIC}.utils.log_level": "utils",
    f"{_ELASTIC}.utils.logging": "utils",
    f"{_ELASTIC}.utils.process_state": "utils",
    f"{_ELASTIC}.utils.store": "utils.store",
}


class _Finder:
    """Finds and loads ripstop's modules under torch's names; first in `sys.meta_path` while installed."""

    def __init__(self) -> None:
        self.replaced: dict[str, ModuleType] = {}  # the torch modules that were imported before
        self._specs: dict[str, ModuleSpec | None] = {}  # of our modules, which the import system replaces

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        loader: Any = self
        return ModuleSpec(fullname, loader, origin=f"{__path__[0]}/{MODULES[fullname]}.py")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_ours(spec.name))
        self._specs[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]
        if not hasattr(module, "__path__"):
            module.__path__ = []  # a package in torch; its submodules are in MODULES

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m torch.distributed.run`."""
        from importlib.util import find_spec

        spec = find_spec(_ours(fullname))
        assert spec is not None and spec.loader is not None, f"{fullname} is in MODULES"
        loader: Any = spec.loader
        code: CodeType | None = loader.get_code(spec.name)
        return code


def _ours(name: str) -> str:
    return f"{__name__}.{MODULES[name]}"


def install() -> None:
    """Make torch's names resolve to ripstop.  Calling it again changes nothing."""
    if installed():
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    for name in MODULES:
        if (module := sys.modules.pop(name, None)) is not None:
            finder.replaced[name] = module
    for name in finder.replaced:
        import_module(name)


def installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def uninstall() -> None:
    """Restore torch's modules as they were before `install()`."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Finder)]:
        sys.meta_path.remove(finder)
        for name in MODULES:
            sys.modules.pop(name, None)
            if (original := finder.replaced.get(name)) is not None:
                sys.modules[name] = original
            parent, _, child = name.rpartition(".")
            if (holder := sys.modules.get(parent)) is None:
                continue
            if original is not None:
                setattr(holder, child, original)
            elif child in vars(holder) and not holder.__name__.startswith(__name__):
                delattr(holder, child)
