"""`Draw`: where an operator of a random program gets its operands and sizes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz.program import Body, Statement, Type, load, statement_lines

SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 8, 12, 16, 16)
LARGEST = 1024


class Rejected(Exception):
    """No statement of this kind can be made here."""


def type_of(aval: Any, dtype: str = "float64") -> Type:
    """The `Type` of an abstract value; Rejected where programs have none of its dtype.

    Args:
        aval: the abstract value.
        dtype: of the floats of the program.
    """
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return Type("key", tuple(aval.shape))
    kinds = {
        "float64": "float",
        "int32": "int",
        "bool": "bool",
        "complex128": "complex",
        "uint32": "word",
        "int64": "long",
        "float32": "single",
        **dict.fromkeys(("bfloat16", "float16", "complex64"), "half"),
    }
    if dtype != "float64":
        kinds |= {"float64": "double", dtype: "float"}
    if aval.dtype.name not in kinds:
        raise Rejected(aval.dtype.name)
    return Type(kinds[aval.dtype.name], tuple(aval.shape))


def abstract(type: Type, dtype: str = "float64") -> Any:
    """The abstract value of a type in a program with floats of ``dtype``."""
    if type.kind == "key":
        return jax.eval_shape(
            lambda: jax.random.split(jax.random.key(0), type.shape) if type.shape else jax.random.key(0)
        )
    if type.kind == "rawkey":
        return jax.ShapeDtypeStruct((2,), jnp.uint32)
    names = {"float": dtype, "int": "int32", "bool": "bool", "complex": "complex128", "word": "uint32"}
    return jax.ShapeDtypeStruct(type.shape, names[type.kind])


class Draw:
    """A program in the making.

    Args:
        rng: where choices come from.
        dtype: of floats.
    """

    def __init__(self, rng: np.random.Generator, dtype: str = "float64") -> None:
        self.rng = rng
        self.dtype = dtype
        self.types: dict[str, Type] = {}
        self.inputs: list[tuple[str, Type]] = []
        self.scopes: list[list[str]] = [[]]
        self.statements: list[list[Statement]] = [[]]
        self.count = 0
        self.closed: list[bool] = [False]

    # -- choices -------------------------------------------------------------------------------

    def chance(self, p: float) -> bool:
        """True with probability ``p``."""
        return bool(self.rng.random() < p)

    def integer(self, low: int, high: int) -> int:
        """From ``low`` to ``high``, both included."""
        return int(self.rng.integers(low, high + 1))

    def choice(self, options: Sequence[Any]) -> Any:
        """One of them."""
        if not options:
            raise Rejected("no option")
        return options[int(self.rng.integers(len(options)))]

    def some(self, options: Sequence[Any], least: int = 1) -> list[Any]:
        """At least ``least`` of them, in order."""
        if len(options) < least:
            raise Rejected("too few")
        count = self.integer(least, len(options))
        return [options[i] for i in sorted(self.rng.permutation(len(options))[:count])]

    def shape(self, low: int = 1, high: int = 3) -> tuple[int, ...]:
        """A shape of ``low`` to ``high`` dims, not too large."""
        while True:
            shape = tuple(self.choice(SIZES) for _ in range(self.integer(low, high)))
            if math.prod(shape) <= LARGEST:
                return shape

    # -- values --------------------------------------------------------------------------------

    def visible(self) -> list[str]:
        """Names that may be used here, latest last."""
        start = max((i for i, closed in enumerate(self.closed) if closed), default=0)
        return [name for scope in self.scopes[start:] for name in scope]

    def pick(self, kind: str = "float", rank: int | None = None, test: Callable[[Type], bool] = lambda _: True) -> str:
        """A value of ``kind`` that is there, latest ones preferred; a new input where there is none or by chance.

        Args:
            kind: of the value.
            rank: its rank, or None.
            test: of its type.
        """
        found = [
            n
            for n in self.visible()
            if self.types[n].kind == kind and (rank is None or len(self.types[n].shape) == rank) and test(self.types[n])
        ]
        if found and not self.chance(0.05):
            at = len(found) - 1 - min(int(self.rng.exponential(1.5)), len(found) - 1)
            return found[at]
        for _ in range(50):
            shape = self.shape(0 if kind in ("int", "bool") else 1) if rank is None else self.shape(rank, rank)
            if kind in ("key", "rawkey"):
                shape = ()
            if test(Type(kind, shape)):
                return self.input(kind, shape)
        raise Rejected(f"no {kind}")

    def input(self, kind: str, shape: Sequence[int]) -> str:
        """A new input of the program."""
        if self.closed[-1]:
            raise Rejected("closed")
        type = Type(kind, tuple(shape))
        if type.size > LARGEST or kind == "complex":
            raise Rejected("too large")
        name = f"a{len(self.inputs)}"
        self.inputs.append((name, type))
        self.types[name] = type
        self.scopes[0].insert(0, name)
        return name

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a value."""
        return self.types[name].shape

    def broadcastable(self, shape: tuple[int, ...]) -> str:
        """A float that broadcasts to ``shape``."""
        found = [n for n in self.visible() if self.types[n].kind == "float" and _broadcasts(self.types[n].shape, shape)]
        if found and self.chance(0.6):
            return self.choice(found)
        given = [1 if self.chance(0.3) else n for n in shape]
        return self.input("float", given[self.integer(0, len(given)) if self.chance(0.3) else 0 :])

    # -- statements ----------------------------------------------------------------------------

    def fresh(self, letter: str = "v") -> str:
        """A new name."""
        self.count += 1
        return f"{letter}{self.count}"

    def add(self, operator: str, text: str, bodies: Sequence[Body] = ()) -> list[str]:
        """Adds ``text`` as a statement; names of what it makes.

        Raises:
            Rejected: jax does not take it, or a value would be too large.
        """
        if not self.dtype.startswith("complex"):
            text = text.replace("jnp.float64", f"jnp.{self.dtype}")
        trial = Statement(operator, (("r0", Type("float", ())),), f"({text})", tuple(bodies))
        reads = sorted(trial.reads())
        lines = [f"def trial({', '.join(reads)}):", *statement_lines(trial, "    "), "    return r0"]
        try:
            made = jax.eval_shape(
                load("\n".join(lines), "trial"), *(abstract(self.types[n], self.dtype) for n in reads)
            )
        except Exception as error:
            raise Rejected(f"{operator}: {text}: {error}") from error
        leaves = jax.tree.leaves(made)
        if len(leaves) == 1 and hasattr(made, "shape") and self._other(leaves[0].dtype):
            text, leaves = f"({text}).astype(jnp.{self.dtype})", [leaves[0].update(dtype=jnp.dtype(self.dtype))]
        types = [type_of(leaf, self.dtype) for leaf in leaves]
        if not types or any(t.size > LARGEST for t in types):
            raise Rejected("too large")
        if len(types) == 1 and not hasattr(made, "shape"):
            text = f"jax.tree.leaves({text})[0]"
        names = [self.fresh() for _ in types]
        self.types.update(zip(names, types, strict=True))
        self.statements[-1].append(Statement(operator, tuple(zip(names, types, strict=True)), text, tuple(bodies)))
        self.scopes[-1].extend(names)
        return names

    def _other(self, dtype: Any) -> bool:
        """Whether ``dtype`` is of floats, but not of those that the program computes in."""
        return self.dtype != "float64" and jnp.issubdtype(dtype, jnp.inexact) and dtype != jnp.dtype(self.dtype)

    def body(self, parameters: Sequence[Type], fill: Callable[[list[str]], str], closed: bool = False) -> Body:
        """A function; ``fill`` adds its statements, given the names of its parameters, and returns its result's text.

        Args:
            parameters: types of its parameters.
            fill: called inside the new scope.
            closed: whether it may use nothing but its parameters.
        """
        names = [self.fresh() for _ in parameters]
        self.types.update(zip(names, parameters, strict=True))
        self.scopes.append(list(names))
        self.statements.append([])
        self.closed.append(closed or self.closed[-1])
        if closed:
            self.closed[-1] = True
        try:
            result = fill(names)
            return Body(self.fresh("f"), tuple(names), tuple(self.statements[-1]), result)
        finally:
            self.scopes.pop()
            self.statements.pop()
            self.closed.pop()


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    if len(shape) > len(target):
        return False
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False))
