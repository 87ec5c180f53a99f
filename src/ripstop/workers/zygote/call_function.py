"""A worker whose entrypoint is a function: `python call_function.py CALL RESULT`, a program, never imported.

CALL holds a pickled `(callable, args)`; the pickled return value goes to RESULT, whole or not at all.  An exception
looks as if Python had run the function as its script: our frame is taken out of the traceback.
"""

# Pathlib is slow to import.
# ruff: noqa: PTH104, PTH123

import os
import pickle
import sys
from types import TracebackType

sys.path[0] = ""  # not our directory: as with `python -c`


def call(source: str, target: str) -> None:
    with open(source, "rb") as file:
        function, args = pickle.load(file)
    try:
        result = function(*args)
    except Exception as error:
        inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
        show = sys.excepthook

        def without_us(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
            error.__traceback__ = inner
            show(kind, error, inner)

        sys.excepthook = without_us
        raise
    with open(f"{target}.{os.getpid()}", "wb") as part:
        pickle.dump(result, part, pickle.HIGHEST_PROTOCOL)
    os.rename(part.name, target)


call(*sys.argv[1:3])
