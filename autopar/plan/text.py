"""Plans as plain text: what ``print(plan)`` and ``plan.explain()`` show, without any library."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from autopar.errors import AutoparError, PlanMismatchError
from autopar.errors.names import counted, near_names
from autopar.ir import Layout, TensorType
from autopar.plan.arguments import input_groups, path_matches
from autopar.plan.columns import bullets, columns, hanging, labelled, table, wrapped
from autopar.plan.content import PlanContent
from autopar.plan.counterfactuals import ALTERNATIVE, LEAST_GAIN, Counterfactuals
from autopar.plan.details import NO_DETAILS, Details, OperatorDetail
from autopar.plan.pipeline import ExecutionPrice, ExecutionPrices
from autopar.plan.throughput import throughput, throughput_text
from autopar.plan.trail import ranges_of, ranges_text, stages_text
from autopar.plan.types import Choice, Considered, InputPart, InputRecord, Stage, dtype_and_shape
from autopar.plan.words import plan_words

#: Part of a step that an optimum may be below the answer: less is rounding, and more says nothing.
PROVEN, USELESS = 1e-6, 0.6

#: Title and columns of the table of plans that people write by hand.
AGAINST = "against alternatives"
ALTERNATIVE_HEADER = ("plan", "step time", "times this plan's", "peak memory", "note")

#: Columns and note of the table of options that the search compared.
CONSIDERED_HEADER = ("option", "estimate", "estimated memory", "note")
CONSIDERED_NOTE = (
    "Estimates are those of the search, which adds up operators and messages. The plan's own figures also count what "
    "overlaps and what its programs hold."
)
#: Says why a choice may cost more than its runner-up.
CHEAPER_ALONE = "cheaper alone: the search also counts the memory limit and what overlaps"

#: Parts of the busy time of a stage, in the order in which they are shown.
TIME_PARTS = ("computing", "exposed communication", "host transfers")

_LABEL_WIDTH, _MOST_COLLECTIVES, _MOST_EXPLAINED = 13, 20, 10
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
# Bytes of a unit as users write it.
_BYTES = {"": 1, "b": 1, "byte": 1, "bytes": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip

_MEMORY_HEADER = (
    "stage", "parameters", "optimizer", "gradients", "activations", "temporaries", "batch", "in flight", "total",
)  # fmt: skip


def bytes_text(count: float) -> str:
    """``1.5 MB``; powers of 1000."""
    value, unit = float(count), 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def parse_bytes(value: int | float | str | None) -> int | None:
    """Bytes from a number or text as "40GB" (powers of 1000) or "16GiB".

    Raises:
        AutoparError: the text is no size, or not positive.
    """
    if value is None:
        return None
    number, unit = (str(value), "") if isinstance(value, int | float) else ("", "?")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-zA-Z]*)\s*", value)
        if match:
            number, unit = match[1], match[2].lower()
    try:
        size = float(number) * _BYTES[unit]
    except (KeyError, ValueError):
        size = -1.0
    if not 1 <= size < math.inf:
        raise AutoparError(
            f"memory_limit={value!r} is not a size", remedy='give bytes a device, or text such as "40GB" or "16GiB"'
        )
    return int(size)


def seconds_text(seconds: float | None) -> str:
    """Seconds for people, as ``12.3 ms``."""
    if seconds is None:
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def time_parts(stage: Stage) -> tuple[float, float, float]:
    """Seconds of the busy time of a stage by `TIME_PARTS`; waits for the host to start kernels are exposed too."""
    computing = min(stage.compute_time, stage.step_time)
    host = min(stage.host_time, stage.step_time - computing)
    return computing, stage.step_time - computing - host, host


def communication_totals(c: PlanContent) -> tuple[str, str]:
    """Seconds of all collectives of a step, hidden or not, and of those that are exposed, each of the fullest stage."""
    total, exposed = 0.0, 0.0
    for stage in c.stages:
        total = max(total, sum(r.seconds for r in stage.collectives if r.kind != "send"))
        exposed = max(exposed, time_parts(stage)[1])
    return seconds_text(total), seconds_text(exposed)


def communication_note(c: PlanContent) -> str:
    """``1.7 s in total, 245 ms exposed``: what computation hides is in the total alone."""
    total, exposed = communication_totals(c)
    stages = " on the stage with most" if len(c.stages) > 1 else ""
    return f"{total} in total{stages}, {exposed} exposed"


def gap_of(bound: float | None, seconds: float) -> float | None:
    """(step - bound) / step: the share that an optimum may be faster; None without a bound."""
    if bound is None or seconds <= 0:
        return None
    return max(0.0, 1 - bound / seconds)


def gap_text(gap: float | None) -> str:
    """A gap in few words: "no bound" without one, "no useful bound" where it says next to nothing."""
    if gap is None:
        return "no bound"
    return "no useful bound" if gap > USELESS else f"gap {gap:.2%}"


def bound_text(c: PlanContent) -> str:
    """Gap of the plan to its bounds: over all that was free, and over the sharding of its stages."""
    gap = gap_of(c.search.lower_bound, c.step_time)
    if gap is None or gap > USELESS:
        text = gap_text(gap)
    elif gap < PROVEN:
        text = "proven optimal for its problem"
    else:
        text = f"at most {gap:.2%} from the optimum"
    of_stages = [gap_of(p.search.lower_bound, p.step_time) for p in c.parts]
    if c.search.sharding_bound is not None:
        of_stages = [gap_of(c.search.sharding_bound, c.step_time)]
    worst = max((1.0 if gap is None else gap for gap in of_stages), default=1.0)
    if worst > USELESS:
        return text
    given = "stages" if c.parts else "microbatches"
    gap_of_sharding = "proven optimal" if worst < PROVEN else f"at most {worst:.2%} from the optimum"
    return f"{text}; for these {given} its sharding is {gap_of_sharding}"


def pipeline_text(c: PlanContent) -> str:
    """Stages, microbatches and schedule."""
    text = f"{counted(len(c.stages), 'stage')}, {counted(c.num_microbatches, 'microbatch')}, {c.schedule}"
    lengths = () if c.pipeline is None else c.pipeline.slice_lengths
    return f"{text}, slices of {', '.join(map(str, lengths))} tokens" if lengths else text


def summary_rows(c: PlanContent, phases: Sequence[tuple[str, float]]) -> list[tuple[str, str]]:
    """(label, text) of a plan's head lines."""
    bound = bound_text(c)
    if c.search.unlimited_s:
        bound += f"; the memory limit costs at most {c.search.objective / c.search.unlimited_s - 1:.2%}"
    rows = [
        ("plan", plan_words(c)),
        ("program", f"{c.program} ({', '.join(_sizes(c))})"),
        ("cluster", c.cluster_name),
        ("mesh", _meshes_text(c)),
        ("step time", f"{seconds_text(c.step_time)} predicted"),
        *([("throughput", rate)] if (rate := throughput_text(throughput(c))) else []),
        ("peak memory", f"{bytes_text(c.peak_memory)} a device predicted"),
        ("search", f"{c.search.strategy}: {bound}"),
    ]
    if c.num_microbatches > 1 or len(c.stages) > 1:
        rows.insert(4, ("pipeline", pipeline_text(c)))
    if c.pipeline is not None and c.pipeline.executions is not None:
        rows.insert(5, ("run as", executions_text(c.pipeline.executions)))
    if any(s.form.recomputes for s in c.stages):
        levels = ", ".join(f"stage {i}: {recomputed_text(s)}" for i, s in enumerate(c.stages))
        rows.insert(-2, ("recomputed", f"{levels} (computed again in the backward pass)"))
    if any(s.host_bytes for s in c.stages):
        moves = ", ".join(
            f"stage {i}: {bytes_text(s.host_bytes)} a device, {seconds_text(s.host_time)} a step{fetched_text(s)}"
            for i, s in enumerate(c.stages)
            if s.host_bytes
        )
        rows.insert(-2, ("host memory", f"{moves} (not needed on the device in the meantime)"))
    away = [str(i) for i, s in enumerate(c.stages) if s.form.activations_offloaded]
    if away:
        rows.insert(
            -2, ("waiting", f"in host memory on stage {', '.join(away)} (microbatches before their backward pass)")
        )
    if any(s.layers for s in c.stages):
        named = "; ".join(f"stage {i}: {layers_text(s)}" for i, s in enumerate(c.stages) if s.layers)
        rows.insert(4, ("layers", named))
    if phases:
        rows.append(("planned in", ", ".join(f"{name} {seconds_text(s)}" for name, s in phases)))
    return rows


