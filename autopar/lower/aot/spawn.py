"""Sends lowered programs to a process of its own, which compiles them for a target."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax import export

from autopar._compat.devices import xla_flags
from autopar._compat.meshes import abstract_mesh
from autopar._compat.world import lowered_for
from autopar.errors import AutoparError
from autopar.frontend import Traced
from autopar.lower.aot.base import Target
from autopar.lower.aot.collectives import Key, counted_collectives
from autopar.lower.aot.messages import ANSWER, PROGRAM, REQUEST, TEXT, CompiledSummary, CompileRequest, ProgramRequest
from autopar.lower.hosted import hosted_of
from autopar.lower.program import LoweredProgram, lower_on
from autopar.plan import Plan

_LAST_LINES = 12


@dataclass(frozen=True)
class Compilation:
    """A program on its way through the compiler.

    Args:
        lowered: runs a step of each collective before compiling, by kind, axes and bytes; None where the compiler put
            all of them in.
        equal: of these, those that a compiler can do without.
        compiled: what was read of the result.
        hlo: its text.
    """

    lowered: Mapping[Key, float] | None
    equal: Mapping[Key, float]
    compiled: CompiledSummary
    hlo: str


@dataclass(frozen=True)
class CompileJob:
    """A program to compile: how it lies on its devices, and its ``jax.export`` bytes."""

    request: ProgramRequest
    code: bytes


@lowered_for(gloo=False)
def compile_for(target: Target, traced: Traced, plan: Plan, timeout_s: float = 1800.0) -> Compilation:
    """Compiles a plan's program for a target.

    Args:
        target: what to compile for.
        traced: the function that the plan was made for.
        plan: a plan of one stage, with as many devices as the target has.
        timeout_s: seconds after which compiling is given up.

    Raises:
        AutoparError: the target's compiler is not installed, or fails.
    """
    target.check_installed()
    program = lower_on(traced, plan, abstract_mesh(plan.stages[0].mesh_axes), target.platform)
    exported = export.export(program.function, platforms=[target.platform])(*program.shapes(traced))
    ((compiled, text),) = compile_jobs(
        target, plan, [CompileJob(_request(plan, program), bytes(exported.serialize()))], timeout_s
    )
    lowered, equal = counted_collectives(program.function, program.shapes(traced), plan.stages[0].mesh_axes)
    return Compilation(lowered, equal, compiled, text)


def compile_jobs(
    target: Target, plan: Plan, jobs: Sequence[CompileJob], timeout_s: float
) -> list[tuple[CompiledSummary, str]]:
    """Compiles programs, one after the other in one process of its own.

    Args:
        target: what to compile for.
        plan: where they are from.
        jobs: the programs.
        timeout_s: seconds after which all of it is given up.

    Returns, for each program, what was read of the result, and its optimized HLO.

    Raises:
        AutoparError: compiling fails, or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as name:
        folder = Path(name)
        for number, job in enumerate(jobs):
            (folder / PROGRAM.format(number)).write_bytes(job.code)
        (folder / REQUEST).write_bytes(msgspec.json.encode(CompileRequest(target.text, tuple(j.request for j in jobs))))
        _run(target, plan, folder, timeout_s)
        answers = msgspec.json.decode((folder / ANSWER).read_bytes(), type=list[CompiledSummary])
        texts = [(folder / TEXT.format(number)).read_text(encoding="utf-8") for number in range(len(jobs))]
        return list(zip(answers, texts, strict=True))


def _request(plan: Plan, program: LoweredProgram) -> ProgramRequest:
    def dims(shardings: Any) -> tuple[tuple[tuple[str, ...], ...], ...]:
        return tuple(tuple(_names(entry) for entry in s.spec) for s in shardings)

    hosted = hosted_of(plan.content)
    return ProgramRequest(
        plan.stages[0].mesh_axes,
        (),
        dims(program.input_shardings),
        dims(program.output_shardings),
        program.donated,
        dict(program.compiler_options),
        tuple(sorted(hosted.inputs)),
        tuple(sorted(hosted.outputs)),
        program.host_bytes,
    )


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _run(target: Target, plan: Plan, folder: Path, timeout_s: float) -> None:
    devices = sum(len(s.devices) for s in plan.stages)
    root = str(Path(__file__).resolve().parents[3])
    config: Any = jax.config
    environment = {
        **os.environ,
        "XLA_FLAGS": xla_flags(os.environ),
        "PYTHONPATH": os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p),
        # Devices of this machine, if it has any, are not touched.
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": str(bool(config.jax_enable_x64)),
        **target.environment(devices),
    }
    command = [sys.executable, "-m", "autopar.lower.aot.worker", str(folder)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise AutoparError(f"compiling for {target.text} took more than {timeout_s:g} s and was stopped") from error
    if done.returncode != 0:
        last = "\n".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
        raise AutoparError(
            f"compiling {plan.content.program} for {target.text} failed with exit code {done.returncode}:\n{last}",
            cause="the compiler refuses the program or the topology, or has a bug",
        )
