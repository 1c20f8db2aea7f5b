"""A pytest plugin that notes which blocks of autopar each test runs, and what it costs.

``pytest -n 0 -p tests.mutations.reach --reach FILE`` appends a line of JSON for each test: its name, its CPU seconds,
and by file of autopar the first lines of the blocks that ran. `blocks` has the blocks of a file. A mark costs about
twenty nanoseconds: CPU seconds are nearly those without. Blocks that other processes run are not noted.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import json
import resource
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_MARKS = "__reach__"
_PARTS = ("body", "orelse")


def blocks(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """First and last line of each function and of each branch and loop in it; functions of numba have none."""
    for body in _bodies(tree, False):
        yield body[0].lineno, body[-1].end_lineno or body[-1].lineno


def _bodies(node: ast.AST, inside: bool) -> Iterator[list[ast.stmt]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            if not any("compiled" in ast.dump(d) or "jit" in ast.dump(d) for d in child.decorator_list):
                yield child.body
                yield from _bodies(child, True)
        else:
            if inside and isinstance(child, ast.If | ast.For | ast.While | ast.ExceptHandler | ast.match_case):
                yield from (part for name in _PARTS if (part := getattr(child, name, None)))
            yield from _bodies(child, inside)


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module whose blocks mark that they ran.

    Args:
        name: of the module.
        path: of its source.
        marks: by path a byte a block, and the first line of each.
    """

    def __init__(self, name: str, path: str, marks: dict[str, tuple[bytearray, list[int]]]) -> None:
        super().__init__(name, path)
        self.marks = marks

    def get_code(self, fullname: str) -> CodeType:
        """The code with a mark at the start of each block."""
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        bodies = list(_bodies(tree, False))
        lines = [body[0].lineno for body in bodies]
        for place, body in enumerate(bodies):
            (mark,) = ast.parse(f"{_MARKS}[{place}] = 1").body
            documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
            body.insert(1 if documented else 0, ast.copy_location(mark, body[0]))
        self.marks[Path(path).relative_to(ROOT).as_posix()] = bytearray(len(lines)), lines
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module's code."""
        code = self.get_code(module.__name__)
        vars(module)[_MARKS] = self.marks[Path(self.path).relative_to(ROOT).as_posix()][0]
        exec(code, vars(module))


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of autopar for `Loader`; see there."""

    def __init__(self, marks: dict[str, tuple[bytearray, list[int]]]) -> None:
        self.marks = marks

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """The module's place; None for what is not autopar's own source."""
        if name.partition(".")[0] != "autopar":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin and spec.origin.endswith(".py") and Path(spec.origin).is_relative_to(ROOT):
            spec.loader = Loader(name, spec.origin, self.marks)
        return spec


class Notes:
    """Writes a line for each test.

    Args:
        path: of the file; it is appended to.
        marks: see `Loader`.
    """

    def __init__(self, path: Path, marks: dict[str, tuple[bytearray, list[int]]]) -> None:
        self.path, self.marks = path, marks

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Notes what ran since the last test."""
        began_s = _cpu_s()
        result = yield
        ran = {name: [n for n, m in zip(lines, found, strict=True) if m] for name, (found, lines) in self.marks.items()}
        for found, _ in self.marks.values():
            found[:] = bytes(len(found))
        line = [item.nodeid, round(_cpu_s() - began_s, 3), {name: lines for name, lines in ran.items() if lines}]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return result


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--reach FILE``."""
    parser.addoption("--reach", default="", help="A file that gets the blocks of autopar that each test runs.")


def pytest_configure(config: pytest.Config) -> None:
    """Registers `Notes`; autopar must not have been imported."""
    if config.option.reach:
        if "autopar" in sys.modules:
            raise pytest.UsageError("autopar is imported already: its blocks cannot be marked")
        marks: dict[str, tuple[bytearray, list[int]]] = {}
        sys.meta_path.insert(0, Finder(marks))
        config.pluginmanager.register(Notes(Path(config.option.reach).absolute(), marks))