def _meshes_text(c: PlanContent) -> str:
    """``stages 0-3: 2@x x 4@y``; stages with meshes of one shape are named together."""
    stages: dict[str, list[int]] = {}
    for i, stage in enumerate(c.stages):
        stages.setdefault(" x ".join(f"{n}@{a}" for a, n in stage.mesh_axes), []).append(i)
    return "; ".join(f"{stages_text(of)}: {shape}" for shape, of in stages.items())


def executions_text(executions: ExecutionPrices) -> str:
    """Both ways in which several processes carry a pipeline out, with their prices, the one that is taken first."""
    rounds = f"{counted(executions.rounds, 'round')} and {counted(executions.permutes, 'permute')} of all workers"
    texts = {
        "lists": f"lists of each process {_price_text(executions.lists)}",
        "one_program": f"one program of {rounds} {_price_text(executions.one_program)}",
    }
    taken = texts.pop(executions.taken)
    return f"{taken}; {', '.join(texts.values())} ({executions.reason})"


def _price_text(price: ExecutionPrice) -> str:
    return f"{seconds_text(price.step_s)} a step, {bytes_text(price.memory_bytes)} a device"


def fetched_text(stage: Stage) -> str:
    """Fetches of layers in host memory: ``, layers fetched one ahead``; "" where there are none."""
    if stage.form.slices_ahead is None:
        return ""
    return ", layers fetched one ahead" if stage.form.slices_ahead else ", layers fetched one by one"


