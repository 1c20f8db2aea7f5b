"""Seconds of a plan by the groups of `autopar.lower.aot.estimates`, and the rates of its devices."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cluster import Cluster, LogicalMesh
from autopar.cost import PRODUCTS, CostModel, matrices_of
from autopar.ir import Graph, Layout, Operator, item_bytes
from autopar.ir.loops import runs_inside
from autopar.lower.aot.base import Target
from autopar.lower.aot.estimates import Rates, StepSeconds
from autopar.lower.aot.groups import GroupNames
from autopar.lower.hlo import HloCollective
from autopar.plan import Plan


def planned_seconds(plan: Plan, graph: Graph) -> StepSeconds:
    """The seconds of a step of a plan of one stage, by group.

    Args:
        plan: the plan.
        graph: of the function that it was made for.
    """
    (stage,) = plan.stages
    cost = CostModel(Cluster.from_json(plan.content.cluster))
    sizes, layouts = dict(stage.mesh_axes), {r.id: r for r in plan.content.operators}
    products_s = 0.0
    for id, op, owner, runs in _operators(graph):
        record = layouts.get(id)
        if op.primitive not in PRODUCTS or record is None:
            continue
        types = owner.operand_types(op)
        shapes = [
            Layout.parse(text).local_shape(t.shape, sizes) if text else t.shape
            for text, t in zip(record.operands, types, strict=True)
        ]
        result = Layout.parse(record.results[0]).local_shape(op.results[0].type.shape, sizes)
        product = matrices_of(op, shapes, result, item_bytes(types[0].dtype))
        if product is not None:
            products_s += runs * float(cost.product_s(product, types[0].dtype))
    collectives_s = sum(c.seconds for c in stage.collectives)
    exposed_s = max(0.0, stage.step_time - stage.compute_time - stage.host_time)
    products_s = min(products_s, stage.compute_time)
    return StepSeconds(
        products_s, stage.compute_time - products_s, collectives_s, exposed_s, max(0.0, collectives_s - exposed_s)
    )


def _operators(graph: Graph, prefix: str = "", runs: float = 1.0) -> Iterator[tuple[str, Operator, Graph, float]]:
    """Operators with those inside of regions: their ids in plans, their graph, and how often they run in a step."""
    for op in graph.operators:
        yield prefix + op.id, op, graph, runs
        for name, region in op.regions:
            yield from _operators(region, f"{prefix}{op.id}/{name}/", runs_inside(op, runs))


def rates_of(target: Target, plan: Plan) -> Rates:
    """Rates that price the text of a compiled program of one stage.

    Args:
        target: what was compiled for.
        plan: of one stage: its cluster and mesh.
    """
    cluster = Cluster.from_json(plan.content.cluster)
    cost, axes = CostModel(cluster), plan.stages[0].mesh_axes
    (mesh,) = cluster.logical_meshes(tuple(n for _, n in axes))
    names = GroupNames(axes)

    def collective_s(sent: HloCollective, full_bytes: float) -> float:
        return cost.collective_s(sent.kind, full_bytes, _along(names.of(sent.kind, sent.groups), mesh), mesh)

    return Rates(target.clock_hz, lambda flops, bytes, dtype: cost.operator_s(flops, bytes, dtype), collective_s)


def _along(name: str, mesh: LogicalMesh) -> tuple[str, ...]:
    """Axes of a mesh by the name of groups; all axes where the groups are along none."""
    along = tuple(name.split("+"))
    return along if set(along) <= {a for a, _ in mesh.axes} else tuple(a for a, n in mesh.axes if n > 1)
