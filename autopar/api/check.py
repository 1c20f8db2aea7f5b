"""`check`: one step decorated and plain on one device, compared leaf by leaf; where they part, operator by operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.extend.core import Primitive

from autopar._compat.devices import world_devices
from autopar._compat.primitives import bind
from autopar.api.many_hosts import many
from autopar.api.mutable import split_mutable
from autopar.api.options import ParallelOptions
from autopar.api.parallel_function import ParallelFunction
from autopar.api.parallelize import parallelize
from autopar.api.pure import PureFunction
from autopar.cluster import Cluster, Device, LinkSpec, NodeGroup
from autopar.errors import AutoparError, MicrobatchError
from autopar.frontend import BoundGraph, Traced
from autopar.frontend.trace import callable_name
from autopar.ir import Graph, Layout, Literal, Operator, Output
from autopar.ir.primitives import SUMS
from autopar.lower.localize.base import scalar
from autopar.lower.program import lower
from autopar.plan import OutputRecord, Plan
from autopar.plan.words import plan_words
from autopar.runtime.hosts.arrays import put, whole


@dataclass(frozen=True)
class Difference:
    """Norms of the difference of two arrays and of the second one, and the largest difference of an element.

    All are inf where one array is finite and the other is not, or where exact values are unequal.
    """

    norm: float
    of: float
    absolute: float

    @property
    def relative(self) -> float:
        """Norm of the difference over norm of the array; the norm itself where the array is zero."""
        return self.norm / self.of if self.of else self.norm


def host(array: Any) -> np.ndarray[Any, Any]:
    """The array in numpy; keys as the numbers that they are."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def difference(got: Any, want: Any) -> Difference:
    """Difference of ``got`` and ``want``; equal infinities and nans are none."""
    a, b = host(got), host(want)
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(math.inf, 0.0, math.inf)
    if not jnp.issubdtype(b.dtype, jnp.inexact):
        same = np.array_equal(a, b)
        return Difference(0.0, 0.0, 0.0) if same else Difference(math.inf, 0.0, math.inf)
    wide = np.complex128 if jnp.issubdtype(b.dtype, jnp.complexfloating) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return Difference(math.inf, 0.0, math.inf)
    distances = a[finite] - b[finite]
    return Difference(
        float(np.linalg.norm(distances)), float(np.linalg.norm(b[finite])), float(np.abs(distances).max(initial=0.0))
    )


def tolerance_of(dtype: Any) -> float:
    """Relative difference that another order of summing may make: a power of the dtype's rounding; 0 if exact."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    info: Any = jnp.finfo
    return float(info(dtype).eps) * 100


@dataclass(frozen=True)
class LeafReport:
    """One array of the result.

    Args:
        path: its path in the result.
        type: shape and dtype as text.
        difference: norm of the difference over norm of the leaf; inf where one is finite and the other is not.
        absolute: largest difference of an element.
        tolerance: what ``difference`` may be for this dtype.
    """

    path: str
    type: str
    difference: float
    absolute: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference <= self.tolerance


@dataclass(frozen=True)
class OperatorReport:
    """The first operator, in running order, whose result differs though what it takes does not.

    Args:
        id: its id in the graph.
        primitive: jax's name of it.
        source: the user's line, or "".
        operands: layouts in which it took its operands; "" for literals.
        results: layouts of its results.
        difference: as that of `LeafReport`, of the result that differs most.
    """

    id: str
    primitive: str
    source: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    difference: float

    def __str__(self) -> str:
        operands = ", ".join(o or "literal" for o in self.operands)
        at = f" at {self.source}" if self.source else ""
        results = ", ".join(self.results)
        return f"{self.id} ({self.primitive}){at}: {operands} -> {results}, off by {self.difference:.1e}"


@dataclass(frozen=True)
class CheckReport:
    """The result of `check`; prints as a table.

    Args:
        program: name of the function.
        leaves: every array of the result, the most different first.
        first_operator: where the values part; None where no leaf is out of its tolerance, or no operator is.
        plan: the plan that ran; of several the one whose result differs most.
        plans: all that ran.
    """

    program: str
    leaves: tuple[LeafReport, ...]
    first_operator: OperatorReport | None
    plan: Plan
    plans: tuple[Plan, ...] = ()

    @property
    def max_difference(self) -> float:
        """The largest difference of a leaf, relative to its norm; 0.0 where the result holds no array."""
        return max((leaf.difference for leaf in self.leaves), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether every leaf is within the tolerance of its dtype."""
        return all(leaf.ok for leaf in self.leaves)

    def __str__(self) -> str:
        wrong = sum(not leaf.ok for leaf in self.leaves)
        mesh = "x".join(str(n) for _, n in self.plan.stages[0].mesh_axes)
        verdict = f"{wrong} differ" if wrong else "all equal within rounding"
        lines = [f"{self.program} on a mesh of {mesh} and on one device: {len(self.leaves)} results, {verdict}"]
        lines += [f"  planned: {plan_words(p.content)}" for p in self.plans]
        shown = self.leaves[: max(5, min(wrong, 20))]
        width = max((len(leaf.path) for leaf in shown), default=0)
        for leaf in shown:
            mark = " " if leaf.ok else "!"
            difference_text = f"relative {leaf.difference:.1e}  absolute {leaf.absolute:.1e}"
            lines.append(f"{mark} {leaf.path:<{width}}  {leaf.type}  {difference_text}")
        if len(shown) < len(self.leaves):
            lines.append(f"  and {len(self.leaves) - len(shown)} more, none differs more")
        if self.first_operator is not None:
            lines.append(f"first operator that differs: {self.first_operator}")
        elif wrong:
            lines.append("no single operator differs by more than rounding: the difference is rounding that grew")
        return "\n".join(lines)


