"""Counts steps for ever; rank 1 crashes once, at $CRASH_AT, and all go on from the last checkpoint, every tenth step.

With $REPORT it tells its launcher where it is.
"""

import os
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
FIRST_LIFE = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
CRASH_AT = int(os.environ["CRASH_AT"])
STEP_S = 0.02


def main() -> None:
    if os.environ.get("REPORT"):
        from ripstop.train import checkpoint_saved, heartbeat
    else:
        heartbeat = checkpoint_saved = lambda *_: None
    state = Path(os.environ["STATE"])
    step = 0 if FIRST_LIFE else int(state.read_text())
    while True:
        time.sleep(STEP_S)
        step += 1
        heartbeat(step)
        if RANK == 0 and step % 10 == 0 and step < CRASH_AT:
            checkpoint_saved(step, str(state))
            state.with_suffix(".new").write_text(str(step))
            state.with_suffix(".new").replace(state)
        if RANK == 1 and FIRST_LIFE and step == CRASH_AT:
            while not state.exists() or int(state.read_text()) != (CRASH_AT - 1) // 10 * 10:
                time.sleep(STEP_S)
            os._exit(7)


if __name__ == "__main__":
    main()
