"""`packed_tables`: the graph of a step whose embedding tables are one array that `transforms.deal_tables` packs.

Separate tables of one width that are each read by one lookup, and updated in the same way, become one array
[slots, rows, width], their optimizer state likewise. Indices of an example come in the order of the slots, as whoever
packs tables prepares them; bags are added up before they travel. The graph is for a price alone: nothing runs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._compat.dtypes import numpy_dtype
from autopar.frontend.build import build_graph
from autopar.ir import Graph, Input, Literal, Operand, Operator, TensorType, Value
from autopar.ir.analysis import live, place
from autopar.ir.phases import BACKWARD, FORWARD
from autopar.ir.primitives import ELEMENTWISE, is_zero
from autopar.search.counterfactuals import PackedTables
from autopar.transforms.dealt_tables import TableDeal, deal_tables

#: Names of the inputs that a packed step has besides its tables: indices by slot, and which member is of which bag.
_IDS, _OWNERS = "packed indices", "packed bags"


@dataclass(frozen=True)
class _Lookup:
    """The only lookup of a table.

    Args:
        table: name of the input.
        rows: name of what is read, bags added up: [examples, width].
        cotangent: name of its gradient, of the same shape.
        members: indices of an example.
        examples: number of them.
        replaced: operators that the lookup in the packed array replaces.
        gradient: name of the table's gradient.
    """

    table: str
    rows: str
    cotangent: str
    members: int
    examples: int
    replaced: frozenset[str]
    gradient: str


@dataclass(frozen=True)
class _Lane:
    """A table with everything of its shape: state of the optimizer, gradient, update.

    Args:
        lookup: of the table.
        values: names of all, inputs first.
        inputs: names of its inputs.
        operators: its elementwise operators.
        sums: operators that add up all elements of one of its values, as for a norm of all gradients.
        kind: equal where lanes are updated in the same way.
    """

    lookup: _Lookup
    values: frozenset[str]
    inputs: tuple[str, ...]
    operators: tuple[Operator, ...]
    sums: tuple[Operator, ...]
    kind: Any


def packed_tables(graph: Graph, slots: int) -> PackedTables | None:
    """The step with its most numerous separate tables packed; None where there are not two that may be.

    Args:
        graph: of a train step in one microbatch.
        slots: devices that tables are dealt out to.
    """
    by_kind: dict[Any, list[_Lane]] = defaultdict(list)
    for lane in _Tables(graph).lanes():
        by_kind[lane.kind].append(lane)
    lanes = max(by_kind.values(), key=len, default=[])
    if len(lanes) < 2 or slots < 2:
        return None
    names = tuple(lane.lookup.table for lane in lanes)
    rows = {name: graph.types[name].shape[0] for name in names}
    deal = deal_tables(rows, slots, {lane.lookup.table: float(lane.lookup.members) for lane in lanes})
    return PackedTables(_Packed(graph, tuple(lanes), deal).packed(), names)


@dataclass(frozen=True)
class _Tables:
    """Finds tables that may be packed.

    Args:
        graph: of a train step.
    """

    graph: Graph

    @cached_property
    def readers(self) -> Mapping[str, Sequence[Operator]]:
        """Operators that read each value, each once."""
        readers: dict[str, list[Operator]] = defaultdict(list)
        for op in self.graph.operators:
            for name in dict.fromkeys(op.reads):
                readers[name].append(op)
        return readers

    @cached_property
    def returned(self) -> frozenset[str]:
        """Names of values that the step returns."""
        return frozenset(o.operand for o in self.graph.outputs if isinstance(o.operand, str))

    @cached_property
    def roots(self) -> Mapping[str, str]:
        """By name of a matrix another that stands for all that elementwise operators connect it with."""
        parents: dict[str, str] = {}

        def root(name: str) -> str:
            while parents.setdefault(name, name) != name:
                parents[name] = parents[parents[name]]
                name = parents[name]
            return name

        for op in self.graph.operators:
            if self._is_elementwise(op):
                for name in op.reads:
                    if self.graph.types[name].rank == 2 and not self._is_broadcast(name):
                        parents[root(name)] = root(op.results[0].name)
        return {name: root(name) for name in list(parents)}

    def _is_elementwise(self, op: Operator) -> bool:
        return op.primitive in ELEMENTWISE and not op.effects and op.results[0].type.rank == 2 and bool(op.reads)

    def _is_broadcast(self, name: str) -> bool:
        """Whether a value is a number in all places."""
        op = self.graph.producers.get(name)
        return op is not None and op.primitive == "broadcast_in_dim" and not self.graph.operand_types(op)[0].rank

    def lanes(self) -> Iterator[_Lane]:
        """Tables that may be packed."""
        members: dict[str, set[str]] = defaultdict(set)
        for name, root in self.roots.items():
            members[root].add(name)
        for i in self.graph.inputs:
            if i.role == "parameter" and i.type.rank == 2 and i.name in self.roots:
                lane = self._lane(i, frozenset(members[self.roots[i.name]]))
                if lane is not None:
                    yield lane

    def _lane(self, table: Input, values: frozenset[str]) -> _Lane | None:
        """The lane of a table, if it may be packed; ``values`` are those of its shape that are connected with it."""
        graph, shape = self.graph, table.type.shape
        producers = [op for op in graph.operators if op.results[0].name in values]
        operators = tuple(op for op in producers if self._is_elementwise(op))
        others = [op for op in producers if not self._is_elementwise(op)]
        inputs = tuple(i.name for i in graph.inputs if i.name in values)
        states = [i for i in graph.inputs if i.name in values and i.name != table.name]
        if any(graph.types[name].shape != shape for name in values) or any(i.role != "optimizer" for i in states):
            return None
        lookup = self._lookup(table, others)
        if lookup is None:
            return None
        ids, sums = {op.id for op in operators}, []
        for name in values:
            for op in self.readers[name]:
                if op.primitive == "reduce_sum" and op.ints("axes") == (0, 1):
                    sums.append(op)
                elif op.id not in ids and op.id not in lookup.replaced:
                    return None
        order = {op.id: n for n, op in enumerate(graph.operators)}
        sums.sort(key=lambda op: order[op.id])
        places = (*inputs, lookup.gradient, *(o.results[0].name for o in operators))
        numbers = {name: n for n, name in enumerate(places)}
        returned = [o for o in graph.outputs if o.operand in values]
        if any(o.updates not in inputs for o in returned):
            return None
        kind = (
            table.type.dtype,
            shape[1],
            lookup.examples,
            tuple((op.primitive, op.attrs, self._operands(op, numbers)) for op in operators),
            tuple(numbers[op.reads[0]] for op in sums),
            tuple((numbers[str(o.operand)], numbers[str(o.updates)]) for o in returned),
        )
        return _Lane(lookup, values, inputs, operators, tuple(sums), kind)

    def _operands(self, op: Operator, numbers: Mapping[str, int]) -> tuple[Any, ...]:
        """Operands by their places in the lane; numbers and what has no place by themselves."""
        operands: list[Any] = []
        for o in op.operands:
            if isinstance(o, str) and o not in numbers and self._is_broadcast(o):
                operands.append(self.graph.producers[o].operands[0])
            else:
                operands.append(numbers.get(o, o) if isinstance(o, str) else o)
        return tuple(operands)

    def _lookup(self, table: Input, others: Sequence[Operator]) -> _Lookup | None:
        """The lookup of a table whose gradient ``others`` make: one sum of rows into zeros."""
        graph = self.graph
        lookups = [op for op in self.readers[table.name] if op.primitive == "gather" and op.operands[0] == table.name]
        if len(lookups) != 1 or len(others) != 1 or others[0].primitive != "scatter-add":
            return None
        (gather,), (scatter,) = lookups, others
        zeros = graph.producers.get(str(scatter.operands[0]))
        rows = gather.results[0]
        plain = gather.ints("start_index_map") == gather.ints("collapsed_slice_dims") == (0,)
        plain &= gather.ints("offset_dims") == (rows.type.rank - 1,) and not gather.ints("operand_batching_dims")
        plain &= gather.ints("slice_sizes") == (1, table.type.shape[1]) and rows.type.rank in (2, 3)
        if not plain or zeros is None or not is_zero(zeros) or scatter.operands[1] != gather.operands[1]:
            return None
        replaced, cotangent = {gather.id, scatter.id}, str(scatter.operands[2])
        if rows.type.rank == 3:
            (sums, *more), back = self.readers[rows.name] or [gather], graph.producers.get(cotangent)
            if more or rows.name in self.returned or sums.primitive != "reduce_sum" or sums.ints("axes") != (1,):
                return None
            if back is None or back.primitive != "broadcast_in_dim" or back.ints("broadcast_dimensions") != (0, 2):
                return None
            replaced.add(sums.id)
            members, rows, cotangent = rows.type.shape[1], sums.results[0], str(back.operands[0])
        else:
            members = 1
        ends = frozenset(replaced)
        gradient = scatter.results[0].name
        return _Lookup(table.name, rows.name, cotangent, members, rows.type.shape[0], ends, gradient)


@dataclass(frozen=True)
class _Packed:
    """Writes the packed step.

    Args:
        graph: with separate tables.
        lanes: of the tables; the first one's operators become those of the packed array.
        deal: slots of the tables.
    """

    graph: Graph
    lanes: tuple[_Lane, ...]
    deal: TableDeal

    @cached_property
    def slots(self) -> list[list[int]]:
        """Numbers of the tables of each slot."""
        return [[n for n, s in enumerate(self.deal.slots) if s == slot] for slot in range(self.deal.devices)]

    @cached_property
    def owners(self) -> np.ndarray[Any, Any]:
        """Sums of bags: [slots, members of all bags of a slot, tables of a slot], 1 where a member is of a table."""
        members = [lane.lookup.members for lane in self.lanes]
        bags = max(sum(members[t] for t in some) for some in self.slots)
        owners = np.zeros((self.deal.devices, bags, max(map(len, self.slots))), np.float32)
        for slot, some in enumerate(self.slots):
            ends = np.cumsum([members[t] for t in some])
            for k, t in enumerate(some):
                owners[slot, ends[k] - members[t] : ends[k], k] = 1
        return owners

    @property
    def type(self) -> TensorType:
        """Of the packed array."""
        table = self.graph.types[self.lanes[0].lookup.table]
        return TensorType((self.deal.devices, self.deal.slot_rows, table.shape[1]), table.dtype)

    def packed(self) -> Graph:
        """The graph, in an order in which it can run."""
        first, *others = self.lanes
        ends: dict[str, Operand] = {}
        forward, rows = self._lookups()
        backward, gradient = self._gradients()
        ends.update({lane.lookup.rows: name for lane, name in zip(self.lanes, rows, strict=True)})
        ends[first.lookup.gradient] = gradient
        for lane in others:
            ends.update({op.results[0].name: Literal("0.0", op.results[0].type) for op in lane.sums})
        dropped = {id for lane in self.lanes for id in lane.lookup.replaced}
        dropped |= {op.id for lane in others for op in (*lane.operators, *lane.sums)}
        lane_ids = {op.id for op in (*first.operators, *first.sums)}
        operators = [*forward, *backward]
        for op in self.graph.operators:
            if op.id not in dropped:
                operators += self._in_lane(op) if op.id in lane_ids else [op]

        def read(operand: Operand) -> Operand:
            return ends.get(operand, operand) if isinstance(operand, str) else operand

        operators = [replace(op, operands=tuple(map(read, op.operands))) for op in operators]
        gone = {name for lane in others for name in lane.values}
        outputs = tuple(
            replace(o, operand=read(o.operand), type=self._as_packed(o.type) if o.operand in first.values else o.type)
            for o in self.graph.outputs
            if o.operand not in gone
        )
        running = live(_sorted(operators), [o.operand for o in outputs])
        return Graph(self.graph.name, self._inputs(running, gone), tuple(running), outputs)

    def _as_packed(self, type: TensorType) -> TensorType:
        return TensorType(self.type.shape, type.dtype)

    def _in_lane(self, op: Operator) -> Iterator[Operator]:
        """An operator of a table as one of the packed array; what it reads everywhere the same becomes as large."""
        if op.primitive == "reduce_sum":
            yield replace(op, attrs=tuple((k, (0, 1, 2) if k == "axes" else v) for k, v in op.attrs))
            return
        operands: list[Operand] = []
        for o in op.operands:
            maker = self.graph.producers.get(o) if isinstance(o, str) else None
            if maker is None or o in self.lanes[0].values or self.graph.type_of(o).rank != 2:
                operands.append(o)
                continue
            name = f"{op.id}/packed.{len(operands)}"
            attrs = tuple((k, self.type.shape if k == "shape" else v) for k, v in maker.attrs)
            yield replace(maker, id=name, results=(Value(name, self._as_packed(maker.results[0].type)),), attrs=attrs)
            operands.append(name)
        (result,) = op.results
        yield replace(op, operands=tuple(operands), results=(Value(result.name, self._as_packed(result.type)),))

    def _inputs(self, operators: Sequence[Operator], gone: set[str]) -> tuple[Input, ...]:
        """Inputs of the packed step: indices that nothing reads any more are none."""
        first = self.lanes[0]
        before, now = ({o for op in ops for o in op.reads} for ops in (self.graph.operators, operators))
        kept = [i for i in self.graph.inputs if i.name not in gone and (i.name in now or i.name not in before)]
        inputs = [replace(i, type=self._as_packed(i.type)) if i.name in first.inputs else i for i in kept]
        inputs.append(Input(_IDS, self._ids, "batch"))
        if self._adds_up:
            inputs.append(Input(_OWNERS, TensorType(self.owners.shape, self.type.dtype), "constant"))
        return tuple(inputs)

    @property
    def _ids(self) -> TensorType:
        return TensorType((self.lanes[0].lookup.examples, *self.owners.shape[:2]), "i32")

    @property
    def _adds_up(self) -> bool:
        """Whether some bag has several members."""
        return any(lane.lookup.members > 1 for lane in self.lanes)

    def _lookups(self) -> tuple[list[Operator], list[str]]:
        """Operators that read the packed array, and names of the rows of each table."""
        slots, _, most = self.owners.shape
        table = self.lanes[0].lookup.table

        def forward(packed: Any, ids: Any, owners: Any) -> list[Any]:
            rows = _read(packed, ids)
            bags = jnp.einsum("sbkw,skm->sbmw", rows, owners) if self._adds_up else rows
            flat = jnp.moveaxis(bags, 0, 1).reshape(len(ids), slots * most, -1)
            places = {t: slot * most + k for slot, some in enumerate(self.slots) for k, t in enumerate(some)}
            return [lax.squeeze(lax.slice_in_dim(flat, p, p + 1, axis=1), (1,)) for _, p in sorted(places.items())]

        return self._traced(forward, FORWARD, [(table, self.type)])

    def _gradients(self) -> tuple[list[Operator], str]:
        """Operators that make the gradient of the packed array, and its name."""
        slots, _, most = self.owners.shape
        cotangents = [lane.lookup.cotangent for lane in self.lanes]
        dtype, examples = numpy_dtype(self.type.dtype), self.lanes[0].lookup.examples
        packed = jax.ShapeDtypeStruct(self.type.shape, dtype)

        def backward(*arrays: Any) -> list[Any]:
            *given, ids, owners = arrays
            none = jnp.zeros((examples, self.type.shape[2]), dtype)
            placed = [given[some[k]] if k < len(some) else none for some in self.slots for k in range(most)]
            flat = jnp.concatenate([x[:, None] for x in placed], 1)
            bags = jnp.moveaxis(flat.reshape(examples, slots, most, -1), 1, 0)
            rows = jnp.einsum("sbmw,skm->sbkw", bags, owners) if self._adds_up else bags
            return list(jax.linear_transpose(lambda p: _read(p, ids), packed)(rows))

        operators, (gradient,) = self._traced(backward, BACKWARD, [(c, self.graph.types[c]) for c in cotangents])
        return operators, gradient

    def _traced(
        self, run: Callable[..., list[Any]], mark: str, taken: Sequence[tuple[str, TensorType]]
    ) -> tuple[list[Operator], list[str]]:
        """Operators of a function of values of the graph, indices and owners, and names of its results."""
        types = [*taken, (_IDS, self._ids), (_OWNERS, TensorType(self.owners.shape, self.type.dtype))]
        shapes = [jax.ShapeDtypeStruct(t.shape, numpy_dtype(t.dtype)) for _, t in types]
        graph = build_graph(jax.make_jaxpr(run)(*shapes), mark, [(name, "other") for name, _ in types]).graph
        given = {name for name, _ in types}

        def named(name: str) -> str:
            return name if name in given else f"packed {mark}/{name}"

        operators = [
            replace(
                op,
                id=named(op.id),
                operands=tuple(named(o) if isinstance(o, str) else o for o in op.operands),
                results=tuple(Value(named(v.name), v.type) for v in op.results),
                marks=(mark,),
            )
            for op in graph.operators
        ]
        return operators, [named(str(o.operand)) for o in graph.outputs]


def _read(packed: Any, ids: Any) -> Any:
    """Rows [slots, examples, indices, width] of [slots, rows, width] for indices [examples, slots, indices]."""
    return jax.vmap(lambda slot, at: slot.at[at].get(mode="promise_in_bounds"))(packed, jnp.moveaxis(ids, 1, 0))


def _sorted(operators: Sequence[Operator]) -> list[Operator]:
    """Operators in their order, each after what it reads."""
    makers = {v.name: op for op in operators for v in op.results}
    placed: dict[str, Operator] = {}
    for op in operators:
        place(op, makers, placed)
    return list(placed.values())
