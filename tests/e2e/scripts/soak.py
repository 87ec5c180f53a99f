"""Dies in every incarnation but the first and the last: each time another way, each time the other rank.

The first and the last go on until the file $SOAK_GO-RESTART is there.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
RESTART = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
LAST = int(os.environ["TORCHELASTIC_MAX_RESTARTS"])


def say(what: str) -> None:
    print(f"restart {RESTART} rank {RANK} {what}", flush=True)
    print(f"restart {RESTART} rank {RANK} {what}, to stderr", file=sys.stderr, flush=True)


def meet() -> None:
    dist.all_reduce(torch.ones(8))


def wait_for_go() -> None:
    """Rank 0 looks, so that both stop in the same step."""
    gone = torch.zeros(1)
    while not gone.item():
        time.sleep(0.01)
        gone.fill_(RANK == 0 and os.path.exists(f"{os.environ['SOAK_GO']}-{RESTART}"))
        dist.all_reduce(gone)


def die() -> None:
    kind = ("kill", "segv", "exit", "raise")[RESTART % 4]
    say(f"{kind} {time.time()}")
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(7)
        case "raise":
            raise RuntimeError("the fault of this incarnation")


dist.init_process_group("gloo")
meet()
say(f"met {time.time()}")
if RESTART in (0, LAST):
    wait_for_go()
if RESTART == LAST:
    dist.destroy_process_group()
    say("done")
elif RANK == RESTART % 2:
    die()
else:
    meet()
