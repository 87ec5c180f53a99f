"""Makes docs/images/report.png: `python -m tests.report.screenshot [FOLDER]`.  Needs Chromium.

Runs a real job of three agents with a crash, a lost node, a hang and a last crash that the restart budget does not
cover; writes its report and takes a picture of the page.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.harness import Job, wait_until

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "docs" / "images" / "report.png"
TRAIN = Path(__file__).with_name("train.py")
FAULTS = "raise:4:70,hang:1:420,oom:3:500"


def run_job(folder: Path) -> Path:
    """The directory of the run.  The script is copied, so that tracebacks have short paths."""
    script = Path(shutil.copy(TRAIN, folder))
    env = {"STATE": str(folder / "state"), "FAULTS": FAULTS, "STEPS": "1000", "STEP_S": "0.08"}
    flags = (
        "--nproc-per-node=2", "--max-restarts=1", "--hang-timeout=4", "--shutdown-timeout=2", "--rdzv-id=llama-7b-sft",
        "--preload=torch,torch.distributed",
    )  # fmt: skip
    with Job(folder, **env) as job:
        nodes = [job.node(*flags, nnodes="2:3", script=script)]
        nodes[0].wait_for_log("joined")  # it runs the coordinator
        nodes += [job.node(*flags, nnodes="2:3", script=script) for _ in range(2)]
        nodes[0].wait_for_log(r"round=2 ranks")
        wait_until(lambda: (int((folder / "state").read_text() or 0) >= 180) or None)
        nodes[2].signal(signal.SIGKILL)
        nodes[0].wait_for_log(r"round=3 ranks")
        nodes.append(job.node(*flags, nnodes="2:3", script=script))
        for node in nodes:
            node.wait(120)
        (run,) = job.logs.iterdir()
    return run


def take_picture(page: Path, image: Path, size: str = "1200,1220") -> None:
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
                f"--user-data-dir={profile}", f"--window-size={size}", f"--screenshot={image}", page.as_uri(),
            ],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="demo-"))
    take_picture(run_job(folder) / "job-report.html", IMAGE)
    print(IMAGE)


if __name__ == "__main__":
    main()
