"""`select`: which operators each layer runs again in the backward pass, from what is held."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal, TypeAlias

from autopar.ir import Graph, Operator
from autopar.ir.phases import phase_of
from autopar.ir.primitives import EXPENSIVE, is_generator

Level: TypeAlias = Literal["none", "selective", "full"]

#: All levels, from the one that holds the most.
LEVELS: tuple[Level, ...] = ("none", "selective", "full")


def stays_saved(op: Operator, level: Level) -> bool:
    """Whether ``op`` never runs again: what it makes is held where it is needed."""
    if op.effects or level == "none":
        return True
    return level == "selective" and (op.primitive in EXPENSIVE or bool(op.regions))


@dataclass(frozen=True)
class Phases:
    """Ids of operators of the forward pass, which may run again, and of the backward pass, for which they do."""

    forward: frozenset[str]
    backward: frozenset[str]

    @staticmethod
    def of(graph: Graph, ids: Iterable[str], backward: Set[str]) -> Phases:
        """Phases of the operators ``ids``, of which ``backward`` are known to depend on cotangents."""
        members = frozenset(ids)
        late = frozenset(
            op.id for op in graph.operators if op.id in members and (op.id in backward or phase_of(op) == "backward")
        )
        return Phases(members - late, late)


@dataclass(frozen=True)
class RecomputedGroup:
    """Operators that run again together, before the first operator of the backward pass that needs one of them.

    Args:
        layer: number of their layer; None for one that depends on no layer (casts of parameters, masks).
        operators: ids of the operators, in running order.
        taken: values that they take from elsewhere: held ones, and inputs of the graph.
        values: values that the backward pass takes from them.
    """

    layer: int | None
    operators: tuple[str, ...]
    taken: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class Selected:
    """Held and recomputed values of a forward pass.

    Args:
        groups: in the order in which the backward pass needs them.
        saved: values of the forward pass that the backward pass takes from it.
    """

    groups: tuple[RecomputedGroup, ...]
    saved: tuple[str, ...]


def select(graph: Graph, phases: Phases, layers: Sequence[Sequence[str]], level: Level) -> Selected:
    """Selects the values of a forward pass to hold.

    Args:
        graph: operators of the forward and the backward pass, and perhaps of more.
        phases: ids of the operators of each pass.
        layers: by layer the ids of its operators in the forward pass. An operator in no layer may run again for any of
            them.
        level: how much to hold: "none" recomputes nothing, "full" holds the inputs of layers alone.
    """
    return _Selection(graph, phases, layers, level).selected()


class _Selection:
    """See `select`."""

    def __init__(self, graph: Graph, phases: Phases, layers: Sequence[Sequence[str]], level: Level) -> None:
        self.graph, self.phases, self.level = graph, phases, level
        self.layer_of = {id: n for n, ids in enumerate(layers) for id in ids}
        self.order = {op.id: n for n, op in enumerate(graph.operators)}

    def maker(self, name: str) -> Operator | None:
        """The operator of the forward pass that makes a value; None for inputs, and for what has no data."""
        op = self.graph.producers.get(name)
        return None if op is None or op.id not in self.phases.forward or is_generator(op) else op

    def selected(self) -> Selected:
        needed: dict[int | str, dict[str, None]] = {}
        for op in self.graph.operators:
            if op.id not in self.phases.backward:
                continue
            for name in op.reads:
                maker = self.maker(name)
                if maker is not None:
                    # What belongs to no layer is made again by itself, or it would wait for some layer.
                    needed.setdefault(self.layer_of.get(maker.id, maker.id), {})[name] = None
        kept = self._kept(needed)
        saved: set[str] = set()
        groups: list[RecomputedGroup] = []
        for key, names in needed.items():
            saved.update(kept.intersection(names))
            repeated = tuple(n for n in names if n not in kept)
            if repeated:
                group = self._group(key if isinstance(key, int) else None, repeated, kept)
                saved.update(n for n in group.taken if self.maker(n) is not None)
                groups.append(group)
        order = (v.name for op in self.graph.operators for v in op.results)
        return Selected(tuple(groups), tuple(n for n in order if n in saved))

    def _kept(self, needed: Mapping[int | str, Iterable[str]]) -> set[str]:
        """Values that are held rather than made again, of those that the backward pass could need."""
        if self.level != "selective":
            forward = (op for op in self.graph.operators if op.id in self.phases.forward)
            return {v.name for op in forward if stays_saved(op, self.level) for v in op.results}
        kept: set[str] = set()
        # From the last layer on: what one takes from those before is then held for them too.
        for key in sorted(needed, key=lambda k: -k if isinstance(k, int) else 1):
            layer = key if isinstance(key, int) else None
            kept |= cheapest_saved(self.graph, needed[key], self.maker, partial(self._repeats, layer), kept)
        return kept

    def _repeats(self, layer: int | None, op: Operator) -> bool:
        return self.layer_of.get(op.id, layer) == layer and not stays_saved(op, self.level)

    def _group(self, layer: int | None, names: tuple[str, ...], kept: Set[str]) -> RecomputedGroup:
        ids: set[str] = set()
        taken: dict[str, None] = {}
        stack = list(reversed(names))
        while stack:
            name = stack.pop()
            op = self.maker(name)
            elsewhere = op is not None and self.layer_of.get(op.id, layer) != layer
            if op is None or elsewhere or name in kept:
                producer = self.graph.producers.get(name)
                if producer is None or not is_generator(producer):
                    taken[name] = None
            elif op.id not in ids:
                ids.add(op.id)
                stack += reversed(op.reads)
        return RecomputedGroup(layer, tuple(sorted(ids, key=self.order.__getitem__)), tuple(taken), names)


_SOURCE, _SINK = "forward pass", "backward pass"


def cheapest_saved(
    graph: Graph,
    needed: Iterable[str],
    maker: Callable[[str], Operator | None],
    repeats: Callable[[Operator], bool],
    saved: Collection[str],
) -> frozenset[str]:
    """Values to hold, besides ``saved``, so that all of ``needed`` are held or can be made again from what is.

    For operators o that may run again and values v, with sides F (there from the forward pass) and B (made or taken in
    the backward pass), the least

        sum of bytes(v) over results v of o, with o in F and v in B

    such that v is in B where the backward pass needs it, an operator's operands are in B where it is in B, and
    operators that are not repeated are in F. That is a minimum cut; the networks of recomputation are from Jain et al.
    (Checkmate, MLSys'20) and, as a cut, from PyTorch's AOTAutograd ("min-cut rematerialization").

    Args:
        graph: types of values.
        needed: values that the backward pass takes.
        maker: the operator that makes a value; None for one that is there anyway, as inputs of the graph are.
        repeats: whether an operator may run again for this.
        saved: values that are held already, which costs nothing.

    Returns those with the fewest bytes; of several such sets the one with which the least runs again.
    """
    nx: Any = import_module("networkx")  # it takes longer to load than small models to plan
    network = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    stack = list(dict.fromkeys(needed))
    for name in stack:
        network.add_edge(("value", name), _SINK)
    seen = set(stack)
    while stack:
        name = stack.pop()
        op = None if name in saved else maker(name)
        if op is None:
            continue
        if op.id not in network:
            network.add_node(op.id)
            if not repeats(op):
                network.add_edge(_SOURCE, op.id)
            else:
                for operand in op.reads:
                    network.add_edge(("value", operand), op.id)
                    if operand not in seen:
                        seen.add(operand)
                        stack.append(operand)
        network.add_edge(op.id, ("value", name), capacity=graph.types[name].nbytes)
    _, (_, sink_side) = nx.minimum_cut(network, _SOURCE, _SINK)
    crossing = (
        (op, value)
        for op, value in network.edges
        if op not in sink_side and value in sink_side and isinstance(value, tuple)
    )
    return frozenset(value[1] for _, value in crossing)
