"""`PureFunction`: plans and compiles a function for each signature, and runs it. `ParallelFunction` stands before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from autopar.api.compiled import Compiled
from autopar.api.effects import check_effects
from autopar.api.options import ParallelOptions
from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.errors import PlanMismatchError
from autopar.frontend import CallSignature, SignatureOptions, Traced, flatten_call, trace
from autopar.frontend.signature import NUMBERS, positional_names, resolve, x64_enabled
from autopar.ir.fingerprint import fingerprint
from autopar.ir.verify import verify
from autopar.lower.program import lower
from autopar.plan import Plan
from autopar.runtime import load_local
from autopar.search import Options, Problem, strategy_named
from autopar.search.clock import Clock


class PureFunction:
    """A function of pytrees with its plans and programs by signature.

    Args:
        fn: the function; it changes none of its arguments.
        options: what `parallelize` was told.
    """

    def __init__(self, fn: Callable[..., Any], options: ParallelOptions) -> None:
        self.fn = fn
        self.options = options
        self.names = positional_names(fn)
        self.signature_options = SignatureOptions(options.static_argnums, options.static_argnames, names=self.names)
        self.planned: dict[CallSignature, tuple[Traced, Plan]] = {}
        self.compiled: dict[CallSignature, Compiled] = {}
        self._traced: dict[CallSignature, Traced] = {}
        self._numbers_static: set[CallSignature] = set()
        self._recent: Compiled | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a step."""
        recent = self._recent
        if recent is not None:
            # The same kind of call as the last one: nothing has to be hashed.
            leaves, treedef = jax.tree.flatten((args, kwargs))
            if recent.quick and treedef == recent.traced.signature.treedef:
                placed = recent.local.match(leaves)
                if placed is not None and recent.traced.signature.x64 == x64_enabled():
                    return recent.run_placed(placed, leaves)
        else:
            leaves = jax.tree.leaves((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self.fn(*args, **kwargs)  # inside another transformation the plain function is what runs
        signature, traced_leaves = self.resolve(args, kwargs)
        compiled = self.compile(signature)
        self._recent = compiled
        return compiled.run(traced_leaves)

    def resolve(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[CallSignature, list[Any]]:
        """The signature of a call and its traced leaves; the function is traced for it if it was not yet.

        Python numbers are traced, as in `jax.jit`. Where that fails and the numbers' values make it work, they
        are values of the program from then on.
        """
        signature, leaves = flatten_call(self.fn, args, kwargs, self.signature_options)
        if signature in self._traced:
            return signature, leaves
        static_options = replace(self.signature_options, static_numbers=True)
        if signature not in self._numbers_static:
            try:
                self._traced[signature] = self._trace(signature, False)
                return signature, leaves
            except Exception:
                if not any(isinstance(leaf, NUMBERS) for leaf in leaves):
                    raise
                other, other_leaves = flatten_call(self.fn, args, kwargs, static_options)
                try:
                    self._traced[other] = self._trace(other, True)
                except Exception:
                    other_leaves = []
                    other = signature
                if other == signature:
                    raise
                self._numbers_static.add(signature)
                return other, other_leaves
        signature, leaves = flatten_call(self.fn, args, kwargs, static_options)
        if signature not in self._traced:
            self._traced[signature] = self._trace(signature, True)
        return signature, leaves

    def _trace(self, signature: CallSignature, static_numbers: bool) -> Traced:
        self._say("tracing")
        clock = Clock()
        with clock.phase("trace"):
            traced = trace(self.fn, signature, batch_argnums=self.options.batch_argnums, static_numbers=static_numbers)
        return replace(traced, phases=clock.phases())

    def plan(self, signature: CallSignature) -> tuple[Traced, Plan]:
        """The traced function and its plan. ``signature`` comes from `resolve`."""
        found = self.planned.get(signature)
        if found is not None:
            return found
        clock = Clock()
        traced = self._traced[signature]
        with clock.phase("graph"):
            verify(traced.graph)
        plan = self.options.plan
        if plan is not None:
            names = [*(i.name for i in traced.graph.inputs), *(op.id for op in traced.graph.operators)]
            plan.check_program(fingerprint(traced.graph), traced.graph.name, names)
        else:
            problem = self.problem(traced)
            search = self.options.search
            strategy = strategy_named(search) if isinstance(search, str) else search
            self._say(f"planning {len(traced.graph.operators)} operators for {problem.cluster}")
            plan = strategy(problem)
        plan = Plan(plan.content, (*traced.phases, *clock.phases(), *plan.phases), _tree_of(traced))
        self.planned[signature] = traced, plan
        return traced, plan

    def problem(self, traced: Traced) -> Problem:
        """What the search is given."""
        o = self.options
        cluster = o.cluster or Cluster.local()
        donated = frozenset(traced.arguments[i][0] for i in self.donated(traced))
        return Problem(
            traced.graph,
            cluster,
            CostModel(cluster),
            Options(mesh_shape=o.mesh_shape, memory_limit_bytes=o.memory_limit_bytes, donated=donated),
        )

    def donated(self, traced: Traced) -> tuple[int, ...]:
        """Indices of the traced leaves whose buffers the step may reuse."""
        positions, names = resolve(self.options.donate_argnums, self.options.donate_argnames, self.names)
        return tuple(
            i for i, (_, argument, _) in enumerate(traced.arguments) if argument in positions or argument in names
        )

    def compile(self, signature: CallSignature) -> Compiled:
        """The program for a signature of `resolve`."""
        found = self.compiled.get(signature)
        if found is not None:
            return found
        traced, plan = self.plan(signature)
        devices = jax.devices()
        wanted = sum(len(s.devices) for s in plan.stages)
        if self.options.plan is not None and wanted != len(devices):
            raise PlanMismatchError(
                f"the plan is for {wanted} devices of {plan.content.cluster_name}; this process has {len(devices)}",
                cause="the plan was made for another cluster",
                remedy="plan again for Cluster.local(), or run where there are as many devices",
            )
        check_effects(traced.graph)
        clock = Clock()
        self._say("compiling")
        with clock.phase("lower"):
            program = lower(traced, plan, devices)
        with clock.phase("compile"):
            local = load_local(traced, program, self.donated(traced))
        plan = Plan(plan.content, (*plan.phases, *clock.phases()), plan.input_tree)
        compiled = Compiled(plan, traced, local, self.fn, self.signature_options, self.resolve)
        self.compiled[signature] = compiled
        return compiled

    def _say(self, text: str) -> None:
        if self.options.progress is not None:
            self.options.progress(text)


def _tree_of(traced: Traced) -> Callable[[list[Any]], Any]:
    """Specs of the inputs as a pytree like the arguments; by path where a container refuses them."""
    signature = traced.signature
    paths = [path for path, _, _ in traced.arguments]

    def tree(specs: list[Any]) -> Any:
        try:
            args, kwargs = signature.arguments(specs[: len(paths)])
        except Exception:
            return dict(zip(paths, specs, strict=False))
        return (args, kwargs) if kwargs else args

    return tree
