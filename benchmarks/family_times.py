"""CPU seconds of steps of families without an example, as planned and with each sharding by hand.

``python -m benchmarks.family_times [--cluster FILE] [NAMES]`` compiles each of `NAMES` for eight CPU devices as planned
for them and with the shardings of the experts of `benchmarks.family_bytes`, and runs all programs in turns in one
process, in either order by turns. What is compared is the least CPU time of a few steps, of all threads together: other
work on the machine makes it no shorter. The median of how many times an expert's turn the plan's next to it takes says
the same next to work that never rests. Plans are made for the cluster file of this machine that ``autopar calibrate
--cpu-devices 8 -o FILE`` wrote, without FILE for one that is measured first, quickly.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.runtime.measuring import QUICK
from benchmarks import family_bytes, reference
from benchmarks.families import Built

#: Turns at least and at most, CPU seconds of all turns beyond which there are no more than the least; steps in a turn
#: at most, and CPU seconds of a turn beyond which it has fewer.
ROUNDS, MOST_ROUNDS, ALL_S, STEPS, TURN_S = 5, 25, 12.0, 3, 0.3
HOPELESS = 1.5


def drawn(shapes: Any) -> Any:
    """Small numbers of the shapes of a tree, the same in each process."""
    rng = np.random.default_rng(0)

    def one(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 8, leaf.shape), leaf.dtype)
        return jnp.asarray(rng.standard_normal(leaf.shape) * 0.02, leaf.dtype)

    return jax.tree.map(one, shapes)


def runners(built: Built, rules: family_bytes.Rules, cluster: autopar.Cluster) -> dict[str, Callable[[], Any]]:
    """By name what runs a step once, on placed state and batch: as planned for a cluster, and by hand."""
    step, shapes = built
    state, batch = drawn(shapes)
    function = autopar.parallelize(step, cluster=cluster, num_stages=1, num_microbatches=1)
    placed = function.shard(state, batch)
    programs: dict[str, Callable[[], Any]] = {"planned": lambda: function(*placed)}
    for form in family_bytes.FORMS:
        states, batches = family_bytes.shardings_by_hand(shapes, form, rules)
        compiled = jax.jit(step, in_shardings=(states, batches), out_shardings=(states, None))
        given = jax.device_put(state, states), jax.device_put(batch, batches)
        programs[form] = lambda compiled=compiled, given=given: compiled(*given)  # type: ignore[misc]
    return programs


def seconds(programs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Least CPU seconds of a step by name, of all `turns`."""
    return {name: min(taken) for name, taken in turns(programs).items()}


def turns(programs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """CPU seconds of a step in each turn, by name; programs take turns, every other time in the other order.

    What takes more than `HOPELESS` times the least at first has no other turn, but for the first program, which the
    others are compared with. Short steps have more turns: next to other work few of them are undisturbed.
    """
    taken: dict[str, list[float]] = {}
    for name, run in programs.items():
        jax.block_until_ready(run())
        taken[name] = [_turn_s(run, 1)]
    fastest_s = min(first for (first,) in taken.values())
    judged = next(iter(programs))
    contest = [name for name in programs if name == judged or taken[name][0] <= HOPELESS * fastest_s]
    steps = max(1, min(STEPS, int(TURN_S / fastest_s)))
    round_s = steps * sum(taken[name][0] for name in contest)
    for n in range(max(ROUNDS, min(MOST_ROUNDS, int(ALL_S / round_s)))):
        for name in contest[:: -1 if n % 2 else 1]:
            taken[name].append(_turn_s(programs[name], steps))
    return taken


def paired(planned: Sequence[float], others: Iterable[Sequence[float]]) -> float:
    """Median of how many times theirs a turn as planned takes, the largest over others with as many turns; else 0."""
    pairs = (zip(planned, other, strict=True) for other in others if len(other) == len(planned))
    return max((statistics.median(a / b for a, b in of_one) for of_one in pairs), default=0.0)


def _turn_s(run: Callable[[], Any], steps: int) -> float:
    began_s = time.process_time()
    for _ in range(steps):
        jax.block_until_ready(run())
    return (time.process_time() - began_s) / steps


def measured_cluster() -> autopar.Cluster:
    """The CPU devices of this process as a quick calibration finds them."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "here.toml")
        autopar.calibrate("here", effort=QUICK).save(file)
        return autopar.Cluster.load(file)


def main(names: list[str], cluster: autopar.Cluster) -> None:
    """Prints a line a family."""
    reference_s = reference.seconds()
    for name in names or family_bytes.CASES:
        build, rules = family_bytes.CASES[name]
        taken = turns(runners(build(), rules, cluster))
        took = {form: min(of_form) for form, of_form in taken.items()}
        planned, in_pairs = took.pop("planned"), paired(taken.pop("planned"), taken.values())
        best = min(took, key=lambda form: took[form])
        others = ", ".join(f"{form} {s:.4f}" for form, s in took.items())
        said = f"{planned:.4f} s, {planned / reference_s:.3g} ref; {others}"
        print(f"{name}: {planned / took[best]:.3f} of {best}, in pairs at most {in_pairs:.3f} ({said})", flush=True)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--cluster")
    given = parser.parse_args()
    main(given.names, autopar.Cluster.load(given.cluster) if given.cluster else measured_cluster())
