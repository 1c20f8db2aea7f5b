"""`ParallelFunction`: a function that plans and compiles itself for each signature that it is called with."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from autopar.api.compiled import Compiled
from autopar.api.options import ParallelOptions
from autopar.api.placement import default_placement, placement_of
from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.errors import AutoparError
from autopar.frontend import CallSignature, SignatureOptions, Traced, flatten_call, trace
from autopar.ir.fingerprint import fingerprint
from autopar.ir.verify import verify
from autopar.lower.program import lower
from autopar.plan import Plan
from autopar.runtime import load_local
from autopar.search import Options, Problem, strategy_named
from autopar.search.clock import Clock


class ParallelFunction:
    """The decorated function; made by `autopar.parallelize`."""

    def __init__(self, fn: Callable[..., Any], options: ParallelOptions) -> None:
        self._fn = fn
        self._options = options
        self._signature_options = SignatureOptions(options.static_argnums, options.static_argnames)
        self._compiled: dict[CallSignature, Compiled] = {}
        self._planned: dict[CallSignature, tuple[Traced, Plan]] = {}
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Plans and compiles once for each signature, then runs. Values are those of the plain function."""
        signature, leaves = flatten_call(self._fn, args, kwargs, self._signature_options)
        compiled = self._compiled.get(signature)
        if compiled is None:
            compiled = self._compile(signature)
        return compiled.run(leaves)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Methods bind as plain functions do."""
        return self if instance is None else functools.partial(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments (arrays or `jax.ShapeDtypeStruct`); runs nothing.

        Raises:
            TraceError: the function cannot be traced.
            InfeasiblePlanError: nothing fits the memory limit.
            PlanMismatchError: the plan given was made for another program.
        """
        return self._plan(self._signature(args, kwargs))[1]

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Plans and compiles for arguments (arrays or `jax.ShapeDtypeStruct`). Errors are those of `plan`."""
        return self._compile(self._signature(args, kwargs))

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs ``init_fn`` with its results built already split, never whole on one device.

        Args:
            init_fn: makes one of the function's arguments, as its state.
            args: arguments of ``init_fn``.
            kwargs: likewise.

        Where a plan is known (given, or made by an earlier call) results lie as it wants; before that
        each is split over all devices on its largest dim, and the first step moves it.
        """
        shapes = jax.eval_shape(init_fn, *args, **kwargs)
        devices = self._devices()
        known = [p for _, p in self._planned.values()] + ([self._options.plan] if self._options.plan else [])
        shardings = next((s for p in known if (s := placement_of(p, shapes, devices)) is not None), None)
        if shardings is None:
            shardings = default_placement(shapes, devices)
        return jax.jit(init_fn, out_shardings=shardings)(*args, **kwargs)

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments, placed as the plan wants them: a tuple, or the argument itself if there is one."""
        signature, leaves = flatten_call(self._fn, args, kwargs, self._signature_options)
        placed, _ = signature.arguments(self._compile(signature).place(leaves))
        return placed[0] if len(placed) == 1 else placed

    # -- steps ---------------------------------------------------------------------------------

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSignature:
        return flatten_call(self._fn, args, kwargs, self._signature_options)[0]

    def _say(self, text: str) -> None:
        if self._options.progress is not None:
            self._options.progress(text)

    def _devices(self) -> list[Any]:
        return list(jax.devices())

    def _plan(self, signature: CallSignature) -> tuple[Traced, Plan]:
        found = self._planned.get(signature)
        if found is not None:
            return found
        clock = Clock()
        self._say("tracing")
        with clock.phase("trace"):
            traced = trace(self._fn, signature, batch_argnums=self._options.batch_argnums)
        with clock.phase("graph"):
            verify(traced.graph)
        plan = self._options.plan
        if plan is not None:
            plan.check_program(fingerprint(traced.graph), traced.graph.name)
        else:
            problem = self._problem(traced)
            search = self._options.search
            strategy = strategy_named(search) if isinstance(search, str) else search
            self._say(f"planning {len(traced.graph.operators)} operators for {problem.cluster}")
            plan = strategy(problem)

        def tree(specs: list[Any]) -> Any:
            count = len(traced.signature.traced)
            args, kwargs = traced.signature.arguments(specs[:count])
            return (args, kwargs) if kwargs else args

        plan = Plan(plan.content, (*clock.phases(), *plan.phases), tree)
        self._planned[signature] = traced, plan
        return traced, plan

    def _problem(self, traced: Traced) -> Problem:
        o = self._options
        cluster = o.cluster or Cluster.local()
        return Problem(
            traced.graph,
            cluster,
            CostModel(cluster),
            Options(mesh_shape=o.mesh_shape, memory_limit_bytes=o.memory_limit_bytes, donated=self._donated(traced)),
        )

    def _donated(self, traced: Traced) -> frozenset[str]:
        o = self._options
        if not o.donate_argnums and not o.donate_argnames:
            return frozenset()
        paths = traced.signature.paths(self._fn)
        names = parameter_names(self._fn)
        wanted: set[int | str] = {*o.donate_argnums, *o.donate_argnames}
        wanted |= {names.index(n) for n in o.donate_argnames if n in names}
        wanted |= {names[n] for n in o.donate_argnums if n < len(names)}
        return frozenset(path for path, argument, _ in paths if argument in wanted)

    def _compile(self, signature: CallSignature) -> Compiled:
        found = self._compiled.get(signature)
        if found is not None:
            return found
        traced, plan = self._plan(signature)
        clock = Clock()
        self._say("compiling")
        with clock.phase("lower"):
            program = lower(traced, plan, self._devices())
        with clock.phase("compile"):
            local = load_local(traced, program)
        plan = Plan(plan.content, (*plan.phases, *clock.phases()), plan.input_tree)
        compiled = Compiled(plan, traced, local, self._fn, self._signature_options)
        self._compiled[signature] = compiled
        return compiled


def parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters of ``fn``, or ()."""
    try:
        return tuple(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return ()


def check_callable(fn: Any) -> None:
    """Raises AutoparError unless ``fn`` can be called."""
    if not callable(fn):
        raise AutoparError(
            f"parallelize takes a function, not {type(fn).__name__}",
            remedy="@autopar.parallelize above a function, or autopar.parallelize(fn, ...)",
        )
