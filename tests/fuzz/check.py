"""Runs one program plain on one device and planned on eight, and says how they differ."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

import autopar
from autopar.api.options import ParallelOptions
from autopar.api.parallelize import parallelize_with
from autopar.ir import Graph
from autopar.lower.padded import padded
from autopar.plan import Plan
from autopar.search import Problem
from autopar.sharding.padding import candidates
from tests.end_to_end.clusters import MIDDLE
from tests.end_to_end.compare import host
from tests.end_to_end.random_plans import random_plan
from tests.fuzz.precision import coarser
from tests.fuzz.program import Program, arguments, load, source
from tests.fuzz.terms import not_finite_by_terms

#: How much larger than what noise does a difference may be that rounding explains.
_EXPLAINED = 10
_NOISE_SEEDS = 3

#: Of programs that run with a random plan one in so many is padded inside: dims that 8 devices do not divide.
PADDED_EVERY = 3
_MOST_WASTE = 9.0


#: (mesh shape, seed of a random plan or None for the best plan).
Config = tuple[tuple[int, ...], "int | None"]


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Args:
        kind: "ok"; "wrong" (other values), "crash" (an exception that is no AutoparError, or one without the
            user's line); "refused" (an AutoparError); "invalid" (jax itself does not take the program);
            "unstable" (values change as much under noise in the last digits, or are not finite and become nan when a
            zero is added to a factor); "miscompiled" (compiling the plain function as one changes its values, and the
            plan's are those of its operators one by one).
        detail: of what is not ok.
        config: that it happened with.
        primitives: names of those in the graph.
    """

    kind: str
    detail: str = ""
    config: Config | None = None
    primitives: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it is a bug."""
        return self.kind in ("wrong", "crash")


def configs(index: int, count: int = 2) -> tuple[Config, ...]:
    """The plans to run program ``index`` with.

    Args:
        index: number of the program.
        count: 4 for the best plan and a random one on a mesh of one and of two dims; 2 for a best one and a random
            one on meshes that take turns; 1 for one of these, most often random on two dims.
    """
    all_four: tuple[Config, ...] = (((8,), None), ((2, 4), None), ((8,), index), ((2, 4), index))
    taken = {1: ((3,), (3,), (2,), (3,), (1,), (3,), (3,), (0,)), 2: ((1, 2), (0, 3), (1, 3), (0, 3))}
    if count not in taken:
        return all_four
    return tuple(all_four[k] for k in taken[count][index % len(taken[count])])


def apart(got: Any, want: Any, dtype: str = "float64") -> float:
    """Difference of two leaves in units of what is allowed; inf where it cannot be told.

    Args:
        got: a leaf.
        want: the leaf that it should be.
        dtype: that the program computes in: values of a more precise type are no better than its own.
    """
    got, want = np.asarray(host(got)), np.asarray(host(want))
    if got.shape != want.shape or got.dtype != want.dtype:
        return np.inf
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        return 0.0 if np.array_equal(got, want) else np.inf
    allowed = coarser(want.dtype, dtype)
    if want.dtype.itemsize < 4:
        got, want = got.astype(np.float32), want.astype(np.float32)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return np.inf
    scale = max(float(np.abs(want[finite]).max(initial=0.0)), 1.0)
    difference = float(np.linalg.norm((got[finite] - want[finite]) / scale))
    norm = float(np.linalg.norm(want[finite] / scale))
    return 0.0 if difference * scale <= allowed.atol else difference / max(norm, 1e-300) / allowed.rtol


def worst(got: Any, want: Any, dtype: str = "float64") -> tuple[float, str]:
    """The largest `apart` of two trees and where it is."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        return np.inf, "structure"
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    return max(((apart(g, w, dtype), jax.tree_util.keystr(path)) for (path, g), w in pairs), default=(0.0, ""))


def primitives_of(graph: Graph) -> set[str]:
    """Names of the primitives of a graph and its regions."""
    found: set[str] = set()
    for op in graph.operators:
        found.add(op.primitive)
        for _, region in op.regions:
            found |= primitives_of(region)
    return found


def planned_of(plan: autopar.Plan) -> set[str]:
    """What a plan does besides: its collectives, and attention in blocks, causal in halves."""
    operators = plan.content.operators
    blocks = {"attention in blocks" for r in operators if r.id.rpartition("/")[2].startswith("attention")}
    halves = {"attention in halves" for r in operators if r.skips_masked}
    return blocks | halves | {f"{c.kind} planned" for c in plan.communication}


def padded_plan(fn: Callable[..., Any], args: Sequence[Any], seed: int) -> Callable[[Problem], Plan]:
    """The search that draws a plan of a function with some of its dims padded inside, whether that is faster or not."""
    pure = autopar.parallelize(fn, cluster=MIDDLE)._plain
    traced = pure.traced(pure.resolve(tuple(args), {})[0])
    rng = np.random.default_rng(seed)

    def search(problem: Problem) -> Plan:
        classes = candidates(problem.graph, 8, _MOST_WASTE) if problem.graph == traced.graph else ()
        dims = tuple(d for c in classes if rng.integers(4) for d in c.dims(problem.graph))
        if not dims:
            return random_plan(seed)(problem)
        plan = random_plan(seed)(replace(problem, graph=padded(traced, dims).graph))
        form = msgspec.structs.replace(plan.stages[0].form, padded=dims)
        return replace(plan, content=plan.content.in_form(form))

    return search


