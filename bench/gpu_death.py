#!/usr/bin/env python3
"""How long the kernel takes from SIGKILL until a process with a CUDA context has ended, without any launcher.

    python bench/gpu_death.py [--runs 5] [--json FILE]

No launcher can free the GPU earlier: this is the floor of the phase "restart" in `gpu_recovery.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

KINDS = {
    "no GPU": "",
    "a CUDA context": "torch.ones(1, device='cuda')",
    "and 10 GB on the GPU": "x = torch.ones(10 * 2**28, device='cuda')",
    "and 1 GB of pinned memory": "x = torch.ones(2**28).pin_memory()",
    "and NCCL": (
        "import torch.distributed as d; d.init_process_group('nccl', store=d.HashStore(), rank=0, world_size=1); "
        "d.all_reduce(torch.ones(1, device='cuda'))"
    ),
}


def seconds_to_die(prepare: str) -> float:
    program = f"import torch, time\n{prepare}\nprint('ready', flush=True)\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        poll = select.poll()
        poll.register(os.pidfd_open(process.pid), select.POLLIN)
        began = time.perf_counter()
        process.send_signal(signal.SIGKILL)
        poll.poll()
        return time.perf_counter() - began
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    raw = {kind: [seconds_to_die(prepare) for _ in range(args.runs)] for kind, prepare in KINDS.items()}
    for kind, times in raw.items():
        print(f"{kind:28}{statistics.median(times):8.3f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()
