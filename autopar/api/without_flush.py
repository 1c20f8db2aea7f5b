"""Calls of steps whose schedule has no flush: what is under way between them is part of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from autopar.api.compiled import Compiled
from autopar.api.mutable import split_mutable
from autopar.api.pure import PureFunction
from autopar.api.user_mesh import as_traced
from autopar.errors import AutoparError
from autopar.runtime.ampnet import AmpProgram
from autopar.runtime.leaves import fits
from autopar.runtime.without_flush import StaleProgram
from autopar.schedule import Table
from autopar.transforms.state import new_state_of


@partial(jax.tree_util.register_dataclass, data_fields=["state", "under_way", "calls"], meta_fields=[])
@dataclass(frozen=True)
class PipelineState:
    """The state of a step without a flush, between two calls; a pytree, so that checkpoints hold all of it.

    Args:
        state: the user's state: on each stage the newest, after the updates that the stage has made.
        under_way: by name the versions, activations and gradients of microbatches that are not through.
        calls: number of calls so far.
    """

    state: Any
    under_way: Mapping[str, Any]
    calls: Any


def call(pure: PureFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """One call of a step without a flush.

    Args:
        pure: the step.
        args: its arguments; the first is its state, plain before the first call and a `PipelineState` later.
        kwargs: likewise by keyword.

    Raises:
        AutoparError: the result is neither a state like the one taken nor a tuple that begins with one.
    """
    if not args:
        raise AutoparError("a step without a flush takes its state as its first argument", remedy="step(state, batch)")
    first, calls, under_way = args[0], 0, {}
    if isinstance(first, PipelineState):
        first, calls, under_way = first.state, int(np.asarray(first.calls)), _arrays(first.under_way)
    if split_mutable((first, *args[1:]), dict(kwargs), has_modules=False)[2].refs:
        raise AutoparError(
            "a step without a flush cannot write to a mutable reference, since passes of later calls are under way",
            remedy="make what the reference holds a part of the state, or take a schedule with a flush",
        )
    signature, leaves = pure.resolve((first, *args[1:]), kwargs)
    with as_traced(signature):
        compiled = pure.compile(signature)
    program = _program(compiled)
    arrays, under_way = program.call(compiled.local.place_all(leaves), under_way, calls)
    result = compiled.traced.results(arrays)
    state, rest = new_state_of(first, result)
    new = PipelineState(state, under_way, np.int64(calls + 1))
    return new if rest is None else (new, *rest)


def drain(pure: PureFunction, state: Any) -> Any:
    """The user's state with nothing under way: every gradient that was begun is in it.

    Args:
        pure: the step.
        state: what a call returned; a plain state comes back as it is.

    Raises:
        AutoparError: the step was not compiled for such a state.
    """
    if not isinstance(state, PipelineState):
        return state
    leaves, treedef = jax.tree.flatten(state.state)
    for compiled in reversed(pure.compiled.values()):
        program = _program(compiled)
        if fits(leaves, program.entries[: len(leaves)]):
            outputs = program.drain(leaves, _arrays(state.under_way), int(np.asarray(state.calls)))
            names = [i.name for i in compiled.traced.graph.inputs[: len(leaves)]]
            new = {
                o.updates: outputs[n] for n, o in enumerate(compiled.traced.graph.outputs) if n in outputs and o.updates
            }
            return jax.tree.unflatten(treedef, [new.get(n, x) for n, x in zip(names, leaves, strict=True)])
    raise AutoparError(
        "the step was not compiled for this state, so nothing can be drained",
        remedy="step.compile(state, batch) first; arrays may be jax.ShapeDtypeStruct",
    )


def order(pure: PureFunction) -> Table:
    """The order of passes of the last call of a step with schedule "ampnet".

    Raises:
        AutoparError: there was none.
    """
    for compiled in reversed(pure.compiled.values()):
        if isinstance(compiled.local, AmpProgram) and compiled.local.last:
            return compiled.local.last[-1]
    raise AutoparError("there is no order", cause='the step was not called with schedule="ampnet"')


def replay(pure: PureFunction, order: Table, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Repeats a call of a step with schedule "ampnet" in the order of passes of an earlier call.

    Args:
        pure: the step.
        order: order of passes of an earlier call with arguments of these shapes.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Raises:
        AutoparError: the step has another schedule.
        ScheduleError: the order is of other numbers, or cannot be.
    """
    signature, leaves = pure.resolve(tuple(args), kwargs)
    with as_traced(signature):
        compiled = pure.compile(signature)
    program = compiled.local
    if not isinstance(program, AmpProgram):
        raise AutoparError(f"schedule {compiled.plan.schedule} records no order", remedy='schedule="ampnet"')
    return compiled.traced.results(program.replay(program.place_all(leaves), order))


def _arrays(under_way: Mapping[str, Any]) -> dict[str, Any]:
    """The state under way, with jax arrays in place of numpy arrays, as a checkpoint may have them."""
    return {
        name: jax.device_put(np.array(a)) if isinstance(a, np.ndarray | np.generic) else a
        for name, a in under_way.items()
    }


def _program(compiled: Compiled) -> StaleProgram:
    program = compiled.local
    if not isinstance(program, StaleProgram):
        raise AutoparError(
            f"the plan has {compiled.plan.num_stages} stage and schedule {compiled.plan.schedule}",
            cause="a schedule without a flush needs stages",
            remedy="num_stages=2, or more",
        )
    return program
