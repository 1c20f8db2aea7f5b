"""CPU seconds of steps of families without an example, as planned and with each sharding by hand.

``python -m benchmarks.family_times [NAMES]`` compiles each of `NAMES` for eight CPU devices as planned for them and
with the shardings of the experts of `benchmarks.family_bytes`, and runs all programs in turns in one process. What is
compared is the least CPU time of a few steps, of all threads together: other work on the machine makes it no shorter.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from benchmarks import family_bytes
from benchmarks.families import Built

NAMES = ("vit", "ranking", "unet", "mixer", "variational", "two towers", "linear attention", "denoising")
ROUNDS, STEPS = 7, 3


def drawn(shapes: Any) -> Any:
    """Small numbers of the shapes of a tree, the same in each process."""
    rng = np.random.default_rng(0)

    def one(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 8, leaf.shape), leaf.dtype)
        return jnp.asarray(rng.standard_normal(leaf.shape) * 0.02, leaf.dtype)

    return jax.tree.map(one, shapes)


def runners(built: Built, rules: family_bytes.Rules) -> dict[str, Callable[[], Any]]:
    """By name what runs a step once, on placed state and batch: as planned, and by hand."""
    step, shapes = built
    state, batch = drawn(shapes)
    function = autopar.parallelize(step, cluster=autopar.Cluster.local(), num_stages=1, num_microbatches=1)
    placed = function.shard(state, batch)
    programs: dict[str, Callable[[], Any]] = {"planned": lambda: function(*placed)}
    for form in family_bytes.FORMS:
        states, batches = family_bytes.shardings_by_hand(shapes, form, rules)
        compiled = jax.jit(step, in_shardings=(states, batches), out_shardings=(states, None))
        given = jax.device_put(state, states), jax.device_put(batch, batches)
        programs[form] = lambda compiled=compiled, given=given: compiled(*given)  # type: ignore[misc]
    return programs


def seconds(programs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Least CPU seconds of a step by name; programs take turns."""
    least = dict.fromkeys(programs, float("inf"))
    for run in programs.values():
        jax.block_until_ready(run())
    for _ in range(ROUNDS):
        for name, run in programs.items():
            began_s = time.process_time()
            for _ in range(STEPS):
                jax.block_until_ready(run())
            least[name] = min(least[name], (time.process_time() - began_s) / STEPS)
    return least


def main(names: list[str]) -> None:
    """Prints a line a family."""
    for name in names or NAMES:
        build, rules = family_bytes.CASES[name]
        took = seconds(runners(build(), rules))
        planned = took.pop("planned")
        best = min(took, key=lambda form: took[form])
        print(f"{name}: {planned / took[best]:.3f} of {best} ({planned:.4f} of {took[best]:.4f} s)", flush=True)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    main(sys.argv[1:])
