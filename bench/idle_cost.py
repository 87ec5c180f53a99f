#!/usr/bin/env python3
"""What an agent costs while its workers run: CPU time of the agent, in percent of a core.

python bench/idle_cost.py [--workers 8] [--seconds 20] [--launcher "ripstop run"]
"""

import argparse
import os
import shlex
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

WORKER = "import pathlib, os, time; pathlib.Path(os.environ['OUT'], os.environ['RANK']).touch(); time.sleep(3600)\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--launcher", default="ripstop run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "sleep.py")
        script.write_text(WORKER)
        flags = ["--standalone", f"--nproc-per-node={args.workers}", "--tee=3", f"--log-dir={folder}/logs", str(script)]
        agent = subprocess.Popen([*shlex.split(args.launcher), *flags], env={**os.environ, "OUT": folder})
        try:
            while not all(Path(folder, str(rank)).exists() for rank in range(args.workers)):
                time.sleep(0.05)
            process = psutil.Process(agent.pid)
            before = process.cpu_times()
            time.sleep(args.seconds)
            after = process.cpu_times()
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait()
    used = after.user + after.system - before.user - before.system
    print(f"{args.workers} workers, {args.seconds:g} s: {100 * used / args.seconds:.2f} % of a core")


if __name__ == "__main__":
    main()
