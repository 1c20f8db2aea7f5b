"""``python -m benchmarks.published.alpa``: plans that are found for Alpa's GPTs, against the steps that Alpa published.

The models are those of its weak scaling inside a node (10 layers, 8 sequences of 1,024 tokens, V100s of 32 GB); each is
planned for the program that XLA makes, without pipeline. A found plan is to be as fast as the one that Alpa ran: as its
measured step, and as the published plan of the same program (`Manual`) by the same prices.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import click
import jax
import jax.numpy as jnp
import optax
from rich.console import Console

import autopar
from autopar.cluster import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.search import Manual
from benchmarks.published.dataset import Run, load
from benchmarks.published.score import score
from benchmarks.published.transformer import TrainingPlan, TransformerSpec, load_constants
from benchmarks.report import Row, table
from examples import gpt

_DATASET = "Alpa intra-op weak scaling"
_SEED = 20261123


def mixed_step(spec: TransformerSpec, batch: int) -> tuple[Any, tuple[Any, Any]]:
    """The train step that Alpa's benchmark runs, and shapes of its arguments.

    Layers are unrolled; the parameters that the model reads are in float16, those that Adam updates in float32, kept
    besides (``use_master_copy`` of alpa.model.model_util.TrainState); no gradient is clipped, biases and norms do not
    decay.

    Args:
        spec: sizes of the model.
        batch: sequences a step.
    """
    config = gpt.Config(
        layers=spec.layers, hidden=spec.hidden, ffn=spec.ffn, heads=spec.heads, vocab=spec.vocab, seq=spec.seq,
        batch=batch, dtype="float16", tied=spec.tied, clip=None,
    )  # fmt: skip
    init, apply = gpt.make_model(config)
    optimizer = optax.adamw(1e-2, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree))

    def cast(tree: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    def create() -> tuple[Any, Any]:
        params = init(jax.random.key(0), share_trace=True)
        state = {"params": cast(params, jnp.float16), "master": params, "opt_state": optimizer.init(params)}
        return state, gpt.token_batch(jax.random.key(1), batch, spec.seq, spec.vocab)

    def loss_of(params: Any, tokens: Any) -> jax.Array:
        return gpt.token_loss(apply(params, tokens["tokens"]), tokens["labels"])

    def train_step(state: Any, tokens: Any) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], tokens)
        updates, moments = optimizer.update(cast(grads, jnp.float32), state["opt_state"], state["master"])
        master = optax.apply_updates(state["master"], updates)
        return {"params": cast(master, jnp.float16), "master": master, "opt_state": moments}, loss

    return train_step, gpt.materialize(create, True)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model that is planned on one node.

    Args:
        spec: the model.
        batch: sequences a step.
        cluster: the node, with the stack that is compiled.
        named: plans that are known of it.
    """

    spec: TransformerSpec
    batch: int
    cluster: Cluster
    named: tuple[TrainingPlan, ...]

    def found(self) -> autopar.Plan:
        """The plan that the search finds."""
        return self._plan()

    def known_s(self) -> float:
        """Seconds of the fastest of the named plans that fit, in one microbatch as they ran; inf where none fits."""
        seconds = [math.inf]
        for plan in self.named:
            try:
                seconds.append(self._plan(search=Manual(tp=plan.tp, dp=plan.dp, zero=plan.zero)).step_time)
            except InfeasiblePlanError:
                continue
        return min(seconds)

    def _plan(self, **options: Any) -> autopar.Plan:
        step, args = mixed_step(self.spec, self.batch)
        return autopar.parallelize(step, cluster=self.cluster, donate_argnums=0, num_stages=1, **options).plan(*args)


def problem_of(run: Run) -> Problem:
    """The problem of a published run."""
    return Problem(run.spec, run.plans[0].global_batch, dataclasses.replace(run.cluster, stack="xla"), run.plans)


def published(most_devices: int) -> Iterator[Run]:
    """Measured runs on at most so many devices."""
    for run in load():
        if run.dataset == _DATASET and run.measured_s is not None and run.cluster.num_devices <= most_devices:
            yield run


def drawn(count: int, most_devices: int, seed: int = _SEED) -> Iterator[Problem]:
    """Neighbours of the published runs: other layers, widths, batches and numbers of devices, tp x dp and ZeRO known.

    Args:
        count: how many.
        most_devices: on how many devices at most.
        seed: of the draw.
    """
    draw, runs = random.Random(seed), [*published(8)]
    for _ in range(count):
        run = draw.choice(runs)
        devices = draw.choice([n for n in (2, 4, 8) if n <= most_devices])
        heads = draw.choice([16, 24, 32])
        spec = dataclasses.replace(
            run.spec, layers=draw.choice([2, 3, 4]), hidden=heads * 128, ffn=heads * 512, heads=heads, kv_heads=heads
        )
        batch = draw.choice([8, 16, 32])
        degrees = [2**k for k in range(devices.bit_length())]
        named = [TrainingPlan(batch, batch * t // devices, tp=t, dp=devices // t) for t in degrees]
        named += [dataclasses.replace(p, zero=2) for p in named if p.dp > 1]
        cluster = dataclasses.replace(runs[0].cluster, stack="xla")
        groups = (dataclasses.replace(cluster.groups[0], count=1, devices_per_node=8),)
        whole = dataclasses.replace(cluster, groups=groups)
        yield Problem(spec, batch, whole if devices == 8 else whole.part(0, devices), tuple(named))


def _row(problem: Problem) -> Row:
    found_s, known_s = problem.found().step_time, problem.known_s()
    return {
        "devices": problem.cluster.num_devices,
        "layers": problem.spec.layers,
        "hidden": problem.spec.hidden,
        "batch": problem.batch,
        "found_s": found_s,
        "known plan_s": known_s,
        "found/known": found_s / known_s,
    }


def rows(most_devices: int = 8) -> tuple[Row, ...]:
    """Found, known and published steps of the published runs.

    Args:
        most_devices: larger runs are left out.
    """
    constants, made = load_constants(), []
    for run in published(most_devices):
        assert run.measured_s is not None
        (priced,) = score([run], constants)
        row = _row(problem_of(run))
        made.append(
            {
                **row,
                "ZeRO": run.plans[0].zero,
                "published_s": run.measured_s,
                "found/published": float(row["found_s"]) / run.measured_s,
                "known/published": float(row["known plan_s"]) / run.measured_s,
                "bill/published": priced.prediction.step_s / run.measured_s,
            }
        )
    return tuple(made)


@click.command()
@click.option("--devices", default=8, show_default=True, help="The largest number of devices.")
@click.option("--draw", default=0, show_default=True, help="So many neighbours are drawn, and take the table's place.")
@click.option("--seed", default=_SEED, show_default=True, help="Of the draw.")
def main(devices: int, draw: int, seed: int) -> None:
    """Prints the table."""
    console = Console(width=160)
    if draw:
        console.print(table("Neighbours of Alpa's GPTs", tuple(map(_row, drawn(draw, devices, seed)))))
    else:
        console.print(table("Alpa's GPTs inside a node", rows(devices)))


if __name__ == "__main__":
    main()
