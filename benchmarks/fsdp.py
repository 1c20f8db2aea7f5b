"""LLaMA's stacked layers under a memory limit, compiled for TPUs and GPUs: gathers inside of loops, and memory.

``python -m benchmarks.fsdp [CASE ...]`` plans each of `CASES` on its target's cluster under a limit that is a multiple
of the state split over all devices, compiles it with that target's compiler, and prints a line: bytes a device as
predicted and compiled, seconds, and how many of the collectives run in loops.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

import autopar
from autopar.lower.aot import Verification, parse_target
from autopar.lower.hlo import collectives
from examples import llama

_SMALL: Mapping[str, Any] = MappingProxyType(
    {"layers": 8, "hidden": 2048, "ffn": 7168, "heads": 16, "kv_heads": 8, "vocab": 32768, "seq": 512, "batch": 32}
)
_LARGE: Mapping[str, Any] = MappingProxyType({"seq": 2048, "batch": 64})
_LARGE_OF_1K: Mapping[str, Any] = MappingProxyType({"seq": 2048, "batch": 32})


@dataclass(frozen=True)
class Case:
    """A model, a target, and a limit.

    Args:
        preset: of LLaMA.
        sizes: other than its preset's.
        target: what is compiled for.
        times_state: the limit as a multiple of the state split over all devices.
    """

    preset: str
    sizes: Mapping[str, Any]
    target: str
    times_state: float


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "small v5p": Case("8B", _SMALL, "tpu:v5p:2x2x2", 1.75),
        "small h100": Case("8B", _SMALL, "cuda:h100:1x8", 1.75),
        "70B v5p": Case("70B", _LARGE, "tpu:v5p:4x4x4", 1.75),
        "70B v5p, 1.3": Case("70B", _LARGE_OF_1K, "tpu:v5p:4x4x4", 1.3),
        "70B v5p, 1.3, 2k tokens": Case("70B", _LARGE, "tpu:v5p:4x4x4", 1.3),
        "70B h100": Case("70B", _LARGE, "cuda:h100:8x8", 1.75),
        "70B h100, 1.3": Case("70B", _LARGE_OF_1K, "cuda:h100:8x8", 1.3),
    }
)


def state_bytes(state: Any) -> int:
    """Bytes of a state, whole."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def measured(case: Case) -> tuple[float, Verification]:
    """The state's share a device in bytes, and the case planned and compiled."""
    step, args = llama.build(case.preset, abstract=True, **case.sizes)
    cluster = parse_target(case.target).cluster()
    share = state_bytes(args[0]) / cluster.num_devices
    options: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1, "donate_argnums": 0}
    function = autopar.parallelize(step, cluster=cluster, memory_limit=int(case.times_state * share), **options)
    found = autopar.verify(function.plan(*args), step, *args, target=case.target)
    assert isinstance(found, Verification)
    return share, found


def in_loops(hlo: str, kind: str) -> tuple[int, int]:
    """How many collectives of a kind run more than once, and how many there are."""
    every = [c for c in collectives(hlo) if c.kind == kind and c.full_bytes > 1 << 16]
    return sum(c.times > 1 for c in every), len(every)


def line(name: str, share: float, found: Verification) -> str:
    """What is printed of a case."""
    predicted, compiled = found.predicted_memory.total, found.compiled_memory.total
    kinds = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
    loops = ", ".join("{} of {} {}s".format(*in_loops(found.hlo, kind), kind) for kind in kinds)
    return (
        f"{name}: state {share / 1e9:.3f} GB, predicted {predicted / 1e9:.3f} GB, compiled {compiled / 1e9:.3f} GB "
        f"({predicted / compiled:.3f}), {found.predicted_step_s:.4g} s predicted, in loops {loops}"
    )


def main(names: list[str]) -> None:
    """Prints a line a case; where FSDP_HLO names a folder, programs are written there."""
    for name in names or CASES:
        try:
            share, found = measured(CASES[name])
        except autopar.AutoparError as error:
            print(f"{name}: {error}", flush=True)
            continue
        print(line(name, share, found), flush=True)
        if folder := os.environ.get("FSDP_HLO"):
            stem = Path(folder) / name.replace(" ", "_").replace(",", "")
            stem.with_suffix(".hlo").write_text(found.hlo, encoding="utf-8")
            stem.with_suffix(".txt").write_text(str(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
