"""Draws faults by seed: small changes of the syntax tree at places drawn over all packages of autopar alike.

`drawn` is where a caller starts. A fault is text that occurs once in a file and the text that replaces it, as in
`tests.mutations.run`. ``python -m tests.mutations.draw --seed N --count N`` takes those out of `drawn.toml` whose text
is gone and draws others for them. Nothing here runs a test.
"""

from __future__ import annotations

import ast
import copy
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import click

from tests.mutations.run import DRAWN, ROOT, Fault, faults, fits

_COMPARED: Mapping[type[ast.cmpop], type[ast.cmpop]] = MappingProxyType(
    {
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
    }
)
_COMPUTED: Mapping[type[ast.operator], type[ast.operator]] = MappingProxyType(
    {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add}
)
_CHANGES = frozenset({"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"})
_KEPT = ("cache", "known", "memo", "seen", "store")
_COPIES = frozenset({"dict", "list", "set"})
_ORDERLESS = frozenset({"isinstance", "max", "min"})
_UNREAD = (ast.Raise, ast.Assert, ast.JoinedStr)


@dataclass(frozen=True)
class Place:
    """A node of a file and what may stand in its stead.

    Args:
        kind: of the fault, such as "off by one".
        node: that is replaced.
        new: text in its stead.
    """

    kind: str
    node: ast.expr | ast.stmt
    new: str


@dataclass(frozen=True)
class Drawn:
    """A drawn fault: its name and file, the ``line`` of its node, text that occurs once there, and what it becomes."""

    name: str
    file: str
    line: int
    old: str
    new: str


def drawn(root: Path, seed: int, count: int) -> tuple[Drawn, ...]:
    """Faults by ``seed``: each package has as many of them, and in a package each kind.

    Args:
        root: folder of the repository.
        seed: of the draws.
        count: how many faults.
    """
    packages = sorted(p for p in (root / "autopar").iterdir() if (p / "__init__.py").exists())
    queues = [_of_package(root, package, random.Random(f"{seed} {package.name}")) for package in packages]
    found: list[Drawn] = []
    while queues and len(found) < count:
        left = []
        for queue in queues:
            fault = next(queue, None)
            if fault is not None and len(found) < count:
                found.append(fault)
                left.append(queue)
        queues = left
    return tuple(found)


def _of_package(root: Path, package: Path, draws: random.Random) -> Iterator[Drawn]:
    by_kind: dict[str, list[tuple[Path, Place]]] = {}
    for path in sorted(package.rglob("*.py")):
        for place in places(ast.parse(path.read_text(encoding="utf-8"))):
            by_kind.setdefault(place.kind, []).append((path, place))
    kinds = sorted(by_kind)
    draws.shuffle(kinds)
    for kind in kinds:
        draws.shuffle(by_kind[kind])
    taken: set[tuple[str, int]] = set()
    while any(by_kind.values()):
        for kind in kinds:
            while by_kind[kind]:
                path, place = by_kind[kind].pop()
                name = path.relative_to(root).as_posix()
                fault = _as_text(name, path.read_text(encoding="utf-8"), place)
                if fault is not None and (name, fault.line) not in taken:
                    taken.add((name, fault.line))
                    yield fault
                    break


def _as_text(name: str, text: str, place: Place) -> Drawn | None:
    """The fault in whole lines; None where no few lines occur once, or nothing changes."""
    lines = text.splitlines(keepends=True)
    node = place.node
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset :].decode()
    old, new = "".join(lines[first : last + 1]), before + place.new + after
    for more in range(4):
        above = "".join(lines[max(first - more, 0) : first])
        if text.count(above + old) == 1:
            changed = text.replace(above + old, above + new)
            try:
                ast.parse(changed)
            except SyntaxError:
                return None
            where = f"{name.removeprefix('autopar/')}:{node.lineno}"
            return Drawn(f"{place.kind} in {where}", name, node.lineno, above + old, above + new)
    return None


