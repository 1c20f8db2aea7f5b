"""The part of ``autopar plan`` that needs jax: arguments, options, the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import click

from autopar.api import ParallelFunction
from autopar.api.options import ParallelOptions
from autopar.api.parallel_function import parallelize_with
from autopar.api.replanned import target_cluster
from autopar.cli.target import StepTarget, find
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.errors.names import known_names
from autopar.lower.aot import parse_target
from autopar.plan import Plan
from autopar.precision import precision_of, wire_of
from autopar.schedule.registry import factory_named
from autopar.search import strategies
from autopar.search.baselines import named_degrees

#: Options that name a plan by its degrees of parallelism.
DEGREES = ("tp", "pp", "dp", "cp", "ep", "chunks", "zero")


@dataclass(frozen=True)
class PlanRequest:
    """Options of the command line; None leaves one to the decorator of the function, or to autopar.

    Args:
        arguments: attribute of the file that holds or returns the arguments.
        preset: preset of ``build``.
        overrides: further arguments of ``build``.
        cluster: what to plan for.
        search: name of a strategy.
        tp, pp, dp, cp, ep, chunks, zero: degrees of the plan that is asked for by name; see `autopar.search.Manual`.
        microbatches: number of microbatches, or "auto".
        stages: number of stages, or "auto".
        schedule: name of a pipeline schedule.
        remat: what may be recomputed.
        offload: what may lie in host memory.
        precision: dtype of mixed precision.
        wire: formats of what is sent, by role.
        memory_limit: bytes a device.
        mesh: sizes of the only logical mesh.
        donate: positions of donated arguments.
        batch: positions of the arguments that are the batch.
        time_limit: seconds of searching.
        effort: how long to search, as a word.
        exhaustive: whether no estimate leaves anything out.
        verify: target whose compiler chooses among plans.
    """

    arguments: str
    preset: str | None
    overrides: Mapping[str, Any]
    cluster: Cluster | None
    search: str | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    chunks: int | None = None
    zero: int | None = None
    microbatches: int | str | None = None
    stages: int | str | None = None
    schedule: str | None = None
    remat: str | None = None
    offload: str | None = None
    precision: str | None = None
    wire: Mapping[str, str] | None = None
    memory_limit: int | None = None
    mesh: tuple[int, ...] | None = None
    donate: tuple[int, ...] | None = None
    batch: tuple[int, ...] | None = None
    time_limit: float | None = None
    effort: str | None = None
    exhaustive: bool | None = None
    verify: str | None = None

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees that were given, by argument of `autopar.search.Manual`."""
        values = {name: getattr(self, name) for name in DEGREES}
        return {name: value for name, value in values.items() if value is not None}


def function_and_arguments(module: ModuleType, target: StepTarget, request: PlanRequest) -> tuple[Any, tuple[Any, ...]]:
    """The function that the user named, and its arguments; of ``build`` where the user named it or nothing.

    Raises:
        click.UsageError: the file does not define them.
    """
    if target.attribute in ("", "build"):
        if not target.attribute and not callable(getattr(module, "build", None)):
            raise click.UsageError(f"{target.place} has no function build, so name one: {target.place}:FUNC")
        return _built(module, target, request)
    if request.preset is not None or request.overrides:
        raise click.UsageError(f"--preset and --set are for {target.place} without a function: they go to its build")
    function = find(module, target.attribute, target.place)
    if not callable(function):
        raise click.UsageError(f"{target.place}:{target.attribute} is {type(function).__name__}, not a function")
    given = find(module, request.arguments, target.place)
    return function, as_arguments(given() if callable(given) else given, f"{target.place}:{request.arguments}")


def as_arguments(value: Any, name: str) -> tuple[Any, ...]:
    """``value`` as the tuple of arguments. click.UsageError for anything but a tuple or a list."""
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, tuple) or hasattr(value, "_fields"):
        raise click.UsageError(f"{name} must give a tuple of all arguments, not {type(value).__name__}; (x,) for one")
    return value


