"""Finds the modules that a script imports, and selects those to import before the workers are forked.

Pure functions of source text, and a small file reader; no code is executed.

Rules
1.  What the script imports before its first other statement is preloaded, in its order.  Docstrings, constants, `if
    TYPE_CHECKING`, and `try` for an ImportError are no other statements.  Later statements may depend on the worker, or
    change what an import does.
2.  A module of the user's own, outside Python's library and site-packages, is preloaded if it has only imports and
    definitions.  Any other is code that the script runs: only its first imports are preloaded, and nothing after it.
3.  torch and numpy are preloaded wherever the script or its own modules import them: many scripts import torch in
    `main()`.  So is torch for a package that is known to import it, and a module of LATE_IMPORTS.
4.  For `-m`, the packages that contain the module are imported first.  Of an installed module, only its own text is
    read: all other installed packages are beside it.  Arguments that are Python files count for rule 3:
    `-m pytest test_x.py`.

This file runs in a separate process of the zygote's, and in a dry run, and imports nothing of ripstop.
"""

# Every job waits for this: `ast` and `pathlib` take longer to import than a script takes to parse.
# ruff: noqa: PTH112, PTH113, PTH118, PTH120, PTH123, PTH202

from __future__ import annotations

import _ast as ast
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any

MAX_FILES = 200
MAX_FILE_BYTES = 2_000_000

# Packages that are preloaded wherever they are imported (rule 3).
PRELOAD_ROOTS = ("torch", "numpy")

# Packages that import torch.
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

# Modules that a package imports at the first use of a name: a script that contains the name will use it.
LATE_IMPORTS = {
    "DistributedDataParallel": "torch._dynamo",
    "optim": "torch._dynamo",
    "Checkpointer": "ripstop.train.checkpointer",
    "Sampler": "ripstop.train.data",
    "State": "ripstop.train.state",
    "Stream": "ripstop.train.data",
}


