"""Bytes that programs of families without an example send, as shares of those of the best sharding by hand.

``python -m benchmarks.family_bytes [--seed N] [--sizes N] [NAMES]`` compiles each of `CASES` for eight CPU devices as
planned, and by `jax.jit` with the shardings of each expert, at sizes that are drawn by a seed, or with ``--sizes 0`` at
those that are written here; one parser reads all programs. A device's bytes are counted, without those
of scalars. XLA on CPU forms no reduce-scatter: all-reduces of an expert's split gradients, which are those along the
axis that splits them and of their size there, count half.
"""

from __future__ import annotations

import inspect
import math
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autopar
from autopar.cluster import Cluster, Device, LinkSpec, NodeGroup
from autopar.lower.hlo import HloCollective, collectives
from benchmarks import more_families, tables
from benchmarks.families import FAMILIES, Built, by_adam

P = PartitionSpec
#: A cluster on which computing costs as much as sending at a few hundred examples a parameter.
LINK = LinkSpec(1e9, 1e-6)
CLUSTER = Cluster("balanced", (NodeGroup(1, 8, Device("balanced", 10**12, 1e13, (("f32", 1e11),)), LINK, LINK),))
FAST_LINK = LinkSpec(1e10, 1e-6)
FAST = Cluster("fast links", (NodeGroup(1, 8, CLUSTER.groups[0].device, FAST_LINK, FAST_LINK),))
#: Specs of weights by the first letters of their names, the first that fits; others are whole.
Rules = tuple[tuple[str, PartitionSpec], ...]
COLUMN, ROW = P(None, "y"), P("y", None)


def mixer(batch: int = 256, layers: int = 2, tokens: int = 64, width: int = 256) -> Built:
    """MLP-Mixer: perceptrons over tokens and over channels in turn."""
    weights: dict[str, tuple[int, ...]] = {"embed": (48, width), "last": (width, 1000)}
    for i in range(layers):
        weights |= {f"tokenup{i}": (tokens, 256), f"tokendown{i}": (256, tokens)}
        weights |= {f"up{i}": (width, 4 * width), f"down{i}": (4 * width, width)}

    def loss(p: Any, b: Any) -> Any:
        x = b["x"] @ p["embed"]
        for i in range(layers):
            x = x + (jax.nn.gelu(x.swapaxes(1, 2) @ p[f"tokenup{i}"]) @ p[f"tokendown{i}"]).swapaxes(1, 2)
            x = x + jax.nn.gelu(x @ p[f"up{i}"]) @ p[f"down{i}"]
        return (jax.nn.log_softmax(x.mean(1) @ p["last"]) ** 2).mean()

    return by_adam(loss, weights, {"x": jax.ShapeDtypeStruct((batch, tokens, 48), jnp.float32)})


def convolutions_over_time(batch: int = 64, seq: int = 256, width: int = 128) -> Built:
    """Dilated convolutions along a sequence, with residuals, as WaveNet's and TCN's."""
    weights = {"in": (1, 8, width), **{f"conv{i}": (3, width, width) for i in range(4)}, "out": (1, width, 8)}

    def conv(x: jax.Array, w: jax.Array, dilation: int = 1) -> jax.Array:
        numbers = ("NHC", "HIO", "NHC")
        return jax.lax.conv_general_dilated(x, w, (1,), "SAME", rhs_dilation=(dilation,), dimension_numbers=numbers)

    def loss(p: Any, b: Any) -> Any:
        x = conv(b["x"], p["in"])
        for i in range(4):
            x = x + jax.nn.relu(conv(x, p[f"conv{i}"], 2**i))
        return ((conv(x, p["out"]) - b["x"]) ** 2).mean()

    return by_adam(loss, weights, {"x": jax.ShapeDtypeStruct((batch, seq, 8), jnp.float32)})


