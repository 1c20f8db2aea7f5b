"""Values, memory and seconds of one train step under the options that one device has, next to the plain jitted step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from benchmarks.device.steps import timed
from benchmarks.footprint import footprint_bytes
from examples import gpt

Row = dict[str, Any]
OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "none": {},
        "four microbatches": {"num_microbatches": 4},
        "remat full": {"remat": "full"},
        "remat within memory": {"memory_limit": 0.7},
        "four microbatches within memory": {"num_microbatches": 4, "memory_limit": 0.6},
        "offload update": {"offload": "update"},
        "offload layers": {"offload": "layers"},
        "offload auto within memory": {"offload": "auto", "memory_limit": 0.6},
        "bf16": {"precision": "bf16"},
        "f16": {"precision": "f16"},
        "f8": {"precision": "f8"},
        "no rewrites": {"rewrites": False},
    }
)
"""Arguments of `autopar.parallelize` by name; ``memory_limit`` is a share of the peak of the plan without options."""


def option_rows(cluster: autopar.Cluster, until_s: float, **sizes: Any) -> Iterator[Row]:
    """A row an option until the clock says ``until_s``; what fails says why.

    Args:
        cluster: of the devices of this process, which plans are priced for.
        until_s: of `time.monotonic`.
        sizes: fields of the configuration of GPT.
    """
    step, (state, batch) = gpt.build("small", **sizes)
    whole = autopar.parallelize(step, cluster=cluster).plan(state, batch).peak_memory
    plain = jax.jit(step)
    oracle = jax.device_get(plain(state, batch))
    base_s = timed(plain, state, batch, loops=False)[1]
    yield {"what": "option", "name": "jit", "measured_s": base_s}
    for name, options in OPTIONS.items():
        if time.monotonic() > until_s:
            return
        row: Row = {"what": "option", "name": name}
        chosen = dict(options)
        if "memory_limit" in chosen:
            chosen["memory_limit"] = int(chosen["memory_limit"] * whole)
        try:
            row |= _option_row(step, cluster, chosen, oracle, state, batch)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:1500]}"
        gc.collect()
        yield row


def _option_row(
    step: Callable[..., Any], cluster: autopar.Cluster, options: Mapping[str, Any], oracle: Any, state: Any, batch: Any
) -> Row:
    decorated = autopar.parallelize(step, cluster=cluster, **options)
    compiled = decorated.compile(state, batch)
    row: Row = {"predicted_s": compiled.plan.step_time, "predicted_memory_bytes": compiled.plan.peak_memory}
    row["compiled_memory_bytes"] = footprint_bytes(compiled.memory_analysis())
    row["difference"] = _difference(decorated(state, batch), oracle)
    row["measured_s"] = timed(decorated, state, batch, loops=False)[1]
    return row


def _difference(values: Any, oracle: Any) -> float:
    """Largest norm of a difference over the norm of the leaf, over all leaves."""
    pairs = zip(jax.tree.leaves(jax.device_get(values)), jax.tree.leaves(oracle), strict=True)
    return max(_relative(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs)


def _relative(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x - y) / max(float(np.linalg.norm(y)), 1e-30))


def behaviour_rows(cluster: autopar.Cluster) -> Iterator[Row]:
    """Rows of what a person meets on a first device: the result of each trial, or its error."""
    for name, run in _BEHAVIOURS.items():
        row: Row = {"what": "behaviour", "name": name}
        try:
            row["result"] = run(cluster)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:1500]}"
        yield row


def _local(cluster: autopar.Cluster) -> str:
    del cluster
    local = autopar.Cluster.local()
    return f"{local.name}: {local.groups[0].device.kind}, {local.groups[0].device.memory_bytes / 1e9:.1f} GB"


def _checked(cluster: autopar.Cluster) -> str:
    step, (state, batch) = gpt.build("tiny")
    return str(autopar.check(step, state, batch, cluster=cluster))[:500]


def _callback(cluster: autopar.Cluster) -> str:
    def callback(y: Any) -> Any:
        raise KeyError("raised by the callback")

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.pure_callback(callback, jax.ShapeDtypeStruct((), jnp.float32), (w * x).sum())
        return w - y

    try:
        jax.block_until_ready(autopar.parallelize(step, cluster=cluster)(jnp.ones(8), jnp.ones(8)))
    except Exception as error:
        return f"raised: {type(error).__name__} with{'' if 'by the callback' in str(error) else 'out'} its text"
    return "not raised"


def _large(cluster: autopar.Cluster) -> str:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jnp.tanh(x[:, None, :] * w[None]).sum(0)

    side = 4 * int((cluster.groups[0].device.memory_bytes / 8) ** 0.5)
    shapes = jax.ShapeDtypeStruct((side, side), jnp.float32), jax.ShapeDtypeStruct((8, side), jnp.float32)
    try:
        autopar.parallelize(step, cluster=cluster).plan(*shapes)
    except autopar.InfeasiblePlanError as error:
        return f"refused: {str(error)[:200]}"
    return "planned"


def _host(cluster: autopar.Cluster) -> str:
    kinds = {m.kind for m in jax.devices()[0].addressable_memories()}
    del cluster
    return ", ".join(sorted(kinds))


_BEHAVIOURS: Mapping[str, Callable[[autopar.Cluster], str]] = MappingProxyType(
    {"local cluster": _local, "memories": _host, "check": _checked, "callback": _callback, "too large": _large}
)
