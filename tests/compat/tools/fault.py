"""For the scripts beside this file: die once in the middle, and say at the end how it went."""

import json
import os
import signal
import sys

FATAL_STEP = 13  # the latest checkpoint is of step 10
STEPS = 30


def maybe_die(step: int) -> None:
    """Kill rank 1 at this step of the first attempt."""
    if step == FATAL_STEP and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def say(first: int, last: int, package: str) -> None:
    """One line: rank, number of workers, first and last step of this attempt, and whether ripstop ran it."""
    from importlib.metadata import version

    is_ours = "round_2" in os.environ["TORCHELASTIC_ERROR_FILE"]
    said = [int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), first, last, is_ours]
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stderr.write(f"tested with {package} {version(package)}\n")