def recomputed_text(stage: Stage) -> str:
    """The recomputation of a stage: ``full``, ``segments of 8 layers``, or both."""
    parts = [str(stage.form.remat)] if stage.form.remat != "none" or not stage.form.segment_layers else []
    parts += [f"segments of {counted(stage.form.segment_layers, 'layer')}"] if stage.form.segment_layers else []
    return ", ".join(parts)


def layers_text(stage: Stage) -> str:
    """``layers 0-11 of 24`` of a stack; "" where the stage has none of its own."""
    if stage.layers is None:
        return ""
    first, end, total = stage.layers
    return f"layer {first} of {total}" if end == first + 1 else f"layers {first}-{end - 1} of {total}"


def _sizes(c: PlanContent) -> tuple[str, ...]:
    """Numbers of operators, inputs and outputs of the program."""
    operators = len(c.operators) or sum(len(s.operators) for s in c.stages)
    return counted(operators, "operator"), counted(len(c.inputs), "input"), counted(len(c.outputs), "output")


def plan_text(c: PlanContent, phases: Sequence[tuple[str, float]], width: int | None = None) -> str:
    """The plan as a table that a person can read.

    Args:
        c: the plan.
        phases: (phase, seconds) of planning.
        width: most characters of a line; None for those of the terminal, `USUAL_COLUMNS` where there is none.
    """
    width = columns() if width is None else width
    parts = [labelled(summary_rows(c, phases), _LABEL_WIDTH, width)]
    rows = [
        (
            str(i),
            bytes_text(m.parameters),
            bytes_text(m.optimizer),
            bytes_text(m.gradients),
            bytes_text(m.activations),
            bytes_text(m.temporaries),
            bytes_text(m.batch),
            bytes_text(m.in_flight),
            bytes_text(m.total),
        )
        for i, m in ((i, s.memory) for i, s in enumerate(c.stages))
    ]
    parts.append("memory a device at the fullest moment\n" + table(_MEMORY_HEADER, rows, width))
    parts.append("inputs\n" + table(inputs_header(c), _input_rows(c), width))
    parts.append(_communication_text(c, width))
    considered = [
        (o.name, seconds_text(o.step_time), "-" if o.peak_memory is None else bytes_text(o.peak_memory), o.note)
        for o in c.search.considered
        if not o.note.startswith(ALTERNATIVE)
    ]
    if alternatives := alternative_rows(c):
        parts.append(f"{AGAINST}\n" + table(ALTERNATIVE_HEADER, alternatives, width))
    if considered:
        note = "\n".join("  " + line for line in wrapped(CONSIDERED_NOTE, width - 2))
        parts.append("considered\n" + table(CONSIDERED_HEADER, considered, width) + f"\n{note}")
    if c.rewrites:
        parts.append("rewrites\n" + bullets(c.rewrites, width))
    if c.notes:
        parts.append("notes\n" + bullets(c.notes, width))
    return "\n\n".join(parts)


