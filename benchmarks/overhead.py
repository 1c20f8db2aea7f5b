"""What a step costs beyond the compiled program: the decorated call next to two calls by hand, in turns.

    decorated    ``state, metrics = function(state, batch)``
    executable   the compiled object, called with placed flat arguments
    jitted       `jax.jit` of the same lowered function with the same shardings, called with flat arguments

Each has a state of its own that goes from step to step, donated. A round runs the three one after the other,
beginning with another one each time; a ratio is the median over rounds, so that other load on the machine falls on all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

import autopar
from benchmarks.clusters import bytes_cluster
from benchmarks.report import Report, Row, Say
from examples import gpt, mlp

TARGET = 1.03
WARM_ROUNDS = 3


@dataclass(frozen=True)
class Model:
    """A model: name, module of examples, preset and overrides."""

    name: str
    module: Any
    preset: str
    overrides: dict[str, Any] = field(default_factory=dict)


MODELS = (
    Model("mlp", mlp, "small", {"layers": 4, "hidden": 512, "batch": 1024, "optimizer": "adam"}),
    Model("gpt", gpt, "tiny", {"layers": 4, "hidden": 128, "seq": 64, "batch": 16, "vocab": 512}),
)
QUICK = (Model("mlp, tiny", mlp, "tiny"),)
"""Too small for the target: it shows that all three run."""


def measure(model: Model, rounds: int) -> Row:
    """The row of a model."""
    step, args = model.module.build(model.preset, **model.overrides)
    host = jax.device_get(args)
    function = autopar.parallelize(step, cluster=bytes_cluster(), donate_argnums=0)
    compiled = function.compile(*args)
    local = compiled.local
    kept = len(jax.tree.leaves(args[0]))

    def flat_loop(call: Callable[..., Sequence[Any]]) -> Callable[[], None]:
        leaves = local.place_all(jax.tree.leaves(host))
        if len(leaves) != len(local.entries):
            raise ValueError("arguments with static leaves are not measured")

        def once() -> None:
            results = call(*leaves, *local.constants)
            jax.block_until_ready(results)
            leaves[:kept] = results[:kept]

        return once

    placed = function.shard(*host)
    states = [placed[0]]
    batch = placed[1]

    def decorated() -> None:
        states[0], metrics = function(states[0], batch)
        jax.block_until_ready((states[0], metrics))

    ways = (decorated, flat_loop(local.executable), flat_loop(local.program.function))
    seconds: list[tuple[float, ...]] = []
    for round in range(WARM_ROUNDS + rounds):
        taken = [0.0] * len(ways)
        for turn in range(len(ways)):
            which = (round + turn) % len(ways)
            began_s = time.perf_counter()
            ways[which]()
            taken[which] = time.perf_counter() - began_s
        seconds.append(tuple(taken))
    kept_rounds = seconds[WARM_ROUNDS:]
    by_way = list(zip(*kept_rounds, strict=True))
    return {
        "model": model.name,
        "mesh": "x".join(str(n) for n in compiled.plan.stages[0].mesh_shape.values()),
        "leaves": len(local.entries),
        "rounds": rounds,
        "decorated_s": statistics.median(by_way[0]),
        "executable_s": statistics.median(by_way[1]),
        "jitted_s": statistics.median(by_way[2]),
        "fastest decorated_s": min(by_way[0]),
        "fastest executable_s": min(by_way[1]),
        "fastest jitted_s": min(by_way[2]),
        "decorated/executable": statistics.median(a / b for a, b, _ in kept_rounds),
        "decorated/jitted": statistics.median(a / c for a, _, c in kept_rounds),
    }


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes one tiny model and holds it to no target."""
    rows: list[Row] = []
    for model in QUICK if quick else MODELS:
        say(f"overhead: {model.name}")
        rows.append(measure(model, 5 if quick else 150))
    return Report(
        "overhead",
        f"a decorated step takes at most {TARGET:.2f} times the step jitted by hand",
        tuple(rows),
        quick or all(row["decorated/jitted"] <= TARGET and row["decorated/executable"] <= TARGET for row in rows),
        measured=("decorated_s", "executable_s", "jitted_s"),
    )
