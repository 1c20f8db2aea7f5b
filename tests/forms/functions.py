"""Functions of jax that are found, not listed: each with operands that it takes, and the primitives that it binds."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

SIZE = 8
MODULES: tuple[ModuleType, ...] = (
    jax.lax, jax.numpy, jax.nn, jax.numpy.linalg, jax.numpy.fft, jax.scipy.special, jax.scipy.linalg, jax.random,
)  # fmt: skip

#: What an operand is made of a matrix of floats.
KINDS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "float": lambda v: v,
        "int": lambda v: (v * 3).astype(jnp.int32),
        "bool": lambda v: v > 0,
        "complex": lambda v: v + 0.5j * v,
        "small int": lambda v: (v * 3).astype(jnp.int4),
        "single": lambda v: v.astype(jnp.float32),
        "row": lambda v: v[0],
    }
)
#: Further operands, of the first one.
RESTS: Mapping[str, Callable[[Any], tuple[Any, ...]]] = MappingProxyType(
    {
        "alone": lambda v: (),
        "same": lambda v: (v,),
        "number": lambda v: (1,),
        "two": lambda v: (v, v),
        "numbers": lambda v: (0, 1),
        "pair": lambda v: ((1, 0),),
        "shape": lambda v: ((SIZE * SIZE,),),
        "indices": lambda v: (jnp.array([0, 2, 1]),),
    }
)
#: Names of functions that are no function of arrays, or not of arrays alone.
_LEFT_OUT = ("save", "load", "from", "print", "block", "asarray", "device", "empty", "eval", "set_", "array_", "with_")


@dataclass(frozen=True)
class Found:
    """A function with operands that it takes.

    Args:
        name: with its module.
        function: of the first operand and the rest.
        kind: of the first operand.
        rest: which further ones.
        primitives: names of those that it binds.
    """

    name: str
    function: Callable[..., Any]
    kind: str
    rest: str
    primitives: frozenset[str]

    def __call__(self, v: Any) -> Any:
        """Sums of the results, as one real number for each row of ``v`` where there are rows, else one."""
        first = KINDS[self.kind](v)
        return total(self.function(first, *RESTS[self.rest](first)))


def total(tree: Any) -> Any:
    """All elements of a tree of arrays added up, as a real number."""
    parts = [jnp.zeros(())]
    for x in jax.tree.leaves(tree):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        parts.append(jnp.sum(jnp.real(x).astype(jnp.float64)))
    return sum(parts[1:], parts[0])


def primitives_of(jaxpr: Any) -> set[str]:
    """Names of the primitives of a jaxpr and of all that it holds."""
    names: set[str] = set()
    for eqn in (jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr).eqns:
        names.add(eqn.primitive.name)
        for value in eqn.params.values():
            for body in value if isinstance(value, tuple | list) else (value,):
                if isinstance(body, ClosedJaxpr | Jaxpr):
                    names |= primitives_of(body)
    return names


def candidates(modules: Sequence[ModuleType] = MODULES) -> list[tuple[str, Callable[..., Any]]]:
    """Public functions of jax's modules by name, each once."""
    functions: dict[str, Callable[..., Any]] = {}
    seen: set[int] = set()
    for module in modules:
        for name in sorted(dir(module)):
            function = getattr(module, name, None)
            plain = name.startswith("_") or any(part in name for part in _LEFT_OUT)
            if plain or inspect.isclass(function) or inspect.ismodule(function) or not callable(function):
                continue
            if id(function) not in seen:
                seen.add(id(function))
                functions[f"{module.__name__}.{name}"] = function
    return list(functions.items())


def found(name: str, function: Callable[..., Any]) -> Found | None:
    """The function with the first operands that it takes; None where none fit."""
    if name.startswith("jax.random."):
        drawn = function
        function = lambda v, *rest: drawn(jax.random.key(1), *rest)  # noqa: E731
    for rest in RESTS:
        for kind in KINDS:
            if (here := taken(name, function, kind, rest)) is not None:
                return here
    return None


def taken(name: str, function: Callable[..., Any], kind: str, rest: str) -> Found | None:
    """The function with these operands; None where it does not take them."""
    trial = Found(name, function, kind, rest, frozenset())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jaxpr = jax.make_jaxpr(trial)(jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float64))
    except Exception:  # it takes other operands
        return None
    return Found(name, function, kind, rest, frozenset(primitives_of(jaxpr)))


def covering(functions: Sequence[Found]) -> list[Found]:
    """Few of the functions that bind every primitive that any of them binds; always the same ones."""
    missing = frozenset().union(*(f.primitives for f in functions))
    chosen: list[Found] = []
    while missing:
        best = max(functions, key=lambda f: (len(f.primitives & missing), -len(f.primitives)))
        chosen.append(best)
        missing -= best.primitives
    return chosen


def all_found() -> Iterator[Found]:
    """Every function that takes some operands."""
    for name, function in candidates():
        here = found(name, function)
        if here is not None:
            yield here
