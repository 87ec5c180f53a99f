"""A job that needs nothing but Python and ripstop: the store process, which needs torch, is never started."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, sys
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if (rank, attempt) == ("1", "0"):
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdout.write(f"rank={rank} attempt={attempt} torch={'torch' in sys.modules}\\n")
"""


def test_a_job_without_torch_heals(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(SCRIPT)
    words = ["run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", f"--log-dir={tmp_path}", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "ripstop", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank={rank} attempt=1 torch=False\n" in done.stdout
