"""One script on many hosts: what its processes compare before anything runs, and the plan that they share."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar._compat.context import context_texts, trace_context
from autopar._compat.world import World, world
from autopar.api.options import ParallelOptions
from autopar.cluster import Cluster
from autopar.frontend import Traced
from autopar.ir import Operator
from autopar.ir.text import operator_text
from autopar.plan import Plan
from autopar.runtime.hosts.agree import Agreement, Fact
from autopar.runtime.hosts.arrays import checksum, is_placed
from autopar.runtime.ray.cluster import RayCluster
from autopar.search.clock import Clock
from autopar.search.compiled_plans import Planned

#: Options that change what is said, not what is done.
_SILENT = ("progress",)
_PACKAGES = ("jax", "jaxlib", "numpy")
#: A setting of jax that programs depend on though no program is traced again for it.
_SETTINGS = ("jax_default_prng_impl",)
#: Settings that may differ between processes: each has devices of its own.
_OWN = ("jax_default_device",)


def many(options: ParallelOptions) -> World | None:
    """The processes that carry out a function together; None where this one does, or workers on Ray."""
    return None if isinstance(options.cluster, RayCluster) else world()


def takes_one_stage(options: ParallelOptions, cluster: Cluster) -> bool:
    """Whether a function of several processes is planned as one stage though its number of stages is free.

    Stages pay where the network between nodes is slower than the links inside a node. CPUs always get one stage: the
    speed of links between their processes is assumed, not measured.
    """
    on_cpus = all("cpu" in d.jax_kinds for d in cluster.device_types)
    return many(options) is not None and (on_cpus or not cluster.has_slower_network)


def takes_one_program(options: ParallelOptions, plan: Plan) -> bool:
    """Whether a pipeline is one XLA program: asked for by name, or chosen by the plan of several processes."""
    if options.pipeline != "auto" or many(options) is None:
        return options.pipeline == "one_program"
    executions = None if plan.content.pipeline is None else plan.content.pipeline.executions
    return executions is not None and executions.taken == "one_program"


def agree(processes: World, traced: Traced, options: ParallelOptions, donated: Sequence[int]) -> Clock:
    """Returns the seconds that it took, as "agree", when all processes are about to compile the same function.

    Args:
        processes: all of them.
        traced: the function as this process traced it.
        options: what `parallelize` was told here.
        donated: indices of the inputs that the step may reuse.

    Raises:
        ProcessMismatchError: one has another program, other options or versions.
        ProcessLostError: one did not come.
    """
    clock = Clock()
    with clock.phase("agree"):
        facts = [*_versions(), *_settings(), *_options(options), *_program(traced)]
        Agreement.next(processes, f"compiling {traced.graph.name}").compare(
            [*facts, ("donated inputs", str(list(donated)))]
        )
    return clock


def share(
    processes: World,
    name: str,
    make: Callable[[], Planned[Traced]],
    form: Callable[[Plan], Traced],
    clock: Clock,
) -> Planned[Traced]:
    """The plan of process 0 on every process; an AutoparError of its search on every process too.

    Args:
        processes: all of them.
        name: of the function.
        make: searches; called on process 0 alone.
        form: the function in the form that a plan is of; called on the others.
        clock: gets the seconds of the exchange, without those of ``make``, as "share".
    """
    planned: list[Planned[Traced]] = []
    searched = Clock()

    def encoded() -> bytes:
        with searched.phase("search"):
            planned.append(make())
        return planned[0].plan.to_json().encode()

    with clock.phase("share"):
        text = Agreement.next(processes, f"planning {name}").take(encoded)
    clock.seconds["share"] -= searched.seconds.get("search", 0.0)
    if planned:
        plan = planned[0].plan
        return Planned(planned[0].traced, dataclasses.replace(plan, phases=(*plan.phases, *clock.phases())))
    plan = Plan.from_json(text)
    return Planned(form(plan), plan)


def same_arguments(processes: World, name: str, leaves: Sequence[Any], names: Sequence[str]) -> None:
    """Waits for all processes; raises an error unless their arguments that are whole on each process are equal.

    Args:
        processes: all of them.
        name: of the function.
        leaves: its traced arguments.
        names: their paths.

    Raises:
        ProcessMismatchError: one has other values; it names the argument.
        ProcessLostError: one did not come.
    """
    facts = [(f"argument {n}", checksum(leaf)) for n, leaf in zip(names, leaves, strict=True)]
    if not all(map(is_placed, leaves)):
        Agreement.next(processes, f"the first call of {name}").compare(facts)


def same_init(
    name: str, leaves: Sequence[Any], paths: Sequence[str], shapes: Sequence[Any], shardings: Sequence[NamedSharding]
) -> None:
    """Waits until all processes are about to make the same state; raises the errors of `same_arguments`.

    Args:
        name: name of the function that makes the state.
        leaves: arguments of that function.
        paths: path of each array of the state.
        shapes: shape and dtype of each array.
        shardings: sharding that each array will have.
    """
    processes = world()
    if processes is None:
        return
    given = [(f"argument {n}", checksum(leaf)) for n, leaf in enumerate(leaves)]
    facts = [
        (f"result {p}", f"{s.dtype}{list(s.shape)} as {k.spec} of {dict(k.mesh.shape)}")
        for p, s, k in zip(paths, shapes, shardings, strict=True)
    ]
    Agreement.next(processes, f"init by {name}").compare([*_versions(), *_settings(), *given, *facts])


def _versions() -> Iterator[Fact]:
    yield "version of autopar", import_module(__name__.partition(".")[0]).__version__
    yield "version of Python", ".".join(platform.python_version_tuple()[:2])
    for package in _PACKAGES:
        yield f"version of {package}", version(package)


def _settings() -> Iterator[Fact]:
    for name in _SETTINGS:
        yield f"setting {name}", str(getattr(jax.config, name))
    for name, text in context_texts(trace_context()).items():
        if name not in _OWN and text is not None:
            yield f"setting {name}", text


def _options(options: ParallelOptions) -> Iterator[Fact]:
    for field in dataclasses.fields(options):
        if field.name not in _SILENT:
            yield f"option {field.name}", _option_text(getattr(options, field.name))


def _option_text(value: Any) -> str:
    """An option as text that is the same on every process, whatever its place in memory."""
    if isinstance(value, Plan):
        return f"plan {hashlib.sha256(value.to_json().encode()).hexdigest()[:16]}"
    if isinstance(value, Cluster):
        return f"{value.name} {value.content_hash[:16]}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_option_text, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_option_text(v)}' for k, v in value.items())}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (f"{f.name}={_option_text(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{type(value).__qualname__}({', '.join(parts)})"
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _program(traced: Traced) -> Iterator[Fact]:
    graph = traced.graph
    yield "function", graph.name
    for i in graph.inputs:
        yield f"input {i.name}", f"{i.type} {i.role}"
    for op in graph.operators:
        yield f"operator {op.id}", _operator(op)
    for o in graph.outputs:
        yield f"output {o.path}", str(o.type)
    for n, constant in enumerate(traced.closed_over):
        yield f"closed over array {n}", checksum(constant)


def _operator(op: Operator) -> str:
    return operator_text(op).strip()
