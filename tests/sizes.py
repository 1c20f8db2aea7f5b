"""Files, functions and classes that a reader may want to look at: large ones, and names with two meanings.

``python -m tests.sizes`` prints them; `make lint` ends with it. They are warnings: a file of 500 lines that is read top
down is fine, and so is a plain class name in two packages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: More lines of a file, lines of a function and parameters of a function are reported.
FILE_LINES, FUNCTION_LINES, PARAMETERS = 500, 60, 8


def warnings(sources: Iterable[tuple[str, str]]) -> Iterator[str]:
    """One line for each file, function and class name that is over a limit.

    Args:
        sources: (name of the module, its text).
    """
    places: dict[str, list[str]] = {}
    for module, text in sources:
        if (lines := len(text.splitlines())) > FILE_LINES:
            yield f"{module}: {lines} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES:
                yield f"{module}.{node.name}: {lines} lines"
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if (count := len(names) - (names[:1] in (["self"], ["cls"]))) > PARAMETERS:
                yield f"{module}.{node.name}: {count} parameters"
    for name, modules in sorted(places.items()):
        if len(modules) > 1:
            yield f"class {name}: in {', '.join(modules)}"


def package() -> Iterator[tuple[str, str]]:
    """Modules of autopar, by name, with their texts."""
    for path in sorted((ROOT / "autopar").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path.read_text(encoding="utf-8")


if __name__ == "__main__":
    for line in warnings(package()):
        print(f"size: {line}")
