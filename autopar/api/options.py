"""`ParallelOptions`: the options of `autopar.parallelize`, checked when they are given. They decide nothing."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from autopar.api.constraints import Pin
from autopar.cluster import Cluster
from autopar.errors import AutoparError, SliceError
from autopar.errors.base import as_kind
from autopar.lower.aot import parse_target
from autopar.plan import Plan
from autopar.precision import Precision, Wire, mixed, with_formats
from autopar.recompute import LEVELS
from autopar.runtime.ray.cluster import RayCluster
from autopar.schedule import Schedule, get
from autopar.schedule import check_schedule as check_fields
from autopar.schedule.slices import check_takes_slices
from autopar.search import Request, strategy_named
from autopar.search.policy import EFFORTS, SearchPolicy, with_effort
from autopar.search.registry import check_strategy

_NAMED_ARGUMENTS: tuple[tuple[str, type], ...] = (
    ("batch_argnums", int), ("donate_argnums", int), ("donate_argnames", str), ("static_argnums", int),
    ("static_argnames", str),
)  # fmt: skip


#: How a pipeline can run: each process the lists of its workers, or one XLA program on all devices.
PIPELINES = ("auto", "lists", "one_program")


@dataclass(frozen=True)
class ParallelOptions:
    """Options of `autopar.parallelize`; see there. ``policy`` has the thresholds of the search, for tests."""

    cluster: Cluster | None = None
    search: Any = "alpa"
    batch_argnums: tuple[int, ...] | None = None
    num_microbatches: int | str = "auto"
    num_stages: int | str = "auto"
    schedule: Any = "auto"
    memory_limit_bytes: int | None = None
    remat: Any = "auto"
    offload: str = "none"
    attention: str = "auto"
    token_slices: Any = None
    rewrites: bool = True
    padding: bool = True
    collective_matmul: str = "none"
    pipeline: str = "auto"
    precision: Precision | None = None
    wire: Wire | None = None
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] | None = None
    constraints: tuple[Pin, ...] = ()
    like: Any = None
    plan: Plan | None = None
    progress: Callable[[str], None] | None = None
    time_limit_s: float | None = None
    effort: str = "default"
    verify: str | None = None
    policy: SearchPolicy = field(default_factory=SearchPolicy)

    @property
    def thresholds(self) -> SearchPolicy:
        """The thresholds of the search: those of ``policy`` with the effort that is asked for."""
        return with_effort(self.policy, self.effort)

    @property
    def tracing(self) -> dict[str, Any]:
        """The options of tracing: arguments that are the batch, and rewrites of the traced program."""
        rewrites = [
            *([] if self.precision is None else [partial(mixed, self.precision)]),
            *([] if self.wire is None else [partial(with_formats, self.wire)]),
        ]
        return {"batch_argnums": self.batch_argnums, "rewrites": tuple(rewrites)}

    def __post_init__(self) -> None:
        if self.cluster is not None and not isinstance(self.cluster, Cluster):
            raise AutoparError(
                f"cluster={self.cluster!r} is not a Cluster",
                remedy="autopar.Cluster.load(name), .local(), or one in code",
            )
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise AutoparError(f"plan={self.plan!r} is not a Plan", remedy="autopar.Plan.load(path)")
        for name, kind in _NAMED_ARGUMENTS:
            if any(not isinstance(v, kind) or isinstance(v, bool) for v in getattr(self, name) or ()):
                raise AutoparError(
                    f"{name}={getattr(self, name)!r} has entries that are not {kind.__name__}",
                    remedy="positions go to ..._argnums, names to ..._argnames",
                )
        self._check_numbers()
        check_schedule(self.schedule)
        if isinstance(self.search, str):
            strategy_named(self.search)
        elif not callable(self.search):
            raise AutoparError(
                f"search={self.search!r} is no strategy", remedy="a registered name, or a callable Problem -> Plan"
            )
        else:
            check_strategy(self.search)
        if self.remat not in ("auto", *LEVELS, False):
            raise AutoparError(
                f"remat={self.remat!r} is not a level of recomputation",
                remedy='remat="auto", "none", "selective" or "full"',
            )
        if self.effort not in EFFORTS:
            raise AutoparError(
                f"effort={self.effort!r} is not a search effort", remedy="effort=" + ", ".join(map(repr, EFFORTS))
            )
        for name in ("padding", "rewrites"):
            if not isinstance(getattr(self, name), bool):
                raise AutoparError(
                    f"{name}={getattr(self, name)!r} is neither True nor False", remedy=f"{name}=True, or False"
                )
        if self.verify is not None:
            parse_target(self.verify)
        self._check_forms()
        self._check_slices()

    def _check_numbers(self) -> None:
        """Raises AutoparError where a count is none, or seconds are not."""
        for name in ("num_microbatches", "num_stages"):
            value = getattr(self, name)
            if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise AutoparError(f"{name}={value!r} is no count", remedy=f'{name}="auto", or 1, 2, 4...')
        if self.time_limit_s is not None and (not _is_number(self.time_limit_s) or not self.time_limit_s >= 0):
            raise AutoparError(
                f"time_limit_s={self.time_limit_s!r} is not a number of seconds", remedy="time_limit_s=10, or None"
            )

    @property
    def request(self) -> Request:
        """Wishes that hold for all that the search states."""
        padding = self.padding and self.search == "alpa"
        return Request(self.attention, padding, self.collective_matmul, self.token_slices)

    @property
    def requested_remat(self) -> str:
        """Levels of recomputation that the search may use; with slices of tokens none."""
        return "none" if self.token_slices is not None else self.remat or "none"

    def _check_slices(self) -> None:
        """Raises AutoparError where slices of tokens are asked for in a form, or with an option, that there is not."""
        asked = self.token_slices
        if asked is None:
            return
        counts = asked if isinstance(asked, tuple) and asked else (asked,)
        if asked != "auto" and any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in counts):
            raise AutoparError(
                f"token_slices={asked!r} is not a division into slices of tokens",
                remedy='token_slices="auto", a number of slices, or their lengths as (512, 256, 256)',
            )
        if self.num_stages == 1 or self.schedule == "none":
            raise SliceError("slices of tokens pass through a pipeline", remedy="num_stages=2 or more")
        with_remat = self.remat not in ("auto", "none", False)
        if with_remat or self.offload != "none":
            raise SliceError(
                "slices of tokens are neither recomputed nor kept in host memory",
                cause="later slices read keys and values that the forward pass left",
                remedy='remat="none" and offload="none" with token_slices',
            )
        name = self.schedule if isinstance(self.schedule, str) else getattr(self.schedule, "name", "")
        check_takes_slices(name)

    def _check_forms(self) -> None:
        """Raises AutoparError where attention, host memory or products are asked for in a form that there is not."""
        if self.attention not in ("auto", "plain", "blocks"):
            raise AutoparError(
                f"attention={self.attention!r} is not a form of attention",
                remedy='attention="auto", "plain" or "blocks"',
            )
        if self.collective_matmul not in ("none", "auto", "always"):
            raise AutoparError(
                f"collective_matmul={self.collective_matmul!r} is not a way to run products",
                remedy='collective_matmul="none", "auto" or "always"',
            )
        if self.pipeline not in PIPELINES:
            raise AutoparError(
                f"pipeline={self.pipeline!r} is not a way to run a pipeline",
                remedy='pipeline="auto", "lists" or "one_program"',
            )
        if self.pipeline == "one_program" and isinstance(self.cluster, RayCluster):
            raise AutoparError(
                'pipeline="one_program" on workers of Ray',
                cause="they carry out the instruction lists",
                remedy='pipeline="auto", or processes of one script: autopar.initialize()',
            )
        if self.offload not in ("none", "auto", "layers", "update"):
            raise AutoparError(
                f"offload={self.offload!r} is not a use of host memory",
                remedy='offload="none", "auto", "layers" or "update"',
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def set_options(options: ParallelOptions) -> tuple[str, ...]:
    """Names of the options that say how a function is to be split and were set, in the order of `ParallelOptions`."""
    silent = ("progress", "policy", "time_limit_s", "exhaustive", "verify", *(n for n, _ in _NAMED_ARGUMENTS))
    default = ParallelOptions()
    fields = [f.name for f in dataclasses.fields(options) if f.name not in silent]
    return tuple(n.removesuffix("_bytes") for n in fields if getattr(options, n) != getattr(default, n))


def check_schedule(schedule: Any) -> None:
    """Raises AutoparError unless ``schedule`` is "auto", "none", a registered name or a `Schedule`."""
    if schedule in ("auto", "none"):
        return
    if isinstance(schedule, Schedule):
        check_fields(schedule, type(schedule).__name__)
        return
    if not isinstance(schedule, str):
        raise AutoparError(
            f"schedule={schedule!r} is no schedule",
            remedy='schedule="1f1b", another registered name, or an autopar.schedule.Schedule',
        )
    get(schedule)


def _value_error(fact: str, *, remedy: str) -> AutoparError:
    """An error about positions or names of arguments, for which `jax.jit` raises a ValueError."""
    return as_kind(AutoparError(fact, remedy=remedy), ValueError)


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


def check_names(fn: Callable[..., Any], options: ParallelOptions) -> None:
    """Raises AutoparError where an option names an argument that ``fn`` does not have."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return
    kinds = {p.kind for p in parameters}
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    wrong_batch = [n for n in options.batch_argnums or () if not 0 <= n < count]
    if wrong_batch and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise _value_error(
            f"batch_argnums has {wrong_batch[0]}; there are {count} positional arguments: {', '.join(names)}",
            remedy="give positions, the first is 0",
        )
    for option in ("static", "donate"):
        given = getattr(options, f"{option}_argnames")
        by_position = [p.name for p in parameters if p.kind in _BY_POSITION and p.name in given]
        if by_position:
            raise _value_error(
                f"{option}_argnames has {', '.join(map(repr, by_position))}, which no call gives by name",
                remedy=f"name its position in {option}_argnums",
            )
        unknown = sorted(set(given) - set(names))
        if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise _value_error(
                f"{option}_argnames has {', '.join(map(repr, unknown))}; the arguments are {', '.join(names)}",
                remedy="give names of arguments",
            )
        wrong = [n for n in getattr(options, f"{option}_argnums") if not -count <= n < count]
        if wrong and inspect.Parameter.VAR_POSITIONAL not in kinds:
            raise _value_error(
                f"{option}_argnums has {wrong[0]}; there are {count} positional arguments: {', '.join(names)}",
                remedy="give positions, the first is 0",
            )
    both = sorted(set(options.static_argnums) & set(options.donate_argnums))
    both_names = sorted(set(options.static_argnames) & set(options.donate_argnames))
    if both or both_names:
        raise _value_error(
            f"{(both_names or both)[0]!r} is both static and donated",
            remedy="a static argument has no buffer to donate",
        )


def as_tuple(value: Any) -> tuple[Any, ...]:
    """An int, a string or an iterable of them, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str) else tuple(value)


def mesh_sizes(value: Sequence[int] | None) -> tuple[int, ...] | None:
    """``mesh_shape`` as a tuple. AutoparError where it holds anything but sizes."""
    if value is None:
        return None
    sizes: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) else ()
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        one = f"mesh_shape=({value},) for one axis, or " if isinstance(value, int) else ""
        raise AutoparError(
            f"mesh_shape={value!r} is not a mesh shape", remedy=f"{one}the sizes of its axes, as mesh_shape=(2, 4)"
        )
    return sizes
