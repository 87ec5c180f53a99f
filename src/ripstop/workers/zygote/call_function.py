"""A worker whose entrypoint is a function: the program `python call_function.py CALL RESULT`.

The file CALL has a pickled `(callable, args)`.  The pickled return value is written to RESULT, completely or not at
all.  An exception's traceback does not show the frame of this program.
"""

# Pathlib is slow to import.
# ruff: noqa: PTH104, PTH123

import os
import pickle
import sys
from types import TracebackType

sys.path[0] = ""  # as with `python -c`, instead of our directory


def main(source: str, target: str) -> None:
    with open(source, "rb") as file:
        function, args = pickle.load(file)
    try:
        result = function(*args)
    except Exception as error:
        inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
        show = sys.excepthook

        def hide_frame(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
            error.__traceback__ = inner
            show(kind, error, inner)

        sys.excepthook = hide_frame
        raise
    with open(f"{target}.{os.getpid()}", "wb") as part:
        pickle.dump(result, part, pickle.HIGHEST_PROTOCOL)
    os.rename(part.name, target)


main(*sys.argv[1:3])
