"""Dims of the batch from which the dims of all values come, by the sharding rules, and those that are dims of tokens.

Tokens are dims of the batch that products with parameters treat in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

from autopar.errors import InfeasiblePlanError
from autopar.ir import Graph, Layout, Literal, Operator, TensorType
from autopar.ir.loops import Scan, While
from autopar.ir.phases import MICROBATCHES, STAGE
from autopar.ir.primitives import DENSE_CONTRACTIONS, PASSED_ON
from autopar.sharding import Rule, rule_for

#: A dim of a batch input: its name and the dim.
Label: TypeAlias = tuple[str, int]
#: For each dim of a value the dims of the batch that it comes from; several where they meet in a sum or a product.
Labels: TypeAlias = tuple[frozenset[Label], ...]

_NONE: frozenset[Label] = frozenset()


@dataclass(frozen=True)
class Origins:
    """For each value of a graph the dims of the batch from which its own dims come.

    Args:
        dims: by value, with the ids of enclosing operators and regions before its name, the origins of its dims.
        kept: dims of the batch that a product with parameters has in its result, the same for each index.
        summed: those that a product with parameters sums over.
        products: by key as in ``dims`` the values that are products of the batch with parameters, and which of their
            dims the batch brings.
        entering: keys of what loops and branches take that is computed from parameters alone.
        sums: keys of what loops of the step itself carry from constants on, and of what loops stack trip by trip, that
            comes to depend on parameters and the batch, as gradients do.
        accumulated: keys of what microbatches add up that comes to depend on the batch: gradients, and metrics. In a
            stage a gradient may depend on no parameter, where other stages send both of its factors.
    """

    dims: Mapping[str, Labels]
    kept: frozenset[Label]
    summed: frozenset[Label]
    products: Mapping[str, frozenset[int]]
    entering: frozenset[str]
    sums: frozenset[str]
    accumulated: frozenset[str]


@dataclass(frozen=True)
class _Known:
    """Origins of a value's dims, and whether it depends on the batch, on parameters, on values with a wire format."""

    dims: Labels
    data: bool = False
    weight: bool = False
    formatted: bool = False

    def joined(self, other: _Known) -> _Known:
        dims = tuple(a | b for a, b in zip(self.dims, other.dims, strict=True))
        return _Known(dims, self.data or other.data, self.weight or other.weight, self.formatted or other.formatted)


def origins(graph: Graph) -> Origins:
    """Follows every dim of every batch input through the graph, as far as it keeps its size.

    Args:
        graph: a train step, or a stage of one; loops and branches are looked into.
    """
    walk = _OriginWalk()
    start = []
    for i in graph.inputs:
        if i.role == "batch":
            start.append(_Known(tuple(frozenset({(i.name, d)}) for d in range(i.type.rank)), data=True))
        else:
            start.append(_Known((_NONE,) * i.type.rank, weight=i.role == "parameter"))
    walk.graph(graph, start, "")
    dims = {key: known.dims for key, known in walk.values.items() if any(known.dims)}
    # What is sent in a format of its own is gathered where that is marked, and enters as it is gathered.
    entering = frozenset(
        key
        for key in walk.entering
        if walk.values[key].weight and not walk.values[key].data and not walk.values[key].formatted
    )
    sums = frozenset(key for key in walk.sums if walk.values[key].weight and walk.values[key].data)
    accumulated = frozenset(key for key in walk.accumulated if walk.values[key].data)
    return Origins(dims, frozenset(walk.kept), frozenset(walk.summed), walk.products, entering, sums, accumulated)


def _followed(rule: Rule) -> Rule:
    """A rule without the dims that windows slide over: each of their elements meets its neighbours."""
    sliding = {n for n, factor in enumerate(rule.factors) if factor.halo is not None}

    def still(places: tuple[tuple[int | None, ...], ...]) -> tuple[tuple[int | None, ...], ...]:
        return tuple(tuple(None if factor in sliding else factor for factor in dims) for dims in places)

    return replace(rule, operands=still(rule.operands), results=still(rule.results)) if sliding else rule


