"""The imports found in a script's text, without running it."""

import pytest

from ripstop.workers.zygote.imports import (
    MAX_FILES,
    follow_imports,
    imported_names,
    imports_to_preload,
    imports_worth_preloading,
)


def preloads(text: str) -> list[str]:
    return imports_worth_preloading(follow_imports(text.encode(), "", lambda name: None))


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
def test_parts_of_torch_and_numpy_are_preloaded_wherever_they_are_imported(text, modules):
    assert preloads(text) == modules


def planned(directory, text, **modules):
    """What is preloaded for a script with this text and these modules beside it."""
    installed(directory, script=text, **modules)
    return imports_to_preload("script", str(directory / "script.py"), [str(directory)], [])[0]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import a, b.c\nfrom d import e", ["a", "b.c", "d", "d.e"]),
        ("'text'\nfrom __future__ import annotations\nA: int = 1\nB = (-1, 'x', {2: A})\nimport a", ["a"]),
        ("import a\nif TYPE_CHECKING:\n    import b\nimport c", ["a", "c"]),
        ("try:\n    import a\nexcept ImportError:\n    a = None\nimport b", ["a", "b"]),
        ("try:\n    import a\nexcept (ImportError, ModuleNotFoundError):\n    import b\nimport c", ["a", "c"]),
        ("import a\nfrom b import *", ["a", "b"]),
        ("import os\nos.environ['A'] = 'b'\nimport a", ["os"]),
        ("import os\nos.environ.A = 1\nimport a", ["os"]),
        ("import a\ndef f(): pass\nimport b", ["a"]),
        ("import a\nclass C: pass\nimport b", ["a"]),
        ("import a\nx = a.y\nimport b", ["a"]),
        ("import a\nx = f()\nimport b", ["a"]),
        ("import a\nx = [f()]\nimport b", ["a"]),
        ("import a\nif a.b:\n    import c", ["a"]),
        ("import a\nif __name__ == '__main__':\n    import c", ["a"]),
        ("import a\ntry:\n    f()\nexcept ImportError:\n    pass\nimport b", ["a"]),
        ("import a\ntry:\n    import b\nexcept ImportError:\n    f()\nimport c", ["a"]),
        ("import a\ntry:\n    import b\nexcept ValueError:\n    pass\nimport c", ["a"]),
        ("import a\ntry:\n    import b\nfinally:\n    f()\nimport c", ["a", "b"]),
        ("import a\nfrom . import b\nimport c", ["a"]),
        ("import a\nimport sys; sys.path.insert(0, '.')\nimport torch", ["a", "sys", "torch"]),
        ("f()\nimport pandas, torch.nn\ndef main():\n    import numpy", ["numpy", "torch", "torch.nn"]),
    ],
)
def test_imports_before_the_first_other_statement_are_preloaded(tmp_path, text, names):
    assert planned(tmp_path, text) == names


def test_an_own_module_of_imports_and_definitions_is_preloaded_after_its_imports(tmp_path):
    text = "import model\nimport z"
    model = "import a\nSIZE = 3\nclass Model(a.Base): pass\ndef f(): g()\nif __name__ == '__main__': f()"
    assert planned(tmp_path, text, model=model) == ["a", "model", "z"]


def test_an_own_module_with_other_code_ends_the_preloading(tmp_path):
    """It may set variables that the next imports depend on."""
    settings = "import b\nimport os\nos.environ['A'] = 'c'\nimport d"
    assert planned(tmp_path, "import a\nimport settings\nimport c", settings=settings) == ["a", "b", "os"]


def test_an_own_package_is_followed_part_by_part(tmp_path):
    names = planned(
        tmp_path,
        "from package.part import thing\nfrom package import other\nimport z",
        package__in____init__="import a",
        package__in__part="from . import common\ndef thing(): pass",
        package__in__common="import b\nfrom .part import thing",
        package__in__other="import c",
    )
    assert names == ["a", "package", "b", "package.common", "package.part", "c", "package.other", "z"]


def test_a_directory_without_init_gives_way_to_a_package_later_on_the_path(tmp_path):
    (tmp_path / "own" / "data").mkdir(parents=True)
    site = tmp_path / "site-packages"
    installed(site, data__in____init__="f()")
    installed(tmp_path / "own", script="import data\nimport parts.one\nimport z", parts__in__one="import a")
    names, _ = imports_to_preload("script", str(tmp_path / "own/script.py"), [str(tmp_path / "own"), str(site)], [])
    assert names == ["data", "parts", "a", "parts.one", "z"]


