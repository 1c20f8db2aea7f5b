"""Arguments that a step changes in place: Flax NNX modules, as `nnx.jit` allows, and references of `jax.new_ref`.

`split_mutable` separates the arguments of a call. Modules are split into states (pytrees of arrays), each reference is
replaced by its value; the traced function makes modules and references of its own, runs, and returns states and values
afterwards; after the call the user's own objects get these, where they lie. A program that never imported flax has no
modules, so flax is looked up, never imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from autopar._compat.jaxprs import is_ref
from autopar.frontend.trace import callable_name


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class ModuleState:
    """The arrays of one module among several that were split together.

    Args:
        index: number of the module.
        names: path of each array in it, as ``layers.0.kernel``.
        leaves: the arrays.
        treedef: structure of the module's part of the state.
        graph: the graph definition of all of them together.
    """

    index: int
    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    treedef: Any
    graph: Any

    def tree_flatten_with_keys(self) -> tuple[list[tuple[GetAttrKey, Any]], Any]:
        """Leaves with their paths in the module, for `jax.tree_util`."""
        keys = [GetAttrKey(n) for n in self.names]
        return list(zip(keys, self.leaves, strict=True)), (self.index, self.names, self.treedef, self.graph)

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Sequence[Any]) -> ModuleState:
        """The state with other leaves."""
        index, names, treedef, graph = aux
        return cls(index, names, tuple(leaves), treedef, graph)

    @property
    def state(self) -> Any:
        """The module's part of the state, as flax has it."""
        return jax.tree.unflatten(self.treedef, self.leaves)


@dataclass(frozen=True)
class SameModule:
    """Stands in a result for the module that was argument number ``index``."""

    index: int


def flax_loaded() -> bool:
    """Whether this process has imported flax.nnx, so that there may be modules."""
    return "flax.nnx" in sys.modules


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def _kinds(nnx: Any) -> tuple[tuple[type, ...], tuple[type, ...]]:
    """(types of graph nodes, types whose inside is not searched)."""
    names = ("Pytree", "Object", "Module", "Variable")
    return tuple(getattr(nnx, n) for n in names if hasattr(nnx, n)), (nnx.State,)


def find_modules(tree: Any) -> tuple[list[Any], list[Any], Any] | None:
    """Modules in a pytree.

    Returns ``(leaves, modules, treedef)`` where leaves are those of the pytree with modules as leaves; None
    where there is no module.
    """
    nnx = _nnx()
    if nnx is None:
        return None
    kinds, closed = _kinds(nnx)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, (*kinds, *closed)))
    modules = [leaf for leaf in leaves if isinstance(leaf, kinds)]
    return (leaves, modules, treedef) if modules else None


def split_modules(modules: Sequence[Any]) -> tuple[list[ModuleState], Any]:
    """The state of each module, and their common graph definition. What they share is in the first that has it."""
    graph, whole = _nnx().split(tuple(modules))
    states = []
    for index in range(len(modules)):
        part = whole.get(index, {})
        paths, treedef = jax.tree_util.tree_flatten_with_path(part)
        names = tuple(_name(path) for path, _ in paths)
        states.append(ModuleState(index, names, tuple(leaf for _, leaf in paths), treedef, graph))
    return states, graph


def _name(path: Sequence[Any]) -> str:
    parts = [str(next(getattr(k, a) for a in ("key", "idx", "name") if hasattr(k, a))) for k in path]
    if len(parts) > 1 and parts[-1] in ("value", "raw_value"):
        parts.pop()
    return ".".join(parts)


def merge_modules(graph: Any, states: Sequence[ModuleState]) -> Sequence[Any]:
    """New modules from the states of `split_modules`."""
    nnx = _nnx()
    merged: Sequence[Any] = nnx.merge(graph, nnx.State({s.index: s.state for s in states if s.names}))
    return merged


def update_modules(modules: Sequence[Any], states: Sequence[ModuleState]) -> None:
    """Writes new states into the user's module objects."""
    nnx = _nnx()
    nnx.update(tuple(modules), nnx.State({s.index: s.state for s in states if s.names}))


def _is_part(x: Any) -> bool:
    return isinstance(x, ModuleState | SameModule)


def without_modules(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` as a pure function of arguments in which each module is a `ModuleState`.

    It returns ``(result, states of the arguments afterwards, states of new modules in the result)``.
    """

    @functools.wraps(fn, updated=())
    def pure(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_part)
        states = [leaf for leaf in leaves if isinstance(leaf, ModuleState)]
        modules = list(merge_modules(states[0].graph, states))
        args, kwargs = jax.tree.unflatten(
            treedef, [modules[leaf.index] if isinstance(leaf, ModuleState) else leaf for leaf in leaves]
        )
        result = fn(*args, **kwargs)
        modules_of_result = find_modules(result)
        graphs: list[Any] = []
        if modules_of_result is not None:
            parts, _, result_tree = modules_of_result
            kinds, _ = _kinds(_nnx())
            for i, part in enumerate(parts):
                if isinstance(part, kinds):
                    same = next((n for n, m in enumerate([*modules, *graphs]) if m is part), None)
                    if same is None:
                        same = len(modules) + len(graphs)
                        graphs.append(part)
                    parts[i] = SameModule(same)
            result = jax.tree.unflatten(result_tree, parts)
        after, _ = split_modules([*modules, *graphs])
        return result, tuple(after[: len(modules)]), tuple(after[len(modules) :])

    if not hasattr(fn, "__name__"):
        pure.__name__ = callable_name(fn)
    return pure


def split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """Arguments with a `ModuleState` for each module, and the modules; none: there are no modules."""
    modules_of_call = find_modules((args, kwargs))
    if modules_of_call is None:
        return args, kwargs, []
    leaves, modules, treedef = modules_of_call
    kinds, _ = _kinds(_nnx())
    unique = list({id(m): m for m in modules}.values())
    states, _ = split_modules(unique)
    at = {id(m): s for m, s in zip(unique, states, strict=True)}
    args, kwargs = jax.tree.unflatten(treedef, [at[id(x)] if isinstance(x, kinds) else x for x in leaves])
    return args, kwargs, unique


def join_result(result: tuple[Any, Any, Any], modules: Sequence[Any]) -> Any:
    """The user's result from that of the pure function; his modules are updated."""
    value, after, new = result
    known_modules = list(modules)
    if new:
        merged = merge_modules(new[0].graph, [*after, *new])
        known_modules += merged[len(modules) :]
    update_modules(modules, after)
    leaves, treedef = jax.tree.flatten(value, is_leaf=lambda x: isinstance(x, SameModule))
    return jax.tree.unflatten(treedef, [known_modules[x.index] if isinstance(x, SameModule) else x for x in leaves])


def put_back(placed: Any, modules: Sequence[Any]) -> Any:
    """``placed`` with the user's modules for their states, which the modules get."""
    leaves, treedef = jax.tree.flatten(placed, is_leaf=_is_part)
    update_modules(modules, [x for x in leaves if isinstance(x, ModuleState)])
    return jax.tree.unflatten(treedef, [modules[x.index] if isinstance(x, ModuleState) else x for x in leaves])


def new_modules(tree: Any) -> Any:
    """``tree`` with a new module for each `ModuleState` in it."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_part)
    states = [x for x in leaves if isinstance(x, ModuleState)]
    if not states:
        return tree
    whole = merge_modules(states[0].graph, states)
    return jax.tree.unflatten(treedef, [whole[x.index] if isinstance(x, ModuleState) else x for x in leaves])


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
