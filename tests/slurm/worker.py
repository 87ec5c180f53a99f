"""A training script without torch: reports where it runs, and saves when it is asked to stop."""

import os
import signal
import sys
import time

ME = "{SLURMD_NODENAME} rank={RANK}/{WORLD_SIZE} run={TORCHELASTIC_RUN_ID} restarts={TORCHELASTIC_RESTART_COUNT}"
ME = ME.format_map(os.environ)


def say(text: str) -> None:
    os.write(1, f"{ME} {text}\n".encode())  # in one piece: the nodes share the output


def save(signum: int, frame: object) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1.5)  # longer than a second signal would allow
    say(f"saved after {signal.Signals(signum).name}")
    sys.exit(0)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, save)
    secret = [name for name in os.environ if name.startswith("RIPSTOP_TOKEN")]
    say(f"started secret={secret}")
    while "--once" not in sys.argv:
        time.sleep(0.1)
