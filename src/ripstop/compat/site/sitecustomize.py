"""Applies `RIPSTOP_COMPAT=1` in every Python process that has this directory in PYTHONPATH.

    eval "$(python -m ripstop.compat --environment)"

Python imports `sitecustomize` when it starts.  This one calls `install()`, and then imports the `sitecustomize` that it
hides, if there is one.
"""

# Keep imports few: every interpreter pays for them.
# ruff: noqa: PTH100, PTH120

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _install_compat_in_site() -> None:
    if os.environ.get("RIPSTOP_COMPAT") != "1":
        return
    try:
        from ripstop.compat import install
    except ImportError:
        sys.stderr.write(f"RIPSTOP_COMPAT=1, but {sys.executable} has no ripstop: torch's launcher is used\n")
        return
    install()


def _import_sitecustomize_hidden_by_compat() -> None:
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


_install_compat_in_site()
_import_sitecustomize_hidden_by_compat()
