"""`make matrix`: the wheel under other interpreters and other versions of torch.

For every pair it makes a virtual environment, installs the wheel and some test packages, and runs a part of the tests:
with torch `none`, the tests of the control plane and a job without torch; otherwise also jobs with torch.
Environments are kept and reused.  An interpreter that is not on this machine is reported, and is not a failure, unless
no pair could be tested.

    python -m tests.packaging.matrix --python 3.11 3.12 --torch none 2.13.0
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("numpy", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil")
WITHOUT_TORCH = (
    "tests/packaging/test_plain_job.py",
    "tests/model",
    "tests/protocol",
    "tests/coordinator",
    "tests/agent",
)
WITH_TORCH = (*WITHOUT_TORCH, "tests/e2e/test_one_node.py", "tests/workers/test_store.py")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", nargs="+", default=["3.11", "3.12", "3.13", "3.14"])
    parser.add_argument(
        "--torch", nargs="+", default=["none"], help="versions; with CUDA packages if PyPI has no other"
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--home", type=Path, default=Path("/tmp/ripstop-matrix"))
    args = parser.parse_args()
    wheel = max(args.dist.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    results = {
        (python, torch): verdict(args.home, wheel, python, torch) for python in args.python for torch in args.torch
    }
    for (python, torch), result in results.items():
        print(f"python {python:<6} torch {torch:<10} {result}")
    return int("FAILED" in results.values() or "passed" not in results.values())


def verdict(home: Path, wheel: Path, python: str, torch: str) -> str:
    if (interpreter := find(python)) is None:
        return "not on this machine"
    environment = home / f"{python}-{torch}"
    own = environment / "bin/python"
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    extra = () if torch == "none" else (f"torch=={torch}",)
    try:
        if not own.exists():
            run([interpreter, "-m", "venv", environment])
        run([*pip, *PACKAGES, *extra, wheel])
        run([*pip, "--force-reinstall", "--no-deps", wheel])
    except subprocess.CalledProcessError:
        return "could not be installed"
    tests = WITHOUT_TORCH if torch == "none" else WITH_TORCH
    done = subprocess.run([own, "-m", "pytest", "-q", "-m", "not long", *tests], cwd=ROOT, env=environ(), check=False)
    return "passed" if done.returncode == 0 else "FAILED"


def find(version: str) -> Path | None:
    """An interpreter of this version that starts: on PATH, or of pyenv."""
    on_path = shutil.which(f"python{version}")
    of_pyenv = (Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python")
    for each in (*([Path(on_path)] if on_path else []), *of_pyenv):
        program = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([each, "-c", program], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return each
    return None


def run(words: list[str | Path]) -> None:
    subprocess.run([*map(str, words)], env=environ(), check=True, stdout=sys.stderr)


def environ() -> dict[str, str]:
    """Without what leads to the checkout or to another environment."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


if __name__ == "__main__":
    sys.exit(main())
