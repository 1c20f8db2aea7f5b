"""Forms that are priced are made of the graph of the step: jax traces what a technique adds, and no operator again."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from autopar.api.steps import as_one_stage
from autopar.frontend.retraced import spliced_p
from autopar.ir import Graph
from autopar.ir.loops import Scan
from autopar.ir.phases import is_stage_loop
from autopar.lower.pipeline.source import TracedStages
from autopar.lower.split_layers import split_layers
from autopar.plan import StepForm
from autopar.stages.layers import forward_operators, members_of
from tests.end_to_end.compare import difference
from tests.end_to_end.test_segments_in_stages import chain
from tests.lower.test_techniques import made
from tests.microbatch.running import run, traced


@pytest.fixture
def bound_again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the primitives that are bound while a step is traced again."""
    names: list[str] = []
    inner = jax.make_jaxpr

    def make_jaxpr(function: Any, *args: Any, **options: Any) -> Any:
        def traced(*shapes: Any) -> Any:
            closed = inner(function, *args, **options)(*shapes)
            names.extend(primitives(closed.jaxpr))
            return closed

        return traced

    monkeypatch.setattr("autopar.lower.retrace.jax.make_jaxpr", make_jaxpr)
    return names


def primitives(jaxpr: Any) -> list[str]:
    """Of a jaxpr and of the bodies of its loops."""
    inside = [n for e in jaxpr.eqns if e.primitive.name == "scan" for n in primitives(e.params["jaxpr"].jaxpr)]
    return [*(e.primitive.name for e in jaxpr.eqns), *inside]


@pytest.mark.parametrize("form", [StepForm(segment_layers=1), StepForm(segment_layers=2)])
def test_segments_trace_no_product_again(x64: None, bound_again: list[str], form: StepForm) -> None:
    found, leaves, wanted = made("stacks")
    bound_again.clear()
    formed, _ = as_one_stage(found, 1, form)
    assert "spliced" in bound_again and "dot_general" not in bound_again and "tanh" not in bound_again
    products = [op for op in found.graph.operators if op.primitive == "dot_general"]
    assert len([op for op in formed.graph.operators if op.primitive == "dot_general"]) == len(products)
    assert len(formed.graph.operators) - formed.program.spliced < 0.2 * len(found.graph.operators)
    for a, b in zip(run(formed, leaves), wanted, strict=True):
        assert difference(np.asarray(a), np.asarray(b)) < 1e-10


def cut(count: int) -> tuple[TracedStages, Any]:
    """A chain of layers in two groups, and its two stages."""
    step, args = chain(layers=4, examples=8)
    split = split_layers(traced(step, args)[0], 2).step
    source = TracedStages(split)
    forward = [op.id for op in forward_operators(split.graph, source.microbatches(count))]
    first = next(id for id in forward if split.graph.by_id[id].primitive == "scan")
    return source, members_of(forward, (first,))


def body(graph: Graph) -> Graph:
    """Of the loop over microbatches of a stage."""
    return next(op.region("body") for op in graph.operators if is_stage_loop(op))


def test_recomputation_in_a_stage_traces_no_operator_again(x64: None, bound_again: list[str]) -> None:
    source, members = cut(2)
    plain = source.in_form(members, 0, StepForm(2)).graph
    bound_again.clear()
    again = source.in_form(members, 0, StepForm(2, "full", ())).graph
    assert set(bound_again) <= {"spliced", "scan", "broadcast_in_dim", "iota"}  # and what reads no value
    copies = [op for op in body(again).operators if "recomputed" in op.marks]
    assert copies and len(body(again).operators) == len(body(plain).operators) + len(copies)
    assert source.stage_graph(members, 0, StepForm(2, "full", ())).graph == again


def test_stages_of_one_kind_have_as_many_microbatches_as_asked_for(x64: None) -> None:
    """One source makes all of them."""
    source, members = cut(2)
    for count in (2, 4, 1):
        for form in (StepForm(count), StepForm(count, "full", ()), StepForm(count, segment_layers=1)):
            (loop,) = filter(is_stage_loop, source.in_form(members, 1, form).graph.operators)
            assert Scan.of(loop).length == count


def test_a_spliced_equation_is_compiled_as_what_it_stands_for(x64: None) -> None:
    """Bodies of loops keep such equations, and whoever compiles a jaxpr finds them."""
    found, leaves, wanted = made("stacks")
    formed, _ = as_one_stage(found, 1, StepForm(segment_layers=2))
    loops = [b for b in formed.program.bounds.values() if b.primitive.name == "scan"]
    assert any(spliced_p.name in primitives(b.params["jaxpr"].jaxpr) for b in loops)
    for a, b in zip(run(formed, leaves), wanted, strict=True):
        assert difference(np.asarray(a), np.asarray(b)) < 1e-10
