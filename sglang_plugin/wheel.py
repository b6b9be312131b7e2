"""Reads functions, classes and attributes out of a wheel's sources, without running or importing any."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import final

from specgov.sglang_plugin.errors import PluginError

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_MAX_HOPS = 5
"""Imports of imports that are followed to a definition."""


@final
class Wheel:
    """A wheel file that is open for reading; close it, or use it in a ``with`` block.

    Raises:
        PluginError: it cannot be read as a wheel.

    """

    def __init__(self, path: Path) -> None:
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise PluginError(f"{path}: cannot be read as a wheel: {error}") from error
        self._names = frozenset(self._zip.namelist())
        self._modules: dict[str, ast.Module | None] = {}
        match = re.match(r"([A-Za-z0-9_.]+)-([^-]+)-.+\.whl$", path.name)
        if match is None:
            raise PluginError(f"{path}: a wheel's name has the form NAME-VERSION-TAGS.whl")
        self.package, self.version = match[1], match[2]

    def __enter__(self) -> Wheel:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def find(self, dotted: str) -> Definition | None:
        """The function or class of that name, through imports in between; None where there is none."""
        parts = dotted.split(".")
        for length in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:length])
            if self._module(module) is not None:
                return self._in_module(module, parts[length:], _MAX_HOPS)
        return None

    def attributes(self, dotted: str) -> frozenset[str] | None:
        """What a class and the classes that it is made from give their objects; None where there is none."""
        found = self._located(dotted, _MAX_HOPS)
        if found is None:
            return None
        module, definition = found
        if not isinstance(definition, ast.ClassDef):
            return None
        names = set(_own_attributes(definition))
        for base in definition.bases:
            if isinstance(base, ast.Name):
                names |= self.attributes(f"{module}.{base.id}") or frozenset()
        return frozenset(names)

    def elsewhere(self, dotted: str) -> list[str]:
        """Other modules that define the same class and function, for what is no longer in its place."""
        module = self._longest_module(dotted)
        wanted = dotted.removeprefix(f"{module}.").split(".")
        marks = [f"class {wanted[0]}".encode()] if len(wanted) > 1 else [b"def " + wanted[0].encode()]
        package = PurePosixPath(dotted.split(".")[0], dotted.split(".")[1])
        found = []
        for name in sorted(self._names):
            if name.endswith(".py") and name.startswith(f"{package}/"):
                source = self._zip.read(name)
                other = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                if other != module and all(mark in source for mark in marks) and _defines(source, wanted):
                    found.append(other)
        return found

    def _longest_module(self, dotted: str) -> str:
        """The modules of a name, be they in this wheel or not: up to the first capital or the end."""
        parts = dotted.split(".")
        for index, part in enumerate(parts):
            if part[:1].isupper():
                return ".".join(parts[:index])
        return ".".join(parts[:-1])

    def _located(self, dotted: str, hops: int) -> tuple[str, Definition] | None:
        """A top-level definition and the module that it stands in."""
        module, _, name = dotted.rpartition(".")
        tree = self._module(module)
        if tree is None or hops == 0:
            return None
        nodes = list(_flat(tree.body))
        for node in nodes:
            if isinstance(node, Definition) and node.name == name:
                return module, node
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        source = _imported(node, module, is_package=self._is_package(module))
                        return self._located(f"{source}.{alias.name}", hops - 1)
        return None

    def _in_module(self, module: str, names: list[str], hops: int) -> Definition | None:
        found = self._located(f"{module}.{names[0]}", hops)
        if found is None or len(names) == 1:
            return None if found is None else found[1]
        return _member(found[1], names[1:])

    def _is_package(self, module: str) -> bool:
        return f"{module.replace('.', '/')}/__init__.py" in self._names

    def _module(self, module: str) -> ast.Module | None:
        if module not in self._modules:
            path = module.replace(".", "/")
            name = f"{path}/__init__.py" if self._is_package(module) else f"{path}.py"
            self._modules[module] = self._parse(name) if name in self._names else None
        return self._modules[module]

    def _parse(self, name: str) -> ast.Module:
        try:
            return ast.parse(self._zip.read(name))
        except (SyntaxError, ValueError) as error:
            raise PluginError(f"{self._zip.filename}: {name} cannot be read as Python: {error}") from error


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A function's parameters without annotations, as in ``self, batch, result=None``."""
    bare = ast.parse(ast.unparse(function)).body[0]
    for node in ast.walk(bare):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(bare.args) if isinstance(bare, ast.FunctionDef | ast.AsyncFunctionDef) else ""


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those inside ``if`` and ``try`` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flat(node.body)
            yield from _flat(node.orelse)


def _member(definition: Definition, names: list[str]) -> Definition | None:
    for node in definition.body:
        if isinstance(node, Definition) and node.name == names[0]:
            return node if len(names) == 1 else _member(node, names[1:])
    return None


def _own_attributes(definition: ast.ClassDef) -> Iterator[str]:
    for node in definition.body:
        if isinstance(node, Definition):
            yield node.name
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
    for inner in ast.walk(definition):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _is_self(inner.value):
            yield inner.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _imported(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """The module that a ``from ... import`` in ``module`` names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _defines(source: bytes, names: list[str]) -> bool:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    for node in tree.body:
        if isinstance(node, Definition) and node.name == names[0]:
            return len(names) == 1 or _member(node, names[1:]) is not None
    return False
