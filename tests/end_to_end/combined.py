"""Cells of the matrix of everything combined: what they are, how they are drawn, and the oracle of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar import Cluster, InfeasiblePlanError, Plan, ScheduleError
from autopar.frontend.equations import bind_equation, interpreted
from autopar.ir.formats import WireFormat
from autopar.precision import DENIED, Precision, mixed, precision_of
from autopar.schedule import get
from autopar.transforms import loss_scaled, narrow_parameters
from examples import gpt
from examples._common import token_batch, token_loss
from tests.end_to_end.clusters import toy
from tests.end_to_end.towers import Towers

MODELS = ("perceptron", "stack", "gpt", "towers")
PRECISIONS: Mapping[str, Any] = MappingProxyType(
    {
        "wide": None,
        "bf16": "bf16",
        "f16": "f16",  # with a scaled loss
        "own": Precision("bf16", deny=DENIED | {"tanh"}),
    }
)
WIRES: Mapping[str, Any] = MappingProxyType(
    {
        "exact": None,
        "g-int8": {"gradients": "int8"},
        "g-bf16": {"gradients": "bf16"},
        "g-f8": {"gradients": "f8_e4m3"},
        "w-int8": {"weights": "int8"},
        "w-bf16": {"weights": "bf16"},
        "both": {"gradients": WireFormat("int8", 64), "weights": WireFormat("int4", 16)},
    }
)
OFFLOADS = ("none", "auto", "layers", "update")
STAGES, MICROBATCHES = (1, 2, 4), (1, 2, 4)
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "branches")
#: Largest error of an element by the largest of its block (docs/precision.md).
STEP = MappingProxyType({"int8": 1 / 254, "int4": 1 / 14, "f8_e4m3": 1 / 16, "f8_e5m2": 1 / 8, "bf16": 1 / 256})


#: Error of a gradient by its largest element that another order of sums makes where compute is narrow.
NARROW = MappingProxyType({"wide": 0.0, "bf16": 2.0**-6, "own": 2.0**-6, "f16": 2.0**-9})
RATE = 0.1


@dataclass(frozen=True)
class Cell:
    """One combination; ``stages`` of branches are as many as they are."""

    model: str
    precision: str
    wire: str
    offload: str
    stages: int
    schedule: str
    microbatches: int
    split: bool

    def __str__(self) -> str:
        return "-".join(map(str, dataclasses.astuple(self)[:-1])) + ("-split" if self.split else "")


def can_be(cell: Cell) -> bool:
    """Whether the parts of a cell go together as they are documented."""
    if cell.offload == "layers" and (cell.model != "stack" or cell.stages > 1):
        return False  # there are no stacks, or they are taken apart for the stages
    if cell.schedule == "branches":
        return cell.model == "towers" and cell.stages == 2
    if cell.stages == 1:
        return cell.schedule == "1f1b"  # one stage has no schedule
    if cell.model == "towers":
        return False
    try:
        get(cell.schedule).table(cell.stages, cell.microbatches)
    except ScheduleError:
        return False
    return True


def drawn_cells(seed: int, count: int) -> list[Cell]:
    """Different cells that can be: a third of one stage, half pipelines, the rest branches side by side."""
    rng, cells = np.random.default_rng(seed), []

    def one(values: Any, *weights: float) -> Any:
        return list(values)[rng.choice(len(values), p=np.array(weights) / sum(weights) if weights else None)]

    while len(cells) < count:
        kind = one(("one", "pipeline", "branches"), 7, 10, 3)
        stages = {"one": 1, "pipeline": one(STAGES[1:]), "branches": 2}[kind]
        cell = Cell(
            "towers" if kind == "branches" else one(MODELS),
            one(PRECISIONS, 3, 2, 2, 1),
            one(WIRES, 6, 2, 1, 1, 2, 1, 1),
            one(OFFLOADS),
            stages,
            {"one": "1f1b", "pipeline": one(SCHEDULES[:-1]), "branches": "branches"}[kind],
            one(MICROBATCHES),
            bool(rng.integers(2)),
        )
        if can_be(cell) and cell not in cells:
            cells.append(cell)
    return cells


@dataclass(frozen=True, eq=False)
class Step:
    """A plain step of gradient descent with momentum: errors of gradients go into the state as they are.

    Args:
        loss: of parameters and a batch, a mean over examples.
        args: state and batch; the state is parameters and momentum.
    """

    loss: Callable[[Any, Any], Any]
    args: tuple[Any, Any]

    def __call__(self, state: Any, batch: Any) -> Any:
        params, held = state
        value, grads = jax.value_and_grad(self.loss)(params, batch)
        held = jax.tree.map(lambda m, g: 0.9 * m + g, held, grads)
        return (jax.tree.map(lambda p, m: p - RATE * m, params, held), held), {"loss": value}

    def example_gradients(self, state: Any, batch: Any) -> Any:
        """The sum over examples of the largest element of their gradients: what any parts of the batch add up to."""
        size = jax.tree.leaves(batch)[0].shape[0]
        one = jax.vmap(jax.grad(self.loss), (None, 0))
        grads = one(state[0], jax.tree.map(lambda x: x[:, None], batch))
        return jax.tree.map(lambda g: jnp.abs(g).reshape(size, -1).max(axis=1).sum() / size, grads)


def build(name: str, dtype: Any, layers: int) -> Step:
    """A plain step of a model of at least ``layers`` layers."""
    rng = np.random.default_rng(7)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[-1] ** 0.5, dtype)

    batch = {"x": 4 * array(16, 32), "y": 4 * array(16, 32)}
    if name == "towers":
        towers = Towers((2, 2), width=32, batch=16)
        _, ((params,), batch) = towers.build(dtype)
        loss = towers.loss
    elif name == "gpt":
        sizes = {"layers": layers, "hidden": 32, "heads": 2, "vocab": 17, "seq": 7}
        init, apply = gpt.make_model(gpt.Config(**sizes, dtype=jnp.dtype(dtype).name))
        params = init(jax.random.key(0), share_trace=True)
        batch = token_batch(jax.random.key(1), 8, 7, 17)

        def loss(params: Any, batch: Any) -> Any:
            return token_loss(apply(params, batch["tokens"]), batch["labels"])

    elif name == "stack":
        params = {"in": array(32, 32), "up": array(layers, 32, 64), "down": array(layers, 64, 32)}
        loss = _stacked
    else:
        params = [{"w": array(32, 32), "b": array(32)} for _ in range(layers)]
        loss = _perceptron
    return Step(loss, ((params, jax.tree.map(jnp.zeros_like, params)), batch))


def _perceptron(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - batch["y"]) ** 2)


def _stacked(params: Any, batch: Any) -> Any:
    def layer(x: Any, own: Any) -> Any:
        return x + jnp.tanh(x @ own[0]) @ own[1], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"] @ params["in"], (params["up"], params["down"]))
    return jnp.mean((x - batch["y"]) ** 2)


def cluster(model: str) -> Cluster:
    """Devices with links to their hosts; over slower links the integer programs of a GPT's stages take minutes."""
    made = toy(bandwidth=1e8 if model == "gpt" else 1e6)
    (group,) = made.groups
    return dataclasses.replace(made, groups=(dataclasses.replace(group, host_bandwidth=1e9),))


