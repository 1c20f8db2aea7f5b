"""Roles of arguments: parameters, optimizer state, batch, other; and the output that replaces each of them.

An output replaces an input (the next call takes it) where an argument, or a part of it, comes back
with the same structure and types. Among the inputs that come back, a parameter is one that the
results next to it depend on (the loss, other leaves); optimizer state only reaches itself and the
parameter that it updates, and averages of parameters only themselves. What does not come back, and has a
dim, is the batch, unless products show that it is a model which is not trained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.ir import Graph, Input, Operand, Operator, Output, TensorType, is_float
from autopar.ir.analysis import names_read, reached_outputs
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.ir.primitives import CASTS

_OPTIMIZER_WORDS = ("opt_state", "optimizer", "opt", "mu", "nu", "trace", "momentum", "velocity")
_MODEL_WORDS = ("model", "p", "params", "parameters", "state", "train_state", "variables", "weights")


def assign_roles(
    graph: Graph, arguments: Sequence[tuple[int | str, str]], batch_argnums: Sequence[int] | None
) -> Graph:
    """``graph`` with roles of inputs and ``updates`` of outputs filled in.

    Args:
        graph: its inputs begin with the traced leaves; closed-over constants follow.
        arguments: for each leaf its argument (position or name) and its path inside the argument.
        batch_argnums: positions of the batch arguments; None finds them.
    """
    leaves = graph.inputs[: len(arguments)]
    reach = reached_outputs(graph)
    updates: dict[int, str] = {}
    if not predicted(graph, arguments, batch_argnums):
        updates = _updates(leaves, arguments, graph.outputs, set(batch_argnums or ()), reach)
    outputs = tuple(replace(o, updates=updates.get(i)) for i, o in enumerate(graph.outputs))
    carried = set(updates.values())
    returned = _Returned.of(outputs, reach)
    read = names_read(graph.operators) | {o.operand for o in graph.outputs if isinstance(o.operand, str)}
    model = frozen_arguments(graph, arguments, carried) if carried else model_arguments(graph, arguments)
    roles: dict[str, str] = {}
    for leaf, (argument, _) in zip(leaves, arguments, strict=True):
        if leaf.name in carried:
            roles[leaf.name] = _state_role(leaf, returned)
        elif batch_argnums is not None:
            kept = "parameter" if not carried and leaf.name in read and may_be_batch(leaf.type) else "other"
            roles[leaf.name] = "batch" if argument in batch_argnums else kept
        elif leaf.name not in read and not carried:
            roles[leaf.name] = "other"
        elif argument in model:
            roles[leaf.name] = "parameter" if may_be_batch(leaf.type) else "other"
        else:
            roles[leaf.name] = "batch" if may_be_batch(leaf.type) else "other"
    return Graph(
        graph.name,
        tuple(replace(i, role=roles.get(i.name, i.role)) for i in graph.inputs),
        graph.operators,
        outputs,
    )


def _updates(
    leaves: Sequence[Input],
    arguments: Sequence[tuple[int | str, str]],
    outputs: Sequence[Output],
    batch_argnums: set[int],
    reach: Mapping[str, int],
) -> dict[int, str]:
    """Index of an output -> name of the input that it replaces.

    Outputs are matched by the end of their path: ``[0].params['w']`` replaces ``state.params['w']``
    where all leaves of an argument find a partner under one prefix, and some partner is computed from its
    leaf (predictions have the type of the labels, but are not made from them).
    """
    by_argument: dict[int | str, list[tuple[Input, str]]] = defaultdict(list)
    for leaf, (argument, path) in zip(leaves, arguments, strict=True):
        if argument not in batch_argnums:
            by_argument[argument].append((leaf, path))
    at = {o.path: i for i, o in enumerate(outputs)}
    taken: set[int] = set()
    updates: dict[int, str] = {}
    for members in by_argument.values():
        for prefix in _prefixes(outputs):
            arrays = [(at.get(prefix + path), leaf) for leaf, path in members]
            fit = all(i is not None and i not in taken and outputs[i].type == leaf.type for i, leaf in arrays)
            if fit and any(i is not None and reach[leaf.name] >> i & 1 for i, leaf in arrays):
                for i, leaf in arrays:
                    assert i is not None
                    taken.add(i)
                    updates[i] = leaf.name
                break
    return updates


def _prefixes(outputs: Sequence[Output]) -> list[str]:
    """Beginnings of result paths, shortest first: "", "[0]", "[1]", "['params']"...; at most two levels."""
    seen: dict[str, None] = {"": None}
    for output in outputs:
        levels = output.path.replace(".", "\0.").replace("[", "\0[").split("\0")[1:]
        for depth in (1, 2):
            if len(levels) >= depth:
                seen["".join(levels[:depth])] = None
    return sorted(seen, key=lambda p: (p.count("[") + p.count("."), p))


@dataclass(frozen=True)
class _Returned:
    """Outputs by what becomes of them, as bits.

    Args:
        outputs: all of them, with the inputs that they replace.
        replacing: for each input that comes back the index of the output that replaces it.
        free: those that replace nothing.
        scalars: those without dims among ``free``: the loss and other metrics.
        reach: see `autopar.ir.analysis.reached_outputs`.
        seen: inputs that come back and reach something in ``free``.
    """

    outputs: Sequence[Output]
    replacing: Mapping[str, int]
    free: int
    scalars: int
    reach: Mapping[str, int]
    seen: tuple[str, ...]

    @staticmethod
    def of(outputs: Sequence[Output], reach: Mapping[str, int]) -> _Returned:
        """The first dims of all outputs."""
        replacing = {o.updates: i for i, o in enumerate(outputs) if o.updates is not None}
        free = sum(1 << i for i, o in enumerate(outputs) if o.updates is None)
        scalars = sum(1 << i for i, o in enumerate(outputs) if o.updates is None and o.type.rank == 0)
        seen = tuple(name for name in replacing if reach[name] & free)
        return _Returned(outputs, replacing, free, scalars, reach, seen)


def _state_role(leaf: Input, returned: _Returned) -> str:
    """Role of an input that comes back."""
    reached = returned.reach[leaf.name]
    own_bit = 1 << returned.replacing[leaf.name]
    named = any(word in _words(leaf.name) for word in _OPTIMIZER_WORDS)
    seen = bool(reached & returned.scalars)  # by the loss or another metric
    if leaf.type.rank == 0:
        counts = named or "count" in leaf.name
        return "optimizer" if counts else "parameter" if seen and is_float(leaf.type.dtype) else "other"
    if seen:
        return "parameter"
    if named:
        return "optimizer"
    others = reached & ~returned.free & ~own_bit
    if others and not others & (others - 1):
        return "optimizer"  # it reaches one other input alone: the parameter that it updates
    return "optimizer" if not others and _is_average(leaf, returned) else "parameter"


def _is_average(leaf: Input, returned: _Returned) -> bool:
    """Whether what replaces ``leaf`` is computed from inputs that come back and that the loss depends on."""
    place = returned.replacing[leaf.name]
    return any(returned.reach[s] >> place & 1 for s in returned.seen if s != leaf.name)


def _words(path: str) -> set[str]:
    for mark in "[]'\".":
        path = path.replace(mark, " ")
    return set(path.split())


_NONE: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True)
class _FirstDims:
    """Places of the first dims of inputs in a value.

    Args:
        plain: (input, dim of the value) where the value is the input, cast, transposed or scaled.
        mixed: likewise where something was added to it.
    """

    plain: frozenset[tuple[str, int]] = _NONE
    mixed: frozenset[tuple[str, int]] = _NONE


@dataclass
class _Products:
    """Inputs by what forward products do to their first dims."""

    summed: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)

    def walk(self, graph: Graph, inputs: Mapping[str, _FirstDims]) -> None:
        """Reads the operators of a graph whose inputs have these first dims."""
        known = dict(inputs)
        for op in graph.operators:
            if phase_of(op) == "backward":
                continue
            dims = [known.get(o, _FirstDims()) if isinstance(o, str) else _FirstDims() for o in op.operands]
            if op.primitive == "dot_general":
                self._product(op, dims)
            elif op.primitive == "conv_general_dilated":
                self.kept |= {name for name, _ in dims[0].mixed}
                self.summed |= set() if dims[0].plain else {name for name, _ in dims[1].mixed}
            elif op.primitive == "scan":
                scan = Scan.of(op)
                constants, carries, stacks = scan.split(dims)
                given = [*constants, *(_FirstDims() for _ in carries), *stacks]
                self.walk(scan.body, dict(zip((i.name for i in scan.body.inputs), given, strict=True)))
            elif dims:
                passed = _passed_on(op, dims, graph.type_of(op.operands[0]))
                known.update((r.name, passed) for r in op.results)

    def _product(self, op: Operator, dims: Sequence[_FirstDims]) -> None:
        numbers: Any = op.attr("dimension_numbers")
        summed = numbers[0]
        for n, mine in enumerate(dims):
            over = set(summed[n])
            self.kept |= {name for name, dim in mine.mixed if dim not in over}
            if not dims[1 - n].plain:
                self.summed |= {name for name, dim in mine.mixed if dim in over}


def _passed_on(op: Operator, dims: Sequence[_FirstDims], type: TensorType) -> _FirstDims:
    """Places of first dims in the results of ``op``, whose first operand has this type."""
    if op.primitive in ("add", "div", "mul", "sub"):
        scales = op.primitive in ("div", "mul")
        plain = frozenset().union(*(d.plain for d in dims)) if scales else _NONE
        return _FirstDims(plain, frozenset().union(*(d.mixed for d in dims)))

    def moved(part: frozenset[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        places = ((name, dim_in_result(op, dim, type)) for name, dim in part)
        return frozenset((name, dim) for name, dim in places if dim is not None)

    return _FirstDims(moved(dims[0].plain), moved(dims[0].mixed))


def frozen_arguments(graph: Graph, arguments: Sequence[tuple[int | str, str]], carried: Set[str]) -> set[int | str]:
    """Arguments of a train step that are a model which is not trained.

    Args:
        graph: its inputs begin with the traced leaves.
        arguments: for each leaf its argument (position or name) and its path inside the argument.
        carried: names of inputs that come back.
    """
    leaves = [(i, a) for i, (a, _) in zip(graph.inputs, arguments, strict=False) if i.name not in carried]
    of_leaf = {i.name: a for i, a in leaves}
    products = _Products()
    first = {i.name: frozenset({(i.name, 0)}) for i in graph.inputs}
    products.walk(graph, {name: _FirstDims(dims, dims) for name, dims in first.items()})
    frozen = {of_leaf[n] for n in products.summed if n in of_leaf}
    frozen -= {of_leaf[n] for n in products.kept if n in of_leaf}
    others = {a for i, a in leaves if may_be_batch(i.type)} - frozen
    return frozen if others else set()


def may_be_batch(type: TensorType) -> bool:
    """Arrays with dims, except random keys: typed, or raw (two uint32)."""
    return type.rank > 0 and not type.dtype.startswith("key<") and not (type.dtype == "u32" and type.shape == (2,))


def model_arguments(graph: Graph, arguments: Sequence[tuple[int | str, str]]) -> set[int | str]:
    """Arguments that are a model.

    Examples lie in the first dim of every array of a batch. An argument whose arrays have first dims of several sizes,
    or that is called as models are, is none, if there is another that may be the batch. Where these say nothing, an
    argument is a model of which a product sums over the first dim of an array, or a loop takes it slice by slice next
    to what it carries.

    Args:
        graph: its inputs begin with the traced leaves.
        arguments: for each leaf its argument (position or name) and its path inside the argument.
    """
    firsts: dict[int | str, set[int]] = defaultdict(set)
    called: dict[int | str, str] = {}
    of_leaf: dict[str, int | str] = {}
    for leaf, (argument, inner) in zip(graph.inputs, arguments, strict=False):
        if may_be_batch(leaf.type):
            firsts[argument].add(leaf.type.shape[0])
            called[argument] = leaf.name.removesuffix(inner)
            of_leaf[leaf.name] = argument
    model = {a for a, sizes in firsts.items() if len(sizes) > 1 or called[a] in _MODEL_WORDS}
    model = model or {of_leaf[n] for n in _without_examples(graph) if n in of_leaf}
    return model if len(model) < len(firsts) else set()


def predicted(graph: Graph, arguments: Sequence[tuple[int | str, str]], batch_argnums: Sequence[int] | None) -> bool:
    """Whether the only result of a function is computed from examples by a model, and so replaces no argument.

    Predictions may have the shape of the examples, as state that comes back has.

    Args:
        graph: its inputs begin with the traced leaves of the arguments.
        arguments: likewise.
        batch_argnums: positions of the batch arguments; None finds them.
    """
    if batch_argnums is not None or len(graph.outputs) != 1 or graph.outputs[0].path:
        return False
    if any(phase_of(op) == "backward" for op in graph.operators):
        return False
    model = model_arguments(graph, arguments)
    pairs = list(zip(graph.inputs, arguments, strict=False))
    returned = graph.outputs[0].type
    equal = [i for i, (argument, path) in pairs if not path and argument not in model and i.type == returned]
    others = [i for i, (argument, _) in pairs if argument not in model and may_be_batch(i.type)]
    weights = [i for i, (argument, _) in pairs if argument in model]
    return bool(weights) and equal == others and all(i.type != returned for i in weights)


def _without_examples(graph: Graph) -> set[str]:
    """Inputs whose first dim holds no examples, by what reads them."""
    firsts: dict[str, tuple[str, int]] = {i.name: (i.name, 0) for i in graph.inputs}  # input, where its first dim is
    inputs: set[str] = set()
    for op in graph.operators:
        if op.operands and op.operands[0] in firsts:
            name, dim = firsts[str(op.operands[0])]
            moved = dim_in_result(op, dim, graph.type_of(op.operands[0]))
            firsts.update((r.name, (name, moved)) for r in op.results if moved is not None)
        taken = _not_by_example(op)
        inputs.update(firsts[o][0] for o, dims in taken if o in firsts and firsts[o][1] in dims)
    return inputs


def _not_by_example(op: Operator) -> list[tuple[Operand, Sequence[int]]]:
    """Operands of ``op`` with the dims that hold no examples: summed over, or taken one by one next to a carry."""
    if op.primitive == "dot_general":
        numbers: Any = op.attr("dimension_numbers")
        return list(zip(op.operands, numbers[0], strict=True))
    if op.primitive == "scan":
        _, carries, stacks = Scan.of(op).split(op.operands)
        return [(o, (0,)) for o in stacks] if any(isinstance(c, str) for c in carries) else []
    return []


def dim_in_result(op: Operator, dim: int, type: TensorType) -> int | None:
    """The dim of the results of ``op`` where the dim of its first operand is; None where it is in none.

    Of one slice of the first dim it is the next dim: where a stack of matrices is indexed each has a first dim of its
    own. A stack of vectors may be examples that are taken one by one.

    Args:
        op: passes its first operand on, as a whole or one slice of it.
        dim: of its first operand.
        type: of that operand.
    """
    if op.primitive in CASTS or op.primitive in ("copy", "stop_gradient"):
        return dim
    if op.primitive == "transpose":
        return op.ints("permutation").index(dim)
    if op.primitive == "squeeze":
        gone = {d % type.rank for d in op.ints("dimensions")}
        return None if dim in gone else dim - sum(d < dim for d in gone)
    if dim or type.rank < 3:
        return None
    if op.primitive in ("slice", "dynamic_slice") and op.results[0].type.shape == (1, *type.shape[1:]):
        return 1
    if op.primitive == "unstack" and op.integer("axis") == 0:
        return 0
    if op.primitive == "gather" and op.results[0].type.shape == type.shape[1:]:
        return 0 if op.ints("collapsed_slice_dims") == (0,) else None
    return None