def graph_convolutions(nodes: int = 4096, edges: int = 32768, width: int = 256) -> Built:
    """Messages along edges, added up at nodes; one graph, split by edges and nodes."""
    weights = {"in": (64, width), "up0": (width, width), "down0": (width, width), "out": (width, 16)}

    def loss(p: Any, b: Any) -> Any:
        x = jax.nn.relu(b["x"] @ p["in"])
        for name in ("up0", "down0"):
            sent = (x @ p[name])[b["from"]]
            x = jax.nn.relu(x + jnp.zeros_like(x).at[b["to"]].add(sent))
        return ((x @ p["out"]) ** 2).mean()

    ends = jax.ShapeDtypeStruct((edges,), jnp.int32)
    return by_adam(loss, weights, {"x": jax.ShapeDtypeStruct((nodes, 64), jnp.float32), "from": ends, "to": ends})


def variational(batch: int = 2048, inner: int = 1024) -> Built:
    """A variational autoencoder of images, with noise that is given."""
    weights = {"up0": (784, inner), "down0": (inner, 512), "up1": (256, inner), "down1": (inner, 784)}

    def loss(p: Any, b: Any) -> Any:
        mean, log = jnp.split(jax.nn.relu(b["x"] @ p["up0"]) @ p["down0"], 2, axis=1)
        y = jax.nn.relu((mean + jnp.exp(log) * b["noise"]) @ p["up1"]) @ p["down1"]
        return ((y - b["x"]) ** 2).mean() + 0.5 * (mean**2 + jnp.exp(2 * log) - 2 * log).mean()

    shapes = {"x": jax.ShapeDtypeStruct((batch, 784), jnp.float32)}
    return by_adam(loss, weights, {**shapes, "noise": jax.ShapeDtypeStruct((batch, 256), jnp.float32)})


def two_towers(batch: int = 1024, rows: int = 32768, width: int = 128) -> Built:
    """Retrieval: a tower a side, the other examples of the batch are the wrong answers."""
    weights: dict[str, tuple[int, ...]] = {}
    for side in ("user", "item"):
        weights |= {f"table{side}": (rows, width), f"up{side}": (width, 512), f"down{side}": (512, width)}

    def loss(p: Any, b: Any) -> Any:
        sides = ("user", "item")
        user, item = (jax.nn.relu(p[f"table{s}"][b[s]] @ p[f"up{s}"]) @ p[f"down{s}"] for s in sides)
        return -jnp.diagonal(jax.nn.log_softmax(user @ item.T)).mean()

    ids = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return by_adam(loss, weights, {"user": ids, "item": ids})


def hypernetwork(batch: int = 512, width: int = 128) -> Built:
    """A perceptron that makes the weights of another one, for each example."""
    weights = {"up": (64, 512), "down": (512, width * 4), "last": (4, 8)}

    def loss(p: Any, b: Any) -> Any:
        weight = (jax.nn.relu(b["task"] @ p["up"]) @ p["down"]).reshape(-1, width, 4)
        return ((jnp.einsum("bsw,bwk->bsk", b["x"], weight) @ p["last"]) ** 2).mean()

    shapes = {"task": jax.ShapeDtypeStruct((batch, 64), jnp.float32)}
    return by_adam(loss, weights, {**shapes, "x": jax.ShapeDtypeStruct((batch, 16, width), jnp.float32)})


