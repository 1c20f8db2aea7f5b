"""Signatures of calls: two calls with equal structure, types and static values run the same program.

Leaves that jax cannot trace (strings, functions, any object) are static: compared by value, passed
to the function as they are. Python numbers are traced, as `jax.jit` does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from autopar._compat.context import trace_context
from autopar.errors import TraceError
from autopar.errors.base import as_kind

NUMBERS = (bool, int, float, complex)


class ArrayHandle:
    """Base of what stands for an array that lies elsewhere; has ``shape`` and ``dtype``."""

    shape: tuple[int, ...]
    dtype: Any


_TYPED = (jax.Array, jax.ShapeDtypeStruct, ArrayHandle)
_NUMPY = (np.ndarray, np.generic)
#: numpy's letters of dtypes that jax has not: long floats, objects, records, text, dates and times.
_REFUSED = "gGOVSUMm"
#: numpy's mark of the byte order that is not this machine's.
_SWAPPED = ">" if sys.byteorder == "little" else "<"


@dataclass(frozen=True)
class SignatureOptions:
    """Options by which arguments are read.

    Args:
        static_argnums: positions of arguments that are values of the program, as in `jax.jit`.
        static_argnames: their names.
        static_numbers: whether Python numbers inside arguments are static too.
        names: names of the function's positional parameters; None asks the function at every call.
    """

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    static_numbers: bool = False
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class _Static:
    """A static value, compared by type and key (1 and True differ).

    ``digest`` is the hash of the key when it was read: an object that changed since has another.
    """

    kind: type
    key: Any
    value: Any = field(compare=False)
    digest: int | None = field(compare=False, default=None)

    def is_still(self, leaf: Any) -> bool:
        """Whether ``leaf`` is the same object, and has not changed as far as hashes tell."""
        now = leaf_entry(leaf, True) if leaf is self.value else None
        return isinstance(now, _Static) and now.digest == self.digest


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
        context: jax's trace context around the call: every setting on which jax traces another program.
        mesh: the mesh of `jax.set_mesh` around the call, without its devices; None where there is none.
    """

    treedef: Any
    entries: tuple[Any, ...]
    static_args: tuple[tuple[int | str, _Static], ...]
    context: tuple[Any, ...] = ()
    mesh: Any = None

    @property
    def static_numbers(self) -> bool:
        """Whether Python numbers of the arguments are values of the program."""
        return any(isinstance(e, _Static) and issubclass(e.kind, NUMBERS) for e in self.entries)

    def takes(self, other: CallSignature) -> bool:
        """Whether a program for this signature may be given the arguments of another call, as jax's compiled objects.

        Settings of jax around that call, and whether its scalars are weakly typed, change nothing in the program.
        """
        same = (self.treedef, self.static_args, len(self.entries)) == (
            other.treedef,
            other.static_args,
            len(other.entries),
        )
        return same and all(
            a == b if isinstance(a, _Static) or isinstance(b, _Static) else a[:2] == b[:2]
            for a, b in zip(self.entries, other.entries, strict=True)
        )

    def with_static(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Arguments of a call with the static ones of this signature where the call leaves them out.

        Compiled objects of jax are called without static arguments.
        """
        if not self.static_args:
            return args, kwargs
        values = {where: static.value for where, static in self.static_args}
        positions = len(self.treedef.children()[0].children())
        left_out = [k for k in range(positions) if k in values]
        if left_out and len(args) == positions - len(left_out):
            rest = iter(args)
            args = [values[k] if k in values else next(rest) for k in range(positions)]
        return args, {**{k: v for k, v in values.items() if isinstance(k, str)}, **kwargs}

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

    def dynamic(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` without static arguments, with ``values`` for the traced leaves: as in `jax.stages`."""
        given = iter(values)
        leaves = [e.value if isinstance(e, _Static) else next(given) for e in self.entries]
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        static = {where for where, _ in self.static_args}
        return tuple(a for i, a in enumerate(args) if i not in static), dict(kwargs)

    def paths(self, fn: Callable[..., Any], arrays: Sequence[Any]) -> tuple[tuple[str, int | str, str], ...]:
        """Text path (``state.params['w']``), argument position or name, and path inside it of each traced leaf.

        Args:
            fn: the function, for the names of its parameters.
            arrays: anything with shape and dtype for the traced leaves: some containers refuse other leaves.
        """
        given = iter(arrays)
        leaves = [e.value if isinstance(e, _Static) else next(given) for e in self.entries]
        tree = jax.tree.unflatten(self.treedef, leaves)
        names = positional_names(fn)
        paths: list[tuple[str, int | str, str]] = []
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
            group, key, rest = path[0].idx, path[1], jax.tree_util.keystr(path[2:])
            if group == 0:
                position = key.idx
                name = names[position] if position < len(names) else f"arg{position}"
                paths.append((name + rest, position, rest))
            else:
                paths.append((f"{key.key}{rest}", key.key, rest))
        return tuple(paths[i] for i in self.traced)


def positional_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the positional parameters of ``fn``, as far as it has names for them."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)


def resolve(
    argnums: Sequence[int], argnames: Sequence[str], names: Sequence[str]
) -> tuple[frozenset[int], frozenset[str]]:
    """Positions and names of arguments that were named by either, as `jax.jit` infers one from the other.

    Args:
        argnums: positions; negative ones count from the last positional parameter.
        argnames: names.
        names: names of the positional parameters.
    """
    positions = {n + len(names) if n < 0 else n for n in argnums}
    positions |= {names.index(n) for n in argnames if n in names}
    return frozenset(positions), frozenset(argnames) | {names[p] for p in positions if 0 <= p < len(names)}


def jax_config(name: str) -> bool:
    """A switch of jax's configuration, here and now."""
    return bool(getattr(jax.config, name))


def context_mesh() -> Any:
    """The mesh of `jax.set_mesh` around the running code, without its devices; None where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def leaf_entry(leaf: Any, static_numbers: bool) -> Any:
    """Entry of a leaf in the signature: ``(shape, dtype, weak_type)``, or a static value.

    Raises:
        TraceError: a dim of the leaf has no number of elements, as those of `jax.export.symbolic_shape`.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct) and any(map(is_symbolic_dim, leaf.shape)):
        raise TraceError(
            f"an argument has the symbolic shape {leaf.shape}",
            cause="dims of jax.export.symbolic_shape stand for any number of elements; a plan is for one",
            remedy="give numbers, or export the function without a plan: jax.export.export(jax.jit(step))",
        )
    if isinstance(leaf, _TYPED):
        return (leaf.shape, leaf.dtype, bool(getattr(leaf, "weak_type", False)))
    if isinstance(leaf, _NUMPY):
        if isinstance(leaf, str | bytes):  # numpy's scalars of text are Python's
            return _static(leaf)
        if leaf.dtype == jax.dtypes.float0:
            return _static(leaf, (leaf.shape, str(leaf.dtype), leaf.tobytes()))
        if leaf.dtype.char in _REFUSED or leaf.dtype.byteorder == _SWAPPED or isinstance(leaf, np.ma.MaskedArray):
            jax.typeof(leaf)  # raises jax's own error
        return (leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), False)
    if isinstance(leaf, NUMBERS) and not static_numbers:
        try:
            aval = jax.typeof(leaf)
        except OverflowError as error:
            refusal = TraceError(
                f"the number {leaf} among the arguments does not fit: {error}",
                cause="Python integers become int32 arrays, or int64 ones with jax_enable_x64",
                remedy="name the argument in static_argnums, or turn jax_enable_x64 on",
            )
            raise as_kind(refusal, OverflowError) from error
        return (aval.shape, aval.dtype, bool(aval.weak_type))
    if isinstance(leaf, jax.core.Tracer):  # of a mutable reference or a token: the outer trace has its type
        return (jax.typeof(leaf), None, False)
    if hasattr(type(leaf), "__jax_array__"):
        jax.typeof(leaf)  # raises jax's own error: such an object is converted before it is an argument
    return _static(leaf)


