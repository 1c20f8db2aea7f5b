"""Times of matrix products, memory, tiny operators, kinds of work and collectives on the devices at hand.

Every device does the same at once, as in a step, so that what they share (the cores and the memory of a host, for
virtual CPU devices) is shared here too. Repetitions go round all programs, so that a slow minute of a shared machine
touches all of them. Virtual CPU devices that are at least as many as the cores keep these busy: of them CPU seconds
over cores are counted, which other work on the machine makes no longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from autopar._compat.meshes import device_mesh
from autopar.cost.calibration import Sample, What
from autopar.runtime.measured_programs import (
    AXIS,
    HERE,
    QUICK,
    Case,
    Effort,
    collective_cases,
    looped,
    program,
    special_cases,
)

_DTYPES = (("f32", jnp.float32), ("bf16", jnp.bfloat16))
_MOST_RUNS = 1 << 16
_PROBES = 5
_CHAINS = (8, 32, 128)

__all__ = ["HERE", "QUICK", "Effort", "measure_devices"]


def measure_devices(
    devices: Sequence[Any], effort: Effort | None = None, say: Callable[[str], None] = lambda text: None
) -> tuple[Sample, ...]:
    """Times everything that `autopar.cost.calibration.fit` needs.

    Of CPUs these are also kinds of work with figures of their own; accelerators have kernels by size in place of them
    (`autopar.cost.kernels`).

    Args:
        devices: jax devices of one kind, of this process.
        effort: sizes and repetitions.
        say: called with a line when a phase begins.
    """
    effort, is_cpu = effort or Effort(), devices[0].platform == "cpu"
    effort = effort if is_cpu else effort.on_accelerators()
    mesh = device_mesh([(AXIS, len(devices))], devices)
    cases = [*_chains(mesh), *_products(mesh, effort), *_copies(mesh, effort)]
    if is_cpu:
        cases += special_cases(mesh, effort)
    if len(devices) > 1:
        cases += collective_cases(devices, effort)
    say(f"compiling {len(cases)} programs for {len(devices)} {devices[0].device_kind}")
    clock = clock_of(devices[0].platform, len(devices), _cores())
    ready = [_prepared(case, effort, clock) for case in cases]
    seconds: list[list[float]] = [[] for _ in ready]
    for n in range(effort.repeats):
        say(f"measuring, round {n + 1} of {effort.repeats}")
        for (_, run), seconds_of_case in zip(ready, seconds, strict=True):
            seconds_of_case.append(_time(run, clock))
    return tuple(
        Sample(c.what, c.name, c.amount, runs, c.group, tuple(seconds_of_case), c.side_bytes, c.convolution)
        for c, (runs, _), seconds_of_case in zip(cases, ready, seconds, strict=True)
    )


def clock_of(platform: str, devices: int, cores: int) -> Callable[[], float]:
    """A counter of the seconds of programs.

    Args:
        platform: of the devices, as jax names it.
        devices: of this process.
        cores: that this process may use.
    """
    if platform != "cpu" or devices < cores:
        return time.perf_counter
    return lambda: time.process_time() / cores


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepared(case: Case, effort: Effort, clock: Callable[[], float]) -> tuple[int, Callable[[], Any]]:
    """Repetitions with which a program takes long enough, and the function that runs it."""
    runs, run = 1, case.make(1)
    _time(run, clock)
    while case.repeated and runs < _MOST_RUNS:
        took = min(_time(run, clock) for _ in range(_PROBES))  # the least: another process may have taken a core
        if took >= effort.least_s:
            break
        runs = min(_MOST_RUNS, runs * max(2, min(16, round(1.3 * effort.least_s / max(took, 1e-9)))))
        run = case.make(runs)
        _time(run, clock)
    return runs, run


def _time(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    jax.block_until_ready(run())
    return clock() - start


def _chains(mesh: Mesh) -> list[Case]:
    """Tiny products one after the other: nothing fuses them, and each is a launch and little else."""

    def case(what: What, length: int) -> Case:
        def step(x: Any) -> Any:
            for _ in range(length):
                x = x @ x
            return x

        def make(runs: int) -> Callable[[], Any]:
            return program(mesh, looped(step, runs), [((4, 4), jnp.float32)])

        return Case(what, "", length, 1, make, repeated=what == "chain")

    return [case("call", 1), *(case("chain", length) for length in _CHAINS)]


def _products(mesh: Mesh, effort: Effort) -> list[Case]:
    """Square products, long thin ones and batches of small ones, with equal arithmetic."""
    cases = []
    for name, dtype in _DTYPES:
        for n in effort.products:
            for shape in _shapes(n):
                cases.append(Case("product", name, 2.0 * n**3, 1, _product(mesh, shape, dtype)))
    return cases


def _shapes(n: int) -> tuple[tuple[int, int, int], ...]:
    """(batch, rows, width) of products rows x width times width x width that make 2 n^3 FLOPs together."""
    square = (1, n, n)
    return (square, (1, 4 * n, n // 2), (16, n, n // 4)) if n >= 64 else (square,)


def _product(mesh: Mesh, shape: tuple[int, int, int], dtype: Any) -> Callable[[int], Callable[[], Any]]:
    batch, rows, width = shape

    def make(runs: int) -> Callable[[], Any]:
        def body(x: Any, w: Any) -> Any:
            return looped(lambda y: jnp.einsum("bmk,bkn->bmn", y, w), runs)(x)

        return program(mesh, body, [((batch, rows, width), dtype), ((batch, width, width), dtype)])

    return make


def _copies(mesh: Mesh, effort: Effort) -> list[Case]:
    """Elementwise operators as a step has them: arithmetic, a sum over rows."""
    width = 256

    def arithmetic(y: Any) -> Any:
        return y * 0.999 + 0.001

    def summed(y: Any) -> Any:
        return y - jnp.sum(y, axis=1, keepdims=True)

    def case(step: Callable[[Any], Any], size: int, moved: float) -> Case:
        def make(runs: int) -> Callable[[], Any]:
            return program(mesh, looped(step, runs), [((size // 4 // width, width), jnp.float32)])

        return Case("copy", "f32", moved * size, 1, make)

    # Read and written; the sum reads once more, but where a kernel of an accelerator holds its rows.
    sums = 3.0 if mesh.devices.flat[0].platform == "cpu" else 2.0
    steps = ((arithmetic, 2.0), (summed, sums))
    return [case(step, size, moved) for size in effort.copies for step, moved in steps]