_PAIRS: Rules = (("up", COLUMN), ("down", ROW))
_ATTENTION: Rules = (("wq", COLUMN), ("wk", COLUMN), ("wv", COLUMN), ("wo", ROW))
#: By family how it is built, and how its weights lie under tensor parallelism by hand.
CASES: Mapping[str, tuple[partial[Built], Rules]] = MappingProxyType(
    {
        "vit": (partial(FAMILIES["vit"], batch=64, layers=2, width=256), (*_PAIRS, ("qkv", COLUMN), ("out", ROW))),
        "translation": (
            partial(FAMILIES["translation"], batch=32, layers=1, width=256),
            (("encoder.qkv", COLUMN), ("decoder.qkv", COLUMN), ("cross.qkv", COLUMN), ("embed", ROW)),
        ),
        "ranking": (partial(FAMILIES["ranking"], batch=1024, rows=4096), (("table", COLUMN),)),
        "ranking by rows": (partial(FAMILIES["ranking"], batch=1024, rows=4096), (("table", ROW),)),
        "recurrent": (
            partial(FAMILIES["recurrent"], batch=64, layers=2, width=256),
            (("gate", COLUMN), ("in", COLUMN), ("out", ROW)),
        ),
        "unet": (
            partial(FAMILIES["unet"], batch=32),
            (("down", P(None, None, None, "y")), ("deep", P(None, None, "y", None))),
        ),
        "mixer": (partial(mixer), (*_PAIRS, ("tokenup", COLUMN), ("tokendown", ROW))),
        "convolutions over time": (partial(convolutions_over_time), (("conv", P(None, None, "y")),)),
        "graph convolutions": (partial(graph_convolutions), _PAIRS),
        "variational": (partial(variational), _PAIRS),
        "two towers": (partial(two_towers), (*_PAIRS, ("table", COLUMN))),
        "hypernetwork": (partial(hypernetwork), _PAIRS),
        "two-level experts": (partial(more_families.two_level_experts), (("expert", P("y", None, None)),)),
        "masked language": (partial(more_families.masked_language), (*_ATTENTION, *_PAIRS, ("embed", ROW))),
        "selective": (
            partial(more_families.selective),
            (("in", COLUMN), ("gate", COLUMN), ("conv", COLUMN), ("out", ROW)),
        ),
        "depthwise": (partial(more_families.depthwise), _PAIRS),
        "adapters": (partial(more_families.adapters), (("z", COLUMN),)),
        "denoising": (partial(more_families.denoising), _ATTENTION),
        "lstm": (partial(more_families.lstm), (("input", COLUMN), ("head", COLUMN), ("embed", COLUMN))),
        "latents": (partial(more_families.latents), (*_ATTENTION, *_PAIRS)),
        "linear attention": (partial(more_families.linear_attention), _ATTENTION),
    }
)
#: Arguments of builders that are halved, kept or doubled, and numbers of layers.
SCALED = frozenset({"batch", "seq", "width", "size", "tokens", "nodes", "edges", "rows", "vocab", "inner", "patches"})
LAYERS = (1, 2, 3)
FORMS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"data": (8, 1), "fsdp": (8, 1), "tensor": (1, 8), "2-D": (2, 4), "fsdp x tensor": (2, 4), "expert": (1, 8)}
)


@dataclass(frozen=True)
class Halved:
    """All-reduces that count half, for they stand for reduce-scatters.

    Args:
        groups: of devices along the axis that splits the gradients.
        bytes: of a gradient in each group.
    """

    groups: frozenset[frozenset[int]]
    bytes: frozenset[int]

    def __contains__(self, c: HloCollective) -> bool:
        same = frozenset(map(frozenset, c.groups)) == self.groups
        return c.kind == "all-reduce" and same and c.full_bytes in self.bytes


def sent_bytes(text: str, halved: Halved | None = None) -> float:
    """Bytes that a device sends in a program.

    Args:
        text: optimized HLO.
        halved: what is counted half.
    """
    every = (c for c in collectives(text) if c.full_bytes > 16)
    return sum(c.wire_bytes * (0.5 if halved is not None and c in halved else 1) for c in every)


def spec_of(name: str, shape: tuple[int, ...], form: str, rules: Rules) -> PartitionSpec:
    """How a weight lies by hand."""
    spec = next((s for start, s in rules if name.startswith(start)), P()) if form not in ("data", "fsdp") else P()
    split = [d for d, n in enumerate(shape) if n % 8 == 0 and (d >= len(spec) or spec[d] is None)]
    if "fsdp" not in form or not split:
        return spec
    largest = max(split, key=lambda d: shape[d])
    dims = [*spec, *[None] * (len(shape) - len(spec))]
    dims[largest] = "x"
    return P(*dims)


