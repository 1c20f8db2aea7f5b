"""CPU seconds in which a warm call of a step with many leaves returns, next to `jax.jit`'s, in turns.

Both are called with the same trees, placed the same, and their state goes from call to call. The step does next to
nothing: what is measured is the way of 500 leaves through Python and jax's own dispatch, up to the call's return, in
the calling thread. A ratio is the median over rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from benchmarks.clusters import bytes_cluster
from benchmarks.report import Report, Row, Say

TARGET = 1.15
LEAVES, ROUNDS, WARM_ROUNDS = 500, 60, 10


def halved(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """A step with a leaf of the result for each of the state."""
    return {name: leaf * 0.5 for name, leaf in state.items()}, x.sum()


def measure(leaves: int, rounds: int, donated: bool) -> Row:
    """The row of a step with so many leaves, whose state is donated or not."""
    donate: dict[str, Any] = {"donate_argnums": 0} if donated else {}
    state, x = {f"w{i}": jnp.ones(8) for i in range(leaves)}, jnp.ones((8, 8))
    decorated = autopar.parallelize(halved, cluster=bytes_cluster(), num_stages=1, num_microbatches=1, **donate)
    compiled = decorated.compile(state, x)
    placed, batch = decorated.shard(state, x)
    jitted = jax.jit(
        halved, in_shardings=compiled.input_shardings[0], out_shardings=compiled.output_shardings, **donate
    )

    def loop(step: Callable[..., Any]) -> Callable[[], Any]:
        states = [jax.tree.map(lambda a: jax.device_put(jnp.copy(a), a.sharding), placed)]

        def once() -> Any:
            states[0], total = step(states[0], batch)
            return states[0], total

        return once

    ways = (loop(decorated), loop(jitted))
    seconds: list[tuple[float, ...]] = []
    for round in range(WARM_ROUNDS + rounds):
        taken = [0.0] * len(ways)
        for turn in range(len(ways)):
            which = (round + turn) % len(ways)
            began_s = time.thread_time()
            results = ways[which]()
            taken[which] = time.thread_time() - began_s
            jax.block_until_ready(results)
        seconds.append(tuple(taken))
    decorated_s, jitted_s = zip(*seconds[WARM_ROUNDS:], strict=True)
    return {
        "leaves": leaves + 1,
        "devices": len(compiled.plan.stages[0].devices),
        "donated": donated,
        "decorated_s": statistics.median(decorated_s),
        "jitted_s": statistics.median(jitted_s),
        "decorated/jitted": statistics.median(a / b for a, b in zip(decorated_s, jitted_s, strict=True)),
    }


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes few leaves and holds them to no target."""
    rows = []
    for donated in (False, True):
        say(f"dispatch: {'donated' if donated else 'kept'} state")
        rows.append(measure(*((20, 3) if quick else (LEAVES, ROUNDS)), donated))
    return Report(
        "dispatch",
        f"a warm call returns in at most {TARGET:.2f} of the CPU time of jax.jit's",
        tuple(rows),
        quick or all(row["decorated/jitted"] <= TARGET for row in rows),
        measured=("decorated_s", "jitted_s"),
    )
