"""``python -m tests.fuzz.edits``: saved plans with one bit or one entry changed, run and compared with the plain step.

Each edit of a plan gives the values of the undecorated function under `jax.jit` on one device, or a typed error. Plans
are of different kinds (`CASES`), edits are drawn: half of them flip a bit of the file, half change an entry of it.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("AUTOPAR_CACHE_DIR", "off")

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar import Cluster, Plan
from autopar.cluster import Device, LinkSpec, NodeGroup
from autopar.errors import AutoparError
from autopar.ir import Layout
from autopar.search import Manual
from examples import mlp, moe
from tests.end_to_end.stacked import build as stacked
from tests.end_to_end.towers import Towers

#: Edits after which compiled programs are let go.
_CLEAR = 100
Built = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A kind of plan.

    Args:
        build: the step and its arguments.
        options: of `parallelize`.
        holds: what a plan of this kind has.
    """

    build: Callable[[], Built]
    options: dict[str, Any]
    holds: Callable[[Plan], Any] = lambda plan: True


def attention(layers: int = 1, batch: int = 8) -> Built:
    """A step of layers of causal attention, with four weights each."""

    def layer(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhe->bhse", x, w[name]) for name in "qkv")
        scores = jnp.einsum("bhse,bhte->bhst", q, k) * 0.5
        scores = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), scores, -1e30)
        mixed = jnp.einsum("bhst,bhte->bhse", jax.nn.softmax(scores), v)
        return x + jnp.einsum("bhse,hed->bsd", mixed, w["o"])

    def loss(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for w in params:
            x = layer(w, x)
        return jnp.mean(x**2)

    def step(params: list[dict[str, jax.Array]], x: jax.Array) -> tuple[list[dict[str, jax.Array]], jax.Array]:
        value, grad = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grad), value

    rng = np.random.default_rng(0)
    shapes = dict.fromkeys("qkv", (8, 4, 2)) | {"o": (4, 2, 8)}
    params = [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(layers)]
    return step, (params, rng.normal(size=(batch, 8, 8)))


def loops() -> Built:
    """A step with a scan, a while loop, a branch, positions and integers."""

    def loss(w: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
        def layer(y: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = jnp.tanh(y @ m)
            return y, y.sum()

        y, sums = jax.lax.scan(layer, x, w)
        y = jax.lax.cond(at[0] > 3, lambda a: a * 2.0, lambda a: a[::-1], y)
        y = jax.lax.fori_loop(0, 3, lambda n, a: a + jnp.sin(a) * n, y)
        return (y[at] ** 2).mean() + sums.mean() + jnp.sort(y, axis=0)[:2].sum()

    def step(w: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        value, grad = jax.value_and_grad(loss)(w, batch["x"], batch["at"])
        return w - 0.1 * grad, {"loss": value, "largest": jnp.abs(grad).max()}

    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 8)), "at": rng.integers(0, 8, 8).astype(np.int32)}
    return step, (jnp.asarray(rng.normal(size=(4, 8, 8)) / 3), batch)


def _mlp(**sizes: Any) -> Callable[[], Built]:
    return lambda: mlp.build(**{"dtype": "float64", "layers": 2, "hidden": 16, "batch": 16, **sizes})