def _static(value: Any, key: Any = None) -> _Static:
    key = value if key is None else key
    try:
        return _Static(type(value), key, value, hash(key))
    except TypeError:
        return _Static(type(value), key, value)  # `flatten_call` says so


def _unhashable(static_args: Sequence[tuple[int | str, _Static]]) -> bool:
    """Whether a static argument, not a leaf of another, is what cannot be hashed: `jax.jit` has another error then."""
    try:
        hash(tuple(static_args))
    except TypeError:
        return True
    return False


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
        names = positional_names(fn) if options.names is None else options.names
        positions, by_name = resolve(options.static_argnums, options.static_argnames, names)
        for position in sorted(p for p in positions if p < len(rest_args)):
            static_args.append((position, _static(args[position])))
            rest_args[position] = _Absent()
        for name in sorted(by_name & set(rest_kwargs)):
            static_args.append((name, _static(rest_kwargs.pop(name))))
    leaves, treedef = jax.tree.flatten((tuple(rest_args), rest_kwargs))
    entries = tuple(
        _Static(_Absent, None, leaf) if type(leaf) is _Absent else leaf_entry(leaf, options.static_numbers)
        for leaf in leaves
    )
    signature = CallSignature(treedef, entries, tuple(static_args), trace_context(), context_mesh())
    try:
        hash(signature)
    except TypeError as error:
        refusal = TraceError(
            f"an argument that is not an array cannot be hashed: {error}",
            cause="static arguments and leaves that are not arrays become part of the compiled program",
            remedy="pass an array, or an object with __hash__ and __eq__",
        )
        raise as_kind(refusal, ValueError if _unhashable(static_args) else TypeError) from error
    return signature, [leaf for leaf, e in zip(leaves, entries, strict=True) if not isinstance(e, _Static)]