def parallel(cell: Cell, fn: Callable[..., Any], args: Any) -> tuple[Any, Plan]:
    """The decorated step of a cell, and its plan."""
    options: dict[str, Any] = {
        "cluster": cluster(cell.model),
        "precision": PRECISIONS[cell.precision],
        "wire": WIRES[cell.wire],
        "offload": cell.offload,
        "num_microbatches": cell.microbatches,
        "num_stages": "auto" if cell.schedule == "branches" else cell.stages,
        "schedule": "none" if cell.stages == 1 else cell.schedule,
        "donate_argnums": 0,
    }
    if cell.split and cell.schedule != "branches":
        options["constraints"] = constraints(cell.model)
    step = autopar.parallelize(fn, **options)
    plan = step.plan(*args)
    if cell.offload != "auto":
        return step, plan
    limit: float | None = 0.9 * plan.peak_memory
    while limit is not None and limit < plan.peak_memory:
        limited = autopar.parallelize(fn, **options, memory_limit=int(limit))
        try:
            limited.compile(*args)
        except InfeasiblePlanError as error:
            # The least that would do, where the search knows it.
            limit = None if error.least_bytes is None or error.least_bytes <= limit else 1.01 * error.least_bytes
            continue
        least = limited.plan(*args)
        assert least.peak_memory <= limit
        return limited, least
    return step, plan


def constraints(model: str) -> dict[str, Any]:
    """Matrices of the model split, so that they are gathered for the passes, and their gradients summed into parts."""
    if model == "stack":
        return {"**/up": (1,), "**/down": (1,)}
    return {"perceptron": {"**/w": (0,)}, "gpt": {"**/kernel": (0,)}, "towers": {"**/tower0/*": (0,)}}[model]


def oracle(cell: Cell, fn: Callable[..., Any], args: Any) -> Callable[..., Any]:
    """The step with what changes values alone, on one device: the pure transform of its jaxpr, the whole batch."""
    precision = precision_of(PRECISIONS[cell.precision])
    if precision is None:
        return jax.jit(fn)
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    state, batch = (jax.tree.leaves(a) for a in args)
    narrow = mixed(precision, closed, [*(True for _ in state), *(False for _ in batch)])

    def equation(eqn: Any, operands: list[Any], scope: str) -> list[Any]:
        if eqn.primitive.name != "dot_general" or operands[0].dtype == jnp.float32:
            return bind_equation(eqn, operands, {})
        # Products of narrow numbers are exact in float32; not all of XLA's for CPUs take narrow operands.
        wide = [x.astype(jnp.float32) for x in operands]
        (total,) = bind_equation(eqn, wide, {"preferred_element_type": jnp.float32})
        return [total.astype(eqn.outvars[0].aval.dtype)]

    run = jax.jit(lambda *leaves: interpreted(narrow.jaxpr, [*narrow.consts, *leaves], "", equation, lambda x: x))
    return lambda *given: jax.tree.unflatten(jax.tree.structure(shape), run(*jax.tree.leaves(given)))