@dataclass
class _OriginWalk:
    values: dict[str, _Known] = field(default_factory=dict)
    kept: set[Label] = field(default_factory=set)
    summed: set[Label] = field(default_factory=set)
    products: dict[str, frozenset[int]] = field(default_factory=dict)
    entering: set[str] = field(default_factory=set)
    sums: set[str] = field(default_factory=set)
    accumulated: set[str] = field(default_factory=set)

    def graph(self, graph: Graph, inputs: Sequence[_Known], prefix: str) -> list[_Known]:
        """Origins of the outputs of a graph whose inputs are known."""
        self.values.update((prefix + i.name, k) for i, k in zip(graph.inputs, inputs, strict=True))
        if prefix:
            self.entering.update(prefix + i.name for i in graph.inputs)
        for op in graph.operators:
            operands = [self._of(o, graph.type_of(o), prefix) for o in op.operands]
            region = _REGIONS.get(op.primitive) if op.regions else None
            if region:
                results = region(self, op, operands, f"{prefix}{op.id}/")
            else:
                results = self._operator(graph, op, operands, prefix)
            self.values.update((prefix + v.name, k) for v, k in zip(op.results, results, strict=True))
        return [self._of(o.operand, o.type, prefix) for o in graph.outputs]

    def _of(self, operand: str | Literal, type: TensorType, prefix: str) -> _Known:
        return self.values[prefix + operand] if isinstance(operand, str) else _Known((_NONE,) * type.rank)

    def _operator(self, graph: Graph, op: Operator, operands: list[_Known], prefix: str) -> list[_Known]:
        # Their rules split all operands of one shape together, which do not belong together for that.
        if op.primitive in PASSED_ON and len(op.operands) == len(op.results):
            return [replace(k, formatted=True) for k in operands] if op.primitive == "wire" else operands
        types = graph.operand_types(op)
        rule = _followed(rule_for(op, types)[0])
        by_factor: dict[tuple[int | None, int], frozenset[Label]] = {}
        for known, type, factors in zip(operands, types, rule.operands, strict=True):
            for labels, size, factor in zip(known.dims, type.shape, factors, strict=True):
                by_factor[factor, size] = by_factor.get((factor, size), _NONE) | labels
        if op.primitive in DENSE_CONTRACTIONS:
            self._product(rule, operands, prefix + op.results[0].name)
        data = any(k.data for k in operands)
        weight = any(k.weight for k in operands)
        formatted = any(k.formatted for k in operands)
        return [
            _Known(
                tuple(
                    _NONE if factor is None else by_factor.get((factor, size), _NONE)
                    for factor, size in zip(factors, v.type.shape, strict=True)
                ),
                data,
                weight,
                formatted,
            )
            for v, factors in zip(op.results, rule.results, strict=True)
        ]

    def _product(self, rule: Rule, operands: Sequence[_Known], result: str) -> None:
        for side in (0, 1):
            known, other = operands[side], operands[1 - side]
            if not known.data or other.data or not other.weight:
                continue
            brought = {f for f in rule.operands[side] if f is not None and f not in rule.operands[1 - side]}
            self.products[result] = frozenset(d for d, f in enumerate(rule.results[0]) if f in brought)
            for labels, factor in zip(known.dims, rule.operands[side], strict=True):
                if factor is None or factor not in rule.results[0]:
                    self.summed |= labels
                elif factor not in rule.operands[1 - side]:
                    self.kept |= labels

    def scan(self, op: Operator, operands: Sequence[_Known], prefix: str) -> list[_Known]:
        """Origins of the results of a scan."""
        scan = Scan.of(op)
        consts, carried, stacks = scan.split(operands)
        if "/body/" not in prefix:
            entries = scan.body.inputs[len(consts) : len(consts) + len(carried)]
            starts = zip(entries, carried, strict=True)
            constant = [f"{prefix}body/{i.name}" for i, k in starts if not (k.data or k.weight)]
            self.sums.update(constant)
            if {MICROBATCHES, STAGE}.intersection(op.marks):
                self.accumulated.update(constant)
        around = prefix.removesuffix(f"{op.id}/")
        self.sums.update(around + v.name for v in op.results[len(carried) :])
        slices = [replace(k, dims=k.dims[1:]) for k in stacks]
        while True:
            passed, rows = scan.split_results(self.graph(scan.body, [*consts, *carried, *slices], f"{prefix}body/"))
            joined = [a.joined(b) for a, b in zip(carried, passed, strict=True)]
            if joined == carried:
                return [*carried, *(replace(k, dims=(_NONE, *k.dims)) for k in rows)]
            carried = joined

    def while_loop(self, op: Operator, operands: Sequence[_Known], prefix: str) -> list[_Known]:
        """Origins of the results of a while loop."""
        loop = While.of(op)
        in_cond, in_body, carried = loop.split(operands)
        while True:
            results = self.graph(loop.body, [*in_body, *carried], f"{prefix}body/")
            joined = [a.joined(b) for a, b in zip(carried, results, strict=True)]
            if joined == carried:
                self.graph(loop.cond, [*in_cond, *carried], f"{prefix}cond/")
                return carried
            carried = joined

    def cond(self, op: Operator, operands: Sequence[_Known], prefix: str) -> list[_Known]:
        """Origins of the results of branches."""
        first, *rest = (self.graph(branch, operands[1:], f"{prefix}{name}/") for name, branch in op.regions)
        for results in rest:
            first = [a.joined(b) for a, b in zip(first, results, strict=True)]
        return first


