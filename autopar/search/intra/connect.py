"""Inputs, results, and the edges from each value to those who take it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir import Graph, Input, Layout, Literal
from autopar.search.constraints import Constraint
from autopar.search.intra.builder import Builder, constrained, input_label, layout_label
from autopar.search.intra.layouts import Pairs
from autopar.search.intra.sharding_problem import CopyDraft, Use, ValueDraft

#: A use, and the choices of its node that count; None for all.
First = tuple[Use, NDArray[np.bool_] | None]
Readers = Sequence[First]


def add_input(
    b: Builder,
    input: Input,
    *,
    copy_of: str | None,
    arriving: bool,
    replaced: bool,
    constraints: Mapping[str, Constraint],
) -> None:
    """Adds the node of a top-level input.

    A choice is a pair (a, b): the input lies in layout a, and forward and backward operators may also take it from a
    copy in the coarser layout b. What may lie in host memory has each pair twice; a stack that loops take in slices has
    no copy there.

    Args:
        b: where it is added.
        input: the input.
        copy_of: name under which it has such a copy, as several operators read it, or a loop takes slices of it; None
            without one.
        arriving: whether it comes with every microbatch, placed as the loop over them takes it: then it has no copy.
        replaced: whether a result of the step replaces it.
        constraints: by input, what the user asked for.
    """
    name, type = input.name, input.type
    layouts = b.layouts.all(type)
    plain = constrained(constraints, name, layouts, b.mesh)
    if not plain:
        b.broken.append(name)
        plain = layouts
    pairs = b.layouts.with_copies(plain) if copy_of is not None else b.layouts.with_themselves(plain)
    has_copy, sliced = len(pairs.pairs) > len(plain), name in b.offered.stacks
    nested = name in b.offered.nested
    forced = (sliced and b.offered.forced) or name in b.offered.update.inputs
    here = Pairs((), (), ()) if forced else pairs
    there = Pairs((), (), ())
    if sliced or nested:
        there = Pairs.of((k, k) for k in plain if not k.dims[0])
    elif name in b.offered.inputs:
        there = pairs
    n, pairs = len(here.pairs), here.and_then(there)
    hosted = (False,) * n + (True,) * len(there.pairs) if there.pairs else ()

    node = b.node(name, np.zeros(len(pairs.pairs)), functools.partial(input_label, pairs.pairs, n))
    trips = type.shape[0] if sliced else 1
    stored = pairs.stored
    b.value(
        name, type, node, stored, 1.0, source=name, hosted=hosted, arriving=arriving, trips=trips, replaced=replaced
    )
    if has_copy and copy_of is not None:
        b.copies.append(CopyDraft(copy_of, node, pairs.read))


def add_outputs(b: Builder, graph: Graph) -> list[tuple[int, tuple[Layout, ...]] | None]:
    """Notes where the results of the step are taken: (node, layouts by strategy) of each; None for literals.

    An output that replaces an input ends in that input's layout, another one in any.
    """
    outputs: list[tuple[int, tuple[Layout, ...]] | None] = []
    for output in graph.outputs:
        if isinstance(output.operand, Literal):
            outputs.append(None)
            continue
        if output.updates is not None:
            target = b.values[output.updates]
            assert target.node is not None
            node, layouts = target.node, target.layouts
            target.replaced_there = b.values[output.operand].made_there
            as_made = target.hosted if target.trips > 1 or target.replaced_there else ()
        else:
            node, layouts = b.free_layouts(f"result{output.path}", output.type)
            as_made = ()
        outputs.append((node, layouts))
        value = b.values[output.operand]
        if value.node is not None:
            name = f"result{output.path}"
            value.uses.append(Use(node, layouts, 1.0, b.time, name, "update", as_made=as_made))
    return outputs


def connect(b: Builder, value: ValueDraft) -> None:
    """Adds the edges from a value to those who take it, through a shared copy where there are several."""
    if value.node is None or not (value.uses or value.source):
        return
    uses = firsts(value.uses, b.split_phases)
    outside = [(u, new) for u, new in uses if u.node != value.node]
    for u, new in uses:
        if u.node == value.node and u.required != value.layouts:
            _take(b, value, u.node, value.layouts, u, new)
    if value.source:
        _connect_input(b, value, outside)
        return
    in_slices = value.trips > 1 or (value.alias and (value.hosted or any(u.as_made for u, _ in outside)))
    if len({u.node for u, _ in outside}) < 2 or value.made_there or in_slices:
        _take_all(b, value, outside)
        return
    phases = sorted({u.phase for u, _ in outside}) if b.split_phases else [""]
    for phase in phases:
        users = [(u, new) for u, new in outside if phase in ("", u.phase)]
        if len({u.node for u, _ in users}) < 2 and phase:
            _take_all(b, value, users)
            continue
        layouts = b.layouts.together((value.layouts, *(u.required for u, _ in users)))
        copy = b.node(
            f"copy of {value.key}" + (f" ({phase})" if phase else ""),
            np.zeros(len(layouts)),
            functools.partial(layout_label, layouts),
        )
        b.nodes[copy].copy_of = value.key
        b.copies.append(CopyDraft(value.key, copy, layouts, (phase,)))
        b.edge(
            value.node, copy, b.layouts.sending(value.wire).resharding(value.sent, value.layouts, layouts, value.weight)
        )
        for u, new in users:
            _take(b, value, copy, layouts, u, new)


def _take_all(b: Builder, value: ValueDraft, readers: Readers) -> None:
    """Adds what uses cost that take a value as it is."""
    assert value.node is not None
    for u, new in readers:
        _take(b, value, value.node, value.layouts, u, new)


def _take(
    b: Builder, value: ValueDraft, node: int, layouts: tuple[Layout, ...], use: Use, new: NDArray[np.bool_] | None
) -> None:
    """Adds what a use costs that takes a value from where ``node`` decides, in one of ``layouts``."""
    costs = b.layouts.sending(value.wire).resharding(value.sent, layouts, use.required, use.weight)
    costs = costs if new is None else np.where(new, costs, 0.0)
    in_slices = value.trips > 1 or (value.alias and value.hosted)
    if in_slices or any(use.as_made):  # slices alone are on the device: nothing can be laid out otherwise
        other = np.array([[k != required for required in use.required] for k in layouts])
        hosted = np.array(value.hosted or (False,) * len(layouts))[:, None]
        costs = np.where(other & (hosted | np.array(use.as_made or (False,) * len(use.required))), np.inf, costs)
    b.edge(node, use.node, costs)


def _connect_input(b: Builder, value: ValueDraft, readers: Readers) -> None:
    """Adds the cost of an input's copy, once a phase that uses it, and the edges to the readers."""
    assert value.node is not None
    stored, table = value.layouts, b.layouts.sending(value.wire)
    at = next((i for i, c in enumerate(b.copies) if c.key == value.key), None)
    used = stored if at is None else b.copies[at].layouts
    if at is not None:
        phases = {u.phase for u, _ in readers if u.phase != "update"} if b.split_phases else {""}
        b.copies[at] = replace(b.copies[at], phases=tuple(sorted(phases)) or ("",))
        gather = np.diagonal(table.resharding(value.sent, stored, used))
        b.nodes[value.node].costs = gather * max(1, len(phases))
    for u, new in readers:
        costs = table.nearer(value.sent, stored, used, u.required, u.weight)
        if u.stacked or u.until:  # the loop may take what is there, not a copy that nobody counted
            there = np.array([[k in (a, c) for k in u.required] for a, c in zip(stored, used, strict=True)])
            if not u.stacked:  # or a small one
                bytes = [b.layouts.local_bytes(value.type, k) for k in (stored, u.required)]
                there |= bytes[0][:, None] >= bytes[1][None, :]
            costs = np.where(there, costs, np.inf)
        if any(u.as_made):
            costs = np.where([[k != required for required in u.required] for k in stored], np.inf, costs)
        b.edge(value.node, u.node, costs if new is None else np.where(new, costs, 0.0))


def firsts(uses: Sequence[Use], by_phase: bool) -> list[First]:
    """For each use of a value the strategies of its node under which no earlier use wants the same layout.

    One conversion serves uses that want the same layout. None stands for all strategies.

    Args:
        uses: of one value.
        by_phase: whether each phase makes its own conversions.
    """
    if len(uses) == 1:
        return [(uses[0], None)]
    first_uses: list[First] = []
    seen: dict[tuple[int, str, bool], list[tuple[Layout, ...]]] = {}
    for u in uses:
        before = seen.setdefault((u.node, u.phase if by_phase else "", u.stacked), [])
        if any(u.required is b for b in before) or u.required in before:
            continue
        new = np.array([all(k != b[i] for b in before) for i, k in enumerate(u.required)]) if before else None
        before.append(u.required)
        first_uses.append((u, None if new is None or new.all() else new))
    return first_uses
