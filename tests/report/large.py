"""A plan as of a model of 96 layers in 64 stages, made by hand."""

from __future__ import annotations

import msgspec

from autopar.cluster import Cluster
from autopar.plan import Communication, Considered, InputRecord, Memory, Plan, SearchContent, Stage
from autopar.schedule import build, chain, get
from autopar.simulate import equal_stages, record_of, routes_of, simulate
from tests.report.plans import make_plan

LEAVES = {
    "attention.query": ("f32[12288,12288]", "[.,x]"), "attention.key": ("f32[12288,12288]", "[.,x]"),
    "attention.value": ("f32[12288,12288]", "[.,x]"), "attention.out": ("f32[12288,12288]", "[x,.]"),
    "mlp.up": ("f32[12288,49152]", "[.,x]"), "mlp.down": ("f32[49152,12288]", "[x,.]"),
    "norm1": ("f32[12288]", "[.]"), "norm2": ("f32[12288]", "[.]"),
}  # fmt: skip


def large_plan(stages: int = 64, layers: int = 96, microbatches: int = 128, per: int = 8) -> Plan:
    """A pipeline on nodes of eight devices."""
    cluster = Cluster.load("dgx-a100", nodes=stages * per // 8)
    table = get("1f1b").table(stages, microbatches)
    flow = chain(table, boundary_bytes=10**8)
    durations = equal_stages(table, flow, {"forward": 1e-3, "backward": 2e-3, "update": 5e-3})
    record = record_of(table, flow, durations, routes_of(build(table, flow)))
    inputs = tuple(
        InputRecord(f"{root}[{k}]['{name}']", type, role, layout, k * stages // layers)
        for root, role in (("state['params']", "parameter"), ("state['mu']", "optimizer"))
        for k in range(layers)
        for name, (type, layout) in LEAVES.items()
    )
    made = tuple(
        Stage(
            (("x", per),),
            tuple(range(s * per, (s + 1) * per)),
            (),
            0.39 + 0.001 * (s % 3),
            0.35,
            Memory(6 * 10**9, 12 * 10**9, 6 * 10**9, (stages - s) * 6 * 10**8, 2 * 10**9, 10**8),
            (
                Communication("all-reduce", 10**8, "x", 4 * microbatches, s, 0.03),
                Communication("send", 10**8, "stages", microbatches, s, 0.004),
            ),
        )
        for s in range(stages)
    )
    base = make_plan(num_operators=3)
    content = msgspec.structs.replace(
        base.content,
        cluster=cluster.to_json(),
        cluster_name=str(cluster),
        stages=made,
        inputs=inputs,
        pipeline=record,
        schedule="1f1b",
        num_microbatches=microbatches,
        peak_memory=max(s.memory.total for s in made),
        memory_limit=cluster.memory_bytes,
        search=SearchContent(
            "alpa", 0.7, 0.69,
            (Considered("64 stages, 128 microbatches", 0.7, 10**10, "chosen"),
             Considered("32 stages, 128 microbatches", 0.8, 10**10), Considered("16 stages", None)),
        ),
    )  # fmt: skip
    return Plan(msgspec.structs.replace(content, step_time=float(simulate(Plan(content)).step_time)))
