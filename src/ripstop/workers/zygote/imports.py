"""Finds the modules that a script imports, and selects those worth importing before the workers are forked.

Pure functions of source text, and a small file reader; no code is executed.  Imports anywhere in the text count, also
in functions, because many scripts import torch in `main()`.  Modules in the script's directory are followed, up to a
limit; so are those beside a module of the current directory.  For a module elsewhere, only its own package is followed:
an installed module has all other installed packages beside it.  This file runs in a separate process of the zygote's
and imports nothing of ripstop.
"""

# Every job waits for this: `ast` and `pathlib` take longer to import than a script takes to parse.
# ruff: noqa: PTH109, PTH112, PTH113, PTH118, PTH120, PTH123, PTH202

from __future__ import annotations

import _ast as ast
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

MAX_FILES = 200
MAX_FILE_BYTES = 2_000_000

# Packages that can be forked after import, and are slow to import.
PRELOAD_ROOTS = ("torch", "numpy")

# Packages that import torch.  The worker imports them itself: not all of them can be forked.
TORCH_DEPENDENTS = frozenset(
    (  # noqa: SIM905 - a column of sixty names is too long
        "accelerate bitsandbytes deepspeed detectron2 diffusers fairscale fairseq fairseq2 flash_attn ignite kornia "
        "lightning lightning_fabric megatron mmcv mmengine monai nemo open_clip peft pyro pytorch_lightning "
        "sentence_transformers tensordict timm torch_geometric torchao torchaudio torchdata torchft torchmetrics "
        "torchrec torchrl torchtext torchtitan torchtune torchvision transformer_engine transformers trl "
        "ultralytics vllm xformers "
    ).split()
)

# Parts of torch that start processes or import other packages.
NOT_PRELOADED = ("torch._", "torch.utils.tensorboard", "torch.utils.cpp_extension", "torch.onnx", "torch.testing")

# Modules that torch imports at the first use of a name: a script that contains the name will use it.
LATE_IMPORTS = {"DistributedDataParallel": "torch._dynamo", "optim": "torch._dynamo"}


def imported_names(source: bytes, package: str = "") -> set[str]:
    """Every dotted name in an import statement of the text; `from a import b` gives `a` and `a.b`.

    An attribute in LATE_IMPORTS counts too, as `.name`: `torch.optim` can be used without its own import.
    """
    names: set[str] = set()
    for node in _live_nodes(compile(source, "script", "exec", ast.PyCF_ONLY_AST)):
        match node:
            case ast.Import(names=aliases):
                names.update(alias.name for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                base = _absolute(module or "", package, level)
                if base:
                    names.add(base)
                    names.update(f"{base}.{alias.name}" for alias in aliases if alias.name != "*")
            case ast.Attribute(attr=attribute) if attribute in LATE_IMPORTS:
                names.add(f".{attribute}")
    return names


def _live_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The tree without the bodies of `if TYPE_CHECKING:`."""
    yield node
    for child in _children(node):
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for other in child.orelse:
                yield from _live_nodes(other)
        else:
            yield from _live_nodes(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for field in node._fields:
        value = getattr(node, field, None)
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST):
                yield child


def _is_type_checking(test: ast.expr) -> bool:
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
    return False


def _absolute(module: str, package: str, level: int) -> str:
    if level == 0:
        return module
    parents = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join(filter(None, [*parents, module]))


def worth_preloading(names: Iterable[str]) -> list[str]:
    """The modules to preload, parents first."""
    names = set(names)
    roots = {name.partition(".")[0] for name in names}
    wanted = {
        name for name in names if name.partition(".")[0] in PRELOAD_ROOTS and not f"{name}.".startswith(NOT_PRELOADED)
    }
    if roots & TORCH_DEPENDENTS:
        wanted.add("torch")
    if "torch" in roots:
        wanted |= {LATE_IMPORTS[last] for name in names if (last := name.rpartition(".")[2]) in LATE_IMPORTS}
    return sorted(wanted)


def follow(source: bytes, package: str, read: Callable[[str], tuple[bytes, str] | None]) -> set[str]:
    """The names imported by this text, and by the imported modules for which `read` returns (text, package)."""
    found: set[str] = set()
    queue = [(source, package)]
    files = 0
    while queue and files < MAX_FILES:
        files += 1
        try:
            names = _with_parents(imported_names(*queue.pop()))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        queue += [module for name in sorted(names - found) if (module := read(name)) is not None]
        found |= names
    return found


def _with_parents(names: set[str]) -> set[str]:
    """Add `a` and `a.b` for `a.b.c`, because its import executes them."""
    return names | {name[:dot] for name in names for dot in range(1, len(name)) if name[dot] == "."}


def imported_by(kind: str, target: str, path: Sequence[str]) -> set[str]:
    """The imports of the script at `target`, or of the module of that name on `path`."""
    if kind == "script":
        home = target if os.path.isdir(target) else os.path.dirname(os.path.realpath(target))
        source = _text(os.path.join(target, "__main__.py") if os.path.isdir(target) else target)
        return set() if source is None else follow(source, "", lambda name: _module(name, home))
    root = target.partition(".")[0]
    home = next((home for home in path if _module(root, home) or os.path.isdir(os.path.join(home, root))), "")
    if not home:
        return set()
    main = _module(f"{target}.__main__", home) or _module(target, home)
    is_installed = os.path.realpath(home) != os.getcwd()

    def read(name: str) -> tuple[bytes, str] | None:
        return None if is_installed and name.partition(".")[0] != root else _module(name, home)

    return set() if main is None else follow(*main, read) | {target}


def _module(name: str, home: str) -> tuple[bytes, str] | None:
    """Text and package of this module below `home`."""
    stem = os.path.join(home, *name.split("."))
    if (source := _text(os.path.join(stem, "__init__.py"))) is not None:
        return source, name
    if (source := _text(f"{stem}.py")) is not None:
        return source, name.rpartition(".")[0]
    return None


def _text(path: str) -> bytes | None:
    """The file's content; None if it does not exist or is too large."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > MAX_FILE_BYTES:
            return None
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None
