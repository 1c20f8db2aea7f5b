"""`check`: one step decorated and plain on one device, compared leaf by leaf; where they part, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.api.drawn import drawn_options
from autopar.api.intermediate import compare_operators
from autopar.api.mutable import split_mutable
from autopar.api.numbers import Difference, difference, tolerance_of
from autopar.api.options import ParallelOptions
from autopar.api.parallel_function import ParallelFunction
from autopar.api.parallelize import parallelize
from autopar.api.pure import PureFunction
from autopar.errors import AutoparError, MicrobatchError
from autopar.frontend import Traced
from autopar.frontend.trace import callable_name
from autopar.ir import Operator
from autopar.plan import Plan
from autopar.plan.words import plan_words
from autopar.runtime.hosts.arrays import whole


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
