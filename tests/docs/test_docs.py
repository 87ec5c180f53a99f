"""The documentation is correct: its code runs, its flags exist, its links work.

A ```python block is a program and is run.  A ```bash block after the line `<!-- run -->` is run too; the blocks of a
page share a directory with a copy of `examples/`.  A block without a language is not run.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ripstop.cli.commands.completion import completion_flags
from ripstop.coordinator.phases import TRANSITIONS
from ripstop.model.rendezvous_conf import ETCD_CONF, IGNORED_CONF, RDZV_CONF
from tests.docs import crd_reference
from tests.docs.state_diagram import PAGE, redrawn

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
TIMEOUT_S = 500

# flags in our pages that are not `ripstop run`'s
OTHERS = {
    *("--checkpoint", "--device", "--epochs", "--lr", "--step-time", "--steps"),  # of scripts
    *("--local-rank", "--use-env"),  # of torch.distributed.launch
    "--environment",  # of ripstop.compat
    *("--multi-gpu", "--num-processes", "--script"),  # of other people's launchers
    *("--faults", "--json", "--launcher", "--only", "--recoveries", "--runs", "--seconds"),  # of bench/
    *("--node-monitor-grace-period", "--validate"),  # of Kubernetes
    "--prefix",  # of etcdctl
    *(
        "--cpus-per-task",
        "--exact",
        "--exclusive",
        "--export",
        "--gpus-per-node",
        "--job-name",
        "--jobid",
        "--kill-on-bad-exit",
        "--mem",
        "--no-kill",
        "--nodelist",
        "--nodes",
        "--ntasks",
        "--ntasks-per-node",
        "--open-mode",
        "--overlap",
        "--resv-ports",
        "--signal",
        "--wait",
    ),  # of Slurm
    "--unix-socket",  # of curl
    *("--build-arg", "--with-requirements"),  # of podman and uv
    *("--ft-cfg-path", "--ft-rank-heartbeat-timeout", "--ft-initial-rank-heartbeat-timeout"),  # of NVRx
    *("--ft-rank-section-timeouts", "--min-np", "--max-np", "--host-discovery-script"),  # of NVRx, Horovod
    *("--precheck", "--network-check", "--exclude-straggler", "--node-unit", "--auto-config"),  # of DLRover
    *("--save-at-breakpoint", "--numa-affinity", "--min-replicas"),  # of DLRover, torchft
}


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    marked: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    found: list[Block] = []
    language: str | None = None
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if language is None:
            language, start = line[3:].split(" ", 1)[0], number
        else:
            code = "\n".join(lines[start : number - 1]) + "\n"
            marked = start > 1 and lines[start - 2] == "<!-- run -->"
            found.append(Block(page, start + 1, language, code, marked))
            language = None
    assert language is None, f"{page}: a block is not closed"
    return found


ALL = [block for page in PAGES for block in blocks(page)]
PROGRAMS = [block for block in ALL if block.language == "python"]
SHELL_PAGES = sorted({block.page for block in ALL if block.language == "bash" and block.marked})


def run(argv: list[str], folder: Path) -> None:
    """Run a command in this directory, with this interpreter's scripts on PATH; kill all its processes afterwards."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "RIPSTOP_", "TORCHELASTIC_"))}
    env |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        "XDG_RUNTIME_DIR": str(folder),
    }
    process = subprocess.Popen(
        argv,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # agents' workers die with them
        output, _ = process.communicate()
        pytest.fail(f"did not end in {TIMEOUT_S} s\n{output}")
    assert process.returncode == 0, output


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_a_python_block_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text("\n" * (block.line - 1) + block.code)  # a traceback's lines are the page's
    if "dist.init_process_group(" in block.code:
        run([sys.executable, "-m", "ripstop", "run", "--standalone", "--nproc-per-node=2", str(script)], tmp_path)
    else:
        run([sys.executable, str(script)], tmp_path)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.long] * (page == "examples.md")) for page in SHELL_PAGES]
)
def test_a_pages_commands_run(page: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    commands = "".join(block.code for block in blocks(page) if block.language == "bash" and block.marked)
    run(["bash", "-euxo", "pipefail", "-c", commands], tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_a_page_names_exists(page: str) -> None:
    flag = r"(?<![\w-])--[a-z][a-z_-]*[a-z]"
    known = {"--help", "--version", *(flag.name for flags in completion_flags().values() for flag in flags)}
    text = (DOCS / page).read_text(encoding="utf-8").replace("<!--", "").replace("-->", "")
    named = {name.replace("_", "-") for name in re.findall(flag, text)}
    assert named - known - OTHERS == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_link_works(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (DOCS / page).read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = DOCS / (file or page)
        assert path.exists(), target
        if anchor:
            assert anchor in headings(path), target


def headings(path: Path) -> set[str]:
    found = set()
    for line in re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", line.lower()).strip()
        found.add(re.sub(r"[-\s]+", "-", words))
    return found


def test_the_state_diagram_is_the_machines_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == redrawn(page), "run: python -m tests.docs.state_diagram"


def test_mermaid_can_parse_the_diagrams_labels() -> None:
    reasons = [reason for moves in TRANSITIONS.values() for reason in moves.values()]
    assert [reason for reason in reasons if re.search("[:;#%{}]", reason)] == []


def test_the_page_on_rendezvous_has_every_key() -> None:
    settings = (DOCS / "rendezvous.md").read_text(encoding="utf-8").split("## Settings")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", settings, re.MULTILINE)
    named = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(RDZV_CONF | IGNORED_CONF | ETCD_CONF.keys())


def test_the_page_on_run_has_every_flag() -> None:
    page = (DOCS / "run.md").read_text(encoding="utf-8")
    names = {flag.name for flag in completion_flags()["run"]} - {"--help"}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page for page in PAGES if f": {page}\n" not in contents] == []


def test_the_fields_of_an_elastic_job_are_its_definitions() -> None:
    page = crd_reference.PAGE.read_text(encoding="utf-8")
    assert page == crd_reference.rewritten(page), "run: python -m tests.docs.crd_reference"
