"""Says "ready", and once the file $GO is there, a great deal, and ends at once, in the way that the file says."""

import os
import signal
import sys
import time
from pathlib import Path


def speak() -> None:
    for number in range(20_000):
        sys.stdout.write(f"{number} {'x' * 50}\n")
    sys.stdout.write("the last word \u20ac")  # and no end of the line
    sys.stdout.flush()


def stopped(*_: object) -> None:
    speak()
    os._exit(0)


signal.signal(signal.SIGTERM, stopped)
print("ready", flush=True)
go = Path(os.environ["GO"])
while not go.exists():
    time.sleep(0.01)
if go.read_text() == "stop":
    time.sleep(60)
speak()
if go.read_text() == "fail":
    sys.exit(3)