def _communication_text(c: PlanContent, width: int) -> str:
    """The collectives of a step; of several stages those that take longest first, with their stage."""
    records = [r for s in c.stages for r in s.collectives]
    if not records:
        return "communication a step: none"
    several = len(c.stages) > 1
    if several:
        records.sort(key=lambda r: -r.seconds)
    rows = [
        (r.kind, bytes_text(r.bytes), r.axis, f"{r.count:g}", seconds_text(r.seconds), *([str(r.stage)] * several))
        for r in records[:_MOST_COLLECTIVES]
    ]
    more = len(records) - len(rows)
    cut = f"; the first {len(rows)}, plan.communication has {more} more" if more > 0 else ""
    title = "\n".join(wrapped(f"communication a step: {communication_note(c)}{cut}", width))
    header = ("kind", "bytes", "axis", "count", "seconds", *(["stage"] * several))
    return title + "\n" + table(header, rows, width)


def alternative_rows(c: PlanContent) -> list[tuple[str, ...]]:
    """Plans that people write by hand, next to this one; none where they were not planned."""
    rows: list[tuple[str, ...]] = []
    for o in c.search.considered:
        if o.note.startswith(ALTERNATIVE):
            ratio = "-" if o.step_time is None or not c.step_time else f"{o.step_time / c.step_time:.3g}"
            seconds = "not possible" if o.step_time is None else seconds_text(o.step_time)
            memory = "-" if o.peak_memory is None else bytes_text(o.peak_memory)
            rows.append((o.name, seconds, ratio, memory, o.note.removeprefix(ALTERNATIVE).lstrip(": ")))
    return rows


def inputs_header(c: PlanContent) -> tuple[str, ...]:
    """Columns of the table of arguments; of several stages with those that hold each."""
    return ("argument", "role", "sharding", *(("stages",) if len(c.stages) > 1 else ()))


def input_rows(c: PlanContent) -> list[tuple[str, ...]]:
    """Rows of the table of arguments, those of repeated layers in one; see `inputs_header`."""
    several = len(c.stages) > 1
    return [
        (g.title, g.first.role, placed_text(g.first), *((g.held_by,) if several else ()))
        for g in input_groups(c.inputs)
    ]


def _input_rows(c: PlanContent, limit: int = 40) -> list[tuple[str, ...]]:
    rows = input_rows(c)
    if len(rows) <= limit:
        return rows
    more = f"... {len(rows) - limit} more: plan.input_shardings has all"
    return [*rows[:limit], (more, *("" for _ in rows[0][1:]))]


def placed_text(record: InputRecord) -> str:
    """``f32[8@x,64]``, and whether it is in host memory; by part where parts are placed in different ways."""
    held: dict[str, list[InputPart]] = {}
    for r, part in zip(record.of_stages, record.parts or (None,), strict=True):
        parts = held.setdefault(typed(record.type, r.layout) + _memory_text(r), [])
        parts += [] if part is None else [part]
    if len(held) == 1:
        return str(*held)
    return ", ".join(f"{text} {_of_parts(parts)}" for text, parts in held.items())


def _of_parts(parts: Sequence[InputPart]) -> str:
    """``on stages 0-3``, or ``in slices 0-5`` of a stack."""
    slices = [n for p in parts if p.slices is not None for n in range(*p.slices)]
    if not slices:
        return f"on {stages_text(p.stage for p in parts)}"
    return f"in slice{'s' * (len(slices) > 1)} {ranges_text(ranges_of(slices))}"


