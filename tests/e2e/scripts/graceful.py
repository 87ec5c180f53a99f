"""Waits for a signal, says so in $TRAIN_LOG, and goes; or, if $STUBBORN, does not go."""

import json
import os
import signal
import time


def say(event: str, **more: object) -> None:
    with open(os.environ["TRAIN_LOG"], "a") as f:
        f.write(json.dumps({"t": time.time(), "event": event, "pid": os.getpid(), **more}) + "\n")


def on_signal(signum: int, _: object) -> None:
    if os.environ.get("STUBBORN"):
        say("ignored", signal=signum)
        return
    say("saved", signal=signum)
    raise SystemExit(0)


signal.signal(signal.SIGTERM, on_signal)
signal.signal(signal.SIGINT, on_signal)
say("start")
while True:
    signal.pause()
