"""Which names of other libraries the package uses, and whether a library has them: read off the sources, nothing is imported.

Modules may hand a library on (`from pooled_mlx.… import mx`) or take it as a parameter (`rumps`, `self._appkit`), and both
are followed. Names asked for with `getattr` or `hasattr` are optional and left out.
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

HANDED_IN = {"rumps": "rumps", "appkit": "AppKit", "foundation": "Foundation"}
"""Parameters and attributes (with underscores before them or not) that are modules which only a Mac has."""


def used_names(package: Path, libraries: tuple[str, ...]) -> dict[str, str]:
    """Dotted name -> where it is used first (`file:line`), of all that the sources below `package` take from `libraries`."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    modules = {_module(package, path): path for path in trees}
    bound: dict[str, dict[str, str]] = {module: {} for module in modules}
    while _bind(trees, modules, bound, libraries):
        pass
    used: dict[str, str] = {}
    for module, path in modules.items():
        for name, line in _names(trees[path], bound[module], libraries):
            used.setdefault(name, f"{path.relative_to(package.parent)}:{line}")
    return used


def _module(package: Path, path: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def _bind(
    trees: Mapping[Path, ast.Module], modules: Mapping[str, Path], bound: dict[str, dict[str, str]], libraries: tuple[str, ...]
) -> bool:
    """One round over all imports; True when a name was learned."""
    learned = False
    for module, path in modules.items():
        for node in ast.walk(trees[path]):
            for name, target in _imports(node, bound, libraries):
                if bound[module].get(name) != target:
                    bound[module][name] = target
                    learned = True
    return learned


def _imports(node: ast.AST, bound: Mapping[str, Mapping[str, str]], libraries: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(local name, dotted library name) of one import."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.partition(".")[0] in libraries:
                yield (
                    (alias.asname or alias.name.partition(".")[0]),
                    (alias.name if alias.asname else alias.name.partition(".")[0]),
                )
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            if node.module.partition(".")[0] in libraries:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
            elif target := bound.get(node.module, {}).get(alias.name):
                yield alias.asname or alias.name, target


def _names(tree: ast.Module, bound: Mapping[str, str], libraries: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for _, target in _imports(node, {}, libraries):
                yield target, node.lineno
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            parts: list[str] = []
            place: ast.expr = node
            while isinstance(place, ast.Attribute):
                inner.add(id(place))
                parts.insert(0, place.attr)
                place = place.value
            if isinstance(place, ast.Name):
                parts.insert(0, place.id)
                if target := bound.get(parts[0]):
                    yield ".".join([target, *parts[1:]]), node.lineno
                elif target := _handed_in(parts):
                    yield target, node.lineno


def _handed_in(parts: list[str]) -> str | None:
    for place, part in enumerate(parts[:-1]):
        if target := HANDED_IN.get(part.lstrip("_")):
            return ".".join([target, *parts[place + 1 :]])
    return None


class Sources:
    """The text of the modules of a library: `.pyi` before `.py`, from a wheel or an unpacked folder."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._known: dict[str, set[str]] = {}

    @classmethod
    def of_wheel(cls, archive: zipfile.ZipFile, package: str, only: re.Pattern[str]) -> Sources:
        """Those modules of `package` whose path matches `only`."""
        names = [name for name in archive.namelist() if name.startswith(f"{package}/") and only.search(name)]
        return cls({name: archive.read(name).decode("utf-8") for name in names})

    def has(self, dotted: str) -> bool:
        """True when the name is a module, or is bound in the deepest module on its way. What is below that is not known."""
        parts = dotted.split(".")
        for cut in range(len(parts), 0, -1):
            if (names := self._names("/".join(parts[:cut]))) is not None:
                return cut == len(parts) or parts[cut] in names
        return False

    def _names(self, module: str) -> set[str] | None:
        """What a module binds, None when there is no such module."""
        for path in (f"{module}/__init__.pyi", f"{module}.pyi", f"{module}/__init__.py", f"{module}.py"):
            if path in self._texts:
                if path not in self._known:
                    self._known[path] = set(_bound_in(ast.parse(self._texts[path])))
                return self._known[path]
        if any(path.startswith(f"{module}/") for path in self._texts):
            return set()
        return None


def _bound_in(tree: ast.AST) -> Iterator[str]:
    """Names that a module binds, also below `if` and `try`, and not inside functions and classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        yield from _bound_in(node)


def framework_has(metadata: str, dotted: str) -> bool:
    """Whether pyobjc's metadata of a framework knows `Framework.Name` or `Framework.Class.method_with_parts_`.

    Classes are found by the methods that are described, and of methods only those with a block must be described: without
    its signature pyobjc cannot pass one.
    """
    _, name, *methods = dotted.split(".")
    known = re.search(rf'(?:[$"]{re.escape(name)}(?:@[^$"]*)?[$"])', metadata) is not None
    selectors = [method.replace("_", ":") for method in methods if "block_" in method]
    return known and all(f'b"{selector}"' in metadata for selector in selectors)
