"""Turns a starting interpreter into a zygote: see `../process.py`.

Python imports `sitecustomize` when it is set up and just before it runs its script.  The zygote stays in this import.
Only its forked workers return from it, and Python then runs the script in them.
"""

# Pathlib is slow to import.
# ruff: noqa: PTH100, PTH120

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType


def _take_hook_modules() -> "dict[str, ModuleType]":
    """Remove ripstop's modules from sys.modules, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "ripstop"}


# The zygote's modules are imported from its folder into empty packages: that needs no sys.path and runs no other code.
# Afterwards they are removed, because the script may import the real ones, or have a `ripstop` of its own.
_home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_before = _take_hook_modules()
for _name in ("ripstop", "ripstop.workers", "ripstop.workers.zygote"):
    sys.modules[_name] = type(sys)(_name)
sys.modules["ripstop.workers.zygote"].__path__ = [_home]
from ripstop.workers.zygote.process import run_zygote  # noqa: E402

_take_hook_modules()
sys.modules.update(_before)
sys.path_importer_cache.pop(_home, None)

run_zygote(_home)

# Only a worker arrives here.  `run_zygote` has imported the user's own sitecustomize if there is one.
if "sitecustomize" not in sys.modules:
    raise ImportError(name="sitecustomize")