#: Eight slow devices with fast links, and a link to their host: small steps are worth splitting.
_DEVICE = Device("slow", 10**9, 1e9, (("f64", 1e8), ("f32", 1e8)))
_CLUSTER = Cluster("eight", (NodeGroup(1, 8, _DEVICE, LinkSpec(1e11, 0.0), LinkSpec(1e11, 0.0), host_bandwidth=25e9),))
_ONE = {"num_stages": 1, "num_microbatches": 1}
CASES: dict[str, Case] = {
    "three axes": Case(_mlp(), {**_ONE, "mesh_shape": (2, 2, 2)}),
    "zero and tensor": Case(
        _mlp(), {**_ONE, "search": Manual(tp=2, dp=4, zero=3), "donate_argnums": 0}, lambda p: p.content.donated
    ),
    "microbatches": Case(_mlp(optimizer="adam"), {"num_stages": 1, "num_microbatches": 4, "mesh_shape": (4, 2)}),
    "recomputed": Case(
        lambda: stacked(2, width=8, dtype=jnp.float64),
        {**_ONE, "remat": "full", "mesh_shape": (4, 2)},
        lambda p: p.stages[0].form.remat == "full",
    ),
    "loops": Case(loops, {**_ONE, "mesh_shape": (2, 2, 2)}),
    "context parallel": Case(
        attention,
        {**_ONE, "search": Manual(dp=2, cp=2, tp=2), "attention": "blocks"},
        lambda p: any("attention" in r.id for r in p.content.operators),
    ),
    "experts": Case(lambda: moe.build("tiny", dtype="float64", layers=1), {**_ONE, "mesh_shape": (4, 2)}),
    "padded": Case(
        _mlp(hidden=31, batch=31), {**_ONE, "mesh_shape": (4, 2)}, lambda p: p.stages[0].form.padded
    ),
    "host": Case(
        _mlp(optimizer="adam"),
        {**_ONE, "offload": "update", "donate_argnums": 0, "search": Manual(dp=8, zero=1)},
        lambda p: any(i.memory == "host" for i in p.content.inputs) and any(r.on_host for r in p.content.operators),
    ),
    "pipeline": Case(
        _mlp(), {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b"}, lambda p: p.num_stages == 2
    ),
    "interleaved": Case(
        _mlp(layers=4),
        {"num_stages": 4, "num_microbatches": 4, "schedule": "interleaved", "remat": "full"},
        lambda p: p.stages[0].form.remat == "full",
    ),
    "stack in stages": Case(
        lambda: stacked(4, width=8, dtype=jnp.float64), {"num_stages": 2, "num_microbatches": 2},
        lambda p: p.content.stack_groups > 1,
    ),
    "branches": Case(
        lambda: Towers((2, 2), momentum=True).build(), {"schedule": "branches", "num_microbatches": 2},
        lambda p: p.pipeline and p.pipeline.members,
    ),
    "slices of tokens": Case(
        lambda: attention(2, 16),
        {"num_stages": 2, "num_microbatches": 2, "schedule": "1f1b", "token_slices": 2},
        lambda p: p.pipeline and p.pipeline.slice_lengths,
    ),
}  # fmt: skip


def planned(name: str, step: Callable[..., Any], args: tuple[Any, ...]) -> Plan:
    """The plan of a case."""
    plan = autopar.parallelize(step, **{"cluster": _CLUSTER, **CASES[name].options}).plan(*args)
    operators = [r for content in (plan.content, *plan.content.parts) for r in content.operators]
    if not any(Layout.parse(k).axes for r in operators for k in r.results) or not CASES[name].holds(plan):
        raise ValueError(f"the plan of {name!r} is not of its kind:\n{plan}")
    return plan


class Edits:
    """Edits of one saved plan.

    Args:
        name: of the case.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        with jax.enable_x64(True):
            self.step, args = CASES[name].build()
            self.args = jax.tree.map(np.asarray, args)
            self.want = jax.tree.map(np.asarray, jax.jit(self.step)(*self.fresh()))
            self.plan = planned(name, self.step, args)
        self.donated = CASES[name].options.get("donate_argnums", ())
        self.text = self.plan.to_json()
        self.document = json.loads(self.text)["plan"]
        self.known: dict[str, str] = {}
        self.entries: set[str] = set()
        self.traced: dict[Any, Any] = {}
        self.ran = 0

    def fresh(self) -> tuple[Any, ...]:
        """Arguments that may be donated."""
        return tuple(jax.tree.map(np.array, self.args))

    def outcome(self, text: str | bytes) -> str:
        """What comes of a plan's text: "equal", "WRONG" with the difference, "typed" or "RAW" with the error.

        Of plans that decide the same one runs, and one for each kind of entry that differs from the saved plan.
        """
        try:
            plan = Plan.from_json(text)
        except Exception as error:
            return _refusal(error)
        document = json.loads(plan.to_json())["plan"]
        key, entries = json.dumps(_decided(document)), set(_different(document, self.document))
        if key not in self.known or not entries <= self.entries:
            self.known[key], self.ran = self._run(plan), self.ran + 1
            self.entries |= entries
        return self.known[key]

    def _run(self, plan: Plan) -> str:
        """What comes of a plan."""
        try:
            with jax.enable_x64(True):
                run = autopar.parallelize(self.step, plan=plan, donate_argnums=self.donated)
                run._plain._traced.update(self.traced)
                got = jax.tree.map(np.asarray, run(*self.fresh()))
                self.traced = dict(run._plain._traced)
        except Exception as error:
            return _refusal(error)
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(self.want), strict=True)
        worst = max(_difference(a, b) for a, b in pairs)
        return "equal" if worst < 1e-8 else f"WRONG by {worst:.2e}"

    def drawn(self, seed: int) -> tuple[str, bytes]:
        """(what is changed, the text of the plan with the change)."""
        rng = random.Random(f"{self.name} {seed}")
        if rng.random() < 0.5:
            return self._bit(rng)
        return self._entry(rng)

    def _bit(self, rng: random.Random) -> tuple[str, bytes]:
        data = bytearray(self.text.encode())
        # Most bits of a file are those of spaces and of numbers that nothing is computed from.
        layouts = [m.start(1) for m in re.finditer(rb"(?<=[\[,+(])([xyzw.])(?=[\],+)])", bytes(data))]
        place = rng.choice(layouts) if layouts and rng.random() < 0.5 else rng.randrange(len(data))
        bit = rng.randrange(2) if rng.random() < 0.5 else rng.randrange(8)
        before = bytes(data[max(0, place - 30) : place + 30])
        data[place] ^= 1 << bit
        return f"bit {bit} of byte {place}, in {before!r}", bytes(data)

    def _entry(self, rng: random.Random) -> tuple[str, bytes]:
        document = json.loads(self.text)
        everywhere = list(_places(document))
        decides = [p for p in everywhere if _decides(p)]
        place = rng.choice(decides if rng.random() < 0.7 else everywhere)
        at = document
        for key in place[:-1]:
            at = at[key]
        last = place[-1]
        before = copy.deepcopy(at[last])
        match rng.randrange(8):
            case 0:
                del at[last]
            case 1 if isinstance(at, list):
                at.insert(last, copy.deepcopy(at[last]))
            case 2 if isinstance(at, list) and len(at) > 1:
                other = rng.randrange(len(at))
                at[last], at[other] = at[other], at[last]
            case 3:
                alike = [p for p in everywhere if p[-1] == last and p != place] or everywhere
                found: Any = document
                for key in rng.choice(alike):
                    found = found[key]
                at[last] = copy.deepcopy(found)
            case _:
                at[last] = _changed(rng, before)
        path = ".".join(map(str, place))
        return f"{path}: {json.dumps(before)[:80]} -> {json.dumps(at)[:200]}", json.dumps(document).encode()


#: Entries of which no program depends on the value.
_PREDICTED = frozenset({
    "step_time", "peak_memory", "choices", "search", "notes", "rewrites", "product_flops", "memory_limit",
    "compute_time", "memory", "collectives", "work_times", "activation_bytes", "host",
    "weight_stash_bytes", "accumulation_bytes", "state_bytes", "received_bytes", "axis_roles",
})  # fmt: skip


def _decided(value: Any, path: tuple[str, ...] = ()) -> Any:
    """A plan without the predictions of itself and its stages."""
    if isinstance(value, dict):
        predicted = _PREDICTED if path in ((), ("parts",), ("stages",), ("parts", "stages")) else frozenset[str]()
        return {k: _decided(v, (*path, k)) for k, v in value.items() if k not in predicted}
    return [_decided(v, path) for v in value] if isinstance(value, list) else value


def _different(value: Any, other: Any, path: str = "") -> Iterator[str]:
    """Kinds of entries in which two documents differ: their paths without numbers."""
    if isinstance(value, dict) and isinstance(other, dict):
        for k in sorted(value.keys() | other.keys()):
            yield from _different(value.get(k), other.get(k), f"{path}.{k}")
    elif isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        for a, b in zip(value, other, strict=True):
            yield from _different(a, b, f"{path}[]")
    elif value != other:
        yield path


def _refusal(error: Exception) -> str:
    """The outcome of an error."""
    line = str(error).partition("\n")[0][:200]
    return f"{'typed' if isinstance(error, AutoparError) else 'RAW'} {type(error).__name__}: {line}"


def _difference(got: Any, want: Any) -> float:
    """The largest difference of two arrays, next to the largest number."""
    return float(np.max(np.abs(got - want), initial=0.0) / (1e-9 + np.max(np.abs(want), initial=0.0)))


def _places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where all values of a document are."""
    if way:
        yield way
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, v in inside:
        yield from _places(v, (*way, key))


_DECIDING = frozenset({"stages", "inputs", "outputs", "operators", "copies", "pipeline", "cuts", "donated",
                       "num_microbatches", "schedule", "memory_bound", "stack_groups", "parts", "cluster"})  # fmt: skip


def _decides(place: tuple[Any, ...]) -> bool:
    """Whether a program may depend on an entry."""
    names = [k for k in place if isinstance(k, str)]
    if names[0] != "plan" or len(names) < 2:
        return False
    path = names[2:] if names[1] == "parts" else names[1:]
    return bool(path) and path[0] in _DECIDING and not {"collectives", "memory", "work_times"} & set(path[1:-1])


def _changed(rng: random.Random, value: Any) -> Any:
    """Another value of the kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, value * 2, 0, 1))
    if isinstance(value, float):
        return rng.choice((value * 2, 0.0, value + 1))
    if isinstance(value, str):
        return _other_text(rng, value)
    if isinstance(value, list):
        return rng.choice(([], value[:-1], value[::-1], [*value, *value[:1]]))
    return rng.choice((None, [], {}, 0, "", False))


def _other_text(rng: random.Random, text: str) -> str:
    """A layout becomes another, any other text one that is near."""
    layout = re.fullmatch(r"\[([^\]]*)\](\+\w+\(.*\))?", text)
    if layout is None:
        return rng.choice((text[:-1], text + "x", text.upper(), "", "host", "device", "lhs", "result", "backward"))
    dims = layout[1].split(",") if layout[1] else []
    tail = layout[2] or ""
    names = ["x", "y", "z"]
    match rng.randrange(5):
        case 0 if dims:
            dims[rng.randrange(len(dims))] = rng.choice([*names, ".", "x+y", "y+x"])
        case 1 if dims:
            dims = [{"x": "y", "y": "x"}.get(d, d) for d in dims]
        case 2 if len(dims) > 1:
            rng.shuffle(dims)
        case 3:
            tail = rng.choice(("", "+sum(x)", "+sum(y)", "+sum(x,y)", "+max(x)"))
        case _:
            dims = ["."] * len(dims)
            tail = rng.choice((tail, ""))
    return f"[{','.join(dims)}]{tail}"


def run(names: Sequence[str], count: int, first: int = 0, show: bool = False) -> dict[str, Counter[str]]:
    """By case how many edits were equal, typed, raw and wrong; what is raw or wrong is printed."""
    found: dict[str, Counter[str]] = {}
    for name in names:
        began_s = time.process_time()
        edits, kinds = Edits(name), Counter[str]()
        unchanged = edits.outcome(edits.text)
        edits.known.clear()
        without_digest = edits.outcome(re.sub(r'"digest": "\w+"', '"digest": ""', edits.text))
        if (unchanged, without_digest) != ("equal", "equal"):
            print(f"{name}: as saved: {unchanged}; without its digest: {without_digest}", flush=True)
        for seed in range(first, first + count):
            what, text = edits.drawn(seed)
            outcome = edits.outcome(text)
            kind = outcome.partition(" ")[0]
            kinds[kind] += 1
            if not (seed - first + 1) % _CLEAR:
                jax.clear_caches()
            if show or kind in ("RAW", "WRONG"):
                print(f"{name} {seed}: {what[:300]}\n    {outcome[:300]}", flush=True)
        found[name] = kinds
        seconds = time.process_time() - began_s
        counts = ", ".join(f"{n} {k}" for k, n in sorted(kinds.items()))
        print(f"{name}: {counts}; {edits.ran} plans ran; {seconds:.0f} CPU s", flush=True)
    return found


def main(arguments: Sequence[str]) -> int:
    """Runs edits of all cases; 1 where one was raw or wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.edits", description=__doc__)
    parser.add_argument("--edits", type=int, default=500, help="of each plan")
    parser.add_argument("--first", type=int, default=0, help="number of the first edit")
    parser.add_argument("--show", action="store_true", help="print all outcomes")
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    options = parser.parse_args(arguments)
    found = run(options.cases, options.edits, options.first, options.show)
    return int(any(kinds["RAW"] or kinds["WRONG"] for kinds in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