def test_torch_and_numpy_are_found_anywhere_in_own_modules(tmp_path):
    names = planned(
        tmp_path,
        "f()\nimport model\nfrom lib.deep import thing\nimport script",
        model="import numpy",
        lib__in____init__="from . import common",
        lib__in__common="import torch",
        lib__in__deep="from .common import x; raise SystemExit('never executed')",
    )
    assert names == ["numpy", "torch"]


def installed(site, **files):
    for name, text in files.items():
        path = site / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def of_module(target, *path, args=()):
    return imports_to_preload("module", target, [str(home) for home in path], args)[0]


def test_for_a_module_its_packages_and_its_own_imports_are_preloaded(tmp_path):
    installed(
        tmp_path,
        package__in____init__="",
        package__in____main__="from .train import main\nmain()",
        package__in__train="import a\nimport torch\ndef main(): pass",
    )
    assert of_module("package", "/nowhere", tmp_path) == ["package", "a", "torch", "package.train"]
    assert of_module("package.train", tmp_path) == ["package", "a", "torch"]
    assert of_module("absent", tmp_path) == []


def test_of_an_installed_module_only_its_own_text_is_read(tmp_path):
    """All other installed packages are beside it."""
    site = tmp_path / "site-packages"
    installed(
        site,
        tool__in____init__="import helper",
        tool__in____main__="from tool import cli\ncli.main()\nimport late\nimport torch.nn",
        tool__in__cli="import numpy.distutils.core",
        helper="import numpy.f2py",
        single="import helper",
    )
    assert of_module("tool", site) == ["tool", "tool.cli", "torch", "torch.nn"]
    assert of_module("single", site) == ["helper"]


def test_torch_is_preloaded_for_a_tool_that_runs_a_file_with_it(tmp_path):
    installed(tmp_path / "site-packages", runner__in____init__="", runner__in____main__="import runner\nrunner.run()")
    installed(tmp_path, test_a="import json\ndef test_a():\n    import torch")
    args = ["-x", str(tmp_path / "test_a.py"), "absent.py"]
    assert of_module("runner", tmp_path / "site-packages", args=args) == ["runner", "torch"]


def test_a_directory_is_read_from_its_main_module(tmp_path):
    installed(tmp_path, __main__="import helper", helper="import torch")
    assert imports_to_preload("script", str(tmp_path), [str(tmp_path)], [])[0] == ["torch", "helper"]


@pytest.mark.parametrize("content", [b"import torch\nx = (", b"\xff\xfe\x00", b"import torch\0", b"(" * 10_000])
def test_a_script_that_cannot_be_parsed_preloads_nothing(tmp_path, content):
    (tmp_path / "script.py").write_bytes(content)
    assert imports_to_preload("script", str(tmp_path / "script.py"), [], [])[0] == []


def test_a_missing_script_preloads_nothing(tmp_path):
    assert imports_to_preload("script", str(tmp_path / "script.py"), [], []) == ([], {})


def test_a_script_in_another_encoding_is_read_as_python_reads_it(tmp_path):
    (tmp_path / "script.py").write_bytes("# coding: latin-1\nimport torch  # é".encode("latin-1"))
    assert imports_to_preload("script", str(tmp_path / "script.py"), [], [])[0] == ["torch"]


def test_the_number_of_followed_modules_is_limited():
    asked: list[str] = []

    def read(name: str) -> tuple[bytes, str]:
        asked.append(name)
        return f"import m{len(asked)}".encode(), ""

    follow_imports(b"import m0", "", read)
    assert len(asked) == MAX_FILES


@pytest.mark.parametrize(
    ("text", "late"),
    [
        ("import torch\nfrom ripstop import train\ntrain.State()", ["ripstop.train.state"]),
        ("import torch\nfrom ripstop.train import Sampler, State", ["ripstop.train.data", "ripstop.train.state"]),
        ("from ripstop import train\ntrain.State()", []),  # without torch, it fails
        ("import torch, mine\nmine.State()", []),
    ],
)
def test_late_imports_of_ripstop_are_preloaded_after_torch(text: str, late: list[str]) -> None:
    found = preloads(text)
    assert [name for name in found if name.startswith("ripstop")] == late
    assert found[len(found) - len(late) :] == late
