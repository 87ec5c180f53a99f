"""The round's store process: torch's own TCPStore on a socket that the agent has bound.

Runs in a fork of a zygote that has torch, or as a program: `python store_process.py HOST PORT FD`.  It imports only
what torch needs, and serves until it is killed.
"""

import os
import sys
from typing import NoReturn


def run_store_process(host: str, port: int, fd: int) -> NoReturn:
    from ripstop.workers.zygote.title import STORE, rename_process

    rename_process(STORE)
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
    except Exception as error:
        why = f"the job's store needs torch, which cannot be imported: {error}; install torch for {sys.executable}."
        fail_store_process(why)
    import signal

    try:
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    except Exception as error:
        fail_store_process(f"torch cannot serve the job's store on {host}:{port}: {error}")
    while True:
        signal.pause()
        assert store is not None  # it serves while it is referenced


def fail_store_process(why: str) -> NoReturn:
    """Exit at once: the listening socket closes, so clients get an error instead of a timeout."""
    sys.stderr.write(f"ripstop: {' '.join(why.split())}\n")
    os._exit(1)


if __name__ == "__main__":
    sys.path[0] = os.path.abspath(f"{__file__}/../../../..")  # noqa: PTH100 - pathlib is slow to import
    import ripstop.workers.zygote.title  # noqa: F401 - while it can be found

    del sys.path[0]
    run_store_process(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
