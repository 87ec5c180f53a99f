"""Writes down when something happened in a training script, for bench/real_recovery.py."""

import json
import os
import time


def say(event):
    """Append a line: the time, the event, who we are, and when this process started."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
        started = time.time() - float(uptime.read().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")
    line = {"t": time.time(), "event": event, "rank": int(os.environ["RANK"]), "pid": os.getpid(), "started": started}
    with open(os.environ["BENCH_LOG"], "a") as log:
        log.write(json.dumps(line) + "\n")
