"""`ParallelFunction`: a function that plans and compiles itself for each signature that it is called with."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from autopar._compat.context import under_trace
from autopar._compat.devices import world_devices
from autopar.api.batches import local_batch, process_examples
from autopar.api.compiled import Compiled
from autopar.api.mutable import Mutable, split_mutable
from autopar.api.options import ParallelOptions, check_names, set_options
from autopar.api.placement import run_on_workers, run_sharded
from autopar.api.pure import PureFunction
from autopar.api.saving import Saving, restore
from autopar.api.staged import LoweredCall, TracedCall
from autopar.api.user_mesh import as_traced
from autopar.api.without_flush import PipelineState, call, drain, order, replay
from autopar.errors import AutoparError
from autopar.errors.base import as_kind
from autopar.frontend.signature import CallSignature, SignatureOptions, flatten_call, jax_config
from autopar.frontend.trace import callable_name, note
from autopar.plan import Plan
from autopar.runtime.ray.cluster import RayCluster
from autopar.schedule import Table
from autopar.schedule.without_flush.schedules import flushes

_P = ParamSpec("_P")
_R = TypeVar("_R")


class ParallelFunction(Generic[_P, _R]):
    """The decorated function; made by `autopar.parallelize`."""

    def __init__(self, fn: Callable[_P, _R], options: ParallelOptions) -> None:
        check_names(fn, options)
        self._fn = fn
        self._options = options
        self._plain = PureFunction(fn, options)
        self._changing: dict[tuple[bool, bool], PureFunction] = {}
        self._jitted: dict[CallSignature, Callable[..., Any]] = {}
        self._module_free: Any = None
        self._saving = Saving()
        functools.update_wrapper(self, fn, updated=())
        # Further attributes of the function, as a jitted one has them.
        vars(self).update((k, v) for k, v in getattr(fn, "__dict__", {}).items() if not hasattr(self, k))

    @property
    def function(self) -> Callable[_P, _R]:
        """The function that was decorated."""
        return self._fn

    @property
    def options(self) -> ParallelOptions:
        """The options of `autopar.parallelize`."""
        return self._options

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Plans and compiles once for each signature, then runs. Values are those of the plain function.

        Under `jax.disable_jit` the plain function runs. Inside of another function that jax traces or transforms it
        runs as a jitted one.
        """
        if jax_config("jax_disable_jit"):
            return self._fn(*args, **kwargs)
        result: Any
        if under_trace():
            result = self._inside(args, kwargs)
            return result  # type: ignore[no-any-return]
        if not self._flushes:
            result = call(self._plain, args, kwargs)
            return result  # type: ignore[no-any-return]
        done, result = self._plain.repeat(args, kwargs)
        if not done:
            pure, given, named, mutable = self._pure(args, kwargs)
            result = mutable.joined(pure(given, named))
        returned: _R = result
        return returned

    def _inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The jitted plain function's result inside of another trace: its arguments are traced, whatever they are.

        Raises:
            AutoparError: the state is one of a schedule without a flush, which the plain function does not know.
        """
        if any(isinstance(a, PipelineState) for a in (*args, *kwargs.values())):
            raise AutoparError(
                f"{callable_name(self._fn)} is called inside of another jax function with the state of a pipeline",
                cause="inside of jax.jit, jax.grad, jax.vmap or a loop the plain function runs, which has no pipeline",
                remedy="give it step.drain(state), or call the decorated function outside",
            )
        named = set_options(self._options)
        if named:
            note(
                f"{callable_name(self._fn)} is decorated and runs inside of this function as the plain function: "
                f"its {', '.join(named)} {'has' if len(named) == 1 else 'have'} no effect"
            )
        o = self._options
        signature_options = SignatureOptions(static_argnums=o.static_argnums, static_argnames=o.static_argnames)
        signature, leaves = flatten_call(self._fn, args, kwargs, signature_options)
        if signature in self._jitted:  # traced once and compiled once, as a jitted function is
            with suppress(jax.errors.UnexpectedTracerError):  # it closes over values of another trace
                return self._jitted[signature](*leaves)

        def called(*arrays: Any) -> Any:
            given, named = signature.arguments(arrays)
            return self._fn(*given, **named)

        called.__name__ = callable_name(self._fn)
        self._jitted[signature] = jax.jit(called)
        return self._jitted[signature](*leaves)

    def drain(self, state: Any) -> Any:
        """The plain state with nothing under way, out of what a call returned with a schedule without a flush.

        Every gradient that was begun is in it; a later call with it begins a new run. Other states come back as they
        are.

        Args:
            state: what a call returned as its state.

        Raises:
            AutoparError: the step was not compiled for such a state.
        """
        return drain(self._plain, state)

    @property
    def order(self) -> Table:
        """The order in which passes ran in the last call, with schedule "ampnet"; `replay` takes it.

        Raises:
            AutoparError: there was no such call.
        """
        return order(self._plain)

    def replay(self, order: Table, *args: Any, **kwargs: Any) -> Any:
        """A call with schedule "ampnet" in an order that happened: the same numbers to the bit.

        Args:
            order: of an earlier call with arguments of these shapes.
            args: arguments of the call.
            kwargs: likewise by keyword.

        Raises:
            AutoparError: the step has another schedule.
            ScheduleError: the order is of other numbers, or cannot be.
        """
        return replay(self._plain, order, args, kwargs)

    @property
    def _flushes(self) -> bool:
        plan = self._options.plan
        return flushes(self._options.schedule if plan is None else plan.schedule)

    def __repr__(self) -> str:
        options, cluster = self._options, self._options.cluster
        where = "the devices of this process" if cluster is None else str(cluster)
        plans = [p for pure in self._both() for _, p in pure.planned.values()]
        warned = "; ".join(f"{_arguments(p)}: {p!r}" for p in plans[:4]) or "not planned yet"
        more = f"; and {len(plans) - 4} more" if len(plans) > 4 else ""
        search = options.search if isinstance(options.search, str) else type(options.search).__name__
        return f"<autopar.parallelize({callable_name(self._fn)}) on {where}, search {search!r}; {warned}{more}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Methods bind as plain functions do."""
        return self if instance is None else BoundFunction(self, instance)

    def __copy__(self) -> ParallelFunction[_P, _R]:
        """Itself, as copies of plain functions are: programs are shared."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelFunction[_P, _R]:
        """Itself, as deep copies of plain functions are."""
        return self

    def __reduce__(self) -> Any:
        """Pickled by name where a module has it under its name, else as its function and options; no program is."""
        name = str(getattr(self, "__qualname__", ""))
        held: Any = sys.modules.get(str(getattr(self, "__module__", "")))
        for part in name.split("."):
            held = getattr(held, part, None)
        return name if held is self else (parallelize_with, (self._fn, self._options))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments (arrays or `jax.ShapeDtypeStruct`); runs nothing.

        Raises:
            TraceError: the function cannot be traced.
            InfeasiblePlanError: nothing fits the memory limit.
            PlanMismatchError: the plan given was made for another program.
        """
        pure, args, kwargs, _ = self._pure(args, kwargs)
        signature, _ = pure.resolve(args, kwargs)
        with as_traced(signature):
            return pure.plan(signature)[1]

    def trace(self, *args: Any, **kwargs: Any) -> TracedCall:
        """The function traced for arguments (arrays or `jax.ShapeDtypeStruct`), as `jax.jit(f).trace` gives it."""
        pure, args, kwargs, _ = self._pure(args, kwargs)
        return TracedCall(pure, pure.resolve(args, kwargs)[0])

    def lower(self, *args: Any, **kwargs: Any) -> LoweredCall:
        """Plans for arguments (arrays or `jax.ShapeDtypeStruct`), as `jax.jit(f).lower`. Errors are those of `plan`."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result for arguments (arrays or `jax.ShapeDtypeStruct`), as `jax.jit(f).eval_shape`.

        Raises:
            TraceError: the function cannot be traced.
        """
        if under_trace():
            o = self._options
            plain = jax.jit(self._fn, static_argnums=o.static_argnums, static_argnames=o.static_argnames)
            return plain.eval_shape(*args, **kwargs)
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forgets what was traced, planned and compiled, as `jax.jit(f).clear_cache`: the next call begins again."""
        self._plain = PureFunction(self._fn, self._options)
        self._changing = {}
        self._jitted = {}
        self._module_free = None

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Plans and compiles for arguments (arrays or `jax.ShapeDtypeStruct`). Errors are those of `plan`."""
        pure, args, kwargs, _ = self._pure(args, kwargs)
        signature, _ = pure.resolve(args, kwargs)
        with as_traced(signature):
            return pure.compile(signature)

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs ``init_fn`` with its results built already split, never whole on one device.

        Args:
            init_fn: makes one of the function's arguments, as its state.
            args: arguments of ``init_fn``.
            kwargs: likewise.

        Where a plan is known (given, or made by an earlier call) results lie as it wants; before that
        each is split over all devices as far as its dims allow, and the first step moves it. On a cluster of workers
        results are made on the workers once the function was compiled, and in this process before.
        """
        if isinstance(self._options.cluster, RayCluster):
            compiled = [c for pure in self._both() for c in pure.compiled.values()]
            remote = [(c.plan, c.local) for c in compiled if not c.local.here]
            return run_on_workers(init_fn, args, kwargs, remote)
        known = [p for pure in self._both() for _, p in pure.planned.values()]
        if self._options.plan is not None:
            known.append(self._options.plan)
        return run_sharded(init_fn, args, kwargs, known, world_devices())

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments, placed as the plan wants them: a tuple, or the argument itself if there is one.

        Modules are placed where they are. Arguments by keyword serve planning and are not returned.
        """
        pure, args, kwargs, mutable = self._pure(args, kwargs)
        signature, leaves = pure.resolve(args, kwargs)
        with as_traced(signature):
            arrays = pure.compile(signature).local.shard_all(leaves)
        placed, _ = signature.arguments(arrays)
        placed = mutable.put_back(placed) if mutable else placed
        return placed[0] if len(placed) == 1 else placed

    def process_examples(self, batch: int | None = None) -> tuple[int, ...]:
        """Numbers of the examples of a global batch that this process has to give to `local_batch`, rising.

        Args:
            batch: number of examples of a global batch; None takes that of the step as it was compiled.

        Raises:
            AutoparError: the step was not compiled, and ``batch`` is not given.
        """
        return process_examples(self._programs(), batch)

    def local_batch(self, tree: Any) -> Any:
        """Global arrays of a batch of which every process has its own examples; all processes call it together.

        Args:
            tree: the examples that `process_examples` names, in that order, as arrays with a dim of examples in front.
                Before the step is compiled each process has as many as every other.

        Raises:
            ProcessMismatchError: a process has too few or too many examples, or other arrays than the others, or two
                processes whose devices have the same example read different ones.
            ProcessLostError: a process did not come.
        """
        return local_batch(self._fn_name, self._programs(), tree)

    def save(self, path: str, state: Any, *, at: int | None = None, keep: int | None = None, wait: bool = False) -> int:
        """Writes a checkpoint in Orbax's format; returns its number as soon as the arrays may be used again.

        Every process writes its own shards, in the background; the checkpoint is there whole or not at all. All
        processes call it together.

        Args:
            path: a folder that all processes share; each checkpoint is a folder in it.
            state: pytree of arrays.
            at: number of the checkpoint, as that of the step; None takes the one after the latest.
            keep: how many are kept, the latest; None keeps all.
            wait: whether to return only when it is on disk; `wait_until_saved` waits later.

        Raises:
            CheckpointError: it cannot be written, Orbax is not installed, or an earlier one could not be written.
            ProcessMismatchError: a process saves something else.
        """
        return self._saving.save(str(path), state, at, keep, wait)

    def wait_until_saved(self) -> None:
        """Returns when all that `save` was given is on disk. CheckpointError where it could not be written."""
        self._saving.wait()

    def restore(self, path: str, like: Any = None, *, at: int | None = None) -> Any:
        """A state out of a checkpoint of `save`, Orbax or Flax, placed as the plan wants it.

        The number of processes, devices and stages may be another than that which wrote it. All processes call it
        together; each reads what lies on its own devices. Where no plan is known yet arrays are split over all devices
        as far as their dims allow.

        Args:
            path: what `save` wrote to, or the folder of one checkpoint.
            like: a state of the structure wanted, as arrays or `jax.ShapeDtypeStruct`; None takes the argument of the
                compiled step that has these leaves, else nested dicts and lists as Orbax has them. With a schedule
                without a flush what is under way is restored too.
            at: number of the checkpoint; None takes the latest that was written to the end.

        Raises:
            CheckpointError: there is none, it is of another structure, or damaged.
            ProcessMismatchError: a process restores another one.
        """
        planned = [p for pure in self._both() for p in reversed(pure.planned.values())]
        plans = [] if self._options.plan is None else [self._options.plan]
        return restore(str(path), like, at, planned, plans, carries=not self._flushes)

    def plans(self) -> list[Plan]:
        """The plans of all signatures so far, the last one last; the one that was given, if there is one."""
        plans_so_far = [p for pure in self._both() for _, p in pure.planned.values()]
        return plans_so_far or ([] if self._options.plan is None else [self._options.plan])

    # -- steps ---------------------------------------------------------------------------------

    @property
    def _fn_name(self) -> str:
        return str(getattr(self._fn, "__name__", type(self._fn).__name__))

    def _programs(self) -> list[Compiled]:
        """Programs compiled for this process's devices, the latest first."""
        return [c for pure in self._both() for c in reversed(pure.compiled.values()) if c.local.here]

    def _both(self) -> tuple[PureFunction, ...]:
        return (self._plain, *self._changing.values())

    def _pure(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[PureFunction, tuple[Any, ...], dict[str, Any], Mutable]:
        """The runner of a call, its arguments there, and the values that the call changes in place."""
        treedef = jax.tree.structure((args, kwargs))
        known = self._module_free is not None and treedef == self._module_free
        args, kwargs, mutable = split_mutable(args, kwargs, has_modules=not known)
        if not mutable.modules:
            self._module_free = treedef
        if not mutable:
            return self._plain, args, kwargs, mutable
        if mutable.kind not in self._changing:
            self._changing[mutable.kind] = PureFunction(mutable.pure(self._fn), self._options)
        return self._changing[mutable.kind], args, kwargs, mutable


def _arguments(plan: Plan) -> str:
    """A signature in short: the arguments of a plan with their types, as far as they fit a line."""
    inputs = [f"{i.path} {i.type}" for i in plan.content.inputs]
    return ", ".join(inputs[:3]) + (f", ... ({len(inputs)} arrays)" if len(inputs) > 3 else "")


def parallelize_with(fn: Callable[_P, _R], options: ParallelOptions) -> ParallelFunction[_P, _R]:
    """The decorated ``fn``."""
    check_callable(fn)
    return ParallelFunction(fn, options)


#: Methods of `ParallelFunction` whose arguments are those of a call.
_TAKE_ARGUMENTS = frozenset({"compile", "eval_shape", "lower", "plan", "trace"})


class BoundFunction:
    """A decorated method of one object; has what `ParallelFunction` has. Equal to others of that object."""

    def __init__(self, function: ParallelFunction[..., Any], instance: Any) -> None:
        self._function = function
        self._instance = instance
        functools.update_wrapper(self, function, updated=())

    @property
    def __self__(self) -> Any:
        """The object that the method is bound to."""
        return self._instance

    @property
    def __func__(self) -> ParallelFunction[..., Any]:
        """The decorated function."""
        return self._function

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoundFunction):
            return NotImplemented
        return self._function is other._function and self._instance is other._instance

    def __hash__(self) -> int:
        return hash((id(self._function), id(self._instance)))

    def __reduce__(self) -> Any:
        """Pickled as bound methods are: the object, and the name of its method."""
        return getattr, (self._instance, self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function on the object: plans and compiles once for each signature, then runs."""
        return self._function(self._instance, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Everything else of `ParallelFunction`; methods that take a call's arguments get the object as the first."""
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._function, name)
        return functools.partial(value, self._instance) if name in _TAKE_ARGUMENTS else value

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._function), *super().__dir__()})

    def replay(self, order: Table, *args: Any, **kwargs: Any) -> Any:
        """Repeats a call with schedule "ampnet" in the order of passes of an earlier call: the same numbers."""
        return self._function.replay(order, self._instance, *args, **kwargs)

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments without the object, placed as the plan wants them: a tuple, or the only one itself."""
        placed = self._function.shard(self._instance, *args, **kwargs)[1:]
        return placed[0] if len(placed) == 1 else placed


def check_callable(fn: Any) -> None:
    """Raises AutoparError unless ``fn`` can be called and gives its result at once."""
    is_generator = inspect.isgeneratorfunction(fn)
    if not callable(fn) or is_generator:
        error = AutoparError(
            f"parallelize takes a function, not {'a generator function' if is_generator else type(fn).__name__}",
            remedy="@autopar.parallelize above a function, or autopar.parallelize(fn, ...)",
        )
        raise as_kind(error, TypeError)
