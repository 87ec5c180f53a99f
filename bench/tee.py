#!/usr/bin/env python3
"""`--tee 3`: how fast workers' lines come to the console, torchrun beside ripstop, and whether all of them come.

    python bench/tee.py [--workers 4] [--lines 200000] [--runs 3] [--json F]

Every worker writes its lines in blocks, even ones to stdout and odd ones to stderr, as fast as it can.  The time is
from the first line that arrives here to the last, so what a launcher takes to start does not count.  Every line is
looked at: whole, with its worker's prefix, in the order in which it was written.  Exits 1 if ripstop lost or tore one,
or is not as fast as `--least` times torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "ripstop": [sys.executable, "-m", "ripstop", "run"],
}
LENGTH = 80  # bytes of a line, with its end
BLOCK = 100  # lines in one write

WRITER = f"""
import os
rank, lines = os.environ["RANK"], int(os.environ["BENCH_LINES"])
for first in range(0, lines, 2 * {BLOCK}):
    for stream in (0, 1):
        numbers = range(first + stream, min(first + 2 * {BLOCK}, lines), 2)
        data = "".join(f"line {{rank}} {{n}} ".ljust({LENGTH - 1}, ".") + "\\n" for n in numbers).encode()
        while data:
            data = data[os.write(1 + stream, data):]
"""
LINE = re.compile(rb"\[default(\d+)\]:(line (\d+) (\d+) \.*)")


class Reader(threading.Thread):
    """One stream of the launcher: its bytes, and when the first and the last of the workers' came."""

    def __init__(self, pipe) -> None:
        super().__init__(daemon=True)
        self.pipe, self.data, self.first, self.last = pipe, bytearray(), 0.0, 0.0

    def run(self) -> None:
        while piece := os.read(self.pipe.fileno(), 1 << 20):
            if b"]:line " in piece:
                self.last = time.monotonic()
                self.first = self.first or self.last
            self.data += piece


def main() -> int:
    args = arguments()
    results: dict[str, list[dict]] = {name: [] for name in LAUNCHERS}
    for number in range(args.runs):
        for name, command in LAUNCHERS.items():
            result = measure(command, args.workers, args.lines)
            results[name].append(result)
            print(f"  run {number + 1}  {name:9} {summary(result)}", flush=True)
    rates = {name: statistics.median(r["lines_per_s"] for r in runs) for name, runs in results.items()}
    ratio = rates["ripstop"] / rates["torchrun"]
    whole = all(not r["faults"] for r in results["ripstop"])
    print(f"\n{args.workers} workers x {args.lines} lines of {LENGTH} bytes, medians of {args.runs}")
    for name, rate in rates.items():
        print(f"  {name:9} {rate:12,.0f} lines/s")
    print(f"  ratio     {ratio:12.2f}  (wanted: {args.least:g} at least)")
    if args.json:
        facts = {"workers": args.workers, "lines": args.lines, "bytes": LENGTH, "ratio": ratio, "runs": results}
        with open(args.json, "w") as file:
            json.dump(facts, file, indent=1)
    return 0 if whole and ratio >= args.least else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lines", type=int, default=200_000, help="lines of each worker")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--least", type=float, default=1.5, help="the ratio that is wanted")
    parser.add_argument("--json", help="write the figures of every run to this file")
    return parser.parse_args()


def measure(command: list[str], workers: int, lines: int) -> dict:
    with tempfile.TemporaryDirectory(prefix="bench-tee-") as folder:
        script = os.path.join(folder, "writer.py")
        with open(script, "w") as file:
            file.write(WRITER)
        flags = ["--standalone", f"--nproc-per-node={workers}", "--tee=3", f"--log-dir={folder}/logs"]
        job = subprocess.Popen(
            [*command, *flags, script],
            env={**os.environ, "BENCH_LINES": str(lines), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        readers = [Reader(job.stdout), Reader(job.stderr)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        code = job.wait()
    seconds = max(r.last for r in readers) - min(r.first for r in readers)
    faults = [f"exit code {code}"] if code else []
    for stream, reader in enumerate(readers):
        faults += check(bytes(reader.data), stream, workers, lines)
    return {"seconds": seconds, "lines_per_s": workers * lines / seconds, "faults": faults}


def check(data: bytes, stream: int, workers: int, lines: int) -> list[str]:
    """What is wrong with the workers' lines of one stream."""
    came: dict[int, list[int]] = {rank: [] for rank in range(workers)}
    torn = 0
    for line in data.split(b"\n"):
        match = LINE.fullmatch(line)
        if match and match[1] == match[3] and len(match[2]) == LENGTH - 1:
            came[int(match[1])].append(int(match[4]))
        elif b"line " in line and b"...." in line:
            torn += 1
    faults = [f"{torn} torn lines in stream {stream + 1}"] if torn else []
    for rank, numbers in came.items():
        wanted = list(range(stream, lines, 2))
        if numbers != wanted:
            missing = len(set(wanted) - set(numbers))
            faults.append(f"worker {rank}, stream {stream + 1}: {missing} lines missing, or out of order")
    return faults


def summary(result: dict) -> str:
    words = "; ".join(result["faults"]) or "every line whole and in order"
    return f"{result['seconds']:7.2f} s {result['lines_per_s']:12,.0f} lines/s  {words}"


if __name__ == "__main__":
    sys.exit(main())
