"""Leaves of a step's state: which are parameters, as the user says, and the new state in what a step returns.

`parameter_leaves` selects parameters, `taken` and `replaced` read and set leaves, `new_state_of` divides a result into
state and the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from autopar.errors import AutoparError

#: A dotted path to the parameters inside the state, as "params" or "model.weights" ("" is all of it), or a function
#: that says of the path of a leaf, as "params.layer0.w", whether it is a parameter.
Parameters: TypeAlias = str | Callable[[str], bool]


def leaf_paths(tree: Any) -> tuple[str, ...]:
    """Dotted path of each leaf: names of keys, attributes and positions."""
    return tuple(".".join(_name(entry) for entry in path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0])


def parameter_leaves(state: Any, parameters: Parameters) -> tuple[int, ...]:
    """Indices of the parameters among the leaves of a state.

    Args:
        state: any pytree.
        parameters: dotted path of the subtree of the state that has them, or a function that says of a path whether it
            is one.

    Raises:
        AutoparError: there are none.
    """
    paths = leaf_paths(state)
    indices = tuple(i for i, path in enumerate(paths) if _is_parameter(path, parameters))
    if not indices:
        first = ", ".join(dict.fromkeys(path.partition(".")[0] or "(one leaf)" for path in paths))
        raise AutoparError(
            f"the state has no leaves under {parameters!r}; it begins with: {first or 'nothing'}",
            cause="the parameters lie elsewhere in the state, or the state is the parameters themselves",
            remedy='name them: params="model", params="0" for the first of a tuple, params="" for all of the state',
        )
    return indices


def taken(state: Any, indices: Sequence[int]) -> tuple[Any, ...]:
    """Leaves of ``state`` at ``indices``."""
    leaves = jax.tree.leaves(state)
    return tuple(leaves[i] for i in indices)


def replaced(state: Any, indices: Sequence[int], leaves: Sequence[Any]) -> Any:
    """``state`` with other leaves at ``indices``."""
    state_leaves, treedef = jax.tree.flatten(state)
    for i, leaf in zip(indices, leaves, strict=True):
        state_leaves[i] = leaf
    return jax.tree.unflatten(treedef, state_leaves)


def _is_parameter(path: str, parameters: Parameters) -> bool:
    if callable(parameters):
        return bool(parameters(path))
    return parameters == "" or path == parameters or path.startswith(f"{parameters}.")


def _name(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def new_state_of(state: Any, result: Any) -> tuple[Any, tuple[Any, ...] | None]:
    """The new state in a result, and what comes after it; None where the state is all.

    Args:
        state: what the step took.
        result: what it returned.

    Raises:
        AutoparError: the result is neither a state like the one taken nor a tuple that begins with one.
    """
    like: Any = jax.tree.structure(state)
    if jax.tree.structure(result) == like:
        return result, None
    if isinstance(result, tuple) and result and jax.tree.structure(result[0]) == like:
        return result[0], result[1:]
    raise AutoparError(
        "the step returns neither a state like the one that it takes nor a tuple that begins with one",
        remedy="return (state, metrics)",
    )
