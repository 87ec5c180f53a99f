"""Turns a starting interpreter into a zygote: see `../process.py`.

Python imports `sitecustomize` when it is set up and just before it runs its script.  The zygote stays in this import.
Only its forked workers return from it, and Python then runs the script in them.
"""

# Pathlib is slow to import.
# ruff: noqa: PTH100, PTH120

import os
import sys

_home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_root = os.path.dirname(os.path.dirname(os.path.dirname(_home)))
_modules, _directories = set(sys.modules), set(sys.path_importer_cache)
sys.path.insert(0, _root)
from ripstop.workers.zygote.process import main  # noqa: E402

# The script must not see that anything was imported, and may have a `ripstop` of its own.
del sys.path[0]
for _name in [name for name in sys.modules if name.startswith("ripstop") and name not in _modules]:
    del sys.modules[_name]
for _name in sys.path_importer_cache.keys() - _directories:
    del sys.path_importer_cache[_name]

main(_home, _root)

# Only a worker arrives here.  `main` has imported the user's own sitecustomize if there is one.
if "sitecustomize" not in sys.modules:
    raise ImportError(name="sitecustomize")