_Region: TypeAlias = Callable[[_OriginWalk, Operator, Sequence[_Known], str], list[_Known]]
_REGIONS: Mapping[str, _Region] = MappingProxyType(
    {"scan": _OriginWalk.scan, "while": _OriginWalk.while_loop, "cond": _OriginWalk.cond}
)


def token_dims(graph: Graph) -> dict[str, int]:
    """Dim of the tokens of each value of the step, inputs among them; the first of several.

    A dim of a batch input is one of tokens where it is not the first, which is of examples, where products with
    parameters keep it, so that each index along it meets the same matrix, and where none sums over it, as over
    features. What it meets in sums and products (that of the labels, of a mask) is one of tokens too. What lies inside
    loops is not among the values.

    Args:
        graph: a whole train step: its backward pass tells features of labels from tokens.
    """
    labels_of = origins(graph)
    tokens = _token_labels(labels_of)
    by_value: dict[str, int] = {}
    for name in graph.types:
        for d, labels in enumerate(labels_of.dims.get(name, ())):
            if labels & tokens:
                by_value.setdefault(name, d)
    return by_value


def _token_labels(labels_of: Origins) -> frozenset[Label]:
    classes = _classes(labels for dims in labels_of.dims.values() for labels in dims if labels)
    return frozenset(
        label
        for members in classes
        for label in members
        if members & labels_of.kept and not members & labels_of.summed and all(d for _, d in members)
    )


def _classes(sets: Iterable[frozenset[Label]]) -> list[frozenset[Label]]:
    """Labels by class: those that are in one of ``sets`` together, and what these are together with."""
    classes: list[frozenset[Label]] = []
    for labels in sorted(set(sets), key=sorted):
        touching = [c for c in classes if c & labels]
        classes = [c for c in classes if not c & labels] + [labels.union(*touching)]
    return classes


@dataclass(frozen=True)
class SharedTokens:
    """Layouts in which values may be made where the devices along a mesh axis share the tokens of examples.

    The axis splits no dim of examples, which would make it one of data parallelism, and products of the batch with
    parameters have their tokens split over it, where they can.

    Args:
        axis: the mesh axis.
        examples: by value, with the ids of enclosing operators and regions before its name, the dims that number
            examples.
        products: by such a name the dim of tokens of products with parameters.
    """

    axis: str
    examples: Mapping[str, frozenset[int]]
    products: Mapping[str, int]

    @staticmethod
    def of(graph: Graph, tokens: Mapping[str, int], axis: str) -> SharedTokens:
        """Finds the tokens of a graph.

        Args:
            graph: a train step or a stage of one; the first dim of its batch inputs numbers examples.
            tokens: by batch input the dim of its tokens, where it has one.
            axis: the mesh axis.
        """
        labels_of, labels = origins(graph), frozenset(tokens.items())
        examples = {
            key: frozenset(d for d, come in enumerate(dims) if any(n == 0 for _, n in come))
            for key, dims in labels_of.dims.items()
        }
        products: dict[str, int] = {}
        for key in sorted(labels_of.products.keys() & labels_of.dims.keys()):
            of_tokens = [d for d, come in enumerate(labels_of.dims[key]) if come & labels]
            if of_tokens:
                products[key] = of_tokens[0]
        return SharedTokens(axis, examples, products)

    def allowed(self, key: str, layouts: Sequence[Layout]) -> list[bool]:
        """Whether the value ``key`` may be made in each layout; one or more are true."""
        examples, tokens = self.examples.get(key, frozenset()), self.products.get(key)
        ok = [not any(self.axis in k.dims[d] for d in examples) for k in layouts]
        if tokens is None:
            return ok
        split = [a and self.axis in k.dims[tokens] for a, k in zip(ok, layouts, strict=True)]
        return split if any(split) else ok


