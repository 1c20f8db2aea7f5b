"""What a practitioner would call absurd, searched for in free plans of drawn models.

``python -m benchmarks sanity [--seed N] [--cases N]`` plans drawn models with everything free. Each finding names the
plan that a practitioner would write instead; that plan is made by name. A finding is explained where it takes no less
time than the free plan, and a fault where it is faster.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import autopar
from autopar import Cluster, Plan
from autopar.plan.types import InputRecord, Stage, dtype_and_shape
from benchmarks import more_families, spatial
from benchmarks.families import FAMILIES, Built
from benchmarks.family_bytes import CASES, CLUSTER
from benchmarks.report import Report, Row, Say

#: Of a free plan's step, what the plan by name may take and the finding still be explained: the search leaves out what
#: cannot be faster by more (`autopar.search.policy`, ``large_gap``).
AS_FAST = 0.97
#: Of the mean work of stages, what a stage should have.
LEAST_WORK = 0.5


@dataclass(frozen=True)
class Finding:
    """Something absurd.

    Args:
        what: it is.
        where: in the plan.
        instead: options of the plan that a practitioner would write.
    """

    what: str
    where: str
    instead: Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """A drawn model on a cluster.

    Args:
        name: of the row.
        build: makes its step and arguments.
        cluster: what it is planned for.
        options: of all its plans.
    """

    name: str
    build: Callable[[], Built]
    cluster: Cluster
    options: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, **options: Any) -> Plan:
        """Its plan with more options."""
        step, args = self.build()
        return autopar.parallelize(step, cluster=self.cluster, **self.options, **options).plan(*args)


#: By family what takes a batch size.
_BUILDERS: Mapping[str, Callable[[int], Built]] = MappingProxyType(
    {
        **{name: lambda batch, name=name: FAMILIES[name](batch) for name in FAMILIES},  # type: ignore[misc]
        "depthwise": more_families.depthwise,
        "masked language": more_families.masked_language,
        "selective": more_families.selective,
        "lstm": more_families.lstm,
        "pooled": lambda batch: spatial.pooled(batch, 8, 64),
        "denoiser": lambda batch: spatial.denoiser(batch, 8, 32),
        "video": lambda batch: spatial.video(batch, 8, 16),
        **{
            name: lambda batch, name=name: CASES[name][0]()  # type: ignore[misc]
            for name in ("mixer", "convolutions over time", "graph convolutions", "two towers", "hypernetwork")
        },
    }
)


def draw(seed: int, number: int) -> Model:
    """Model ``number`` of a seed."""
    rng = random.Random(f"{seed}/{number}")
    family, batch = rng.choice(sorted(_BUILDERS)), 2 ** rng.randint(0, 8)
    cluster = rng.choice((CLUSTER, Cluster.load("dgx-a100", nodes=1), Cluster.load("p3.16xlarge", nodes=2)))
    return Model(f"{family}, batch {batch}, {cluster.name}", lambda: _BUILDERS[family](batch), cluster)


def findings(plan: Plan) -> Iterator[Finding]:
    """All that is absurd in a plan."""
    inputs = plan.content.inputs
    for number, stage in enumerate(plan.stages):
        here = [i for i in inputs if i.stage == number]
        yield from _whole_batch(stage, here)
        yield from _scattered_twice(stage, here, plan.num_microbatches)
        yield from _all_to_all(stage, here)
    if len(plan.stages) > 1:
        mean_s = sum(s.compute_time for s in plan.stages) / len(plan.stages)
        for number, stage in enumerate(plan.stages):
            if stage.compute_time < LEAST_WORK * mean_s:
                where = f"stage {number}: {stage.compute_time:.3g} s of {mean_s:.3g} s on average"
                for fewer in sorted({1, len(plan.stages) - 1}):
                    yield Finding("stage with little work", where, {"num_stages": fewer})


def _bytes_of(record: InputRecord) -> int:
    dtype, shape = dtype_and_shape(record.type)
    return math.prod(shape) * max(1, int("".join(c for c in dtype if c.isdigit()) or 8) // 8)


def _split_axes(record: InputRecord, dim: int | None = None) -> frozenset[str]:
    """Mesh axes that split a dim of an argument, or any of its dims."""
    dims = record.layout.partition("[")[2].partition("]")[0].split(",")
    taken = dims if dim is None else dims[dim : dim + 1]
    return frozenset(axis for d in taken for axis in re.findall(r"\w+", d))


def _traffic(stage: Stage, kinds: Sequence[str], sizes: frozenset[int]) -> dict[int, float]:
    """By bytes of a tensor how often a step collectives of some kinds move one of these sizes."""
    found: dict[int, float] = {}
    for c in stage.collectives:
        if c.kind in kinds and c.bytes in sizes:
            found[c.bytes] = found.get(c.bytes, 0.0) + c.count
    return found


def _batch(inputs: Sequence[InputRecord]) -> list[InputRecord]:
    return [i for i in inputs if i.role == "batch" and dtype_and_shape(i.type)[1]]


def _examples_first(inputs: Sequence[InputRecord]) -> dict[str, Any]:
    return {"constraints": {i.path: (0,) for i in _batch(inputs)}}


def _whole_batch(stage: Stage, inputs: Sequence[InputRecord]) -> Iterator[Finding]:
    """A batch dim that could be split is whole, and weights or their gradients travel."""
    batch, devices = _batch(inputs), math.prod(n for _, n in stage.mesh_axes)
    if not batch or devices == 1 or any(_split_axes(i, 0) for i in batch):
        return
    if any(dtype_and_shape(i.type)[1][0] % devices for i in batch):
        return
    sizes = frozenset(_bytes_of(i) for i in inputs if i.role == "parameter")
    moved = _traffic(stage, ("all-gather", "reduce-scatter", "all-reduce"), sizes)
    if moved:
        where = f"{batch[0].path} {batch[0].layout}; {sum(n * c for n, c in moved.items()):.3g} bytes of weights"
        yield Finding("batch whole while weights travel", where, _examples_first(inputs))


def _scattered_twice(stage: Stage, inputs: Sequence[InputRecord], microbatches: int) -> Iterator[Finding]:
    """A parameter is gathered, and what is made of its size is scattered, twice for each microbatch."""
    parameters = [i for i in inputs if i.role == "parameter" and _split_axes(i)]
    sizes = frozenset(map(_bytes_of, parameters))
    gathered, scattered = (_traffic(stage, (kind,), sizes) for kind in ("all-gather", "reduce-scatter"))
    for size in sorted(sizes):
        same = [i for i in parameters if _bytes_of(i) == size]
        most = 2 * len(same) * microbatches
        if gathered.get(size, 0.0) >= most and scattered.get(size, 0.0) >= most:
            yield Finding("gathered and scattered twice", same[0].path, {"constraints": {i.path: () for i in same}})


def _all_to_all(stage: Stage, inputs: Sequence[InputRecord]) -> Iterator[Finding]:
    """As many all-to-alls as products."""
    products = sum(1 for id in stage.operators if "dot_general" in id or "conv_general" in id)
    count = sum(c.count for c in stage.collectives if c.kind == "all-to-all")
    if products > 1 and count >= products - 1 and _batch(inputs):
        where = f"{count:g} all-to-alls of {products} products"
        yield Finding("all-to-alls between neighbours", where, _examples_first(inputs))


def faster_alternatives(plan: Plan) -> Iterator[str]:
    """Arguments without whose choice the step planned again is faster: the first of a batch, the largest parameter."""
    weights = sorted((i for i in plan.content.inputs if i.role == "parameter"), key=_bytes_of)
    for record in (*_batch(plan.content.inputs)[:1], *weights[-1:]):
        other = None if plan.again is None else plan.again.without(record.path)
        if other is not None and other.step_time is not None and other.step_time < AS_FAST * plan.step_time:
            yield f"{record.path} {record.layout}: {plan.step_time:.4g} s, without it {other.step_time:.4g} s"


def judged(model: Model) -> Row:
    """The row of a model: its findings, and which are faults."""
    plan = model.plan()
    found, faults = list(findings(plan)), list(faster_alternatives(plan))
    for finding in found:
        try:
            other_s = model.plan(**finding.instead).step_time
        except autopar.AutoparError:
            continue  # nobody could write that plan
        if other_s < AS_FAST * plan.step_time:
            faults.append(f"{finding.what}, {finding.where}: {plan.step_time:.4g} s, otherwise {other_s:.4g} s")
    return {
        "model": model.name,
        "step_s": plan.step_time,
        "stages": len(plan.stages),
        "findings": "; ".join(f"{f.what} ({f.where})" for f in found),
        "faults": "; ".join(faults),
    }


def run(quick: bool, say: Say, seed: int = 0, cases: int = 30) -> Report:
    """The benchmark; ``quick`` takes two models."""
    rows = []
    for number in range(2 if quick else cases):
        rows.append(judged(draw(seed, number)))
        say(f"sanity: {rows[-1]}")
    found = sum(bool(row["findings"]) for row in rows)
    notes = (f"seed {seed}", f"{found} of {len(rows)} plans have a finding")
    return Report(
        "sanity", "every finding is explained by a price", tuple(rows), not any(r["faults"] for r in rows), notes
    )
