"""When causal attention leaves out what its mask leaves empty, and what that is predicted to send."""

from __future__ import annotations

import pytest

from autopar.cluster import Link, LogicalMesh
from autopar.cost import CostModel
from autopar.ir import Operator, TensorType
from autopar.ir.blockwise import blockwise
from autopar.search.intra.attention import AttentionSite
from autopar.search.intra.edges import edges
from autopar.search.intra.operators import OperatorTable, Signature
from autopar.sharding import Strategy
from tests.end_to_end.attentions import FORMS, MORE, train_step
from tests.search.problems import f32, graph_of, i32, toy


def mesh(latency_s: float = 0.0) -> LogicalMesh:
    """Eight devices in a row."""
    return LogicalMesh((("x", 8),), (Link(1e9, latency_s),))


MESH = mesh()


def cores(form: str, tokens: int) -> list[tuple[Operator, tuple[TensorType, ...]]]:
    """The attention forward and backward of a form, with types of operands."""
    fn = {**FORMS, **MORE}[form]
    graph = blockwise(graph_of(train_step(fn), *[f32(1, tokens, 1, 16)] * 3, i32(1, tokens)), 1).graph
    return [(op, graph.operand_types(op)) for op in graph.operators if op.primitive.startswith("attention")]


def ring(op: Operator, types: tuple[TensorType, ...], split: bool = True) -> Strategy:
    """The strategy of an operator that splits tokens, or none of them."""
    options = OperatorTable(MESH).options(op, Signature.of(op, types, (False,) * len(types), (False,) * len(types)))
    (found,) = (s for s in options.strategies if bool(s.rings) == split)
    return found


@pytest.mark.parametrize(("latency_s", "tokens", "pays"), [(1e-3, 256, False), (1e-3, 16384, True), (0.0, 256, True)])
def test_tokens_are_dealt_out_where_that_takes_less_than_it_saves(latency_s: float, tokens: int, pays: bool) -> None:
    """Messages of a millisecond cost more than products of 256 tokens, and less than those of 16,384."""
    cost, row = CostModel(toy(8)), mesh(latency_s)
    for op, types in cores("by_hand", tokens):
        strategy = ring(op, types)
        site = AttentionSite(cost, row, strategy, op, types)
        assert site.skips_masked == pays
        around = [r.count for r in strategy.rings]
        more = list(site.dealt()) if pays else []
        sent = [e.bytes for e in edges(cost, row, strategy, op, types)]
        assert len(sent) == sum(around) + len(more)
        assert sent[sum(around) :] == [b for _, b in more]


def test_seconds_are_those_of_what_is_made() -> None:
    """Of 4n products of halves 2n + 1."""
    cost = CostModel(toy(8))
    for (op, types), (same, _) in zip(cores("by_hand", 4096), cores("whole", 4096), strict=True):
        for split, share in ((True, 17 / 32), (False, 3 / 4)):
            strategy = ring(op, types, split)
            seconds = [AttentionSite(cost, MESH, strategy, o, types).seconds for o in (op, same)]
            assert seconds[0] == pytest.approx(share * seconds[1], rel=1e-6)


def test_what_is_not_causal_or_not_even_makes_all_scores() -> None:
    cost = CostModel(toy(8))
    for form, tokens in (("whole", 256), ("biased", 256), ("by_hand", 8 * 5)):
        for op, types in cores(form, tokens):
            assert not AttentionSite(cost, MESH, ring(op, types), op, types).skips_masked
