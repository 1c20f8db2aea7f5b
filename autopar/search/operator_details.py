"""Lines of the source and forms of operators, as plans show them.

`with_operators` adds those of all operators of a step to the plan of one stage, and `with_stage_operators` those of the
choices of all stages to the plan of a pipeline, whose choices are of the stages' own graphs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from autopar.ir import Graph, Operator, TensorType
from autopar.plan import Plan, PlanContent
from autopar.plan.details import Details, OperatorDetail
from autopar.schedule import parse_table
from autopar.search.source import CutStage, StageSource
from autopar.sharding.factors import Dims, Rule
from autopar.sharding.registry import rule_for
from autopar.stages import StageParts
from autopar.stages.layers import forward_operators, members_of

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def with_operators(details: Details, graph: Graph) -> Details:
    """``details`` with the line and the form of every operator of ``graph``."""
    operators = tuple(OperatorDetail(id, op.source, einsum_of(op, types)) for id, op, types in every_operator(graph))
    return structs.replace(details, operators=operators)


def with_stage_operators(plan: Plan, graph: Graph, source: StageSource) -> Plan:
    """The plan of a pipeline with the line and the form of each choice's operator; other plans as they are.

    Args:
        plan: of a step.
        graph: of the step.
        source: the same step, which it cuts.
    """
    if plan.content.pipeline is None or plan.details.operators:
        return plan
    source = source.with_stages_after(parse_table(plan.content.pipeline.table).after)
    stages: dict[OperatorDetail, list[int]] = {}
    lines = {id: op.source for id, op, _ in every_operator(graph)}
    makers = {v.name: op.source for op in graph.operators for v in op.results}
    members = _members(plan.content, graph, source)
    names_of_stage: dict[int, list[str]] = defaultdict(list)
    for k in plan.content.choices:
        names_of_stage[k.stage].append(k.name)
    forms: dict[int, tuple[CutStage, dict[str, str]]] = {}  # by graph: isomorphic stages share one
    for parts in source.slice(plan.content.num_microbatches, members).parts:
        names = names_of_stage[parts.stage]
        form = structs.replace(plan.stages[parts.stage].form, microbatches=plan.content.num_microbatches)
        cut = source.in_form(members, parts.stage, form)
        _, known = forms.setdefault(id(cut.graph), (cut, {}))
        for detail in _of_stage(cut, names, lines, known):
            stages.setdefault(detail, []).append(parts.stage)
        for detail in _of_values(parts, names, makers):
            stages.setdefault(detail, []).append(parts.stage)
    operators = tuple(structs.replace(detail, stages=tuple(numbers)) for detail, numbers in stages.items())
    return replace(plan, details=structs.replace(plan.details, operators=operators))


def _members(content: PlanContent, graph: Graph, source: StageSource) -> tuple[tuple[str, ...], ...]:
    """Ids of the forward operators of each stage."""
    if content.pipeline is not None and content.pipeline.members:
        return content.pipeline.members
    forward = forward_operators(graph, source.microbatches(content.num_microbatches))
    return members_of([op.id for op in forward], content.cuts)


def _of_stage(
    cut: CutStage, names: Sequence[str], lines: Mapping[str, str], forms: dict[str, str]
) -> Iterator[OperatorDetail]:
    """Details of the operators of one stage that a choice is named by.

    A stage whose graph is that of an isomorphic one has lines of its own: those of the operators that it is cut from.

    Args:
        cut: the stage.
        names: of its choices.
        lines: by operator of the step, where it is written.
        forms: by operator of the stage's graph its form; those of its choices are added.
    """
    wanted = set(names)
    for id, op, types in every_operator(cut.graph):
        if id in wanted:
            if id not in forms:
                forms[id] = einsum_of(op, types)
            yield OperatorDetail(id, lines.get(cut.origin(id), "") or op.source, forms[id])


def _of_values(parts: StageParts, names: Sequence[str], makers: Mapping[str, str]) -> Iterator[OperatorDetail]:
    """Details of the values that a stage receives or sends and a choice is named by: the lines that make them."""
    values = {str(v): v.name for v in parts.graph_inputs} | {f"result{v}": v.name for v in parts.graph_sends}
    for name in names:
        if line := makers.get(values.get(name, "")):
            yield OperatorDetail(name, line)


def einsum_of(op: Operator, types: Sequence[TensorType]) -> str:
    """``ab,bc->ac  f32[8,64] f32[64,32] -> f32[8,32]``: dims of one letter are split together, ``.`` is never split.

    Args:
        op: the operator. A loop or branch has its types alone.
        types: types of its operands.
    """
    results = [v.type for v in op.results]
    shown = f"{' '.join(map(str, types))} -> {' '.join(map(str, results))}".strip()
    if op.regions:
        return shown
    rule, _ = rule_for(op, tuple(types))
    return f"{rule_letters(rule)}  {shown}"


def rule_letters(rule: Rule) -> str:
    """Labels of operands and results as letters, as ``ab,bc->ac``."""
    names: dict[int, str] = {}

    def one(dims: Dims) -> str:
        return "".join(
            "." if d is None else names.setdefault(d, _LETTERS[len(names)] if len(names) < len(_LETTERS) else "?")
            for d in dims
        )

    operands = [one(dims) for dims in rule.operands]
    return f"{','.join(operands)}->{','.join(one(dims) for dims in rule.results)}"


def every_operator(graph: Graph, prefix: str = "") -> Iterator[tuple[str, Operator, tuple[TensorType, ...]]]:
    """(id as in a plan, operator, types of its operands) of a graph and of the loops and branches in it."""
    for op in graph.operators:
        yield prefix + op.id, op, graph.operand_types(op)
        for name, region in op.regions:
            yield from every_operator(region, f"{prefix}{op.id}/{name}/")
