"""`reassociated`: a graph whose products of products and of sums are computed in the cheaper order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.algebra.emission import Emission, Existing
from autopar.ir.algebra.sums import Cone, Uses
from autopar.ir.analysis import dependents, live, names_made
from autopar.ir.graph import Graph, Operand, Operator
from autopar.ir.types import TensorType


@dataclass(frozen=True)
class ChangedOperator:
    """An operator of a change.

    Args:
        op: the operator.
        types: of its operands.
        of_batch: whether it takes anything that is computed of the batch, so that devices may share it by examples.
    """

    op: Operator
    types: tuple[TensorType, ...]
    of_batch: bool


@dataclass(frozen=True)
class Change:
    """One place that may be computed otherwise. A product ``x w`` that is in both forms is in neither list.

    Args:
        product: id of the product that is no longer made.
        source: its line in the program.
        distributed: whether a product of a sum becomes a sum of products.
        before: operators that are no longer needed.
        after: those that stand for them.
    """

    product: str
    source: str
    distributed: bool
    before: tuple[ChangedOperator, ...]
    after: tuple[ChangedOperator, ...]


@dataclass(frozen=True)
class Reassociated:
    """A rewritten graph.

    Args:
        graph: the graph.
        changes: what was changed, in running order within each round.
        likes: by id of a new operator that of one before which has its parameters; for the others attributes say all.
    """

    graph: Graph
    changes: tuple[Change, ...]
    likes: Mapping[str, str]


def reassociated(graph: Graph, batch: Collection[str], pays: Callable[[Change], bool]) -> Reassociated:
    """``graph`` with products computed in another order where that pays; bodies of its operators stay as they are.

    ``(p q) z`` becomes ``p (q z)``, and ``x (w + p q)`` becomes ``x w + (x p) q``, transposes and scalar factors in
    between included. A product is given up only where all that reads it is rewritten. Equal in exact arithmetic.

    Args:
        graph: a step, or a body.
        batch: inputs that hold examples, or are computed of them.
        pays: whether a change is made. It must not hold of a change and its inverse.
    """
    changes: list[Change] = []
    likes: dict[str, str] = {}
    counts: dict[str, int] = {}
    while True:
        rewriting = _Round(graph, batch, pays, counts)
        if not rewriting.changes:
            return Reassociated(graph, tuple(changes), likes)
        graph = rewriting.result()
        changes += rewriting.changes
        likes.update((new, likes.get(old, old)) for new, old in rewriting.likes.items())


class _Round:
    """Changes that concern different operators. See `reassociated`."""

    def __init__(
        self, graph: Graph, batch: Collection[str], pays: Callable[[Change], bool], counts: dict[str, int]
    ) -> None:
        self.graph = graph
        self.of_batch = {*batch, *names_made(dependents(graph.operators, batch))}
        self.uses = Uses.of(graph)
        self.known = Existing.of(graph, counts)
        self.changes: list[Change] = []
        self.likes: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.before: dict[int, list[Operator]] = {}
        touched: set[str] = set()
        for op in graph.operators:
            cone = self.uses.cone(op) if self.uses.is_product(op) else None
            if cone is None:
                continue
            ids = {op.id, *(o.id for o in (*cone.linear, *cone.ends))}
            emission = Emission(self.uses, self.known.behind())
            if ids & touched or not all(emission.end(e, n, cone) for e, n in zip(cone.ends, cone.sides, strict=True)):
                continue
            change = self._change(cone, emission)
            if pays(change):
                touched |= ids | {w.op.id for w in change.before}
                self._keep(change, emission)

    def _keep(self, change: Change, emission: Emission) -> None:
        self.changes.append(change)
        self.likes.update(emission.likes)
        self.names.update(emission.names)
        for at, op in emission.operators:
            self.known.add(op, 2 * at - 1)
            self.before.setdefault(at, []).append(op)

    def _change(self, cone: Cone, emission: Emission) -> Change:
        """Operators that a change removes and adds."""
        taken = {o for _, op in emission.operators for o in op.reads} - set(emission.names) | set(
            emission.names.values()
        )
        removed = {op.id: op for op in cone.ends}
        pending = list(cone.ends)
        while pending:
            for name in pending.pop().reads:
                op = self.graph.producers.get(name)
                if op is not None and op.id not in removed and self._is_unread(op, removed, taken):
                    removed[op.id] = op
                    pending.append(op)
        before = sorted(removed.values(), key=lambda op: self.uses.places[op.results[0].name])
        added = [op for _, op in emission.operators]
        of_batch = {*self.of_batch, *names_made(dependents(added, self.of_batch))}

        def works(operators: Sequence[Operator]) -> tuple[ChangedOperator, ...]:
            return tuple(
                ChangedOperator(
                    op, tuple(_type(o, emission.known) for o in op.operands), not of_batch.isdisjoint(op.reads)
                )
                for op in operators
                if op.id not in emission.unchanged
            )

        return Change(cone.product.id, cone.product.source, emission.distributed, works(before), works(added))

    def _is_unread(self, op: Operator, removed: Mapping[str, Operator], taken: set[str]) -> bool:
        names = [v.name for v in op.results]
        if op.effects or any(n in taken or n in self.uses.returned for n in names):
            return False
        return all(reader.id in removed for n in names for reader in self.uses.readers.get(n, ()))

    def result(self) -> Graph:
        """The graph with all changes."""
        operators: list[Operator] = []
        for n, op in enumerate(self.graph.operators):
            operators += [*self.before.get(n, []), op]
        renamed = [replace(op, operands=self._renamed(op.operands)) for op in operators]
        outputs = tuple(replace(o, operand=self._renamed([o.operand])[0]) for o in self.graph.outputs)
        kept = tuple(live(renamed, (o.operand for o in outputs)))
        return replace(self.graph, operators=kept, outputs=outputs)

    def _renamed(self, operands: Sequence[Operand]) -> tuple[Operand, ...]:
        return tuple(self._new(o) if isinstance(o, str) else o for o in operands)

    def _new(self, name: str) -> str:
        while name in self.names:
            name = self.names[name]
        return name


def _type(operand: Operand, known: Existing) -> TensorType:
    return known.types[operand] if isinstance(operand, str) else operand.type
