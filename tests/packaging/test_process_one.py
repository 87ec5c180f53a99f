"""`ripstop run` as process 1 of a container: here, of a PID namespace."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import wait_until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare: apt install util-linux"
)
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
SCRIPT = """
import os, signal, sys, time
from pathlib import Path

def stop(number, frame):
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
reading, writing = os.pipe()
if os.fork() == 0:
    if (orphan := os.fork()) == 0:
        time.sleep(0.2)  # until its parent is gone
        os._exit(0)
    os.write(writing, str(orphan).encode())
    os._exit(0)
os.wait()
orphan = Path("/proc", os.read(reading, 100).decode())
while orphan.exists():  # also as a zombie
    time.sleep(0.01)
print("the orphan is gone", flush=True)
time.sleep(1000)
"""


def test_process_1_reaps_orphans_and_passes_sigterm_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    output = tmp_path / "output"
    run = (sys.executable, "-m", "ripstop", "run", "--standalone", "--log-dir=logs", "train.py")
    with output.open("wb") as file:
        process = subprocess.Popen([*NAMESPACE, *run], cwd=tmp_path, stdout=file, stderr=file)
    try:
        wait_until(lambda: "the orphan is gone" in output.read_text() or None, why=output.read_text)
        first = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        os.kill(first, signal.SIGTERM)
        assert process.wait(120) == 143
        assert "saved" in output.read_text()
    finally:
        process.kill()
        process.wait()
