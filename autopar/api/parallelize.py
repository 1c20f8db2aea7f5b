"""`parallelize`: the decorator."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

from autopar.api.constraints import parse_pins
from autopar.api.options import ParallelOptions, as_tuple, mesh_sizes
from autopar.api.parallel_function import ParallelFunction, parallelize_with
from autopar.api.progress import reporter_of
from autopar.api.replanned import target_cluster
from autopar.cluster import Cluster
from autopar.plan import Plan
from autopar.plan.text import parse_bytes
from autopar.precision import Precision, precision_of, wire_of

_P = ParamSpec("_P")
_R = TypeVar("_R")


class ParallelizeOptions(TypedDict, total=False):
    """Keyword arguments of `parallelize`, for type checkers."""

    cluster: Cluster | str | None
    search: Any
    batch_argnums: int | Sequence[int] | None
    num_microbatches: int | str
    num_stages: int | str
    schedule: Any
    memory_limit: int | str | None
    remat: Any
    offload: str
    attention: str
    padding: bool
    collective_matmul: str
    pipeline: str
    token_slices: str | int | Sequence[int] | None
    rewrites: bool
    precision: str | Precision | None
    wire: Mapping[str, Any] | None
    donate_argnums: int | Sequence[int]
    donate_argnames: str | Sequence[str]
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    mesh_shape: Sequence[int] | None
    constraints: Mapping[str, Any] | None
    mesh_axes: Mapping[str, int] | None
    like: Any
    plan: Plan | str | os.PathLike[str] | None
    progress: Callable[[str], None] | bool | None
    time_limit_s: float | None
    effort: str
    verify: str | None


@overload
def parallelize(fn: Callable[_P, _R], **options: Unpack[ParallelizeOptions]) -> ParallelFunction[_P, _R]: ...


@overload
def parallelize(
    fn: None = None, **options: Unpack[ParallelizeOptions]
) -> Callable[[Callable[_P, _R]], ParallelFunction[_P, _R]]: ...


def parallelize(
    fn: Callable[..., Any] | None = None,
    *,
    cluster: Cluster | str | None = None,
    search: Any = "alpa",
    batch_argnums: int | Sequence[int] | None = None,
    num_microbatches: int | str = "auto",
    num_stages: int | str = "auto",
    schedule: Any = "auto",
    memory_limit: int | str | None = None,
    remat: Any = "auto",
    offload: str = "none",
    attention: str = "auto",
    token_slices: str | int | Sequence[int] | None = None,
    rewrites: bool = True,
    padding: bool = True,
    collective_matmul: str = "none",
    pipeline: str = "auto",
    precision: str | Precision | None = None,
    wire: Mapping[str, Any] | None = None,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    mesh_shape: Sequence[int] | None = None,
    constraints: Mapping[str, Any] | None = None,
    mesh_axes: Mapping[str, int] | None = None,
    like: Any = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | bool | None = None,
    time_limit_s: float | None = None,
    effort: str = "default",
    verify: str | None = None,
) -> Any:
    """Makes a function run on all devices of a cluster, split in the way that is predicted fastest.

    Args:
        fn: an ordinary jax function, as a train step; None to use as ``@parallelize(...)``.
        cluster: what to plan for, or the name or path of a cluster file; None takes the devices of this process.
        search: name of a registered strategy, or a callable ``Problem -> Plan``.
        batch_argnums: positions of the arguments that are the batch, where it cannot be told.
        num_microbatches: parts of the batch that run one after another.
        num_stages: pipeline stages.
        schedule: name of the pipeline schedule, or one of your own; "auto": the fastest that fits, "none": no pipeline.
        memory_limit: bytes a device, or text as "40GB"; None takes the device's memory.
        remat: what the backward pass may recompute beyond what the function states: "none", "selective" (not
            matrix products), "full" (all but what enters a layer), or "auto": as little as the memory allows.
        offload: what lies in host memory while nothing needs it: "none"; "auto": state of the update and stacks that
            loops slice, where no faster plan fits; "layers": all such stacks; "update": such state, updated by hosts.
        attention: form of softmax attention: "plain" as it is written, "blocks", which keeps no scores and may split
            tokens along a ring of devices, or "auto": for more than 8192 tokens whichever is faster.
        token_slices: slices of tokens in which microbatches of a causal model pass through a pipeline: their lengths, a
            number of even ones, or "auto": the lengths that are predicted fastest. None: whole microbatches.
        rewrites: whether products are computed in another order than written where that is cheaper, as
            ``x @ (w + a @ b)`` and its gradients with the factors ``a`` and ``b`` alone; listed in ``plan.rewrites``.
        padding: whether dims that the devices do not divide, as a vocabulary of 50257, are padded inside of the step
            where the plan is faster so; arguments and results keep their sizes, and values do not change.
        collective_matmul: products in blocks next to messages, not after gathers: "none", "auto": if faster, "always".
        pipeline: how stages run in several processes of one script: "lists": every process carries out the instruction
            lists of its workers; "one_program": one XLA program on all devices; "auto": what is predicted faster.
        precision: mixed precision of a plain float32 step: "bf16", "f16", "f8", "mxf8" or a `Precision`.
        wire: formats in which devices send "gradients" and "weights" of two dims or more, as ``{"gradients": "int8"}``:
            "int8", "int4", "bf16", "f8_e4m3", "f8_e5m2". It changes values, each by at most half a step of its block a
            term; None sends them as they are.
        donate_argnums, donate_argnames: arguments whose buffers the step may reuse, as in `jax.jit`.
        static_argnums, static_argnames: arguments that are values of the program, as in `jax.jit`.
        mesh_shape: sizes of the only logical mesh to consider, as ``(2, 4)``; one of all devices is that of one stage.
        constraints: where arguments lie, by path (as in ``plan.explain``; ``*`` is any part, ``**`` any number): a
            tuple of the dims that must be split, all others whole, or a `PartitionSpec`. The last match counts.
        mesh_axes: sizes of the axes that such specs name, as ``{"data": 4, "model": 2}``.
        like: another decorated function, or its plan: arguments that are the same as its own lie as it has them.
        plan: a plan to run instead of searching, or the path of its file.
        progress: called with a line when a phase begins, as the logger ``autopar`` is. None shows on standard
            error what takes over two seconds: a line that changes on terminals and in notebooks, lines elsewhere. False
            shows nothing.
        time_limit_s: seconds of searching after which, as after Ctrl-C, the best plan known is taken, with a note; the
            search goes on until there is one. ``math.inf`` is ``effort="exhaustive"``.
        effort: how long to search, in work units (see `plan.search.work`), which are the same on every machine, and how
            near to its bound to stop: "quick" (some seconds), "default" (seconds to two minutes, where another form of
            the plan may save 1%), "high" (0.2%), or "exhaustive": all that may be planned of a small model, in minutes.
        verify: devices whose compiler decides, as "tpu:v5p:4x4x4" (see `autopar.verify`): of the best few plans of
            different kinds the one whose program keeps the limit and is fastest; ``cluster`` follows from it.

    Returns:
        A `ParallelFunction`.

    Raises:
        AutoparError: an option is wrong.
    """
    options = ParallelOptions(
        cluster=Cluster.load(cluster) if isinstance(cluster, str) else cluster or target_cluster(verify),
        search=search,
        batch_argnums=None if batch_argnums is None else as_tuple(batch_argnums),
        num_microbatches=num_microbatches,
        num_stages=num_stages,
        schedule=schedule,
        memory_limit_bytes=parse_bytes(memory_limit),
        remat=remat,
        offload=offload,
        attention=attention,
        token_slices=token_slices
        if token_slices is None or isinstance(token_slices, str | int)
        else tuple(token_slices),
        rewrites=rewrites,
        padding=padding,
        collective_matmul=collective_matmul,
        pipeline=pipeline,
        precision=precision_of(precision),
        wire=wire_of(wire),
        donate_argnums=as_tuple(donate_argnums),
        donate_argnames=as_tuple(donate_argnames),
        static_argnums=as_tuple(static_argnums),
        static_argnames=as_tuple(static_argnames),
        mesh_shape=mesh_sizes(mesh_shape),
        constraints=parse_pins(constraints, mesh_axes),
        like=like,
        plan=Plan.load(plan) if isinstance(plan, str | os.PathLike) else plan,
        progress=reporter_of(progress),
        time_limit_s=time_limit_s,
        effort="exhaustive" if time_limit_s == math.inf else effort,
        verify=verify,
    )
    return (lambda function: parallelize_with(function, options)) if fn is None else parallelize_with(fn, options)
