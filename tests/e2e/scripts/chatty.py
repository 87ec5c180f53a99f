"""Says a line on stdout and one on stderr, again and again, and never imports torch; reports its steps with $REPORT."""

import os
import sys
import time

if os.environ.get("REPORT"):
    from ripstop.train import heartbeat

RANK = os.environ["RANK"]
for number in range(1_000_000):
    print(f"out {RANK} {os.getpid()} {number}", flush=True)
    print(f"err {RANK} {os.getpid()} {number}", file=sys.stderr, flush=True)
    if os.environ.get("REPORT"):
        heartbeat(number)
    time.sleep(0.05)
