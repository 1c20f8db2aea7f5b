"""Predicted collectives, memory and seconds by group, and those of XLA's compilers for TPU and GPU.

These compilers need no such device.

Needs the extras ``tpu`` and ``cuda12-aot``; `make verify` installs them into an environment of its own. Targets whose
compiler is missing are left out and named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import autopar
from autopar import AutoparError
from autopar.lower.aot import Verification, parse_target
from benchmarks import bert
from benchmarks.report import Report, Row, Say
from examples import gpt, llama, mlp, moe, wide_resnet

TARGETS = ("tpu:v5p:4x4x4", "tpu:v5e:16x16", "tpu:v6e:2x4", "cuda:h100:1x8", "cuda:h100:8x8")
#: What differs by more in a group of seconds is explained in docs/cost-model.md.
SECONDS_TOLERANCE = 0.25
_TRANSFORMER = {"layers": 2, "hidden": 512, "heads": 8, "vocab": 4096, "seq": 256, "batch": 64, "dtype": "bfloat16"}
#: Large enough that splitting pays on hundreds of devices, small enough to compile here. The batch is that of a device:
#: where each has little to hold, the TPU compiler keeps most of it in memory on the chip, which nothing counts.
EXAMPLES: Mapping[str, tuple[Any, Mapping[str, Any]]] = MappingProxyType(
    {
        "mlp": (mlp, {"layers": 4, "hidden": 2048, "batch": 2048, "dtype": "bfloat16"}),
        "gpt": (gpt, _TRANSFORMER),
        "gpt_f32": (gpt, {**_TRANSFORMER, "dtype": "float32"}),
        "llama": (llama, {**_TRANSFORMER, "ffn": 1024}),
        "moe": (moe, {**_TRANSFORMER, "ffn": 1024, "experts": 16, "group": 256}),
        "bert_f32": (bert, {"layers": 4, "hidden": 512, "heads": 8, "vocab": 8192, "seq": 128, "batch": 8}),
        "wide_resnet": (wide_resnet, {"stages": (1, 1), "base_channels": 64, "classes": 128, "batch": 128}),
    }
)


def verified(name: str, target: str, overrides: Mapping[str, Any] | None = None) -> Verification:
    """An example, planned for a target's cluster and compiled for it.

    Args:
        name: of the example.
        target: what to compile for.
        overrides: its sizes; None takes those of `EXAMPLES`, with their batch on each device.
    """
    module, sizes = EXAMPLES[name]
    cluster = parse_target(target).cluster()
    whole = {**sizes, "batch": sizes["batch"] * cluster.num_devices}
    step, args = module.build(abstract=True, **(whole if overrides is None else overrides))
    plan = autopar.parallelize(step, cluster=cluster, donate_argnums=0, num_stages=1).plan(*args)
    return autopar.verify(plan, step, *args, target=target)


def row(name: str, found: Verification) -> tuple[Row, tuple[Row, ...]]:
    """The row of an example on a target, and its rows by kind of collective."""
    label = {"example": name, "target": found.target, "mesh": "x".join(str(n) for _, n in found.mesh_axes)}
    details = tuple(
        {
            **label,
            "kind": t.kind,
            "predicted": t.predicted,
            "compiled": t.compiled,
            "predicted_bytes": t.predicted_wire_bytes,
            "compiled_bytes": t.compiled_wire_bytes,
            "as predicted": t.ok,
            "rewritten": sum(len(r.rewritten) for r in found.rows if r.kind == t.kind),
        }
        for t in found.totals
    )
    return {
        **label,
        "collectives": sum(t.compiled for t in found.totals),
        "lowered as predicted": found.lowered_ok,
        "compiled as predicted": found.collectives_ok,
        "explained": found.explained,
        "predicted_bytes": found.predicted_sent_bytes,
        "sent_bytes": found.sent_bytes,
        "memory predicted": found.predicted_memory.total / 1e6,
        "memory compiled": found.compiled_memory.total / 1e6,
        "predicted/compiled": found.memory_ratio,
        "predicted_s": found.predicted_step_s,
        "cycles": found.cycles,
        "compile_s": found.compile_s,
    }, details


def seconds_rows(name: str, found: Verification) -> tuple[Row, ...]:
    """Seconds of an example on a target by group of operators, and the shares that run in parallel with computation."""
    planned, compiled = found.planned_step_s, found.compiled_step_s
    label = {"example": name, "target": found.target}
    groups = ("products_s", "memory_s", "collectives_s", "exposed_s", "total_s")
    rows = []
    for group in groups:
        said, done = getattr(planned, group), getattr(compiled, group)
        near = abs(said - done) <= SECONDS_TOLERANCE * done
        rows.append({**label, "group": group.removesuffix("_s"), "predicted_s": said, "compiled_s": done,
                     "predicted/compiled": said / done if done else 0.0, "within 25%": near})  # fmt: skip
    shares = [s.asynchronous_s / s.collectives_s if s.collectives_s else 1.0 for s in (planned, compiled)]
    return (*rows, {**label, "group": "asynchronous share", "predicted_s": shares[0], "compiled_s": shares[1],
                    "predicted/compiled": shares[0] / shares[1] if shares[1] else 0.0,
                    "within 25%": abs(shares[0] - shares[1]) <= 0.15})  # fmt: skip


def unexplained(name: str, found: Verification) -> tuple[str, ...]:
    """A line for each collective that is neither as predicted nor rewritten in a known way, and for memory."""
    lines = [
        f"{name} on {found.target}: {r.kind} along {r.axis} of {r.bytes} bytes: {r.predicted:g} predicted, "
        f"{r.lowered:g} lowered, {r.compiled:g} compiled"
        for r in found.rows
        if not r.ok
    ]
    if not found.memory_ok:
        lines.append(f"{name} on {found.target}: memory predicted/compiled {found.memory_ratio:.3f}")
    return tuple(lines)


def run(quick: bool, say: Say, targets: Sequence[str] = (), examples: Sequence[str] = ()) -> Report:
    """The benchmark.

    Args:
        quick: take the perceptron on few virtual CPU devices alone.
        say: called with a line when an example begins.
        targets: of `TARGETS`, or others; all of them unless given.
        examples: of `EXAMPLES`; all of them unless given.
    """
    rows: list[Row] = []
    details: list[Row] = []
    seconds: list[Row] = []
    notes = ["memory in MB"]
    shown: list[Verification] = []
    for target in targets or (("cpu:4",) if quick else TARGETS):
        try:
            parse_target(target).check_installed()
        except AutoparError as error:
            notes.append(f"{target} left out: {error.fact}")
            continue
        for name in examples or (("mlp",) if quick else EXAMPLES):
            say(f"verified: {name} on {target}")
            found = verified(name, target, {} if quick else None)
            first, more = row(name, found)
            rows.append(first)
            details.extend(more)
            seconds.extend(seconds_rows(name, found))
            shown.append(found)
            notes.extend(unexplained(name, found))
    return Report(
        "verified",
        "compiled collectives as predicted in kind and count, bytes within 2% but for what XLA is known to have "
        "rewritten; memory within 10%",
        tuple(rows),
        bool(shown) and all(v.explained and v.memory_ok for v in shown),
        notes=tuple(notes),
        details=(("collectives by kind", tuple(details)), ("seconds by group", tuple(seconds))),
        measured=("compile_s",),
    )