def _built(module: ModuleType, target: StepTarget, request: PlanRequest) -> tuple[Any, tuple[Any, ...]]:
    build = find(module, "build", target.place)
    presets = getattr(module, "PRESETS", None)
    if request.preset is not None and isinstance(presets, Mapping) and request.preset not in presets:
        raise click.BadParameter(
            f"{target.place} has no preset {request.preset!r}; {known_names(request.preset, presets)}",
            param_hint="--preset",
        )
    preset = {} if request.preset is None else {"preset": request.preset}
    built = build(**preset, abstract=True, **request.overrides)
    if not isinstance(built, tuple) or len(built) != 2 or not callable(built[0]):
        raise click.UsageError(f"build of {target.place} must return (function, arguments)")
    return built[0], as_arguments(built[1], f"build of {target.place}")


def make_plan(function: Any, arguments: tuple[Any, ...], request: PlanRequest, say: Callable[[str], None]) -> Plan:
    """The plan that was asked for. A decorated function keeps the options of its decorator that were not given.

    Args:
        function: plain or decorated.
        arguments: its positional arguments, arrays or shapes.
        request: options.
        say: called with a line when a phase begins.

    Raises:
        click.BadParameter: there is no such strategy.
        AutoparError: no plan can be made.
    """
    if request.search is not None:
        check_strategy(request.search)
    step = decorated(function, request)
    return parallelize_with(step.function, dataclasses.replace(step.options, progress=say)).plan(*arguments)


def decorated(function: Any, request: PlanRequest) -> ParallelFunction[..., Any]:
    """The function, decorated with the options of the command line."""
    return parallelize_with(*options_of(function, request))


def check_strategy(name: str) -> None:
    """Raises click.BadParameter where no strategy is called ``name``."""
    if name not in strategies():
        raise click.BadParameter(
            f"no search strategy is called {name!r}; {known_names(name, strategies())}", param_hint="--search"
        )


def parsed(read: Callable[[Any], Any], given: Any, option: str) -> Any:
    """The value of an option; click.BadParameter where it has none."""
    try:
        return read(given)
    except AutoparError as error:
        raise click.BadParameter(f"{error.fact}; {error.remedy}", param_hint=option) from error


def _known_schedule(name: str | None) -> str | None:
    """The name of a schedule. ScheduleError where none is called so."""
    if name not in (None, "auto", "none"):
        factory_named(name)
    return name


def options_of(function: Any, request: PlanRequest) -> tuple[Callable[..., Any], ParallelOptions]:
    """The plain function, and the options of its decorator with those that were given."""
    verify = request.verify and parsed(parse_target, request.verify, "--verify").text
    given = {
        "cluster": request.cluster or target_cluster(verify),
        "search": request.search,
        "num_microbatches": request.microbatches,
        "num_stages": request.stages,
        "schedule": parsed(_known_schedule, request.schedule, "--schedule"),
        "remat": request.remat,
        "offload": request.offload,
        "precision": parsed(precision_of, request.precision, "--precision"),
        "wire": parsed(wire_of, request.wire, "--wire"),
        "memory_limit_bytes": request.memory_limit,
        "mesh_shape": request.mesh,
        "donate_argnums": request.donate,
        "batch_argnums": request.batch,
        "time_limit_s": request.time_limit,
        "effort": "exhaustive" if request.exhaustive else request.effort,
        "verify": verify,
    }
    known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    options = ParallelOptions()
    if isinstance(function, ParallelFunction):
        options, function = function.options, function.function
    if request.degrees:
        if request.search is not None:
            raise click.UsageError(f"--{next(iter(request.degrees))} names a plan, so --search does not apply")
        known["search"] = named_degrees(known.get("cluster") or options.cluster or Cluster.local(), request.degrees)
    return function, dataclasses.replace(options, **known, plan=None)
