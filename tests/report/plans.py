"""Plans made by hand, of any size."""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.plan import (
    Choice,
    Communication,
    Considered,
    InputRecord,
    Memory,
    OperatorRecord,
    OutputRecord,
    Plan,
    PlanContent,
    SearchContent,
    Stage,
)


def make_plan(
    *,
    axes: tuple[tuple[str, int], ...] = (("x", 2), ("y", 4)),
    layout: str = "[x,.]",
    num_operators: int = 3,
    num_inputs: int = 2,
    num_stages: int = 1,
    notes: tuple[str, ...] = (),
    path: str = "state['w'][{}]",
    step_time: float = 2e-3,
    parameters: int = 10**9,
    lower_bound: float | None = 2e-3,
    considered: tuple[Considered, ...] = (Considered("mesh 2x4", 2e-3, 10**9, "chosen"), Considered("mesh 8", None)),
    cluster: str | None = None,
) -> Plan:
    """A plan that is whole but means nothing."""
    loaded = Cluster.load("dgx-a100")
    ids = tuple(f"jvp()/dot_general.{i}" for i in range(num_operators))
    collectives = (
        Communication("all-reduce", 10**6, "x", 4, 0, 3e-4, ids[:1]),
        Communication("all-gather", 10**7, "y", 2, 0, 4e-4, ids[:1]),
    )
    stage = Stage(axes, tuple(range(8)), ids, step_time, 1e-3, Memory(parameters, 2 * 10**9, 0, 5 * 10**8), collectives)
    return Plan(
        PlanContent(
            program="train_step",
            fingerprint="ab" * 32,
            cluster=loaded.to_json() if cluster is None else cluster,
            cluster_name=str(loaded),
            step_time=step_time,
            peak_memory=stage.memory.total,
            num_microbatches=1,
            schedule="none",
            stages=(stage,) * num_stages,
            inputs=tuple(InputRecord(path.format(i), "f32[64,32]", "parameter", layout) for i in range(num_inputs)),
            outputs=(OutputRecord("[0]", "f32[]", "[]"),),
            operators=tuple(OperatorRecord(i, ("[x,.]", "[.,.]"), ("[x,.]",)) for i in ids),
            copies=(),
            choices=tuple(
                Choice(name, (), "[x,.],[.,.] -> [x,.]", 1e-5 * (i + 1), "[.,x],[x,.] -> [.,.]", 2e-4)
                for i, name in enumerate(ids)
            ),
            search=SearchContent("alpa", step_time, lower_bound, considered),
            notes=notes,
        )
    )
