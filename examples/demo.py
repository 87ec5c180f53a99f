"""`make demo`: a training with two workers loses one and recovers.

Starts examples/ddp_resume.py under `ripstop run`, kills worker 1 with SIGKILL half-way, and measures the time until the
training continues.  Exits 0 only if the training has finished.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 60
KILL_AT = 30
TRAINING = Path(__file__).with_name("ddp_resume.py")
DEADLINE = 120.0


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="ripstop-demo-") as scratch:
        command = [
            *("ripstop", "run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"),
            *("--log-dir", f"{scratch}/logs", str(TRAINING)),
            *("--checkpoint", f"{scratch}/checkpoint.pt", "--steps", str(STEPS)),
        ]
        report("starting two workers: " + " ".join(command[:5]) + " examples/ddp_resume.py")
        started = time.monotonic()
        job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        signal.signal(signal.SIGALRM, lambda *_: job.kill())
        signal.setitimer(signal.ITIMER_REAL, DEADLINE)
        try:
            healed = watch(job, started)
            return conclude(job.wait(), healed)
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()


def watch(job: subprocess.Popen[str], started: float) -> float | None:
    """Print the training's output and kill a worker; return the seconds from the kill until training continues."""
    assert job.stdout is not None
    workers: dict[int, int] = {}
    killed_at = healed = None
    for line in job.stdout:
        print(f"    {line.rstrip()}", flush=True)
        match line.split():
            case ["worker", rank, "is", "process", pid]:
                workers[int(rank)] = int(pid)
            case ["training", *_] if killed_at is not None:
                healed = time.monotonic() - killed_at
                report(f"training continues from the checkpoint, {healed:.2f} s after the kill")
            case ["training", *_]:
                report(f"both are training, {time.monotonic() - started:.1f} s after the command was given")
            case ["step", step, *_] if int(step) == KILL_AT and killed_at is None:
                report(f"worker 1 is killed now: kill -9 {workers[1]}")
                killed_at = time.monotonic()
                os.kill(workers[1], signal.SIGKILL)
    return healed


def conclude(code: int, healed: float | None) -> int:
    if code == 0 and healed is not None:
        report(f"finished: all {STEPS} steps, one worker lost, {healed:.2f} s of interruption")
        return 0
    report(f"the demo failed: exit code {code}, " + ("no recovery seen" if healed is None else "after the recovery"))
    return code or 1


def report(text: str) -> None:
    print(f"\033[1m» {text}\033[0m" if sys.stdout.isatty() else f"» {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
