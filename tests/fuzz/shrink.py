"""Makes a failing program small: cuts results, turns statements into inputs, simplifies the mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.program import Program, Statement, Type, source


def shrunk(program: Program, fails: Callable[[Program], bool], tries: int = 200) -> Program:
    """A small program that still fails.

    Args:
        program: one that fails.
        fails: whether a program fails in the same way; False for what is no program.
        tries: at most how many programs to look at.
    """
    left = tries
    seen = {source(program)}
    better = True
    while better and left > 0:
        better = False
        for candidate in _smaller(program):
            text = source(candidate)
            if text in seen or left <= 0:
                continue
            seen.add(text)
            left -= 1
            if fails(candidate):
                program, better = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Candidates, the boldest first."""
    for name in program.results:
        if len(program.results) > 1:
            yield replace(program, results=(name,)).pruned()
    for name in program.results:
        if len(program.results) > 1:
            yield replace(program, results=tuple(r for r in program.results if r != name)).pruned()
    for mode in ("forward", "grad"):
        if program.mode not in ("forward", mode):
            yield replace(program, mode=mode)
    # A statement whose values are given instead of computed.
    for at, s in enumerate(program.statements):
        if all(t.kind in ("float", "int", "bool") for _, t in s.targets):
            yield _given(program, at, s)
    # An earlier result instead of the last ones.
    for s in program.statements[:-1]:
        for name, _ in s.targets:
            yield replace(program, results=(name,)).pruned()
    for at, s in enumerate(program.statements):
        for smaller in _bodies_smaller(s, program.dtype):
            yield replace(
                program, statements=(*program.statements[:at], smaller, *program.statements[at + 1 :])
            ).pruned()


def _given(program: Program, at: int, statement: Statement) -> Program:
    number = max((int(name[1:]) for name, _ in program.inputs), default=-1) + 1
    renamed = {name: f"a{number + n}" for n, (name, _) in enumerate(statement.targets)}
    inputs = tuple((renamed[name], t) for name, t in statement.targets)
    definitions = tuple(Statement("given", ((name, t),), renamed[name]) for name, t in statement.targets)
    rest = (*program.statements[:at], *definitions, *program.statements[at + 1 :])
    if statement.operator == "given":
        return program
    return replace(program, inputs=(*program.inputs, *inputs), statements=rest).pruned()


def _bodies_smaller(statement: Statement, dtype: str) -> Iterator[Statement]:
    """Statements with a line of a body left out, its value made a constant."""
    for b, body in enumerate(statement.bodies):
        for at, line in enumerate(body.statements):
            candidates = [_constant(line, dtype)] if line.operator != "constant" else []
            candidates += list(_bodies_smaller(line, dtype))
            for new in candidates:
                lines = (*body.statements[:at], new, *body.statements[at + 1 :])
                bodies = (*statement.bodies[:b], replace(body, statements=lines), *statement.bodies[b + 1 :])
                yield replace(statement, bodies=bodies)


def _constant(line: Statement, dtype: str) -> Statement:
    if len(line.targets) != 1:
        return line
    (_, type) = line.targets[0]
    return replace(line, operator="constant", text=_filled(type, dtype), bodies=())


def _filled(type: Type, dtype: str) -> str:
    if type.kind == "float":
        return f"jnp.full({type.shape}, 0.7, jnp.{dtype})"
    return f"jnp.ones({type.shape}, { {'int': 'jnp.int32', 'bool': 'bool'}.get(type.kind) })"
