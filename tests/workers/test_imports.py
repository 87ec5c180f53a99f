"""The imports found in a script's text, without running it."""

import pytest

from ripstop.workers.zygote.imports import MAX_FILES, follow, imported_by, imported_names, worth_preloading


def preloads(text: str) -> list[str]:
    return worth_preloading(follow(text.encode(), "", lambda name: None))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch", {"torch"}),
        ("import a.b as c, d", {"a.b", "d"}),
        ("from a import b, c as e", {"a", "a.b", "a.c"}),
        ("from a import *", {"a"}),
        ("def main():\n    class X:\n        def f(self):\n            import torch", {"torch"}),
        ("try:\n    import a\nexcept ImportError:\n    import b", {"a", "b"}),
        ("async def f():\n    async with x:\n        import a", {"a"}),
        ("match 1:\n    case 1:\n        import a", {"a"}),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", {"b"}),
        ("import typing\nif typing.TYPE_CHECKING:\n    import a", {"typing"}),
        ("'import a'\n# import b", set()),
    ],
)
def test_imports_are_found_anywhere_in_the_text(text, names):
    assert imported_names(text.encode()) == names


@pytest.mark.parametrize(
    ("text", "package", "names"),
    [
        ("from . import a", "p.q", {"p.q", "p.q.a"}),
        ("from .a import b", "p.q", {"p.q.a", "p.q.a.b"}),
        ("from ..a import b", "p.q", {"p.a", "p.a.b"}),
        ("from ...... import b", "p.q", set()),
    ],
)
def test_relative_imports_are_resolved_against_the_package(text, package, names):
    assert imported_names(text.encode(), package) == names


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import json, pandas, mine", []),
        ("import torch", ["torch"]),
        ("import numpy as np", ["numpy"]),
        ("from torch.nn import functional", ["torch", "torch.nn", "torch.nn.functional"]),
        ("import torchvision.models", ["torch"]),
        ("from transformers import Trainer", ["torch"]),
        ("import torch._inductor.config", ["torch"]),
        ("from torch.utils.tensorboard import SummaryWriter", ["torch", "torch.utils"]),
        ("import torch\nx = torch.optim.SGD", ["torch", "torch._dynamo"]),
        ("import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP",
         ["torch", "torch._dynamo", "torch.nn", "torch.nn.parallel", "torch.nn.parallel.DistributedDataParallel"]),
        ("import cooking\ncooking.optim()", []),
        ("import torchless, numpyro", []),
    ],
)  # fmt: skip
def test_only_packages_that_can_be_forked_are_preloaded(text, modules):
    assert preloads(text) == modules


def test_modules_beside_the_script_are_followed(tmp_path):
    (tmp_path / "script.py").write_text("import model\nfrom lib.deep import thing\nimport script")
    (tmp_path / "model.py").write_text("import numpy")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text("from . import common")
    (tmp_path / "lib" / "common.py").write_text("import torch")
    (tmp_path / "lib" / "deep.py").write_text("from .common import x; raise SystemExit('never executed')")
    names = imported_by("script", str(tmp_path / "script.py"), [])
    assert worth_preloading(names) == ["numpy", "torch"]


def test_a_module_is_found_on_the_path_and_its_package_followed(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text("from .train import main")
    (tmp_path / "package" / "train.py").write_text("import torch")
    for name in ("package", "package.train"):
        assert worth_preloading(imported_by("module", name, ["/nowhere", str(tmp_path)])) == ["torch"]
    assert imported_by("module", "absent", [str(tmp_path)]) == set()


def installed(site, **files):
    for name, text in files.items():
        path = site / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_of_an_installed_module_only_its_own_package_is_followed(tmp_path):
    """All other installed packages are beside it."""
    installed(
        tmp_path,
        tool__in____init__="",
        tool__in____main__="from tool import cli",
        tool__in__cli="import helper, torch.nn",
        helper="import numpy.distutils.core",
        numpy__in____init__="import torch.onnx, numpy.testing",
        torch__in____init__="import torch.fx",
        single="import helper",
    )
    names = imported_by("module", "tool", [str(tmp_path)])
    assert names == {"tool", "tool.cli", "helper", "torch", "torch.nn"}
    assert worth_preloading(names) == ["torch", "torch.nn"]
    assert imported_by("module", "single", [str(tmp_path)]) == {"single", "helper"}


def test_modules_beside_one_of_the_current_directory_are_followed(tmp_path, monkeypatch):
    installed(tmp_path, train="import model", model="import torch")
    monkeypatch.chdir(tmp_path)
    assert worth_preloading(imported_by("module", "train", [str(tmp_path)])) == ["torch"]


def test_a_directory_is_read_from_its_main_module(tmp_path):
    (tmp_path / "__main__.py").write_text("import helper")
    (tmp_path / "helper.py").write_text("import torch")
    assert worth_preloading(imported_by("script", str(tmp_path), [])) == ["torch"]


@pytest.mark.parametrize("content", [b"import torch\nx = (", b"\xff\xfe\x00", b"import torch\0", b"(" * 10_000])
def test_a_script_that_cannot_be_parsed_preloads_nothing(tmp_path, content):
    (tmp_path / "script.py").write_bytes(content)
    assert imported_by("script", str(tmp_path / "script.py"), []) == set()


def test_a_missing_script_preloads_nothing(tmp_path):
    assert imported_by("script", str(tmp_path / "script.py"), []) == set()


def test_a_script_in_another_encoding_is_read_as_python_reads_it(tmp_path):
    (tmp_path / "script.py").write_bytes("# coding: latin-1\nimport torch  # é".encode("latin-1"))
    assert imported_by("script", str(tmp_path / "script.py"), []) == {"torch"}


def test_the_number_of_followed_modules_is_limited():
    asked: list[str] = []

    def read(name: str) -> tuple[bytes, str]:
        asked.append(name)
        return f"import m{len(asked)}".encode(), ""

    follow(b"import m0", "", read)
    assert len(asked) == MAX_FILES