def check(fn: Callable[..., Any], *args: Any, **options: Any) -> CheckReport:
    """Runs one step decorated and plain on one device and compares the results.

    Where the options say neither what to plan for nor how, the step is planned as if arithmetic were slow, so that
    something is split however small it is, at once and in two microbatches; the report says what was split.

    Args:
        fn: a function, or one that `parallelize` made (then its options hold).
        args: its arguments. They are left as they are: nothing is donated, no module is changed.
        options: of `parallelize`; what is no option of it is a keyword argument of ``fn``.

    Raises:
        AutoparError: as those of `ParallelFunction.plan`.
    """
    known = set(ParallelOptions.__dataclass_fields__) | {"memory_limit"}
    for_fn = {k: v for k, v in options.items() if k not in known}
    given = {k: v for k, v in options.items() if k in known}
    if isinstance(fn, ParallelFunction):
        if given:
            raise AutoparError(
                f"{callable_name(fn.function)} is decorated already; check got {', '.join(sorted(given))} besides",
                remedy="check the plain function with these options, or the decorated one without",
            )
        function = fn
    else:
        function = parallelize(fn, **given)
    options_here = replace(function.options, donate_argnums=(), donate_argnames=())
    args, kwargs, mutable = split_mutable(args, for_fn)
    fn = mutable.pure(function.function)
    reports = []
    for planned in drawn_options(options_here):
        try:
            reports.append(_checked(PureFunction(fn, planned), args, kwargs))
        except MicrobatchError:
            if not reports:
                raise
    worst = max(reports, key=lambda r: (not r.ok, r.max_difference))
    return replace(worst, plans=tuple(r.plan for r in reports))


