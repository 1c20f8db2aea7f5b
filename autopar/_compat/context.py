"""jax's trace context: the settings that `jax.jit` has in the key of a program.

`trace_context` reads it, `entered` runs code under one that was read earlier, `context_text` writes it for keys on
disk and for comparisons between processes. `under_trace` says whether jax traces the running code.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Entries that say where in a trace the code is, not how it is traced.
_PLACES = ("axis_env_state",)
#: Entries for a mesh around the code; `autopar.api.user_mesh` enters and leaves meshes.
_MESHES = ("mesh_context_manager", "abstract_mesh_context_manager")


def trace_context() -> tuple[Any, ...]:
    """The values of all settings on which jax traces another program, here and now; hashable, in jax's order."""
    from jax._src import config  # here, so that the planner floors can be imported without jax

    values: tuple[Any, ...] = config.trace_context()
    return values


def under_trace() -> bool:
    """Whether the running code is part of another function that jax transforms: jit, grad, vmap, a loop's body."""
    from jax._src import core

    return not core.trace_state_clean()


def context_names() -> tuple[str, ...]:
    """Names of the entries of `trace_context`; empty where this jaxlib does not tell them."""
    from jax._src import config

    try:
        names: tuple[str, ...] = config.trace_context_names()
    except NotImplementedError:
        return ()
    return names


@contextmanager
def entered(context: tuple[Any, ...]) -> Iterator[None]:
    """Runs the body under the settings of ``context``. Meshes, and contexts that users made, stay as they are.

    Args:
        context: from `trace_context`.
    """
    now = trace_context()
    if context == now:
        yield
        return
    from jax._src import config

    states = config.config_states
    changed: list[tuple[Any, Any]] = []
    try:
        for name, value, present in zip(context_names(), context, now, strict=False):
            if name in states and value != present:
                state: Any = states[name]
                changed.append((state, state.swap_local(value)))
                _tell(state, value)
        yield
    finally:
        for state, before in reversed(changed):
            state.set_local(before)
            _tell(state, None if before is config.config_ext.unset else before)


def _tell(state: Any, value: Any) -> None:
    """Calls what jax calls when a setting changes in a thread."""
    if state._update_thread_local_hook:
        state._update_thread_local_hook(value)


def context_texts(context: tuple[Any, ...]) -> dict[str, str | None]:
    """Text of each setting that is the same in every process, by name; None where a setting has no such text.

    Args:
        context: from `trace_context`.
    """
    names = context_names()
    texts: dict[str, str | None] = {}
    for number, value in enumerate(context):
        name = names[number] if names else str(number)
        text = str(value.value) if isinstance(value, enum.Enum) else str(value)
        # Without names the entry that is a place cannot be told from others that have an address.
        unnamed_place = not names and " at 0x" in text
        if name not in _PLACES and not unnamed_place and not (name in _MESHES and not value):
            key = f"{name} {number}" if name in texts else name
            texts[key] = None if " at 0x" in text else text
    return texts


def context_text(context: tuple[Any, ...]) -> str | None:
    """All settings of a context as one text, for keys on disk; None where a setting has no text."""
    texts = context_texts(context)
    if None in texts.values():
        return None
    return "; ".join(f"{name}={text}" for name, text in texts.items())
