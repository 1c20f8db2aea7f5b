"""A program as plain data: statements that are lines of Python, which can be printed, cut and run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tests.fuzz import support

NAMES = re.compile(r"\b[va]\d+\b")
MODES = ("forward", "grad", "sgd", "adam", "remat", "vmap", "per_example", "jvp", "hvp")


@dataclass(frozen=True)
class Type:
    """Shape and kind ("float", "int", "bool", "key", "rawkey", "complex") of a value."""

    kind: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        n = 1
        for d in self.shape:
            n *= d
        return n


@dataclass(frozen=True)
class Body:
    """A function inside a program.

    Args:
        name: its name.
        parameters: names of its parameters.
        statements: its lines.
        result: text of what it returns.
    """

    name: str
    parameters: tuple[str, ...]
    statements: tuple[Statement, ...]
    result: str


@dataclass(frozen=True)
class Statement:
    """``targets = text``.

    Args:
        operator: name of what made it, for counts.
        targets: (name, type) of what it makes; several are the leaves of the value of ``text``.
        text: the expression; it names values and the functions in ``bodies``.
        bodies: functions that it calls.
    """

    operator: str
    targets: tuple[tuple[str, Type], ...]
    text: str
    bodies: tuple[Body, ...] = ()

    def reads(self) -> frozenset[str]:
        """Names that it needs, also those that its bodies close over."""
        found = set(NAMES.findall(self.text))
        for body in self.bodies:
            found |= free_names(body)
        return frozenset(found)


def free_names(body: Body) -> frozenset[str]:
    """Names of the surrounding program that a body uses."""
    bound = set(body.parameters)
    found: set[str] = set()
    for s in body.statements:
        found |= s.reads() - bound
        bound |= {name for name, _ in s.targets}
    return frozenset(found | (set(NAMES.findall(body.result)) - bound))


@dataclass(frozen=True)
class Program:
    """A program.

    Args:
        inputs: (name, type); floats are parameters, the others data.
        statements: its lines, in order.
        results: names of what it returns.
        mode: what is done with the function; one of `MODES`.
        seed: of the arguments.
        dtype: of floats.
    """

    inputs: tuple[tuple[str, Type], ...]
    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    mode: str = "forward"
    seed: int = 0
    dtype: str = "float64"

    @property
    def params(self) -> tuple[tuple[str, Type], ...]:
        """The float inputs."""
        return tuple(i for i in self.inputs if i[1].kind == "float")

    @property
    def data(self) -> tuple[tuple[str, Type], ...]:
        """The other inputs."""
        return tuple(i for i in self.inputs if i[1].kind != "float")

    def pruned(self) -> Program:
        """Without statements and inputs that no result needs."""
        needed = set(self.results)
        kept: list[Statement] = []
        for s in reversed(self.statements):
            if needed & {name for name, _ in s.targets}:
                kept.append(s)
                needed |= s.reads()
        inputs = tuple(i for i in self.inputs if i[0] in needed)
        return replace(self, inputs=inputs, statements=tuple(reversed(kept)))


def all_statements(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Statements and those of their bodies."""
    for s in statements:
        yield s
        for body in s.bodies:
            yield from all_statements(body.statements)


def statement_lines(statement: Statement, indent: str, noise: str = "") -> Iterator[str]:
    """The lines of a statement; ``noise`` are further arguments of ``noisy``, "" for none."""
    for body in statement.bodies:
        yield f"{indent}def {body.name}({', '.join(body.parameters)}):"
        for s in body.statements:
            yield from statement_lines(s, indent + "    ", noise)
        yield f"{indent}    return {body.result}"
    names = [name for name, _ in statement.targets]
    if len(names) == 1:
        yield f"{indent}{names[0]} = {statement.text}"
    else:
        yield f"{indent}{', '.join(names)} = jax.tree.leaves({statement.text})"
    if noise:
        yield from (f"{indent}{name} = noisy({name}, {noise})" for name in names)


_TAILS = {
    "forward": "    return forward(*params)",
    "grad": "    return jax.value_and_grad(loss, has_aux=True)(params)",
    "sgd": "    (value, out), grads = jax.value_and_grad(loss, has_aux=True)(params)\n"
    "    return sgd(params, grads), value, out",
    "adam": "    value, grads = jax.value_and_grad(lambda p: loss(p)[0])(params)\n"
    "    return *adam(params, grads, moments), value",
    "remat": "    return jax.value_and_grad(jax.checkpoint(lambda p: loss(p)[0]))(params)",
    "vmap": "    return jax.vmap(lambda p: forward(p, *params[1:]))(params[0])",
    "per_example": "    def one(p):\n        return jax.value_and_grad(lambda q: loss(q)[0])((p, *params[1:]))\n\n"
    "    return jax.vmap(one)(params[0])",
    "jvp": "    return jax.jvp(lambda p: loss(p)[0], (params,), (jax.tree.map(jnp.cos, params),))",
    "hvp": "    return jax.jvp(jax.grad(lambda p: loss(p)[0]), (params,), (jax.tree.map(jnp.cos, params),))",
}


def source(program: Program, noise_seed: int | None = None) -> str:
    """The Python text of ``step(params, moments, data)``; with a seed, noise is added to each value."""
    noise = "" if noise_seed is None else f"{program.dtype!r}, {noise_seed}"

    def names(pairs: Iterable[tuple[str, Type]]) -> str:
        return "".join(f"{name}, " for name, _ in pairs).strip()

    lines = ["def step(params, moments, data):"]
    if program.data:
        lines.append(f"    {names(program.data)} = data")
    lines.append("")
    lines.append(f"    def forward({names(program.params).rstrip(',')}):")
    if noise:
        lines += [f"        {name} = noisy({name}, {noise})" for name, _ in program.params]
    for s in program.statements:
        lines += statement_lines(s, "        ", noise)
    lines.append(f"        return ({', '.join(program.results)},)")
    lines.append("")
    if program.mode not in ("forward", "vmap"):
        lines += ["    def loss(p):", "        out = forward(*p)", "        return total(out), out", ""]
    lines.append(_TAILS[program.mode])
    return "\n".join(lines) + "\n"


def arguments(program: Program) -> tuple[Any, ...]:
    """``(params, moments, data)`` of a program."""
    lead = (8,) if program.mode in ("vmap", "per_example") else ()
    params = tuple(
        support.argument(t.kind, (lead if n == 0 else ()) + t.shape, program.seed + n, program.dtype)
        for n, (_, t) in enumerate(program.params)
    )
    moments: Any = ()
    if program.mode == "adam":
        moments = tuple(
            tuple(
                support.argument(t.kind, t.shape, program.seed + k + n, program.dtype)
                for n, (_, t) in enumerate(program.params)
            )
            for k in (100, 200)
        )
    data = tuple(support.argument(t.kind, t.shape, program.seed + 50 + n) for n, (_, t) in enumerate(program.data))
    return params, moments, data


def load(text: str, name: str = "step", filename: str = "<program>") -> Callable[..., Any]:
    """The function ``name`` that ``text`` defines."""
    scope: dict[str, Any] = {"jax": jax, "jnp": jnp}
    scope.update({k: getattr(support, k) for k in support.NAMES})
    exec(compile(text, filename, "exec"), scope)
    return scope[name]
