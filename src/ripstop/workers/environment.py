"""A worker's environment, as a pure function of its place in the round.

The variables are torchrun's, so that a script for torchrun runs unchanged.  Rules: (1) a variable that the user has set
is kept, except for those that identify a worker: they are always replaced, so that a job inside another job's worker
does not take its identity; (2) ripstop sets only variables that torchrun sets: the old `NCCL_ASYNC_ERROR_HANDLING` is
passed on if the user has set it, and never added, because torch would warn about it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ripstop.model.config import STOP_SIGNALS
from ripstop.model.round import Place

TIMER_FILE = "TORCHELASTIC_TIMER_FILE"  # the path of the timer pipe, for workers and agents
SOCKET = "RIPSTOP_SOCKET"  # `train/reports.py` reads it
STANDBY = "RIPSTOP_STANDBY"  # "1" in a standby that runs the script, until it is a worker
STRAGGLER = "RIPSTOP_STRAGGLER"  # "off": `train/step_profile.py` makes no profiles

ROUND_VARIABLES = (  # those that change for a worker that goes on in place; it keeps its error file
    "RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


def shared_environment(base: Mapping[str, str], slots: int) -> dict[str, str]:
    """The variables that all workers of a node share in every round; the zygote imports with them."""
    env = {name: value for name, value in base.items() if name not in (SOCKET, STANDBY)}  # an outer job's
    if slots > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # several workers with a thread for each core overload the node
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return env


def local_environment(
    base: Mapping[str, str], slots: int, local_rank: int, *, virtual_local_rank: bool = False
) -> dict[str, str]:
    """The variables of one worker that are the same in every round; a standby warms up with them.

    With `virtual_local_rank`, every worker has local rank 0 and sees only its own GPU.
    """
    virtual = (
        {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": _worker_environment_gpu(base, local_rank)}
        if virtual_local_rank
        else {}
    )
    return shared_environment(base, slots) | {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(slots)} | virtual


def worker_environment(
    base: Mapping[str, str],
    place: Place,
    local_rank: int,
    *,
    run_id: str,
    role: str,
    max_restarts: int,
    error_file: Path,
    earlier_restarts: int = 0,
    signals: Sequence[str] = STOP_SIGNALS,
    virtual_local_rank: bool = False,
    timer_pipe: Path | None = None,
    socket: str = "",
    finds_stragglers: bool = True,
) -> dict[str, str]:
    """The complete environment of one worker.  On `socket`, if any, it reports its progress to the agent.

    `earlier_restarts` are restarts of the whole job by its cluster.
    """
    timers = {TIMER_FILE: str(timer_pipe)} if timer_pipe else {}
    reports = {SOCKET: socket} if socket else {}
    if socket and not finds_stragglers:
        reports[STRAGGLER] = "off"
    return (
        local_environment(base, place.slots, local_rank, virtual_local_rank=virtual_local_rank)
        | {
            "RANK": str(place.first_rank + local_rank),
            "WORLD_SIZE": str(place.world_size),
            "GROUP_RANK": str(place.group_rank),
            "GROUP_WORLD_SIZE": str(place.group_size),
            "ROLE_RANK": str(place.role_first_rank + local_rank),
            "ROLE_WORLD_SIZE": str(place.role_size),
            "ROLE_NAME": role,
            "MASTER_ADDR": place.store.host,
            "MASTER_PORT": str(place.store.port),
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": str(earlier_restarts + place.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signals),  # for a worker that starts workers itself
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 does not host the store: every worker is a client
        }
        | timers
        | reports
    )


def _worker_environment_gpu(base: Mapping[str, str], local_rank: int) -> str:
    """The number or UUID of this worker's GPU."""
    if "CUDA_VISIBLE_DEVICES" not in base:
        return str(local_rank)
    names = base["CUDA_VISIBLE_DEVICES"].split(",")
    return names[local_rank].strip() if local_rank < len(names) else ""
