"""Reports steps, and uses new memory in each."""

import mmap
import time

from ripstop.train import heartbeat

for step in range(1_000_000):
    with mmap.mmap(-1, 16 << 20) as memory:
        memory.write(b"x" * len(memory))
    time.sleep(0.02)
    heartbeat(step)