def _memory_text(record: InputRecord) -> str:
    return ", in host memory" if record.memory == "host" else ""


def held_bytes(c: PlanContent, record: InputRecord) -> int:
    """Bytes a device of what one stage holds of an argument, from a record of `InputRecord.of_stages`."""
    dtype, shape = dtype_and_shape(record.type)
    return Layout.parse(record.layout).local_bytes(TensorType(shape, dtype), c.stages[record.stage].mesh_shape)


def _held_lines(c: PlanContent, what: str) -> list[str]:
    """The stages that hold the arguments called so, with what each holds; nothing in a plan of one stage."""
    if len(c.stages) == 1 or not what:
        return []
    named = [i for i in c.inputs if i.path == what] or [
        i for i in c.inputs if what in i.path or path_matches(what, i.path)
    ]
    return ["\n".join((i.path, *_parts_lines(c, i))) for i in named[:_MOST_EXPLAINED]]


def _parts_lines(c: PlanContent, record: InputRecord) -> list[str]:
    lines = []
    for r, part in zip(record.of_stages, record.parts or (None,), strict=True):
        slices = ""
        if part is not None and part.slices is not None:
            first, end = part.slices
            numbers = ranges_text(((first, end - 1),))
            slices = f"slice{'s' * (end - first > 1)} {numbers} of {dtype_and_shape(record.type)[1][0]}, "
        amount = f"{bytes_text(held_bytes(c, r))} a device{_memory_text(r)}"
        lines.append(f"  held by:    stage {r.stage}: {slices}{typed(r.type, r.layout)}, {amount}")
    return lines


def typed(type_text: str, layout_text: str) -> str:
    """``f32[8@x,64]`` from ``f32[8,64]`` and ``[x,.]``."""
    dtype, _, dims = type_text.partition("[")
    inner, _, tail = layout_text[1:].partition("]")
    if not dims[:-1]:
        return type_text + tail
    parts = [
        n if axis == "." else f"{n}@{axis}" for n, axis in zip(dims[:-1].split(","), inner.split(","), strict=True)
    ]
    return f"{dtype}[{','.join(parts)}]{tail}"


def explain_text(
    c: PlanContent,
    what: str | None,
    details: Details = NO_DETAILS,
    again: Counterfactuals | None = None,
) -> str:
    """Why an argument, an operator or the whole plan is as it is, as text."""
    return hanging(_explained(c, what, details, again), columns())


def _explained(c: PlanContent, what: str | None, details: Details, again: Counterfactuals | None) -> str:
    """See `Plan.explain`; lines of any length."""
    if what is None:
        dearest = explained_choices(c, c.choices, details)[:_MOST_EXPLAINED]
        fixed = [n for n in c.notes if n.startswith(("constraint", "sharding_constraint"))]
        heading = "what was asked for\n\n" + "\n".join(fixed) + "\n\n" if fixed else ""
        return (
            heading
            + "the ten most expensive choices\n\n"
            + "\n\n".join(map(_choice_text, dearest))
            + _packed_text(c, again)
        )
    exact = [k for k in c.choices if what == k.name or what in k.members]
    partly = [k for k in c.choices if what in k.name or any(what in m for m in k.members)]
    by_path = [k for k in c.choices if any(path_matches(what, name) for name in (k.name, *k.members))]
    matching, held = exact or partly or by_path, _held_lines(c, what)
    if not matching and not held:
        names = sorted({*(i.path for i in c.inputs), *(n for k in c.choices for n in (k.name, *k.members))})
        raise PlanMismatchError(
            f"the plan has no operator or argument called {what!r}",
            remedy=near_names(what, names),
        )
    rows = explained_choices(c, matching, details)
    shown = rows[:_MOST_EXPLAINED]
    if again is not None and len(matching) == 1:
        return _choice_text(rows[0]) + _without_text(c, again.without(matching[0].name))
    tail = (
        f"\n\n... {len(rows) - len(shown)} more match; a longer part of the name tells of fewer"
        if len(rows) > len(shown)
        else ""
    )
    return "\n\n".join((*held, *map(_choice_text, shown))) + tail


