"""A worker's environment, as a pure function of its place in the round.

The names and their meaning are torchrun's, so that a script that ran there runs here.  Rules: (1) what the user set
is the user's, except for the names that say who a worker is; those are always ours, so that a job started from inside
another job's worker is not mistaken for it; (2) nothing is set that torch itself does not set:
`NCCL_ASYNC_ERROR_HANDLING`, the old name, is passed on when the user has set it and else left alone, for torch would
complain about it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ripstop.model.config import STOP_SIGNALS
from ripstop.model.round import Place

TIMER_FILE = "TORCHELASTIC_TIMER_FILE"  # names the pipe, to workers and to us
SOCKET = "RIPSTOP_SOCKET"  # `train/reports.py` reads it


def shared_environment(base: Mapping[str, str], slots: int) -> dict[str, str]:
    """What all workers of a node share, known before any round: for a process that imports on their behalf."""
    env = {name: value for name, value in base.items() if name != SOCKET}  # that of a job around this one
    if slots > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # several workers, each with a thread a core, would overload the node
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return env


def worker_environment(
    base: Mapping[str, str],
    place: Place,
    local_rank: int,
    *,
    run_id: str,
    role: str,
    max_restarts: int,
    error_file: Path,
    signals: Sequence[str] = STOP_SIGNALS,
    virtual_local_rank: bool = False,
    timer_pipe: Path | None = None,
    socket: str = "",
) -> dict[str, str]:
    """The complete environment of one worker; a virtual local rank is 0 for all, each with a GPU 0 of its own.

    `socket` is where it may tell the agent of its progress; empty: nowhere.
    """
    alone = {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": _gpu(base, local_rank)} if virtual_local_rank else {}
    timers = {TIMER_FILE: str(timer_pipe)} if timer_pipe else {}
    heard = {SOCKET: socket} if socket else {}
    return (
        shared_environment(base, place.slots)
        | {
            "RANK": str(place.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_WORLD_SIZE": str(place.slots),
            "GROUP_RANK": str(place.group_rank),
            "GROUP_WORLD_SIZE": str(place.group_size),
            "ROLE_RANK": str(place.role_first_rank + local_rank),
            "ROLE_WORLD_SIZE": str(place.role_size),
            "ROLE_NAME": role,
            "MASTER_ADDR": place.store.host,
            "MASTER_PORT": str(place.store.port),
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": str(place.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signals),  # read where a worker starts workers itself
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is not rank 0's to host: every worker is a client
        }
        | alone
        | timers
        | heard
    )


def _gpu(base: Mapping[str, str], local_rank: int) -> str:
    """The name of this worker's GPU among those that the node's workers see."""
    if "CUDA_VISIBLE_DEVICES" not in base:
        return str(local_rank)
    names = base["CUDA_VISIBLE_DEVICES"].split(",")
    return names[local_rank].strip() if local_rank < len(names) else ""
