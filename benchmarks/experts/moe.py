"""Experts for the mixture of experts: data parallel, FSDP, expert parallel with all-to-all (GShard, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from benchmarks.experts.base import Expert, Shape, by_pattern, fully_sharded, replicated


@dataclass(frozen=True)
class Sizes:
    """Sizes that the constraints name: see ``examples.moe.Config``; ``capacity`` is the slots of an expert."""

    batch: int
    seq: int
    hidden: int
    ffn: int
    vocab: int
    experts: int
    group: int
    capacity: int


def rows(s: Sizes) -> dict[Shape, P]:
    """Tokens and groups of tokens split over the devices."""
    groups = s.batch * s.seq // s.group
    return {
        (s.batch, s.seq, s.hidden): P("x", None, None),
        (s.batch, s.seq, s.ffn): P("x", None, None),
        (s.batch, s.seq, s.vocab): P("x", None, None),
        (groups, s.group, s.hidden): P("x", None, None),
        (groups, s.group, s.experts): P("x", None, None),
        (groups, s.group, s.experts, s.capacity): P("x", None, None, None),
    }


def between(s: Sizes) -> dict[Shape, P]:
    """Slots split by group outside the experts and by expert inside: an all-to-all at every crossing."""
    groups = s.batch * s.seq // s.group
    return {
        (s.experts, groups, s.capacity, s.hidden): P(None, "x", None, None),
        (groups, s.experts, s.capacity, s.hidden): P("x", None, None, None),
        (s.experts, groups, s.capacity, s.ffn): P("x", None, None, None),
        (groups, s.experts, s.capacity, s.ffn): P(None, "x", None, None),
    }


def inside(s: Sizes) -> dict[Shape, P]:
    """Slots split by expert on both sides of the experts."""
    groups = s.batch * s.seq // s.group
    made: dict[Shape, P] = {}
    for width in (s.hidden, s.ffn):
        made[s.experts, groups, s.capacity, width] = P("x", None, None, None)
        made[groups, s.experts, s.capacity, width] = P(None, "x", None, None)
    return made


def experts(s: Sizes) -> tuple[Expert, ...]:
    """All experts, for 8 devices."""
    split = by_pattern(((r"\['(up|down)'\]$", P("x", None, None)),))
    # Dense layers have weights of the same names with one dim less, which the pattern leaves whole.
    return (
        Expert("data parallel", (8,), replicated, P("x"), rows(s)),
        Expert("data parallel, left to XLA", (8,), replicated, P("x")),
        Expert("FSDP", (8,), fully_sharded(("x",), 8), P("x"), rows(s)),
        Expert("expert parallel", (8,), split, P("x"), rows(s) | between(s)),
        Expert("expert parallel, slots by expert", (8,), split, P("x"), rows(s) | inside(s)),
        Expert("expert parallel, left to XLA", (8,), split, P("x")),
    )
