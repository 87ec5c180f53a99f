"""Says a line on stdout and one on stderr, again and again, and never imports torch."""

import os
import sys
import time

RANK = os.environ["RANK"]
for number in range(1_000_000):
    print(f"out {RANK} {os.getpid()} {number}", flush=True)
    print(f"err {RANK} {os.getpid()} {number}", file=sys.stderr, flush=True)
    time.sleep(0.05)
