"""Differential check of rules and localizers: every strategy of a primitive against the whole.

`check_localized` runs one primitive with `jax.shard_map` in every strategy that its rule allows, finishes
partial results, and compares every device's piece with the primitive applied to the whole operands.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal as JaxLiteral
from jax.extend.core import Primitive
from jax.sharding import AxisType, PartitionSpec

from autopar._compat.dtypes import dtype_name
from autopar._compat.primitives import bind
from autopar.cluster.mesh import Link, LogicalMesh
from autopar.frontend.attrs import attrs_of
from autopar.ir import Attr, Layout, Literal, Operator, TensorType, Value
from autopar.lower.localize import LocalContext, localize
from autopar.sharding import Rule, Strategy, rule_for, strategies

MESHES: tuple[tuple[tuple[str, int], ...], ...] = (
    (("x", 8),),
    (("x", 2), ("y", 4)),
    (("x", 4), ("y", 2)),
)

EMPTY: Mapping[str, Attr] = MappingProxyType({})

# Strategies compiled in one program: compiling is most of the time.
_BATCH = 24

# The programs run once: the time that optimizing them takes is never earned back.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True, eq=False)
class Case:
    """One primitive with concrete whole operands."""

    op: Operator
    primitive: Primitive
    params: Mapping[str, Any]
    operands: tuple[Any, ...]
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]

    @property
    def rule(self) -> Rule:
        """The rule that is registered for the operator."""
        return rule_for(self.op, self.operand_types)[0]


def logical_mesh(axes: tuple[tuple[str, int], ...]) -> LogicalMesh:
    """A mesh for planning with ``axes``; its links do not matter here."""
    return LogicalMesh(axes, tuple(Link(1e9, 1e-6) for _ in axes))


def type_of(aval: Any) -> TensorType:
    """Shape and dtype of an array or abstract value."""
    return TensorType(tuple(aval.shape), dtype_name(aval.dtype))


def _equations(
    jaxpr: Any, values: Sequence[Any], consts: Sequence[Any]
) -> Generator[tuple[Any, list[Any]], None, list[Any]]:
    """Every equation with its operands, nested calls opened; the consumer gets them in running order."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, JaxLiteral) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
        if inner is not None:
            results = yield from _equations(inner.jaxpr, operands, inner.consts)
        else:
            yield eqn, operands
            results = bind(eqn.primitive, eqn.params, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def case_of(
    function: Callable[..., Any], *arrays: Any, primitive: str | None = None, attrs: Mapping[str, Attr] = EMPTY
) -> Case:
    """The equation of interest of ``function`` with its operands.

    Args:
        function: traced on ``arrays``.
        arrays: whole operands.
        primitive: name of the primitive to look at (its first equation); the only equation where None.
        attrs: further attributes of the operator.
    """
    closed = jax.make_jaxpr(function)(*arrays)
    values = [jnp.asarray(a) if not hasattr(a, "dtype") else a for a in jax.tree.leaves(arrays)]
    found = [
        (eqn, operands)
        for eqn, operands in _equations(closed.jaxpr, values, closed.consts)
        if primitive is None or eqn.primitive.name == primitive
    ]
    if not found or (primitive is None and len(found) != 1):
        raise ValueError(f"no single equation of interest ({primitive}) in {closed}")
    eqn, operands = found[0]
    names: list[str | Literal] = []
    for i, v in enumerate(eqn.invars):
        literal = isinstance(v, JaxLiteral) and v.aval.shape == ()
        names.append(Literal(repr(np.asarray(v.val).item()), type_of(v.aval)) if literal else f"operand.{i}")
    operand_types = tuple(type_of(v.aval) for v in eqn.invars)
    result_types = tuple(type_of(v.aval) for v in eqn.outvars)
    op = Operator(
        id=f"{eqn.primitive.name}.0",
        primitive=eqn.primitive.name,
        operands=tuple(names),
        results=tuple(Value(f"result.{i}", t) for i, t in enumerate(result_types)),
        attrs=tuple(sorted((*attrs_of(eqn.params), *attrs.items()))),
    )
    return Case(op, eqn.primitive, eqn.params, tuple(operands), operand_types, result_types)


def _noise(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    if like.dtype == np.bool_:
        return rng.random(like.shape) < 0.5
    if np.issubdtype(like.dtype, np.integer):
        return rng.integers(0, 5, like.shape).astype(like.dtype)
    real = rng.standard_normal(like.shape)
    if np.issubdtype(like.dtype, np.complexfloating):
        real = real + 1j * rng.standard_normal(like.shape)
    return np.asarray(real).astype(like.dtype)


def _terms(rng: np.random.Generator, value: Any, count: int, reduce: str) -> np.ndarray:
    """``count`` arrays, stacked, whose reduction is ``value``."""
    whole = np.asarray(value)
    noise = [_noise(rng, whole) for _ in range(count - 1)]
    if reduce == "sum":
        with np.errstate(over="ignore"):
            last = whole.copy()
            for n in noise:
                last = (last - n).astype(whole.dtype)
        return np.stack([last, *noise])
    worse: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "max": lambda n: np.minimum(whole, n),
        "min": lambda n: np.maximum(whole, n),
        "and": lambda n: whole | n,
        "or": lambda n: whole & n,
    }
    terms = np.stack([whole, *(worse[reduce](n) for n in noise)])
    owner = rng.integers(0, count, whole.shape)
    # Any device may hold the true value, so swap it there, element by element.
    index = np.expand_dims(owner, 0)
    other = np.take_along_axis(terms, index, 0)
    terms[0] = other[0]
    np.put_along_axis(terms, index, np.expand_dims(whole, 0), 0)
    return terms


def _finish(value: Any, layout: Layout) -> Any:
    if not layout.partial:
        return value
    if layout.reduce == "sum":
        return jax.lax.psum(value, layout.partial)
    wide = value.astype(jnp.int32) if value.dtype == jnp.bool_ else value
    reduce = jax.lax.pmin if layout.reduce in ("min", "and") else jax.lax.pmax
    return reduce(wide, layout.partial).astype(value.dtype)


def _spec(layout: Layout, lead: bool) -> PartitionSpec:
    return PartitionSpec(*(layout.partial if lead else ()), *(d or None for d in layout.dims))


def _program(case: Case, strategy: Strategy, sizes: Mapping[str, int], mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """The case under one strategy as a function of whole operands (terms stacked in front)."""
    context = LocalContext(
        sizes, case.operand_types, case.result_types, strategy.operand_layouts, strategy.result_layouts, op=case.op
    )

    def local(*microbatch_inputs: Any) -> list[Any]:
        own = [
            p.reshape(p.shape[len(layout.partial) :]) if layout.partial else p
            for p, layout in zip(microbatch_inputs, strategy.operand_layouts, strict=True)
        ]
        results = localize(case.primitive, case.params, own, context)
        return [_finish(r, layout) for r, layout in zip(results, strategy.result_layouts, strict=True)]

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(_spec(layout, True) for layout in strategy.operand_layouts),
        out_specs=[_spec(layout, False) for layout in strategy.result_layouts],
        check_vma=False,
    )


def _inputs(case: Case, strategy: Strategy, sizes: Mapping[str, int], rng: np.random.Generator) -> list[Any]:
    made = []
    for value, layout in zip(case.operands, strategy.operand_layouts, strict=True):
        if not layout.partial:
            made.append(value)
            continue
        lead = tuple(sizes[a] for a in layout.partial)
        terms = _terms(rng, value, int(np.prod(lead)), layout.reduce)
        made.append(terms.reshape(*lead, *np.shape(value)))
    return made


def _host(value: Any) -> np.ndarray:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value)