def gradients_by_hand(params: Mapping[str, Any], form: str, rules: Rules) -> Halved:
    """All-reduces of gradients that are split along the first axis."""
    grid = np.arange(math.prod(FORMS[form])).reshape(FORMS[form])
    sizes = set()
    for name, leaf in params.items():
        spec = spec_of(name, leaf.shape, form, rules)
        if "x" in spec:
            sizes.add(leaf.size * leaf.dtype.itemsize // (FORMS[form][1] if "y" in spec else 1))
    return Halved(frozenset(frozenset(map(int, g)) for g in grid.T), frozenset(sizes))


def shardings_by_hand(args: tuple[Any, Any], form: str, rules: Rules) -> tuple[Any, dict[str, NamedSharding]]:
    """Shardings of a state and a batch in a form."""
    state, batch = args
    mesh = jax.make_mesh(FORMS[form], ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def lies(path: Any, leaf: Any) -> NamedSharding:
        name = str(getattr(path[-1], "key", ""))
        return NamedSharding(mesh, spec_of(name, leaf.shape, form, rules) if leaf.shape else P())

    # Expert parallel: experts and examples along the same axis.
    examples = P(("x", "y")) if form == "expert" else P("x")
    batches = {k: NamedSharding(mesh, P() if k.startswith("fixed") else examples) for k in batch}
    return jax.tree_util.tree_map_with_path(lies, state), batches


def by_hand(built: Built, form: str, rules: Rules) -> float:
    """Bytes that a device sends in the program of a form."""
    step, (state, batch) = built
    states, batches = shardings_by_hand((state, batch), form, rules)
    compiled = jax.jit(step, in_shardings=(states, batches), out_shardings=(states, None), donate_argnums=0)
    halved = gradients_by_hand(state[0], form, rules) if "fsdp" in form else None
    return sent_bytes(compiled.lower(state, batch).compile().as_text(), halved)


def planned(built: Built, cluster: Cluster = CLUSTER, **options: Any) -> float:
    """Bytes that a device sends in the program that is planned."""
    step, args = built
    options |= {"num_stages": 1, "num_microbatches": 1, "donate_argnums": 0}
    return sent_bytes(autopar.parallelize(step, cluster=cluster, **options).compile(*args).as_text())


def of_tables() -> Iterator[tuple[str, float, float]]:
    """Of tables as written, packed, and packed with split slots: what it is, and both numbers of bytes."""
    hand = sent_bytes(tables.table_wise())
    for links, cluster in (("", CLUSTER), (", links ten times as fast", FAST)):
        yield f"tables{links}", planned(tables.as_written(), cluster), hand
        yield f"packed tables{links}", planned(tables.dealt(), cluster), hand
        yield f"packed tables, split slots{links}", planned(tables.dealt(), cluster, **tables.SPLIT_SLOTS), hand


def drawn_sizes(build: partial[Built], rng: random.Random) -> dict[str, int]:
    """Sizes of a family near those that are written here; every batch is a multiple of eight."""
    own = {p.name: p.default for p in inspect.signature(build.func).parameters.values()} | build.keywords
    sizes = {name: int(n * rng.choice((0.5, 1, 2))) for name, n in own.items() if name in SCALED}
    return sizes | ({"layers": rng.choice(LAYERS)} if "layers" in own else {})


def share_of(name: str, sizes: Mapping[str, int]) -> tuple[float, float, str]:
    """Bytes of a family as planned, those of the best expert, and its name."""
    build, rules = CASES[name]
    experts = {form: by_hand(build(**sizes), form, rules) for form in FORMS}
    best = min(experts, key=lambda form: experts[form])
    return planned(build(**sizes)), experts[best], best


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of the sizes.")
@click.option(
    "--sizes", "count", default=1, show_default=True, help="Draws of each family; 0 takes what is written here."
)
@click.argument("names", nargs=-1)
def main(seed: int, count: int, names: tuple[str, ...]) -> None:
    """Prints a line a family and size, and those of tables next to tables that are dealt out by hand."""
    if not names or "tables" in names:
        for what, ours, hand in of_tables():
            print(f"{what}: {ours / hand:.3f} of table-wise ({ours:.0f} of {hand:.0f} bytes)", flush=True)
    for name in names or CASES:
        if name == "tables":
            continue
        rng = random.Random(f"{seed}/{name}")
        for sizes in [drawn_sizes(CASES[name][0], rng) for _ in range(count)] or [{}]:
            ours, theirs, best = share_of(name, sizes)
            text = "".join(f", {key} {n}" for key, n in sizes.items())
            print(f"{name}{text}: {ours / theirs:.3f} of {best} ({ours:.0f} of {theirs:.0f} bytes)", flush=True)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    main()