def places(tree: ast.Module) -> Iterator[Place]:
    """All places in the functions of a file, in the order of the text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for statement in node.body:
                yield from _inside(statement)


def _inside(node: ast.AST) -> Iterator[Place]:
    if isinstance(node, (*_UNREAD, ast.FunctionDef, ast.ClassDef)):
        return
    yield from _at(node)
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST):
                    yield from _inside(child)


def _at(node: ast.AST) -> Iterator[Place]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            yield _changed("comparison swapped", node, ops=[_COMPARED[type(op)]()])
        case ast.BinOp(op=op) if type(op) in _COMPUTED and not _is_text(node):
            yield _changed("operator swapped", node, op=_COMPUTED[type(op)]())
            if isinstance(op, ast.Add | ast.Sub):
                yield Place("term dropped", node, f"({ast.unparse(node.left)})")
            yield from _off_by_one(node, node.right, "right")
        case ast.BoolOp(values=values):
            yield (
                _changed("condition dropped", node, values=values[:-1])
                if len(values) > 2
                else Place("condition dropped", node, f"({ast.unparse(values[0])})")
            )
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield Place("condition negated", test, f"(not ({ast.unparse(test)}))")
        case ast.AugAssign():
            yield Place("statement dropped", node, "pass")
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=attr))) if attr in _CHANGES:
            yield Place("statement dropped", node, "pass")
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Tuple(elts=[_, _, *_])) if "key" in name:
            yield from _without_one(node.value)
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=ast.Tuple(elts=[_, _, *_])) if any(
            word in name for word in _KEPT
        ):
            yield from _without_one(node.slice)
        case ast.Slice(lower=ast.Constant(value=int(value))):
            yield _changed("off by one", node, lower=ast.Constant(value + 1))
        case ast.Subscript(slice=ast.Constant(value=int(value))) if value in (0, 1) and "shape" in ast.unparse(
            node.value
        ):
            yield _changed("wrong axis", node, slice=ast.Constant(1 - value))
        case ast.Call():
            yield from _at_call(node)


def _at_call(node: ast.Call) -> Iterator[Place]:
    called = node.func.id if isinstance(node.func, ast.Name) else ""
    if called == "range" and node.args:
        yield _changed("off by one", node, args=[*node.args[:-1], _less_one(node.args[-1])])
    if called in ("max", "min") and len(node.args) > 1:
        yield Place("term dropped", node, f"({ast.unparse(node.args[0])})")
    if called in _COPIES and len(node.args) == 1 and isinstance(node.args[0], ast.Name) and not node.keywords:
        yield Place("copy left out", node, ast.unparse(node.args[0]))
    if isinstance(node.func, ast.Attribute) and node.func.attr == "copy" and not node.args:
        yield Place("copy left out", node, ast.unparse(node.func.value))
    for keyword in node.keywords:
        value = keyword.value
        if keyword.arg in ("axis", "dim", "dimension") and isinstance(value, ast.Constant) and type(value.value) is int:
            yield Place("wrong axis", value, str(1 - value.value))
    if len(node.args) > 1 and all(isinstance(a, ast.Name) for a in node.args[:2]) and called not in _ORDERLESS:
        yield _changed("arguments swapped", node, args=[node.args[1], node.args[0], *node.args[2:]])


def _off_by_one(node: ast.BinOp, operand: ast.expr, field: str) -> Iterator[Place]:
    if isinstance(operand, ast.Constant) and type(operand.value) is int and operand.value in (0, 1, 2):
        yield _changed("off by one", node, **{field: ast.Constant(operand.value + 1)})


def _without_one(value: ast.expr) -> Iterator[Place]:
    assert isinstance(value, ast.Tuple)
    for at in range(len(value.elts)):
        left = [e for n, e in enumerate(value.elts) if n != at]
        yield Place("part of a key dropped", value, f"({', '.join(ast.unparse(e) for e in left)},)")


def _less_one(value: ast.expr) -> ast.expr:
    return ast.BinOp(value, ast.Sub(), ast.Constant(1))


def _is_text(node: ast.BinOp) -> bool:
    parts: Sequence[ast.expr] = (node.left, node.right)
    return any(
        isinstance(p, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(p, ast.Constant) and isinstance(p.value, str))
        for p in parts
    )


def _changed(kind: str, node: ast.expr, **fields: object) -> Place:
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return Place(kind, node, f"({ast.unparse(made)})" if not isinstance(node, ast.Slice) else ast.unparse(made))


def text_of(found: Iterable[Fault]) -> str:
    """Faults as `tests.mutations.run.faults` reads them."""
    parts = ["# Drawn by `python -m tests.mutations.draw`, with the tests that caught them.\n"]
    for fault in found:
        fields = [("name", fault.name), ("file", fault.file), ("old", fault.old), ("new", fault.new)]
        if fault.equivalent:
            fields.append(("equivalent", fault.equivalent))
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields]
        parts.append("\n".join(["[[faults]]", *lines, f"tests = {json.dumps(fault.tests)}"]) + "\n")
    return "\n".join(parts)


def filled(kept: Sequence[Fault], root: Path, seed: int, count: int) -> list[Fault]:
    """Faults that are there and as many more as are missing, each of the package that has the fewest by then."""
    found = list(kept)
    packages = Counter(f.file.split("/")[1] for f in found)
    places = {(f.file, f.line) for f in found}
    queue = [d for d in drawn(root, seed, 4 * count) if (d.file, d.line) not in places]
    while queue and len(found) < count:
        one = min(queue, key=lambda d: packages[d.file.split("/")[1]])  # the first of the seed's order
        queue.remove(one)
        packages[one.file.split("/")[1]] += 1
        found.append(Fault(one.name, one.file, one.old, one.new, ()))
    return found


@click.command()
@click.option("--seed", required=True, type=int)
@click.option("--count", default=100, help="Faults that are there in the end.")
def main(seed: int, count: int) -> None:
    """Fills `drawn.toml`."""
    kept = [fault for fault in faults(DRAWN) if fits(fault)]
    DRAWN.write_text(text_of(filled(kept, ROOT, seed, count)), encoding="utf-8")


if __name__ == "__main__":
    main()
