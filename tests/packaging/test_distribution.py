"""The sdist and the wheel: complete, and enough to run a job without the checkout.

The wheel is built from the sdist, as an installer without a wheel does.  It is installed into an empty virtual
environment.  Its dependencies come from this interpreter's environment: a `.pth` file adds the directory, and does
not run the `.pth` file of an editable install there.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120
SCRIPT = """
import os, signal, sys
import ripstop, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
total = torch.ones(1)
dist.all_reduce(total)
print(f"sum={total.item():.0f} {ripstop.__file__}", flush=True)
dist.destroy_process_group()
"""


def call(*words: str | Path, cwd: Path | None = None) -> str:
    """The output of a command, which must succeed.  No variable leads it to this checkout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PET_", "RIPSTOP_"))}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def package_files() -> set[str]:
    """The files of the package in this checkout."""
    source = ROOT / "src"
    found = (path.relative_to(source) for path in (source / "ripstop").rglob("*") if path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


@dataclass(frozen=True, slots=True)
class Built:
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "hatchling", "build", "--target=sdist", f"--directory={folder}", cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    build = ["wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", f"--wheel-dir={folder}"]
    call(sys.executable, "-m", "pip", "--disable-pip-version-check", *build, sdist)
    (wheel,) = folder.glob("*.whl")
    return Built(sdist, wheel)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, symlinks=True)
    install = ["--disable-pip-version-check", "--python", str(home), "install", "--quiet", "--no-deps", "--no-index"]
    call(sys.executable, "-m", "pip", *install, built.wheel)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return home


def test_a_checkout_can_be_installed(tmp_path: Path) -> None:
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", f"--target={tmp_path}", "."]
    call(sys.executable, "-m", "pip", "--disable-pip-version-check", *install, cwd=ROOT)
    assert (tmp_path / "ripstop/__init__.py").is_file()


def test_pages_name_the_wheel_and_not_a_release_that_does_not_exist(built: Built) -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")))
    assert set(re.findall(r"ripstop-[\w.-]*\.whl", pages)) == {built.wheel.name}
    assert re.findall(r"(?:pip|pipx|uv tool) install ripstop(?!\[).*", pages) == []


def test_an_extra_can_be_added_later_although_no_index_has_ripstop(installed: Path) -> None:
    """py-spy is there already: it is one of the test packages."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", installed]
    assert "py-spy" in call(*pip, "install", "--no-index", "ripstop[diagnose]")


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: Built) -> None:
    names = set(zipfile.ZipFile(built.wheel).namelist())
    assert {name for name in names if not re.match(r"ripstop-[^/]*\.dist-info/", name)} == package_files()


def test_the_wheels_metadata_is_the_projects(built: Built) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheel = zipfile.ZipFile(built.wheel)
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = wheel.read(name).decode()
    extras = re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)
    assert sorted(extras) == sorted(project["optional-dependencies"])
    assert f"Requires-Python: {project['requires-python']}" in metadata
    assert wheel.read(name.replace("METADATA", "entry_points.txt")).decode().split() == [
        *("[console_scripts]", "ripstop", "=", "ripstop.cli:main")
    ]


def test_the_sdist_has_what_make_and_the_tests_need(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = "Makefile CONTRIBUTING.md mkdocs.yml requirements/run.txt docs/images/recovery.svg deploy/crd.yaml"
    missing = [name for name in wanted.split() if name not in names]
    assert (missing, [name for name in names if "__pycache__" in name]) == ([], [])
    assert {f"src/{name}" for name in package_files()} <= names


def test_a_job_of_two_workers_heals_under_the_installed_command(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = ["run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "--log-dir=logs", "train.py"]
    output = call(installed / "bin/ripstop", *run, cwd=tmp_path)
    assert output.count(f"sum=2 {installed}") == 2, output
    (report,) = tmp_path.glob("logs/*/job-report.html")
    assert "<style>" in report.read_text()  # report/style.css


def test_the_installed_page_and_hooks_are_files(installed: Path, tmp_path: Path) -> None:
    program = (
        "from ripstop.api.page_files import FOLDER; print(FOLDER / 'index.html', (FOLDER / 'index.html').is_file())"
    )
    assert call(installed / "bin/python", "-c", program, cwd=tmp_path).split()[1] == "True"
    assert call(installed / "bin/ripstop", "version", cwd=tmp_path).startswith("ripstop 0.")
    assert call(installed / "bin/python", "-m", "ripstop.compat", "--environment", cwd=tmp_path).count("\n") == 2
