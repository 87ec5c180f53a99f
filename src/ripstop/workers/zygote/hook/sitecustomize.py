"""Turns a starting interpreter into a zygote: see `../process.py`.

Python imports `sitecustomize` when all is set up and just before it runs its script.  The zygote stays in here; only
its forked workers come out again, into an interpreter that goes on to run the script as if nothing had been.
"""

# Pathlib is slow to import.
# ruff: noqa: PTH100, PTH118, PTH120

import os
import sys

_home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_path = os.path.join(_home, "process.py")
_zygote: dict[str, object] = {"__name__": "ripstop.workers.zygote.process", "__file__": _path}
exec(type(__loader__)("process", _path).get_code("process"), _zygote)  # type: ignore[name-defined]
_zygote["main"](_home)  # type: ignore[operator]

# Only a worker arrives here.  `main` has imported the user's own sitecustomize, where there is one; else there is none.
if "sitecustomize" not in sys.modules:
    raise ImportError(name="sitecustomize")