def sent_error(cell: Cell, step: Step) -> Callable[..., list[tuple[Any, Any]]]:
    """A function of state and batch: what the formats of a cell may add to each leaf of the gradient.

    The first of a leaf is the bound of an element: a sum is encoded a term, and an all-reduce encodes it once more. The
    second is of the norm, as errors of elements are independent. Weights are rounded block by block: which blocks is
    the plan's, so four times the error is allowed that `narrow_parameters` makes with its own, of the norm twice.
    """
    formats = dict(WIRES[cell.wire] or {})

    def largest(state: Any, batch: Any) -> list[tuple[Any, Any]]:
        plain = jax.tree.leaves(jax.grad(step.loss)(state[0], batch))
        allowed = [(jnp.zeros(()), jnp.zeros(())) for _ in plain]
        if "gradients" in formats:
            f = STEP[getattr(formats["gradients"], "name", formats["gradients"])]
            terms = jax.tree.leaves(step.example_gradients(state, batch))
            allowed = [(t * f * (2 + f), 4 * f * _norm(g)) for t, g in zip(terms, plain, strict=True)]
        if "weights" in formats:
            rounded = narrow_parameters(step, format=formats["weights"], params="0")(state, batch)[0][1]
            there = [a - 0.9 * b for a, b in zip(jax.tree.leaves(rounded), jax.tree.leaves(state[1]), strict=True)]
            apart = [(4 * jnp.abs(x - y).max(), 2 * _norm(x - y)) for x, y in zip(there, plain, strict=True)]
            allowed = [(a + m, b + n) for (a, b), (m, n) in zip(allowed, apart, strict=True)]
        return allowed

    return jax.jit(largest)


def _norm(x: Any) -> Any:
    return jnp.sqrt((x * x).sum())


@dataclass(frozen=True)
class Compared:
    """A leaf of the state after a step, by its largest element or its norm: how far it is from the oracle's."""

    path: str
    error: float
    allowed: float
    moved: float


def compared(cell: Cell, steps: int = 2) -> tuple[Plan, list[Compared]]:
    """Steps of a cell, each beside the oracle's from the same state."""
    exact = PRECISIONS[cell.precision] is None and WIRES[cell.wire] is None
    with jax.enable_x64(exact):
        step = build(cell.model, jnp.float64 if exact else jnp.float32, max(2, cell.stages))
        fn: Any = step
        state, batch = jax.tree.map(np.array, step.args)
        if cell.precision == "f16":
            fn = loss_scaled(step, scale=2.0**10)
            state = jax.tree.map(np.array, fn.init(state))
        run, plan = parallel(cell, fn, (state, batch))
        want, sent = oracle(cell, fn, (state, batch)), sent_error(cell, step)
        found: list[Compared] = []
        for _ in range(steps):
            before = state
            state, out = jax.tree.map(np.array, run(jax.tree.map(np.copy, state), batch))
            wanted, told = jax.tree.map(np.array, want(before, batch))
            if cell.precision == "f16":
                assert (state.scale, state.good_steps, state.skipped) == (wanted.scale, wanted.good_steps, 0)
            before, got, aim = (getattr(s, "state", s) for s in (before, state, wanted))
            found += _leaves(cell, sent(before, batch), before, got, aim)
            found.append(Compared("loss", abs(out["loss"] - told["loss"]), _loss_allowed(cell, told["loss"]), 1.0))
    return plan, found


def _loss_allowed(cell: Cell, loss: float) -> float:
    if "weights" in (WIRES[cell.wire] or {}):
        return 0.5 * loss
    return float(loss) * (1e-12 if PRECISIONS[cell.precision] is None and WIRES[cell.wire] is None else 1e-3)


def _leaves(cell: Cell, sent: list[tuple[Any, Any]], before: Any, state: Any, wanted: Any) -> list[Compared]:
    exact = PRECISIONS[cell.precision] is None and WIRES[cell.wire] is None
    bounds = [(RATE * a, RATE * b) for a, b in sent] + sent
    found = []
    flat = [jax.tree_util.tree_flatten_with_path(t)[0] for t in (before, state, wanted)]
    # Sums whose terms nearly cancel, as biases in front of a softmax: their error is by their terms.
    least = 1e-2 * max(float(np.abs(aim - old).max()) for (_, old), _, (_, aim) in zip(*flat, strict=True))
    for both, (path, old), (_, got), (_, aim) in zip(bounds, *flat, strict=True):
        assert got.shape == aim.shape and got.dtype == aim.dtype
        for bound, order in zip(both, (np.inf, None), strict=True):
            size, moved, error = (float(np.linalg.norm(np.ravel(x), order)) for x in (aim, aim - old, got - aim))
            allowed = (1e-12 if exact else 1e-6) * size + NARROW[cell.precision] * max(moved, least) + float(bound)
            found.append(Compared(jax.tree_util.keystr(path), error, allowed, moved))
    return found