def _checked(pure: PureFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CheckReport:
    """The comparison of one plan with the plain function."""
    signature, leaves = pure.resolve(args, kwargs)
    compiled = pure.compile(signature)
    traced = compiled.traced
    leaves = [whole(leaf) for leaf in leaves]
    got = [whole(x) for x in compiled.local.run(compiled.local.place_all(leaves), leaves)]
    want = _plain(pure.fn, traced, leaves)
    reports = sorted(
        (_leaf(o.path, str(o.type), g, w) for o, g, w in zip(traced.graph.outputs, got, want, strict=True)),
        key=lambda leaf: (-leaf.difference, leaf.path),
    )
    first = None
    if not all(leaf.ok for leaf in reports):
        worst = compare_operators(traced, compiled.plan, leaves)
        if worst is not None:
            first = _operator(compiled.plan, *worst)
    return CheckReport(traced.graph.name, tuple(reports), first, compiled.plan)


def _plain(fn: Callable[..., Any], traced: Traced, leaves: Sequence[Any]) -> Sequence[Any]:
    """Array leaves of the result of ``fn`` on one device."""
    static = {index for index, _ in traced.out_static}

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = traced.signature.arguments(arrays)
        return [x for i, x in enumerate(jax.tree.leaves(fn(*args, **kwargs))) if i not in static]

    with jax.default_device(jax.local_devices()[0]):
        whole = [_copied(x, a.dtype) for x, a in zip(leaves, traced.signature.avals(), strict=True)]
        result: Sequence[Any] = jax.jit(flat)(*whole)
    return result


def _copied(leaf: Any, dtype: Any) -> Any:
    """A copy on the default device, but not bound to it: a step may have a mesh of its own with more devices."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.asarray(leaf, dtype))


def _leaf(path: str, type: str, got: Any, want: Any) -> LeafReport:
    difference_text: Difference = difference(got, want)
    return LeafReport(
        path or "result",
        type,
        difference_text.relative,
        difference_text.absolute,
        tolerance_of(jnp.asarray(want).dtype),
    )


def _operator(plan: Plan, op: Operator, difference_text: Difference) -> OperatorReport:
    record = next(r for r in plan.content.operators if r.id == op.id)
    return OperatorReport(op.id, op.primitive, op.source, record.operands, record.results, difference_text.relative)


# Arithmetic so slow, and links so fast, that splitting pays for arrays of a few numbers.
_FLOPS, _MEMORY_BANDWIDTH, _LINK_BANDWIDTH, _MEMORY_BYTES = 1e8, 1e9, 1e11, 10**11


def drawn_options(options: ParallelOptions) -> list[ParallelOptions]:
    """Options of the plans that a step is checked under.

    Args:
        options: those of the function. Where they say what to plan for, or how, they are the only ones; else the step
            is planned for slow devices, once at once and once in two microbatches.
    """
    asked = (options.cluster, options.plan, options.mesh_shape, options.like, options.memory_limit_bytes)
    devices = 1 if many(options) is not None else Cluster.local().num_devices
    if any(a is not None for a in asked) or options.constraints or options.search != "alpa" or devices == 1:
        return [options]
    splitting = replace(options, cluster=_slow(devices))
    if options.num_microbatches != "auto" or options.num_stages != "auto":
        return [splitting]
    return [replace(splitting, num_microbatches=1), replace(splitting, num_microbatches=2, num_stages=1)]


def _slow(devices: int) -> Cluster:
    link = LinkSpec(_LINK_BANDWIDTH, 0.0)
    device = Device("slow", _MEMORY_BYTES, _MEMORY_BANDWIDTH, (("f32", _FLOPS),))
    return Cluster("devices on which splitting pays", (NodeGroup(1, devices, device, link, link),))


#: Bytes of intermediate values that are looked at in one run.
_CHUNK_BYTES = 1 << 30
#: Their results may be small differences of large operands: rounding counts against the operands.
_CANCELLING = SUMS | {"scan"}


def compare_operators(traced: Traced, plan: Plan, leaves: Sequence[Any]) -> tuple[Operator, Difference] | None:
    """The first operator whose result differs by more than rounding, and by how much; None if there is none.

    Args:
        traced: the function.
        plan: its plan.
        leaves: traced leaves of a call.
    """
    graph = traced.graph
    recorded = {r.id: r.results for r in plan.content.operators}
    sizes: dict[str, float] = {}
    arguments = [*leaves, *traced.closed_over]
    for i, leaf in zip(graph.inputs, arguments, strict=True):
        sizes[i.name] = difference(leaf, leaf).of
    for operators in _chunks([op for op in graph.operators if op.id in recorded]):
        values = [
            (v.name, v.type, layout) for op in operators for v, layout in zip(op.results, recorded[op.id], strict=True)
        ]
        outputs = tuple(Output(name, name, type) for name, type, _ in values)
        records = tuple(
            OutputRecord(name, str(type), str(Layout(Layout.parse(layout).dims))) for name, type, layout in values
        )
        part = Graph(graph.name, graph.inputs, graph.operators, outputs)
        bound = BoundGraph(part, traced.program.bounds, traced.program.constants)
        cut = replace(traced, program=bound, weak=(False,) * len(outputs))
        content = msgspec.structs.replace(plan.content, outputs=records, donated=())
        program = lower(cut, Plan(content), world_devices())
        placed = [put(_array(a), s) for a, s in zip(arguments, program.input_shardings, strict=True)]
        sharded = dict(zip((n for n, _, _ in values), map(whole, program.function(*placed)), strict=True))
        plain = dict(zip((n for n, _, _ in values), _on_one_device(cut, arguments), strict=True))
        for op in operators:
            differences = [difference(sharded[v.name], plain[v.name]) for v in op.results]
            for v, d in zip(op.results, differences, strict=True):
                sizes[v.name] = d.of
            known = [sizes.get(o, 0.0) for o in op.reads]
            base = max(known, default=0.0) if op.primitive in _CANCELLING else 0.0
            for v, d in zip(op.results, differences, strict=True):
                if d.norm > 10 * tolerance_of(plain[v.name].dtype) * max(d.of, base):
                    return op, max(differences, key=lambda e: e.relative)
    return None


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _chunks(operators: Sequence[Operator]) -> Iterator[list[Operator]]:
    chunk: list[Operator] = []
    size = 0
    for op in operators:
        here = sum(v.type.nbytes for v in op.results)
        if chunk and size + here > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(op)
        size += here
    if chunk:
        yield chunk


def _on_one_device(traced: Traced, arguments: Sequence[Any]) -> Sequence[Any]:
    """Outputs of the graph, every operator on whole arrays."""
    device = jax.local_devices()[0]
    here = [jax.device_put(_array(a), device) for a in arguments]

    def run(*arrays: Any) -> list[Any]:
        program = traced.program
        env: dict[str, Any] = dict(zip((i.name for i in program.graph.inputs), arrays, strict=True))
        for op in program.graph.operators:
            if op.primitive == "constant":
                results = [jax.numpy.asarray(program.constants[op.id])]
            else:
                bound = program.bounds[op.id]
                operands = [scalar(o) if isinstance(o, Literal) else env[o] for o in op.operands]
                primitive: Primitive = bound.primitive
                results = bind(primitive, bound.params, operands)
            env.update(zip((v.name for v in op.results), results, strict=True))
        return [env[str(o.operand)] for o in program.graph.outputs]

    outputs: Sequence[Any] = jax.jit(run)(*here)
    return outputs
