"""The container files agree with the project: extras, files, user.  `make check` lints them with hadolint."""

import re
import tomllib
from pathlib import Path

import pytest

from ripstop.kubernetes import deploy

ROOT = Path(__file__).parents[2]
PATHS = sorted(ROOT.glob("deploy/Containerfile.*"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions, with the defaults of their arguments."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    defaults = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))
    for name, value in defaults.items():
        text = text.replace(f"${{{name}}}", value)
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in text.splitlines() if line]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.suffix)
def test_extras_and_files_exist(path: Path) -> None:
    for name, value in instructions(path):
        if name == "RUN":
            (extras,) = re.findall(r"\.whl\)\[(.*?)\]", value)
            assert set(extras.split(",")) <= EXTRAS.keys()
        elif name == "COPY" and not value.startswith("dist/"):
            assert (ROOT / value.split()[0]).is_file()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.suffix)
def test_the_base_has_a_tag_and_the_user_is_not_root(path: Path) -> None:
    found = dict(instructions(path))
    assert re.fullmatch(r"[\w./-]+:[\w.-]+", found["FROM"]) and not found["FROM"].endswith(":latest")
    assert int(found["USER"].split(":")[0]) > 0


def test_the_operators_user_is_the_deployments() -> None:
    pod = deploy.deployment(deploy.IMAGE, deploy.HOME)["spec"]["template"]["spec"]
    user = dict(instructions(ROOT / "deploy/Containerfile.operator"))["USER"]
    assert user == "{0}:{0}".format(pod["securityContext"]["runAsUser"])
