"""A plan written into a StableHLO module as Shardy's shardings, which XLA's partitioner follows.

A mesh with the plan's axes; a sharding of every argument, result and operation; a constraint before an operation that
takes an operand in another layout than it was made in. Shardy has no partial sums between operations, so a value that
the plan makes as terms of a sum gets the layout in which it is read first: the collective comes right after it. See
Zhou et al., "Shardy" (OpenXLA, 2024), and Xu et al., "GSPMD" (2021), for what the partitioner makes of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from autopar.errors import PlanMismatchError
from autopar.frontend import BoundGraph, Traced
from autopar.frontend.stablehlo import StablehloModule
from autopar.frontend.stablehlo.module import CONTROL, named_attributes
from autopar.ir import Layout, Literal, Operator
from autopar.ir.loops import While
from autopar.plan import Plan

MESH = "mesh"


@dataclass
class _Decided:
    """Decisions of the plan for operations of the module, by their numbers.

    Args:
        results: layouts of an operation's results.
        operands: layouts in which it takes its operands; None for any.
    """

    results: dict[int, tuple[Layout, ...]] = field(default_factory=dict)
    operands: dict[int, tuple[Layout | None, ...]] = field(default_factory=dict)


def annotate(module: StablehloModule, traced: Traced, plan: Plan) -> str:
    """Text of ``module`` with the shardings of ``plan``. The module is changed.

    Args:
        module: what was read.
        traced: its entry function, traced.
        plan: a plan of it, of one stage and one microbatch.

    Raises:
        PlanMismatchError: the plan has stages or microbatches, which shardings cannot say.
    """
    if plan.num_stages != 1 or plan.num_microbatches != 1:
        raise PlanMismatchError(
            f"a plan of {plan.num_stages} stages and {plan.num_microbatches} microbatches does not shard one module",
            remedy="plan with num_stages=1 and num_microbatches=1",
        )
    (stage,) = plan.stages
    inputs = [Layout.parse(i.layout) for i in plan.content.inputs]
    outputs = [Layout.parse(o.layout) for o in plan.content.outputs]
    records = {r.id: (_parsed(r.operands), _parsed(r.results)) for r in plan.content.operators}
    decided = _Decided()
    _decide(traced.program, "", inputs, outputs, records, decided)
    with module.module.context, ir.Location.unknown():
        writer = _Writer(module, decided)
        writer.mesh(stage.mesh_axes, stage.devices)
        writer.operations(inputs)
        writer.signature(inputs, outputs)
    return str(module.module.operation.get_asm(enable_debug_info=True))


def _parsed(layouts: Sequence[str]) -> tuple[Layout | None, ...]:
    return tuple(Layout.parse(text) if text else None for text in layouts)


def _decide(
    bound: BoundGraph,
    prefix: str,
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    records: Mapping[str, tuple[tuple[Layout | None, ...], tuple[Layout | None, ...]]],
    out: _Decided,
) -> None:
    """Fills in ``out`` for the operators of one graph and of those inside."""
    graph = bound.graph
    uses: dict[str, list[Layout]] = defaultdict(list)
    layouts_made = dict(zip((i.name for i in graph.inputs), inputs, strict=False))
    for op in graph.operators:
        operands, results = records.get(prefix + op.id, ((), ()))
        for o, layout in zip(op.operands, operands, strict=False):
            if isinstance(o, str) and layout is not None:
                uses[o].append(layout)
        layouts_made.update((v.name, k) for v, k in zip(op.results, results, strict=False) if k is not None)
    for output, layout in zip(graph.outputs, outputs, strict=True):
        if isinstance(output.operand, str):
            uses[output.operand].append(layout)
    for op in graph.operators:
        number = bound.origins.get(op.id)
        if number is None or not all(v.name in layouts_made for v in op.results):
            continue
        # Of several operators that an operation is made of the last one makes its results.
        out.results[int(number)] = tuple(_settled(layouts_made[v.name], uses[v.name]) for v in op.results)
        out.operands[int(number)] = tuple(
            None if isinstance(o, Literal) or k is None or k.partial else k
            for o, k in zip(op.operands, records[prefix + op.id][0], strict=True)
        )
        _inside(bound, op, prefix, records, out)


def _inside(bound: BoundGraph, op: Operator, prefix: str, records: Mapping[str, Any], out: _Decided) -> None:
    operands, results = records[prefix + op.id]
    given = [k or Layout.replicated(t.rank) for k, t in zip(operands, bound.graph.operand_types(op), strict=True)]
    for name, region in bound.bounds[op.id].regions.items() if op.regions else ():
        taken, wanted = given[1:], [k for k in results if k is not None]
        if op.primitive == "while":
            in_cond, in_body, carry = While.of(op).split(given)
            taken = [*(in_cond if name == "cond" else in_body), *carry]
            wanted = carry if name == "body" else [Layout.replicated(0)]
        elif op.primitive == "scan":
            taken = given  # a loop that counts stacks nothing
        _decide(region, f"{prefix}{op.id}/{name}/", taken, wanted, records, out)


def _settled(layouts_made: Layout, uses: Sequence[Layout]) -> Layout:
    """The layout of a value between operations: that of its first use where it is made as terms of a sum."""
    if not layouts_made.partial:
        return layouts_made
    return next((Layout(k.dims) for k in uses if not k.partial), Layout(layouts_made.dims))


@dataclass
class _Writer:
    """Writes shardings into a module.

    Args:
        module: the module.
        decided: what the plan says.
        layouts: layout of each value that has one.
        constrained: values of constraints that are there, by block, value and layout.
    """

    module: StablehloModule
    decided: _Decided
    layouts: dict[Any, Layout] = field(default_factory=dict)
    constrained: dict[tuple[Any, Any, Layout], Any] = field(default_factory=dict)

    def mesh(self, axes: Sequence[tuple[str, int]], devices: Sequence[int]) -> None:
        """Declares the mesh, and how many devices the module is for."""
        body = self.module.module.body
        numbers = [] if list(devices) == list(range(len(devices))) else list(devices)
        attribute = sdy.MeshAttr.get([sdy.MeshAxisAttr.get(a, n) for a, n in axes], numbers)
        sdy.MeshOp(MESH, attribute, ip=ir.InsertionPoint.at_block_begin(body))
        count = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), len(devices))
        self.module.module.operation.attributes["mhlo.num_partitions"] = count

    def operations(self, inputs: Sequence[Layout]) -> None:
        """Shardings of all operations, and constraints of operands."""
        every = list(self.module.operations())
        self.layouts.update(zip(self.module.block.arguments, inputs, strict=False))
        for number, op in enumerate(every):
            results = self.decided.results.get(number)
            shapes = [tuple(r.type.shape) for r in op.results]
            if results is None or [len(k.dims) for k in results] != [len(s) for s in shapes]:
                continue
            op.attributes["sdy.sharding"] = sdy.TensorShardingPerValueAttr.get([self.sharding(k) for k in results])
            self.layouts.update(zip(op.results, results, strict=True))
            if op.operation.name == "stablehlo.while":
                for region in op.regions:
                    self.layouts.update(zip(region.blocks[0].arguments, results, strict=True))
        for number, op in enumerate(every):
            if number in self.decided.operands and op.operation.name not in CONTROL:
                self.operands(op, self.decided.operands[number])

    def operands(self, op: Any, wanted: Sequence[Layout | None]) -> None:
        """Constraints of operands that are taken in another layout than they lie in."""
        if len(wanted) > len(op.operands):
            return
        for n, layout in enumerate(wanted):
            value = op.operands[n]
            known = self.layouts.get(value)
            if layout is None or known is None or layout == known or len(layout.dims) != len(value.type.shape):
                continue
            key = (op.operation.block, value, layout)
            if key not in self.constrained:
                layouts_made = sdy.ShardingConstraintOp(value, self.sharding(layout), ip=ir.InsertionPoint(op))
                self.constrained[key] = layouts_made.operation.results[0]
            op.operands[n] = self.constrained[key]

    def signature(self, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> None:
        """Shardings of the arguments and results of the entry function."""
        for key, layouts in (("arg_attrs", inputs[: len(self.module.arguments)]), ("res_attrs", outputs)):
            before = self.module.entry.attributes
            given = list(before[key]) if key in before else [ir.DictAttr.get({})] * len(layouts)
            kept = [
                ir.DictAttr.get({**named_attributes(attrs), "sdy.sharding": self.sharding(k)})
                for attrs, k in zip(given, layouts, strict=True)
            ]
            self.module.entry.attributes[key] = ir.ArrayAttr.get(kept)

    def sharding(self, layout: Layout) -> Any:
        """A layout as Shardy writes it; no dim may be split further."""
        dims = [sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(a) for a in d], True) for d in layout.dims]
        return sdy.TensorShardingAttr.get(MESH, dims)
