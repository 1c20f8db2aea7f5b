"""What makes two calls of a function the same program: structure, types, and static values.

Leaves that jax cannot trace (strings, functions, any object) are static: compared by value, passed
to the function as they are. Python numbers are traced, as `jax.jit` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.errors import TraceError

_NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True)
class SignatureOptions:
    """How arguments are read.

    Args:
        static_argnums: positions of arguments that are values of the program, as in `jax.jit`.
        static_argnames: their names.
        static_numbers: whether Python numbers inside arguments are static too.
    """

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    static_numbers: bool = False


@dataclass(frozen=True)
class _Static:
    """A static value, compared by type and value (1 and True differ)."""

    kind: type
    value: Any


@dataclass(frozen=True)
class _Absent:
    """Stands where a static argument was taken out."""


@dataclass(frozen=True)
class CallSignature:
    """One way of calling a function; equal signatures share a program.

    Args:
        treedef: structure of ``(args, kwargs)`` with static arguments taken out.
        entries: for each leaf ``(shape, dtype, weak_type)``, or a static value.
        static_args: (position or name, value) of the static arguments.
    """

    treedef: Any
    entries: tuple[Any, ...]
    static_args: tuple[tuple[int | str, _Static], ...]

    @property
    def traced(self) -> tuple[int, ...]:
        """Indices of the leaves that are arrays."""
        return tuple(i for i, e in enumerate(self.entries) if not isinstance(e, _Static))

    def avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each traced leaf."""
        return tuple(
            jax.ShapeDtypeStruct(e[0], e[1], weak_type=e[2]) for e in self.entries if not isinstance(e, _Static)
        )

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fresh ``(args, kwargs)`` with ``arrays`` for the traced leaves."""
        given = iter(arrays)
        leaves = [e.value if isinstance(e, _Static) else next(given) for e in self.entries]
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        args, kwargs = list(args), dict(kwargs)
        for where, static in self.static_args:
            if isinstance(where, int):
                args[where] = static.value
            else:
                kwargs[where] = static.value
        return tuple(args), kwargs

    def paths(self, fn: Callable[..., Any]) -> tuple[tuple[str, int | str, str], ...]:
        """For each traced leaf: its text path (``state.params['w']``), argument position or name, path inside it."""
        tree = jax.tree.unflatten(self.treedef, list(range(len(self.entries))))
        names = positional_names(fn)
        found: dict[int, tuple[str, int | str, str]] = {}
        for path, index in jax.tree_util.tree_flatten_with_path(tree)[0]:
            group, key, rest = path[0].idx, path[1], jax.tree_util.keystr(path[2:])
            if group == 0:
                position = key.idx
                name = names[position] if position < len(names) else f"arg{position}"
                found[index] = (name + rest, position, rest)
            else:
                found[index] = (f"{key.key}{rest}", key.key, rest)
        return tuple(found[i] for i in self.traced)


def positional_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters of ``fn``, as far as it has names for them."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)


def _entry(leaf: Any, static_numbers: bool) -> Any:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return (leaf.shape, leaf.dtype, bool(getattr(leaf, "weak_type", False)))
    if isinstance(leaf, np.ndarray | np.generic):
        return (leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), False) if leaf.dtype.kind not in "OUSMm" else (
            _Static(type(leaf), leaf.tobytes())
        )
    if isinstance(leaf, _NUMBERS) and not static_numbers:
        aval = jax.typeof(leaf)
        return (aval.shape, aval.dtype, True)
    return _Static(type(leaf), leaf)


def flatten_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: SignatureOptions
) -> tuple[CallSignature, list[Any]]:
    """The signature of a call and its traced leaves, in order.

    Raises:
        TraceError: a static argument, or a leaf that is no array, cannot be hashed.
    """
    static_args: list[tuple[int | str, _Static]] = []
    rest_args, rest_kwargs = list(args), dict(kwargs)
    if options.static_argnums or options.static_argnames:
        names = positional_names(fn)
        positions = {n % len(args) if n < 0 and args else n for n in options.static_argnums}
        positions |= {names.index(n) for n in options.static_argnames if n in names}
        by_name = set(options.static_argnames) | {names[p] for p in positions if 0 <= p < len(names)}
        for position in sorted(p for p in positions if p < len(rest_args)):
            static_args.append((position, _Static(type(args[position]), args[position])))
            rest_args[position] = _Absent()
        for name in sorted(by_name & set(rest_kwargs)):
            static_args.append((name, _Static(type(kwargs[name]), rest_kwargs.pop(name))))
    leaves, treedef = jax.tree.flatten((tuple(rest_args), rest_kwargs))
    entries = tuple(_entry(leaf, options.static_numbers) for leaf in leaves)
    signature = CallSignature(treedef, entries, tuple(static_args))
    try:
        hash(signature)
    except TypeError as error:
        raise TraceError(
            f"an argument that is not an array cannot be hashed: {error}",
            cause="static arguments and leaves that are not arrays become part of the compiled program",
            remedy="pass an array, or an object with __hash__ and __eq__",
        ) from error
    return signature, [leaf for leaf, e in zip(leaves, entries, strict=True) if not isinstance(e, _Static)]
