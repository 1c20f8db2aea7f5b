"""`in_slices`: a pipeline whose microbatches pass in slices of tokens, and the lengths that are fastest.

TeraPipe (Li et al., ICML'21): the dynamic program of `autopar.schedule.slices` over the seconds of a slice after a
prefix. These are the stage's planned seconds, in the proportion in which the roofline of `autopar.cost` prices its
operators on a slice: short slices fill a device badly, and late ones have more keys to look at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal as OneOf
from typing import TypeAlias

import msgspec

from autopar.cost import CostModel, operator_flops, send_s
from autopar.errors import SliceError
from autopar.ir import Graph, Operator, TensorType
from autopar.ir.primitives import is_fusible
from autopar.microbatch.tokens import TokenSlicing, analyze_tokens, check_lengths
from autopar.microbatch.tokens.states import TokenState
from autopar.plan import Pipeline, PipelineTransfer, PipelineValue, PipelineWork, Plan
from autopar.schedule import Table, build, parse_table, to_text
from autopar.schedule.slices import slice_lengths, with_slices
from autopar.schedule.table import KINDS
from autopar.search.problem import Problem
from autopar.simulate import run
from autopar.simulate.plans import from_record

#: What is asked for: lengths, a number of even slices, or "auto" for the fastest.
TokenSliceOption: TypeAlias = "tuple[int, ...] | int | OneOf['auto']"


def in_slices(problem: Problem, graph: Graph, plan: Plan, asked: TokenSliceOption) -> Plan:
    """``plan`` in slices of tokens; the plan itself where one slice is fastest.

    Args:
        problem: what was planned.
        graph: the step that the plan cuts.
        plan: of several stages.
        asked: lengths of the slices, their number if they are equal, or "auto" for the fastest.

    Raises:
        SliceError: a position of the step reads later ones, the lengths are not those of a sequence, or examples meet.
        ScheduleError: the schedule takes no slices.
    """
    record = plan.content.pipeline
    if record is None:
        raise SliceError("slices of tokens pass through a pipeline", remedy="num_stages=2 or more")
    if any(w.kind == "meeting" for w in record.works):
        raise SliceError(
            "examples meet between the forward and the backward passes, which slices of tokens do not wait for",
            cause="a contrastive loss, or experts balanced over the global batch",
            remedy="leave token_slices out, or balance over a microbatch",
        )
    slicing = analyze_tokens(graph)
    table = parse_table(record.table)
    with_slices(table, 1)
    shares = SliceShares(problem.cost_model, graph, slicing, plan.num_microbatches, len(plan.stages[0].devices))
    cuts = _cuts(asked, slicing.tokens, record, shares, problem)
    simulated = [_simulated(plan, record, table, lengths, shares) for lengths in cuts]
    step_s, sliced = min(simulated, key=lambda timed: (timed[0], len(timed[1].slice_lengths)))
    lengths = sliced.slice_lengths
    if len(lengths) == 1 or (asked == "auto" and step_s >= plan.step_time):
        return plan
    owed_bytes = _owed_bytes(graph, slicing, plan)
    content = msgspec.structs.replace(
        plan.content,
        step_time=step_s,
        peak_memory=plan.content.peak_memory + owed_bytes,
        pipeline=sliced,
        search=msgspec.structs.replace(plan.content.search, objective=step_s, lower_bound=None),
        notes=(*plan.content.notes, f"slices of {', '.join(map(str, lengths))} tokens; stages keep keys and values"),
    )
    return replace(plan, content=content)


def _cuts(
    asked: TokenSliceOption, tokens: int, record: Pipeline, shares: SliceShares, problem: Problem
) -> list[tuple[int, ...]]:
    """The lengths that are simulated: what is asked for; for "auto" those of the dynamic program and even ones."""
    if asked == "auto":
        fastest = _fastest(tokens, record, shares, problem)
        return [fastest, *(_even(tokens, n) for n in (2, 4, 8) if n <= tokens)]
    if isinstance(asked, int):
        if not 1 <= asked <= tokens:
            raise SliceError(f"{tokens} tokens cannot be cut into {asked} slices", remedy=f"1 to {tokens}")
        return [_even(tokens, asked)]
    return [check_lengths(asked, tokens).lengths]


def _even(tokens: int, count: int) -> tuple[int, ...]:
    return tuple(tokens // count + (k < tokens % count) for k in range(count))


def _fastest(tokens: int, record: Pipeline, shares: SliceShares, problem: Problem) -> tuple[int, ...]:
    """The lengths of the least ``m sum t_i + (K - 1) max t_i``: m microbatches follow each other without a gap."""
    stage_s: dict[int, float] = {}
    for w in record.works:
        stage_s[w.stage] = stage_s.get(w.stage, 0.0) + (w.seconds if w.kind in KINDS else 0.0)
    longest_s = max(stage_s.values())
    unit = next(n for n in range(max(1, tokens // problem.policy.schedules.token_units), tokens + 1) if tokens % n == 0)

    def seconds(length: int, before: int) -> float:
        return longest_s * shares.of(length, before) + 2 * problem.cost_model.starts.start_s

    stages = 1 + (len(stage_s) - 1) / shares.microbatches
    return slice_lengths(tokens, stages, seconds, unit=unit, tolerance_s=longest_s / 1000).lengths


def _simulated(
    plan: Plan, record: Pipeline, table: Table, lengths: Sequence[int], shares: SliceShares
) -> tuple[float, Pipeline]:
    """Seconds of a step in slices, and its record."""
    sliced = _sliced_record(plan, record, with_slices(table, len(lengths)), lengths, shares)
    of_slices, dataflow, durations = from_record(sliced)
    return run(build(of_slices, dataflow), durations).step_time, sliced


@dataclass(frozen=True, eq=False)
class SliceShares:
    """Time of a slice, as a share of a whole microbatch.

    Args:
        cost: prices operators.
        graph: the step.
        slicing: its analysis.
        microbatches: parts of its batch.
        devices: that a stage has.
    """

    cost: CostModel
    graph: Graph
    slicing: TokenSlicing
    microbatches: int
    devices: int

    @cached_property
    def _kinds(self) -> Counter[tuple[Operator, tuple[TensorType, ...], tuple[TokenState | None, ...]]]:
        """Operators of the loop over slices by what they are, without names."""
        kinds: Counter[tuple[Operator, tuple[TensorType, ...], tuple[TokenState | None, ...]]] = Counter()
        for id, how in self.slicing.operators.items():
            op = self.graph.by_id[id]
            results = tuple(replace(v, name=str(n)) for n, v in enumerate(op.results))
            plain = replace(op, id="", operands=("",) * len(op.operands), results=results, source="", scope="")
            kinds[plain, self.graph.operand_types(op), (*how.operands, *how.results)] += 1
        return kinds

    @cached_property
    def _priced(self) -> dict[tuple[int, int, int], float]:
        """Seconds of operators of a kind, by the kind's place, length and tokens before it; those without keys by 0."""
        return {}

    @cached_property
    def _whole_s(self) -> float:
        return self._seconds(self.slicing.tokens, 0)

    def of(self, length: int, before: int) -> float:
        """Seconds of a slice of ``length`` tokens after ``before``, as a share of those of all tokens at once."""
        return self._seconds(length, before) / self._whole_s

    def _seconds(self, length: int, before: int) -> float:
        total = 0.0
        for place, ((op, types, states), count) in enumerate(self._kinds.items()):
            key = place, length, before if any(s is not None and s.keys is not None for s in states) else 0
            if key not in self._priced:
                self._priced[key] = self._operator_s(op, types, states, length, before)
            total += count * self._priced[key]
        return total

    def _operator_s(
        self,
        op: Operator,
        types: Sequence[TensorType],
        states: Sequence[TokenState | None],
        length: int,
        before: int,
    ) -> float:
        parts = self.microbatches * self.devices
        sizes = [_sized(t, s, length, before) for t, s in zip(types, states, strict=False)]
        results = zip(op.results, states[len(types) :], strict=True)
        sized = replace(op, results=tuple(replace(v, type=_sized(v.type, s, length, before)) for v, s in results))
        flops = operator_flops(sized, sizes) / parts
        nbytes = 0.0 if is_fusible(op) else sum(t.nbytes for t in (*sizes, *(v.type for v in sized.results))) / parts
        return self.cost.operator_s(flops, nbytes, op.results[0].type.dtype, starts=not is_fusible(op))


