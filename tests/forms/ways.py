"""Six ways in which autopar runs a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

import autopar
from autopar.errors import AutoparError
from autopar.lower.microbatch import microbatched
from autopar.lower.padded import padded
from autopar.lower.rewrites import recomputed_step
from autopar.sharding.padding import candidates
from tests.end_to_end.clusters import MIDDLE
from tests.forms.forms import arguments
from tests.fuzz.check import run_planned
from tests.microbatch.running import numbers, run, traced

Step = Callable[..., Any]


def _rewritten(rewrite: Callable[[Any], Any]) -> Callable[[Step, tuple[Any, ...]], Any]:
    def way(step: Step, args: tuple[Any, ...]) -> Any:
        found, leaves = traced(step, args)
        return run(rewrite(found), leaves)

    return way


def _widened(found: Any) -> Any:
    return padded(found, [d for c in candidates(found.graph, 5, 9.0) for d in c.dims(found.graph)])


def _staged(step: Step, args: tuple[Any, ...]) -> Any:
    return autopar.parallelize(step, cluster=MIDDLE, num_stages=2, num_microbatches=2)(*args)


WAYS: Mapping[str, Callable[[Step, tuple[Any, ...]], Any]] = MappingProxyType(
    {
        "whole": _rewritten(lambda found: found),
        "microbatches": _rewritten(lambda found: microbatched(found, 2)),
        "padded": _rewritten(_widened),
        "recomputed": _rewritten(lambda found: recomputed_step(found, "full")[0]),
        "split": lambda step, args: run_planned(step, args, ((2, 4), 1))[0],
        "stages": _staged,
    }
)


def outcome(step: Step, way: str) -> str:
    """ "ok", "refused: ...", "invalid: ..." (jax does not take the step), "wrong: ..." or "crash: ...".

    Args:
        step: of `tests.forms.forms.step_of`.
        way: a name in `WAYS`.
    """
    args = arguments()
    try:
        wanted = [numbers(x) for x in jax.tree.leaves(jax.jit(step)(*args))]
    except Exception as error:
        return f"invalid: {type(error).__name__}"
    try:
        results = [numbers(x) for x in jax.tree.leaves(WAYS[way](step, args))]
    except AutoparError as error:
        return f"refused: {str(error).splitlines()[0]}"
    except Exception as error:
        return f"crash: {type(error).__name__}: {error}"
    for got, want in zip(results, wanted, strict=True):
        scale = max(float(np.nanmax(np.abs(want), initial=0.0, where=np.isfinite(want))), 1e-30)
        near = np.isclose(got, want, rtol=1e-7, atol=1e-7 * scale, equal_nan=True)
        if got.dtype != want.dtype or not near.all():
            return f"wrong: {got.ravel()[~near.ravel()][:3]} in place of {want.ravel()[~near.ravel()][:3]}"
    return "ok"
