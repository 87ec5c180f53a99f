"""`RIPSTOP_COMPAT=1` for every Python that a tool starts: this directory is to be in PYTHONPATH.

    eval "$(python -m ripstop.compat --environment)"

Python imports `sitecustomize` when it starts.  This one does what the variable asks, and then lets the one that it
hides, if there is one, do its part.
"""

# Every interpreter pays for what is imported here.
# ruff: noqa: PTH100, PTH120

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _install() -> None:
    if os.environ.get("RIPSTOP_COMPAT") != "1":
        return
    try:
        from ripstop.compat import install
    except ImportError:
        sys.stderr.write(f"RIPSTOP_COMPAT=1, but {sys.executable} has no ripstop: torch's own launcher is used\n")
        return
    install()


def _hand_on() -> None:
    path, module = list(sys.path), sys.modules.pop("sitecustomize")
    sys.path = [entry for entry in path if os.path.abspath(entry) != _here]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.path[:] = path
        sys.modules.setdefault("sitecustomize", module)


_install()
_hand_on()