def _packed_text(c: PlanContent, again: Counterfactuals | None) -> str:
    """The end of an explanation: seconds of a step whose separate tables are one array, where it is faster."""
    other = None if again is None else again.packed()
    if other is None or other.step_time is None or other.step_time >= (1 - LEAST_GAIN) * c.step_time:
        return ""
    return (
        f"\n\nseparate tables\n\n{other.name}\n  packed:     a step of {seconds_text(other.step_time)} "
        f"({other.step_time / c.step_time - 1:+.1%}) as one array of `autopar.transforms.deal_tables`, "
        "with indices in the order of its slots"
    )


def _without_text(c: PlanContent, other: Considered | None) -> str:
    """The last line of an explanation: seconds of a step without the choice."""
    if other is None:
        return ""
    if other.step_time is None:
        return f"\n  without it: {other.note}"
    more = f" ({other.step_time / c.step_time - 1:+.2%})" if c.step_time else ""
    return (
        f"\n  without it: a step of {seconds_text(other.step_time)}{more} with everything else chosen again, "
        f"within the memory limit: {other.name}"
    )


@dataclass(frozen=True)
class ExplainedChoice:
    """A choice that one or more stages have in common.

    Args:
        choice: the first stage's.
        detail: line and form of its operator; empty where they are not known.
        stages: the stages; empty in a plan of one stage.
    """

    choice: Choice
    detail: OperatorDetail
    stages: tuple[int, ...]


def explained_choices(
    c: PlanContent, choices: Iterable[Choice], details: Details = NO_DETAILS
) -> list[ExplainedChoice]:
    """Choices of a plan, the dearest first, those that stages have in common as one.

    Args:
        c: the plan.
        choices: some of it.
        details: of the plan.
    """
    known = {(d.id, stage): d for d in details.operators for stage in d.stages or (0,)}
    stages: dict[tuple[Choice, OperatorDetail], list[int]] = {}
    for k in sorted(choices, key=lambda k: (-k.cost, k.name, k.stage)):
        detail = known.get((k.name, k.stage), OperatorDetail(k.name))
        same = structs.replace(k, stage=0), structs.replace(detail, stages=())
        stages.setdefault(same, []).append(k.stage)
    several = len(c.stages) > 1
    return [ExplainedChoice(k, d, tuple(numbers) if several else ()) for (k, d), numbers in stages.items()]


def _choice_text(row: ExplainedChoice) -> str:
    k, detail = row.choice, row.detail
    lines = [k.name]
    if row.stages:
        lines.append(f"  on:         {stages_text(row.stages)}")
    lines += [f"  at:         {detail.source}"] if detail.source else []
    lines += [f"  computes:   {detail.form}"] if detail.form else []
    lines += [f"  choice:     {k.choice}", f"  cost:       {seconds_text(k.cost)}"]
    if k.runner_up:
        lines.append(f"  runner-up:  {k.runner_up}")
        why = f"; {CHEAPER_ALONE}" if k.runner_up_cost is not None and k.runner_up_cost < k.cost else ""
        lines.append(f"  its cost:   {seconds_text(k.runner_up_cost)} (everything else as it is{why})")
    else:
        lines.append("  runner-up:  none; nothing else is possible here")
    if k.members:
        shown = ", ".join(k.members[:6])
        more = f" and {len(k.members) - 6} more, which plan.content.choices has" if len(k.members) > 6 else ""
        lines.append(f"  follows it: {shown}{more}")
    return "\n".join(lines)


def html_summary(c: PlanContent, phases: Sequence[tuple[str, float]]) -> str:
    """A short HTML form for notebooks."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(label)}</th><td>{html.escape(text)}</td></tr>"
        for label, text in summary_rows(c, phases)
    )
    inputs = "".join(
        f"<tr><td>{html.escape(a)}</td><td>{html.escape(b)}</td><td><code>{html.escape(d)}</code></td>"
        + "".join(f"<td>{html.escape(s)}</td>" for s in stages)
        + "</tr>"
        for a, b, d, *stages in _input_rows(c)
    )
    head = "".join(f"<th>{name}</th>" for name in inputs_header(c))
    return f"<table>{rows}</table><table><tr>{head}</tr>{inputs}</table>"