def imported_names(source: bytes, package: str = "") -> set[str]:
    """Every dotted name in an import statement of the text; `from a import b` gives `a` and `a.b`.

    An attribute in LATE_IMPORTS counts too, as `.name`: `torch.optim` can be used without its own import.
    """
    names: set[str] = set()
    for node in _live_import_nodes(compile(source, "script", "exec", ast.PyCF_ONLY_AST)):
        match node:
            case ast.Import(names=aliases):
                names.update(alias.name for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                base = _absolute_import_name(module or "", package, level)
                if base:
                    names.add(base)
                    names.update(f"{base}.{alias.name}" for alias in aliases if alias.name != "*")
            case ast.Attribute(attr=attribute) if attribute in LATE_IMPORTS:
                names.add(f".{attribute}")
    return names


def _live_import_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The tree without the bodies of `if TYPE_CHECKING:`."""
    yield node
    for child in _import_node_children(node):
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for other in child.orelse:
                yield from _live_import_nodes(other)
        else:
            yield from _live_import_nodes(child)


def _import_node_children(node: ast.AST) -> Iterator[ast.AST]:
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


def _absolute_import_name(module: str, package: str, level: int) -> str:
    if level == 0:
        return module
    parents = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join(filter(None, [*parents, module]))


def imports_worth_preloading(names: Iterable[str]) -> list[str]:
    """The modules to preload, parents first."""
    names = _with_parent_imports(set(names))
    roots = {name.partition(".")[0] for name in names}
    wanted = {
        name for name in names if name.partition(".")[0] in PRELOAD_ROOTS and not f"{name}.".startswith(NOT_PRELOADED)
    }
    if roots & TORCH_DEPENDENTS:
        wanted.add("torch")
    if "torch" in roots:
        late = {LATE_IMPORTS[last] for name in names if (last := name.rpartition(".")[2]) in LATE_IMPORTS}
        wanted |= {module for module in late if module.rpartition(".")[0] in names}
    return sorted(wanted, key=lambda name: (not name.startswith(PRELOAD_ROOTS), name))


def follow_imports(source: bytes, package: str, read: Callable[[str], tuple[bytes, str] | None]) -> set[str]:
    """The names imported by this text, and by the imported modules for which `read` returns (text, package)."""
    found: set[str] = set()
    queue = [(source, package)]
    files = 0
    while queue and files < MAX_FILES:
        files += 1
        try:
            names = _with_parent_imports(imported_names(*queue.pop()))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        queue += [module for name in sorted(names - found) if (module := read(name)) is not None]
        found |= names
    return found


def _with_parent_imports(names: set[str]) -> set[str]:
    """Add `a` and `a.b` for `a.b.c`, because its import executes them."""
    return names | {name[:dot] for name in names for dot in range(1, len(name)) if name[dot] == "."}


def imports_to_preload(
    kind: str, target: str, path: Sequence[str], args: Sequence[str]
) -> tuple[list[str], dict[str, bytes]]:
    """What to import for this script or module, in order, and the texts that this was concluded from, by path."""
    scan = _Scan(path)
    names: set[str] = set()
    if kind == "script":
        main = os.path.join(target, "__main__.py") if os.path.isdir(target) else target
        source = scan.text(main)
        if source is not None:
            scan.head(source, "")
            names = follow_imports(source, "", scan.own_module)
    else:
        names = scan.module_head(target)
        files = [arg for arg in args if arg.endswith(".py")]
        for source in filter(None, map(scan.text, files)):
            names |= follow_imports(source, "", lambda name: None)
    return list(dict.fromkeys([*scan.names, *imports_worth_preloading(names)])), scan.sources


class _Scan:
    """The imports of a program before its first other statement (rules 1, 2 and 4)."""

    def __init__(self, path: Sequence[str]) -> None:
        self.path = path
        self.names: list[str] = []  # to preload, in order
        self.sources: dict[str, bytes] = {}  # by path
        self.visited: set[str] = set()
        self.homes: dict[str, str | None] = {}

    def module_head(self, target: str) -> set[str]:
        """Read the module that `-m` names; return all names that it imports anywhere."""
        home = self._find(target.partition(".")[0])
        if home is None:
            return set()
        package = f"{target}.__main__" if self._read(f"{target}.__main__", home) else target
        main = self._read(package, home)
        if main is None:
            return set()
        parents = package.split(".")[:-1]
        is_complete = all(self._import(".".join(parents[: n + 1])) for n in range(len(parents)))
        if is_complete:
            self.head(*main)
        return follow_imports(*main, self.own_module)

    def head(self, source: bytes, package: str, is_main: bool = True) -> bool:
        """Collect the imports before the first other statement; return whether there is none."""
        if len(self.sources) > MAX_FILES:
            return False
        try:
            tree: Any = compile(source, "script", "exec", ast.PyCF_ONLY_AST)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return self._statements(tree.body, package, is_main)

    def _statements(self, body: Sequence[ast.stmt], package: str, is_main: bool) -> bool:
        return all(self._statement(node, package, is_main) for node in body)

    def _statement(self, node: ast.stmt, package: str, is_main: bool) -> bool:
        match node:
            case ast.Import(names=aliases):
                return all(self._import(alias.name) for alias in aliases)
            case ast.ImportFrom(module="__future__"):
                return True
            case ast.ImportFrom(module=module, names=aliases, level=level):
                base = _absolute_import_name(module or "", package, level)
                return bool(base) and self._import(base) and all(self._import_from(base, a.name) for a in aliases)
            case ast.If(test=test, orelse=orelse) if _is_type_checking(test):
                return self._statements(orelse, package, is_main)
            case ast.Try(body=tried, handlers=handlers, orelse=orelse, finalbody=final):
                return (
                    all(_is_import_error_clause(handler.type) and _is_harmless(handler.body) for handler in handlers)
                    and self._statements(tried, package, is_main)
                    and self._statements([*orelse, *final], package, is_main)
                )
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return not is_main
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                return not is_main
        return _is_harmless([node])

    def _import(self, name: str) -> bool:
        """`import name`: return whether the statements after it can be preloaded."""
        home = self._home(name)
        if home is None:
            self.names.append(name)
            return True
        parts = name.split(".")
        for module in (".".join(parts[: n + 1]) for n in range(len(parts))):
            if module in self.visited:
                continue
            self.visited.add(module)
            main = self._read(module, home)
            if main is not None and not self.head(*main, is_main=False):
                return False
            self.names.append(module)
        return True

    def _import_from(self, base: str, name: str) -> bool:
        if name == "*":
            return True
        full = f"{base}.{name}"
        home = self._home(base)
        if home is None:
            self.names.append(full)
            return True
        return self._import(full) if self._read(full, home) is not None else True

    def own_module(self, name: str) -> tuple[bytes, str] | None:
        """Text and package of a module of the user's own."""
        home = self._home(name)
        return None if home is None else self._read(name, home)

    def _home(self, name: str) -> str | None:
        """The directory of the user's own that has this module; None for any other module."""
        root = name.partition(".")[0]
        if root not in self.homes:
            self.homes[root] = None if root in sys.builtin_module_names else self._find(root)
        home = self.homes[root]
        return None if home is None or has_installed_modules(home) else home

    def _find(self, root: str) -> str | None:
        """Where Python finds this package: a directory without `__init__.py` counts only if there is nothing else."""
        for home in self.path:
            stem = os.path.join(home, root)
            if os.path.isfile(f"{stem}.py") or os.path.isfile(os.path.join(stem, "__init__.py")):
                return home
        return next((home for home in self.path if os.path.isdir(os.path.join(home, root))), None)

    def _read(self, name: str, home: str) -> tuple[bytes, str] | None:
        """Text and package of this module below `home`."""
        stem = os.path.join(home, *name.split("."))
        if (source := self.text(os.path.join(stem, "__init__.py"))) is not None:
            return source, name
        if (source := self.text(f"{stem}.py")) is not None:
            return source, name.rpartition(".")[0]
        return None

    def text(self, path: str) -> bytes | None:
        """The file's content; None if it does not exist or is too large."""
        if path not in self.sources:
            try:
                if not os.path.isfile(path) or os.path.getsize(path) > MAX_FILE_BYTES:
                    return None
                with open(path, "rb") as file:
                    self.sources[path] = file.read()
            except OSError:
                return None
        return self.sources[path]


def has_installed_modules(home: str) -> bool:
    """Whether this directory is Python's library, or has installed packages."""
    return home.endswith(("site-packages", "dist-packages")) or home == os.path.dirname(os.__file__)


def _is_import_error_clause(test: ast.expr | None) -> bool:
    match test:
        case ast.Name(id="ImportError" | "ModuleNotFoundError" | "Exception"):
            return True
        case ast.Tuple(elts=tests):
            return all(map(_is_import_error_clause, tests))
    return False


def _is_harmless(body: Sequence[ast.stmt]) -> bool:
    """Whether these statements only define constants, or import."""
    for node in body:
        match node:
            case ast.Pass() | ast.Import() | ast.ImportFrom():
                continue
            case ast.Expr(value=value) if _is_constant(value):
                continue
            case ast.Assign(targets=targets, value=value) if _is_constant(value):
                if all(isinstance(target, ast.Name) for target in targets):
                    continue
            case ast.AnnAssign(target=ast.Name(), value=value) if value is None or _is_constant(value):
                continue
        return False
    return True


def _is_constant(value: ast.expr) -> bool:
    match value:
        case ast.Constant() | ast.Name():
            return True
        case ast.Tuple() | ast.List() | ast.Set() | ast.Dict() | ast.UnaryOp() | ast.BinOp():
            return all(
                map(_is_constant, (child for child in _import_node_children(value) if isinstance(child, ast.expr)))
            )
    return False