def _sized(type: TensorType, state: TokenState | None, length: int, before: int) -> TensorType:
    if state is None or (state.rows is None and state.keys is None):
        return type
    shape = list(type.shape)
    if state.rows is not None:
        shape[state.rows] = length
    if state.keys is not None:
        shape[state.keys] = before + length
    return replace(type, shape=tuple(shape))


def _owed_bytes(graph: Graph, slicing: TokenSlicing, plan: Plan) -> int:
    """Bytes a device of what slices of a microbatch owe to earlier ones on a stage, of even stages."""
    parts = plan.num_microbatches * plan.num_stages * len(plan.stages[0].devices)
    return math.ceil(sum(graph.types[n].nbytes for n in slicing.owed) / parts)


def _sliced_record(plan: Plan, record: Pipeline, table: Table, lengths: Sequence[int], shares: SliceShares) -> Pipeline:
    """The record of a pipeline with one work, and one value of each microbatch's, a slice."""
    tokens = sum(lengths)
    of_slice = [shares.of(n, before) for n, before in zip(lengths, accumulate((0, *lengths)), strict=False)]
    cut = {v.name for v in record.values if v.lifetime == "microbatch"}

    def named(names: Sequence[str], k: int) -> tuple[str, ...]:
        return tuple(f"{n}#{k}" if n in cut else n for n in names)

    works: list[PipelineWork] = []
    for w in record.works:
        if w.kind not in KINDS:
            works.append(w)
            continue
        for k, share in enumerate(of_slice):
            reads, writes = named(w.reads, k), named(w.writes, k)
            works.append(msgspec.structs.replace(w, part=k, seconds=w.seconds * share, reads=reads, writes=writes))
    values: list[PipelineValue] = []
    for v in record.values:
        for k, n in enumerate(lengths) if v.name in cut else ():
            values.append(msgspec.structs.replace(v, name=f"{v.name}#{k}", bytes=math.ceil(v.bytes * n / tokens)))
        values += [] if v.name in cut else [v]
    transfers = [t for transfer in record.transfers for t in _transfers(plan, table, transfer, lengths, record, shares)]
    return Pipeline(to_text(table), tuple(works), tuple(values), tuple(transfers), slice_lengths=tuple(lengths))


def _transfers(
    plan: Plan,
    table: Table,
    transfer: PipelineTransfer,
    lengths: Sequence[int],
    record: Pipeline,
    shares: SliceShares,
) -> list[PipelineTransfer]:
    """Seconds of sending a value slice by slice."""
    sizes: Mapping[str, int] = {v.name: v.bytes for v in record.values if v.lifetime == "microbatch"}
    if transfer.value not in sizes:
        return [transfer]
    source, target = (plan.stages[table.stages_of_worker(w)[0]] for w in (transfer.source, transfer.target))
    nbytes = sizes[transfer.value] * len(source.devices) / sum(lengths)
    cluster = shares.cost.cluster
    return [
        msgspec.structs.replace(
            transfer,
            value=f"{transfer.value}#{k}",
            seconds=send_s(cluster, nbytes * n, source.devices, target.devices),
        )
        for k, n in enumerate(lengths)
    ]
