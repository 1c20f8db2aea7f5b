"""Thirty small planning problems and a hash of the plan of each, so that a change of the planner shows what it changes.

``python -m benchmarks.fixed_plans`` plans all of them and says which plans are not those of ``fixed_plans.json``;
names after it plan some; ``--write`` keeps what was found. A plan has two hashes: of all its content, and of it without
the record of the search, in which a bound may get sharper while the plan stays as it is.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import msgspec

import autopar
from autopar import Cluster, Plan
from autopar.cluster import Device, LinkSpec, NodeGroup
from autopar.errors import AutoparError
from autopar.plan import SearchContent
from autopar.search.cache import VARIABLE
from benchmarks import reference
from examples import gpt, llama, mlp, moe, wide_resnet

#: Fields of a stage in format 2, in their order.
_STAGE_OF_2 = (
    "mesh_axes", "devices", "operators", "step_time", "compute_time", "memory", "collectives", "work_times",
    "activation_bytes", "remat", "layer_ends", "host_bytes", "host_time", "activations_offloaded",
    "weight_stash_bytes", "accumulation_bytes", "state_bytes", "received_bytes", "layers", "block_scores",
    "layered_update", "padded", "slices_ahead", "combine_bytes", "gather_bytes", "backward_update", "segment_layers",
)  # fmt: skip

FILE = Path(__file__).with_suffix(".json")


def toy(nodes: int = 1, devices: int = 4, *, inter: float = 1e7, memory: int = 10**9, flops: float = 1e8) -> Cluster:
    """Equal nodes of slow devices, for which a small model is work.

    Args:
        nodes: their number.
        devices: of each node.
        inter: bytes a second between nodes.
        memory: bytes a device.
        flops: a second.
    """
    device = Device("toy", memory, 1e9, (("f32", flops),))
    return Cluster("toy", (NodeGroup(nodes, devices, device, LinkSpec(1e8, 1e-6), LinkSpec(inter, 1e-5)),))


def mixed() -> Cluster:
    """A node of fast devices and two nodes of slow ones."""
    fast, slow = (Device(name, 10**9, 1e9, (("f32", flops),)) for name, flops in (("fast", 4e8), ("slow", 1e8)))
    inside, between = LinkSpec(1e8, 1e-6), LinkSpec(1e7, 1e-5)
    return Cluster("mixed", (NodeGroup(1, 2, fast, inside, between), NodeGroup(2, 2, slow, inside, between)))


def host(memory: int) -> Cluster:
    """Four devices whose node has memory that they may use."""
    device = Device("toy", memory, 1e9, (("f32", 1e8),))
    link = LinkSpec(1e8, 1e-6)
    group = NodeGroup(1, 4, device, link, link, host_memory_bytes=10**9, host_bandwidth=1e7)
    return Cluster("with-host", (group,))


def perceptron(*widths: int, batch: int = 16) -> tuple[Callable[..., Any], Sequence[Any]]:
    """A step of gradient descent with momentum on a perceptron of such widths."""

    def loss(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x * x).mean()

    def step(state: Any, x: jax.Array) -> Any:
        weights, moments = state
        gradients = jax.grad(loss)(weights, x)
        moments = [0.9 * m + g for m, g in zip(moments, gradients, strict=True)]
        return [w - 0.1 * m for w, m in zip(weights, moments, strict=True)], moments

    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in itertools.pairwise(widths)]
    return step, ((weights, weights), jax.ShapeDtypeStruct((batch, widths[0]), jnp.float32))


@dataclass(frozen=True)
class Case:
    """A problem: its name, the step with its arguments, where it is to run, and options of `autopar.parallelize`."""

    name: str
    build: Callable[[], tuple[Callable[..., Any], Sequence[Any]]]
    cluster: Callable[[], Cluster]
    options: Mapping[str, Any] = field(default_factory=dict)

    def plan(self) -> Plan:
        """What the planner makes of it."""
        step, args = self.build()
        plan: Plan = autopar.parallelize(step, cluster=self.cluster(), donate_argnums=0, **self.options).plan(*args)
        return plan


def _example(module: Any, **overrides: Any) -> Callable[[], tuple[Callable[..., Any], Sequence[Any]]]:
    return lambda: module.build("tiny", abstract=True, **overrides)


def _dgx(nodes: int = 1, name: str = "dgx-a100") -> Callable[[], Cluster]:
    return lambda: Cluster.load(name, nodes=nodes)


def _perceptron(*widths: int, batch: int = 16) -> Callable[[], tuple[Callable[..., Any], Sequence[Any]]]:
    return lambda: perceptron(*widths, batch=batch)


_GPT, _MLP = _example(gpt), _example(mlp, layers=4)
_PIPELINE = {"num_stages": 2, "num_microbatches": 4}
_DEEP = _perceptron(64, 64, 32, 64, 64)

CASES = (
    # One stage, the mesh free and given, with memory short.
    Case("one stage, mlp", _MLP, _dgx()),
    Case("one stage, gpt", _GPT, _dgx(), {"mesh_shape": (2, 4)}),
    Case("one stage, gpt in a scan", _example(gpt, scan=True), _dgx(), {"num_stages": 1}),
    Case("one stage, llama", _example(llama), _dgx(), {"num_stages": 1, "mesh_shape": (8,)}),
    Case("one stage, experts", _example(moe), _dgx(), {"num_stages": 1, "mesh_shape": (4, 2)}),
    Case("one stage, wide resnet", _example(wide_resnet, stages=(1, 1)), toy, {"num_stages": 1}),
    Case("one stage, limit", _MLP, toy, {"memory_limit": 40_000, "num_stages": 1}),
    Case("one stage, microbatches given", _MLP, toy, {"num_microbatches": 4, "num_stages": 1}),
    Case("one stage, limit, batch large", _perceptron(64, 64, 64, batch=256), toy, {"memory_limit": 90_000}),
    Case("one stage, recomputed", _GPT, toy, {"remat": "full", "num_stages": 1, "mesh_shape": (4,)}),
    Case("one stage, tiny, recomputed where short", _DEEP, toy, {"memory_limit": 42_000, "num_stages": 1}),
    Case("one stage, state on the host", _DEEP, lambda: host(30_000), {"offload": "auto", "num_stages": 1}),
    # Pipelines.
    Case("pipeline, tiny", _DEEP, toy, _PIPELINE),
    Case("pipeline, mlp", _MLP, _dgx(), _PIPELINE),
    Case("pipeline, gpt", _GPT, _dgx(), _PIPELINE),
    Case("pipeline, gpt in a scan", _example(gpt, scan=True, layers=4), _dgx(), _PIPELINE),
    Case("pipeline, zero bubble", _DEEP, toy, {**_PIPELINE, "schedule": "zb-h1"}),
    Case("pipeline, interleaved", _example(mlp, layers=8), toy,
         {"num_stages": 4, "num_microbatches": 4, "schedule": "interleaved"}),
    Case("pipeline, limit", _DEEP, toy, {**_PIPELINE, "memory_limit": 50_000}),
    Case("pipeline, limit, gpt", _GPT, toy, {**_PIPELINE, "memory_limit": 1_300_000}),
    Case("pipeline, recomputed", _MLP, toy, {**_PIPELINE, "remat": "full"}),
    Case("pipeline, activations on the host", _perceptron(64, 64, 64, 64, 64, batch=256), lambda: host(110_000),
         {"offload": "auto", "num_stages": 2, "num_microbatches": 16}),
    Case("pipeline, microbatches free", _MLP, toy, {"num_stages": 2}),
    Case("pipeline, stages free, schedule given", _DEEP, toy, {"num_microbatches": 4, "schedule": "1f1b"}),
    # Several nodes, of one kind and of several.
    Case("two nodes, tiny, free", _DEEP, lambda: toy(2, 2)),
    Case("two nodes, mlp, free", _MLP, lambda: toy(2, 2, inter=1e6)),
    Case("two nodes, gpt, free", _GPT, _dgx(2, "p3.16xlarge")),
    Case("four nodes, limit", _perceptron(64, 128, 128, 64), lambda: toy(4, 1), {"memory_limit": 100_000}),
    Case("many nodes", _example(gpt, scan=True, layers=6, batch=48), _dgx(24)),
    Case("mixed devices", _MLP, mixed, {"num_stages": 3, "num_microbatches": 8}),
)  # fmt: skip


def digest(plan: Plan) -> dict[str, Any]:
    """What is kept of a plan."""
    bare = msgspec.structs.replace(
        plan.content,
        search=_unsearched(plan.content.search),
        parts=tuple(msgspec.structs.replace(p, search=_unsearched(p.search)) for p in plan.content.parts),
    )
    return {
        "content": _hash(Plan(plan.content)),
        "without_search": _hash(Plan(bare)),
        "step_time_s": plan.step_time,
        "peak_bytes": plan.peak_memory,
        "pipeline": f"{plan.num_stages} stages, {plan.num_microbatches} microbatches, {plan.schedule}",
    }


def _unsearched(search: SearchContent) -> SearchContent:
    return SearchContent(search.strategy, 0.0, None)


def _hash(plan: Plan) -> str:
    """Of the plan as format 2 has it: no details, whose source lines change with this file, and no facts since then."""
    document = json.loads(plan.to_json())["plan"]
    for content in (document, *document.get("parts", ())):
        content["cluster"] = json.dumps(content["cluster"], sort_keys=True, separators=(",", ":"))
        content["stages"] = [_stage_of_format_2(stage) for stage in content["stages"]]
        content.pop("product_flops", None)
        for record, name in ((r, n) for key, n in (("inputs", "parts"), ("choices", "stage")) for r in content[key]):
            record.pop(name, None)
        (content.get("pipeline") or {}).pop("executions", None)
    return hashlib.sha256(msgspec.json.encode(document, order="deterministic")).hexdigest()[:16]


def _stage_of_format_2(stage: dict[str, Any]) -> dict[str, Any]:
    """A stage with its form and thresholds among its fields, in their order of then."""
    form, joined, host = stage.get("form", {}), stage.get("thresholds", {}), stage.get("host", {})
    fields = {**stage, **form, "combine_bytes": joined.get("sums"), "gather_bytes": joined.get("gathers")}
    fields |= {"host_bytes": host.get("bytes"), "host_time": host.get("move_time")}
    kept = {name: fields[name] for name in _STAGE_OF_2 if fields.get(name) is not None}
    return {name: value for name, value in kept.items() if name != "layer_ends" or value}


def digests(cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """By name what is kept of each plan, or the error where there is none."""
    found: dict[str, dict[str, Any]] = {}
    reference_s = reference.seconds()
    print(f"{reference_s:6.2f} CPU s  reference", file=sys.stderr)
    for case in cases:
        began_s = time.process_time()
        try:
            found[case.name] = digest(case.plan())
        except AutoparError as error:
            found[case.name] = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        text = found[case.name].get("pipeline") or found[case.name]["error"]
        took_s = time.process_time() - began_s
        print(f"{took_s:6.2f} CPU s ({took_s / reference_s:.3g} ref)  {case.name}: {text}", file=sys.stderr)
    return found


def differences(kept: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """A line for each plan that is not the one that was kept, with what differs."""
    lines = []
    for name, now in found.items():
        before = kept.get(name, {})
        differing = [key for key in dict.fromkeys((*before, *now)) if before.get(key) != now.get(key)]
        if differing:
            shown = ", ".join(f"{key} {before.get(key)} -> {now.get(key)}" for key in differing)
            lines.append(f"{name}: {shown}")
    return lines


@click.command()
@click.argument("names", nargs=-1)
@click.option("--write", is_flag=True, help="Keep what is found.")
def main(names: tuple[str, ...], write: bool) -> None:
    """Plans the fixed set and compares; exits with 1 where a plan differs."""
    os.environ[VARIABLE] = "off"
    jax.config.update("jax_platforms", "cpu")
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    found = digests([c for c in CASES if not names or c.name in names])
    lines = differences(kept, found)
    print("\n".join(lines) or f"{len(found)} plans as they were")
    if write:
        FILE.write_text(json.dumps({**kept, **found}, indent=1) + "\n", encoding="utf-8")
    elif lines:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