def _compare(got: Any, want: Any, strategy: Strategy, result: int, rtol: float | None) -> None:
    """Every device's piece of ``got`` equals that part of ``want``."""
    whole = _host(want)
    assert got.shape == want.shape
    partial = any(layout.partial for layout in (*strategy.operand_layouts, *strategy.result_layouts))
    for shard in got.addressable_shards:
        piece, expected = _host(shard.data), whole[shard.index]
        message = f"result {result} on {shard.device} under {strategy}"
        if jnp.issubdtype(whole.dtype, jnp.inexact):
            tolerance = rtol if rtol is not None else 1e-5 if whole.dtype.itemsize >= 4 else 2e-2
            finite = np.abs(whole[np.isfinite(whole)]).max(initial=1.0)
            wide = np.complex128 if np.iscomplexobj(whole) else np.float64
            slack = tolerance * float(finite) * (4 if partial else 1)
            np.testing.assert_allclose(piece.astype(wide), expected.astype(wide), tolerance, slack, err_msg=message)
        else:
            np.testing.assert_array_equal(piece, expected, err_msg=message)


def check_localized(
    function: Callable[..., Any],
    *arrays: Any,
    primitive: str | None = None,
    meshes: Sequence[tuple[tuple[str, int], ...]] = MESHES,
    rtol: float | None = None,
    limit: int = 96,
    least: int = 2,
    attrs: Mapping[str, Attr] = EMPTY,
) -> list[Strategy]:
    """Compare every strategy of a primitive with the primitive on whole operands.

    Args:
        function: uses the primitive once, or names it with ``primitive``.
        arrays: its whole operands.
        primitive: as in `case_of`.
        meshes: (axis, size) lists over 8 devices.
        rtol: relative tolerance of floats; integers, bools and keys must be equal.
        limit: where a mesh has more strategies, this many are drawn (same ones every time).
        least: AssertionError where all meshes together have fewer strategies than this (a rule that
            splits nothing on any mesh would pass any check).
        attrs: as in `case_of`.

    Returns the strategies that were run.
    """
    case = case_of(function, *arrays, primitive=primitive, attrs=attrs)
    want = bind(case.primitive, case.params, list(case.operands))
    ran: list[Strategy] = []
    for axes in meshes:
        sizes = dict(axes)
        mesh = jax.make_mesh(
            tuple(sizes.values()),
            tuple(sizes),
            axis_types=(AxisType.Auto,) * len(sizes),
            devices=jax.devices()[: int(np.prod(list(sizes.values())))],
        )
        chosen = strategies(case.rule, case.operand_types, case.result_types, logical_mesh(axes), halos=True)
        rng = np.random.default_rng(len(chosen))
        if len(chosen) > limit:
            chosen = tuple(chosen[i] for i in sorted(rng.choice(len(chosen), limit, replace=False)))
        for start in range(0, len(chosen), _BATCH):
            batch = chosen[start : start + _BATCH]
            programs = [_program(case, s, sizes, mesh) for s in batch]

            def run(inputs: list[list[Any]], programs: list[Callable[..., Any]] = programs) -> list[Any]:
                return [p(*values) for p, values in zip(programs, inputs, strict=True)]

            results = jax.jit(run, compiler_options=_QUICK)([_inputs(case, s, sizes, rng) for s in batch])
            for strategy, got in zip(batch, results, strict=True):
                for i, (g, w) in enumerate(zip(got, want, strict=True)):
                    _compare(g, w, strategy, i, rtol)
        ran.extend(chosen)
    assert len(ran) >= least, f"only {len(ran)} strategies for {case.op}"
    return ran