@dataclass(frozen=True)
class SharedMatrices:
    """Layouts in which values may be made where the devices along a mesh axis share the matrices of layers.

    The axis splits no dim of examples, and products of the batch with parameters in the parameter's dims: each device
    has a part of the matrix and all that meets it, and no device repeats another one's product (Shoeybi et al.,
    "Megatron-LM", 2019).

    Args:
        axis: the mesh axis.
        whole: by value, with the ids of enclosing operators and regions before its name, the dims that the axis may
            not split.
        products: values among them that are products of the batch with parameters.
    """

    axis: str
    whole: Mapping[str, frozenset[int]]
    products: Set[str] = frozenset()

    @staticmethod
    def of(graph: Graph, axis: str) -> SharedMatrices:
        """Finds the dims that ``axis`` may not split, in a step whose batch inputs' first dim numbers examples."""
        labels_of = origins(graph)
        whole: dict[str, frozenset[int]] = {}
        for key, dims in labels_of.dims.items():
            examples = {d for d, come in enumerate(dims) if any(n == 0 for _, n in come)}
            # Of a product with a parameter the last dim is the parameter's; where the others are from is lost where the
            # batch was cut into microbatches.
            batch = range(len(dims) - 1) if key in labels_of.products and len(dims) > 2 else ()
            whole[key] = frozenset({*examples, *batch})
        return SharedMatrices(axis, whole, frozenset(labels_of.products))

    def allowed(self, key: str, layouts: Sequence[Layout]) -> list[bool]:
        """Whether the value ``key`` may be made in each layout; one or more are true."""
        whole = self.whole.get(key, frozenset())
        ok = [not any(self.axis in k.dims[d] for d in whole) for k in layouts]
        if key in self.products:
            ok = where_any(ok, [self.axis in k.partial or self.axis in k.dims[-1] for k in layouts])
        return ok if any(ok) else [True] * len(layouts)


def where_any(ok: Sequence[bool], wanted: Sequence[bool]) -> list[bool]:
    """``ok`` where also wanted, if that leaves any."""
    both = [a and b for a, b in zip(ok, wanted, strict=True)]
    return both if any(both) else list(ok)


@dataclass(frozen=True)
class SharedExamples:
    """Layouts in which values may be made where the devices along mesh axes share the batch.

    Products of the batch with parameters have the batch split over each axis, so that no replica repeats another one's
    product, however slow the links are.

    Args:
        axes: the mesh axes.
        products: by key of a product of the batch with parameters the dims that the batch brings.
    """

    axes: tuple[str, ...]
    products: Mapping[str, frozenset[int]]

    @staticmethod
    def of(graph: Graph, axes: tuple[str, ...]) -> SharedExamples:
        """Finds the products of a train step, or of a stage of one."""
        return SharedExamples(axes, origins(graph).products)

    def allowed(self, key: str, layouts: Sequence[Layout]) -> list[bool]:
        """Whether the value ``key`` may be made in each layout; one or more are true."""
        ok = [True] * len(layouts)
        brought = self.products.get(key, frozenset())
        for axis in self.axes if brought else ():
            ok = where_any(ok, [any(axis in k.dims[d] for d in brought) for k in layouts])
        return ok


def check_tokens(graph: Graph, dims: Mapping[str, int], parts: int) -> None:
    """Raises InfeasiblePlanError unless ``parts`` devices can share the tokens of every batch argument that has some.

    Args:
        graph: a whole train step.
        dims: from `token_dims`.
        parts: devices.
    """
    held = [i for i in graph.inputs if i.role == "batch" and i.name in dims]
    if not held:
        raise InfeasiblePlanError(
            f"{graph.name} has no tokens that cp={parts} devices can share: no batch argument has a dim of them",
            cause="tokens are a dim next to that of the examples, which products with parameters keep and do not sum",
            remedy="leave cp out, and give its devices to dp or tp",
        )
    for i in held:
        size = i.type.shape[dims[i.name]]
        if size % parts:
            possible = [n for n in range(2, size + 1) if size % n == 0]
            raise InfeasiblePlanError(
                f"{i.name} {i.type} has {size} tokens an example, which cp={parts} devices do not divide",
                cause="context parallelism gives each device the same number of tokens",
                remedy=f"cp={', '.join(map(str, possible[:8]))}, or examples of {(size // parts + 1) * parts} tokens "
                "(tokens and labels as arguments of their own, not one text that is cut in the step)",
            )
