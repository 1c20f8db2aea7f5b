"""Arguments that a step changes in place: Flax modules (`autopar.api.modules`) and references of `jax.new_ref`.

Before a call each reference is replaced by its value; the traced function makes a reference of its own, runs, and
returns the value afterwards; after the call the user's reference gets it, where it lies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from autopar._compat.jaxprs import is_ref
from autopar.api.modules import flax_loaded, join_result, put_back, split_arguments, without_modules
from autopar.frontend.trace import callable_name


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class RefValue:
    """The value of a reference among the arguments.

    Args:
        index: number of the reference; one that is given twice has one number.
        held: its value in a tuple; empty where the reference was given before.
    """

    index: int
    held: tuple[Any, ...]

    def tree_flatten_with_keys(self) -> tuple[list[tuple[GetAttrKey, Any]], Any]:
        """The value under the key ``value``, for `jax.tree_util`."""
        return [(GetAttrKey("value"), x) for x in self.held], self.index

    @classmethod
    def tree_unflatten(cls, index: int, held: Sequence[Any]) -> RefValue:
        """The same reference with another value."""
        return cls(index, tuple(held))


@dataclass(frozen=True)
class Mutable:
    """Arguments that a call changes in place; false where it changes nothing.

    Args:
        modules: Flax modules among the arguments.
        refs: references among them, each once.
    """

    modules: Sequence[Any] = ()
    refs: Sequence[Any] = ()

    def __bool__(self) -> bool:
        return bool(self.modules or self.refs)

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether there are modules, and references: calls of one kind have one pure function."""
        return bool(self.modules), bool(self.refs)

    def pure(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` of the values of what it changes, which returns their values afterwards too."""
        fn = without_modules(fn) if self.modules else fn
        return _without_refs(fn) if self.refs else fn

    def joined(self, result: Any) -> Any:
        """The user's result from that of the pure function; his modules and references are updated."""
        if self.refs:
            result, *after = result
            for x in filter(_is_value, jax.tree.leaves(after, is_leaf=_is_value)):
                ref, (value,) = self.refs[x.index], x.held
                ref[...] = value if isinstance(value, jax.core.Tracer) else jax.device_put(value, ref.sharding)
        return join_result(result, self.modules) if self.modules else result

    def put_back(self, placed: Any) -> Any:
        """Placed arguments of the pure function as those of the user's, with his own modules and references."""
        placed = put_back(placed, self.modules) if self.modules else placed
        return jax.tree.map(lambda x: self.refs[x.index] if _is_value(x) else x, placed, is_leaf=_is_value)


def _is_value(x: Any) -> bool:
    return isinstance(x, RefValue)


def split_mutable(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, has_modules: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any], Mutable]:
    """Separates arguments into pytrees of arrays and the objects (modules, refs) that the call changes in place.

    Args:
        args: positional arguments of a call.
        kwargs: keyword arguments of the call.
        has_modules: whether to look for modules; False if arguments of this structure had none before.
    """
    modules: Sequence[Any] = ()
    if has_modules and flax_loaded():
        args, kwargs, modules = split_arguments(args, kwargs)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    refs = list({id(leaf): leaf for leaf in leaves if _refers(leaf)}.values())
    if refs:
        number = {id(ref): n for n, ref in enumerate(refs)}
        seen: set[int] = set()
        for i, leaf in enumerate(leaves):
            if id(leaf) in number:
                leaves[i] = RefValue(number[id(leaf)], () if id(leaf) in seen else (_value(leaf),))
                seen.add(id(leaf))
        args, kwargs = jax.tree.unflatten(treedef, leaves)
    return args, kwargs, Mutable(modules, refs)


def _refers(leaf: Any) -> bool:
    return is_ref(leaf) or (isinstance(leaf, jax.ShapeDtypeStruct) and bool(getattr(leaf, "is_ref", False)))


def _value(ref: Any) -> Any:
    return jax.ShapeDtypeStruct(ref.shape, ref.dtype) if isinstance(ref, jax.ShapeDtypeStruct) else ref[...]


def _without_refs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` as a function of arguments in which each reference is a `RefValue`.

    It returns its result, and its arguments with what the references hold afterwards, None in place of all else:
    under the same paths, so that they are seen to replace what was given.
    """

    @functools.wraps(fn, updated=())
    def pure(*args: Any, **kwargs: Any) -> Any:
        values = [x for x in jax.tree.leaves((args, kwargs), is_leaf=_is_value) if _is_value(x)]
        refs = {x.index: jax.new_ref(x.held[0]) for x in values if x.held}

        def after(x: Any) -> RefValue | None:
            return RefValue(x.index, (refs[x.index][...],)) if _is_value(x) and x.held else None

        given = jax.tree.map(lambda x: refs[x.index] if _is_value(x) else x, (args, kwargs), is_leaf=_is_value)
        result = fn(*given[0], **given[1])
        return result, *jax.tree.map(after, (args, kwargs), is_leaf=_is_value)

    if not hasattr(fn, "__name__"):
        pure.__name__ = callable_name(fn)
    return pure