def run_planned(fn: Callable[..., Any], args: Sequence[Any], config: Config) -> tuple[Any, set[str]]:
    """Results of a planned run, and the primitives that it has, with what its plan does."""
    mesh, seed = config
    search = "alpa" if seed is None else random_plan(seed)
    if seed is not None and seed % PADDED_EVERY == 0:
        search = padded_plan(fn, args, seed)
    options = ParallelOptions(cluster=MIDDLE, mesh_shape=mesh, search=search, num_stages=1, attention="blocks")
    compiled = parallelize_with(fn, options).compile(*args)
    drawn = primitives_of(compiled.traced.graph) | planned_of(compiled.plan)
    drawn |= {"dims padded inside"} if compiled.plan.stages[0].form.padded else set()
    return jax.block_until_ready(compiled(*args)), drawn


def check(
    fn: Callable[..., Any],
    args: Sequence[Any],
    plans: Sequence[Config],
    noisy: Sequence[Callable[..., Any]] = (),
    dtype: str = "float64",
    ran_plain: Callable[[], object] = object,
) -> Outcome:
    """Compares ``fn`` planned and plain.

    Args:
        fn: the function.
        args: its arguments.
        plans: what to plan with; the first that differs ends the check.
        noisy: the same function with noise in the last digits, by which to judge differences: they are unstable where
            noise alone makes values differ by more than is allowed, or by a tenth of the difference.
        dtype: that the function computes in.
        ran_plain: called when the plain function has run: what ends the process before is not a fault of plans.
    """
    try:
        want = jax.block_until_ready(jax.jit(fn)(*args))
    except Exception as error:
        return Outcome("invalid", f"{type(error).__name__}: {error}")
    ran_plain()
    found: set[str] = set()
    for config in plans:
        try:
            got, names = run_planned(fn, args, config)
        except autopar.AutoparError as error:
            return Outcome("refused" if error.source else "crash", str(error), config)
        except Exception as error:
            where = traceback.format_exception(error)
            return Outcome("crash", f"{type(error).__name__}: {error}\n{''.join(where[-6:])}", config)
        found |= names
        most, path = worst(got, want, dtype)
        if most > 1:
            explained = any(_explains(other, args, want, most, dtype) for other in noisy)
            if explained or _is_not_finite_by_terms(fn, args, got, want, dtype):
                return Outcome("unstable", path, config, tuple(sorted(found)))
            if _is_as_single_operators(fn, args, got, dtype):
                return Outcome("miscompiled", f"{path} of the plain function", config, tuple(sorted(found)))
            return Outcome("wrong", f"{path} differs by {most:.1e} of what is allowed", config, tuple(sorted(found)))
    return Outcome("ok", primitives=tuple(sorted(found)))


def _explains(noisy: Callable[..., Any], args: Sequence[Any], want: Any, most: float, dtype: str) -> bool:
    """Whether noise in the last digits does as much as the difference ``most``."""
    moved = worst(jax.jit(noisy)(*args), want, dtype)[0]
    return moved > 1 or most <= _EXPLAINED * moved


def _is_not_finite_by_terms(fn: Callable[..., Any], args: Sequence[Any], got: Any, want: Any, dtype: str) -> bool:
    """Whether a result is that of the plain function but for nan where sums of terms have it in place of inf."""
    shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (got, want)]
    if jax.tree.structure(got) != jax.tree.structure(want) or shapes[0] != shapes[1]:
        return False
    return worst(got, not_finite_by_terms(fn, args, got, want), dtype)[0] <= 1


def _is_as_single_operators(fn: Callable[..., Any], args: Sequence[Any], got: Any, dtype: str) -> bool:
    """Whether a result is that of the plain function operator by operator: then compiling it as one changed it."""
    try:
        return worst(got, jax.block_until_ready(fn(*args)), dtype)[0] <= 1
    except Exception:  # jax runs some operators inside of a compiled function only
        return False


def check_program(
    program: Program, plans: Sequence[Config], filename: str = "<program>", ran_plain: Callable[[], object] = object
) -> Outcome:
    """`check` of a generated program."""
    fn = load(source(program), filename=filename)
    noisy = [load(source(program, k)) for k in range(_NOISE_SEEDS)]
    return check(fn, arguments(program), plans, noisy, program.dtype, ran_plain)


def assert_program(fn: Callable[..., Any], args: Sequence[Any], *plans: Config, dtype: str = "float64") -> None:
    """For written-out tests: the program gives the same values planned."""
    with jax.enable_x64(True):
        outcome = check(fn, args, plans, dtype=dtype)
    assert outcome.kind in ("ok", "refused", "miscompiled"), f"{outcome.kind}: {outcome.detail} {outcome.config}"
