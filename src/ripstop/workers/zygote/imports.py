"""What a script imports, and what of that is worth importing before the workers are forked.

Pure functions of source text, and one thin reader of files; nothing is ever executed.  Imports anywhere in the text
count, in functions too, since many scripts import torch in `main()`.  Modules beside the script are followed, a bounded
number of them; so are those beside a module of the current directory.  Of a module that is elsewhere, its own package
is followed alone: beside an installed one is all else that is installed.  This file runs in a helper process of the
zygote's and so imports nothing of ours.
"""

# Every run of a job waits for this: `ast` and `pathlib` take longer to import than a script takes to parse.
# ruff: noqa: PTH109, PTH112, PTH113, PTH118, PTH120, PTH123, PTH202

from __future__ import annotations

import _ast as ast
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

MOST_FILES = 200
MOST_BYTES = 2_000_000

# Safe to fork after import, and slow enough to be worth it.
ROOTS = ("torch", "numpy")

# Packages that import torch.  They themselves stay for the worker: not all of them can be forked.
IMPLY_TORCH = frozenset(
    (  # noqa: SIM905 - a column of sixty names helps nobody
        "accelerate bitsandbytes deepspeed detectron2 diffusers fairscale fairseq fairseq2 flash_attn ignite kornia "
        "lightning lightning_fabric megatron mmcv mmengine monai nemo open_clip peft pyro pytorch_lightning "
        "sentence_transformers tensordict timm torch_geometric torchao torchaudio torchdata torchft torchmetrics "
        "torchrec torchrl torchtext torchtitan torchtune torchvision transformer_engine transformers trl "
        "ultralytics vllm xformers "
    ).split()
)

# Parts of torch that start processes or pull in packages of others.
NOT_AHEAD = ("torch._", "torch.utils.tensorboard", "torch.utils.cpp_extension", "torch.onnx", "torch.testing")

# What torch imports late, when the named thing is first used: a script that says the name will get there.
LATE = {"DistributedDataParallel": "torch._dynamo", "optim": "torch._dynamo"}


def imported_names(source: bytes, package: str = "") -> set[str]:
    """Every dotted name an import statement in the text mentions; `from a import b` gives `a` and `a.b`.

    An attribute that is a name of LATE counts too, as `.name`: `torch.optim` needs no import of its own.
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
            case ast.Attribute(attr=attribute) if attribute in LATE:
                names.add(f".{attribute}")
    return names


def _live_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The tree without what stands under `if TYPE_CHECKING:`."""
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
    """The modules to import ahead, parents first."""
    names = set(names)
    roots = {name.partition(".")[0] for name in names}
    wanted = {name for name in names if name.partition(".")[0] in ROOTS and not f"{name}.".startswith(NOT_AHEAD)}
    if roots & IMPLY_TORCH:
        wanted.add("torch")
    if "torch" in roots:
        wanted |= {LATE[last] for name in names if (last := name.rpartition(".")[2]) in LATE}
    return sorted(wanted)


def follow(source: bytes, package: str, read: Callable[[str], tuple[bytes, str] | None]) -> set[str]:
    """The names imported by this text and by the modules it imports, as far as `read` gives their (text, package)."""
    found: set[str] = set()
    queue = [(source, package)]
    files = 0
    while queue and files < MOST_FILES:
        files += 1
        try:
            names = _with_parents(imported_names(*queue.pop()))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        queue += [module for name in sorted(names - found) if (module := read(name)) is not None]
        found |= names
    return found


def _with_parents(names: set[str]) -> set[str]:
    """`a.b.c` stands for `a` and `a.b` too, as its import runs them."""
    return names | {name[:dot] for name in names for dot in range(1, len(name)) if name[dot] == "."}


def imported_by(kind: str, target: str, path: Sequence[str]) -> set[str]:
    """What the script at `target`, or the module of that name found on `path`, imports."""
    if kind == "script":
        home = target if os.path.isdir(target) else os.path.dirname(os.path.realpath(target))
        source = _text(os.path.join(target, "__main__.py") if os.path.isdir(target) else target)
        return set() if source is None else follow(source, "", lambda name: _module(name, home))
    root = target.partition(".")[0]
    home = next((home for home in path if _module(root, home) or os.path.isdir(os.path.join(home, root))), "")
    if not home:
        return set()
    main = _module(f"{target}.__main__", home) or _module(target, home)
    alone = os.path.realpath(home) != os.getcwd()

    def read(name: str) -> tuple[bytes, str] | None:
        return None if alone and name.partition(".")[0] != root else _module(name, home)

    return set() if main is None else follow(*main, read) | {target}


def _module(name: str, home: str) -> tuple[bytes, str] | None:
    """Text and package of the module of this name below `home`."""
    stem = os.path.join(home, *name.split("."))
    if (source := _text(os.path.join(stem, "__init__.py"))) is not None:
        return source, name
    if (source := _text(f"{stem}.py")) is not None:
        return source, name.rpartition(".")[0]
    return None


def _text(path: str) -> bytes | None:
    """The file; None if it is not there or too long to be worth it."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > MOST_BYTES:
            return None
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None
