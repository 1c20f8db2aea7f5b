"""Small random steps on small random clusters, with what is asked of the plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar import InfeasiblePlanError, Plan
from autopar.cluster import Cluster, Device, LinkSpec, NodeGroup
from autopar.search.policy import SearchPolicy
from tests.search.joint.space import SCHEDULES, Asked, Space
from tests.search.problems import f32, with_policy

#: (nodes, devices of each), and how often each is drawn.
SHAPES = (((1, 2), 0.3), ((2, 1), 0.4), ((2, 2), 0.15), ((1, 4), 0.15))

DEFAULT = SearchPolicy()

#: Bytes a device where memory is no matter.
PLENTY = 10**9


@dataclass(frozen=True)
class Case:
    """A step, where it is to run, and what is asked for.

    ``memory_bound`` is the memory limit as a part of what the best plan without a limit needs; None for none.
    """

    number: int
    widths: tuple[int, ...]
    bent: tuple[bool, ...]
    momentum: bool
    batch: int
    cluster: Cluster
    memory_bound: float | None
    donated: tuple[int, ...]
    asked: Asked

    def step(self) -> tuple[Callable[..., Any], Sequence[Any]]:
        """A train step of a product a layer, some with a tanh behind it, and its abstract arguments."""

        def loss(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
            for w, bent in zip(weights, self.bent, strict=True):
                x = jnp.tanh(x @ w) if bent else x @ w
            return (x * x).mean()

        def step(state: Any, x: jax.Array) -> Any:
            weights, *moments = state
            gradients = jax.grad(loss)(weights, x)
            for held in moments:
                gradients = [0.9 * m + g for m, g in zip(held, gradients, strict=True)]
            return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], *([gradients] * len(moments))

        weights = [f32(*shape) for shape in itertools.pairwise(self.widths)]
        return step, ((weights,) * (1 + self.momentum), f32(self.batch, self.widths[0]))

    def planned(self, limit_bytes: int, policy: SearchPolicy = DEFAULT) -> Plan | None:
        """What autopar chooses; None where nothing fits."""
        fn, args = self.step()
        asked = self.asked
        try:
            parallel = autopar.parallelize(
                fn,
                cluster=self.cluster,
                memory_limit=limit_bytes,
                donate_argnums=self.donated,
                num_stages=asked.stages or "auto",
                num_microbatches=asked.microbatches or "auto",
                schedule=asked.schedule or "auto",
                rewrites=False,  # what is enumerated is the step as it is written
            )
            return with_policy(parallel, policy).plan(*args)
        except InfeasiblePlanError:
            return None

    def limit_bytes(self) -> int:
        """The memory limit."""
        if self.memory_bound is None:
            return PLENTY
        free = self.planned(PLENTY)
        assert free is not None
        return int(free.peak_memory * self.memory_bound)

    def space(self, limit_bytes: int) -> Space:
        """All ways."""
        fn, args = self.step()
        counts = tuple(n for n in (1, 2, 4, 8) if self.batch % n == 0)
        return Space(fn, args, self.cluster, limit_bytes, self.donated, counts, self.asked)


def case(number: int) -> Case:
    """The ``number``-th case; equal for equal numbers."""
    rng = np.random.default_rng((31, number))
    layers = int(rng.integers(2, 5))
    (nodes, per), _ = SHAPES[rng.choice(len(SHAPES), p=[p for _, p in SHAPES])]
    if nodes * per > 2:
        layers = min(layers, 3)  # more of both have too many ways
    # Slow devices: a step takes long next to what starting a program takes.
    device = Device("toy", PLENTY, float(rng.choice([1e6, 1e7])), (("f32", 1e6),))
    inside = float(rng.choice([1e4, 1e5, 1e6]))
    links = (LinkSpec(b, float(rng.choice([1e-5, 1e-3]))) for b in (inside, inside / float(rng.choice([1, 5, 20]))))
    kind = rng.choice(["free", "stages", "counts", "schedule"], p=[0.4, 0.3, 0.15, 0.15])
    stages = int(rng.integers(2, min(layers, nodes * per) + 1))
    asked = Asked(
        None if kind == "free" else stages,
        None if kind in ("free", "stages") else int(rng.choice([2, 4])),
        str(rng.choice(SCHEDULES)) if kind == "schedule" else None,
    )
    return Case(
        number,
        tuple(int(w) for w in rng.choice([4, 8, 16, 32, 64], layers + 1)),
        tuple(bool(b) for b in rng.integers(0, 2, layers)),
        bool(rng.integers(0, 2)),
        int(rng.choice([4, 8])),
        Cluster("toy", (NodeGroup(nodes, per, device, *links),)),
        None if rng.random() < 0.3 else float(rng.uniform(0.6, 1.0)),
        (0,) if rng.integers(0, 2) else (),
        asked,
    )
