"""``python -m autopar.lower.aot.worker FOLDER``: compiles programs for a target, in a process of its own.

One process holds one accelerator plugin, and the options of the CPU's virtual devices are read once.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding

from autopar._compat.meshes import partition_spec
from autopar.lower.aot.base import Target
from autopar.lower.aot.collectives import GroupNames
from autopar.lower.aot.messages import (
    ANSWER,
    PROGRAM,
    REQUEST,
    TEXT,
    CompiledCollective,
    CompiledMemory,
    CompiledSummary,
    CompileRequest,
    ProgramRequest,
)
from autopar.lower.aot.registry import parse_target
from autopar.lower.hlo import HloCollective, collectives, work
from autopar.lower.hosted import placed

_SCOPES = 4


def compile_program(target: Target, request: ProgramRequest, program: bytes) -> tuple[CompiledSummary, str]:
    """Compiles; returns what is read of the result and its optimized HLO.

    Args:
        target: what to compile for.
        request: how the program lies on its devices.
        program: ``jax.export`` bytes.
    """
    names = tuple(a for a, _ in request.mesh_axes)
    shape = tuple(n for _, n in request.mesh_axes)
    grid = target.part_grid(shape, request.devices) if request.devices else target.device_grid(shape)
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    exported = export.deserialize(bytearray(program))

    def places(dims: tuple[tuple[tuple[str, ...], ...], ...], host: tuple[int, ...]) -> tuple[NamedSharding, ...]:
        return tuple(placed(mesh, partition_spec(d), host=n in host) for n, d in enumerate(dims))

    function = jax.jit(
        exported.call,
        in_shardings=places(request.input_dims, request.host_inputs),
        out_shardings=places(request.output_dims, request.host_outputs),
        donate_argnums=request.donated,
    )
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        lowered = function.lower(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals))
        options: dict[str, Any] = {**request.compiler_options, **target.compiler_options}
        compiled = lowered.compile(options)
    compile_s = time.perf_counter() - start
    text = str(compiled.as_text())
    memory: Any = compiled.memory_analysis()
    done = work(text)
    return CompiledSummary(
        str(grid.flat[0].device_kind),
        summarized(collectives(text), GroupNames(request.mesh_axes)),
        CompiledMemory(
            int(memory.argument_size_in_bytes),
            int(memory.output_size_in_bytes),
            int(memory.temp_size_in_bytes),
            int(memory.alias_size_in_bytes),
            0 if memory.host_argument_size_in_bytes else request.host_bytes,
            int(memory.peak_memory_in_bytes) if target.platform == "tpu" else 0,
        ),
        done.fusions,
        done.cycles,
        compile_s,
    ), text


def summarized(collectives: tuple[HloCollective, ...], names: GroupNames) -> tuple[CompiledCollective, ...]:
    """Collectives that are the same taken together; those of one device a group, which send nothing, left out."""
    by_collective: dict[tuple[str, str, int], list[HloCollective]] = defaultdict(list)
    for c in collectives:
        if c.group_size > 1:
            by_collective[c.kind, names.of(c.kind, c.groups), c.full_bytes].append(c)
    return tuple(
        CompiledCollective(
            kind,
            axis,
            full_bytes,
            sum(c.wire_bytes for c in group),
            sum(c.times for c in group),
            len({c.name for c in group}),
            all(c.exact for c in group),
            tuple(sorted({c.dtype for c in group})),
            tuple(sorted({c.scope for c in group if c.scope}))[:_SCOPES],
        )
        for (kind, axis, full_bytes), group in sorted(by_collective.items())
    )


def main(folder: Path) -> None:
    """Reads the request in ``folder``, writes the answers there."""
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=CompileRequest)
    target = parse_target(request.target)
    jax.devices()  # plugins register on the first look
    answers = []
    for number, program in enumerate(request.programs):
        answer, text = compile_program(target, program, (folder / PROGRAM.format(number)).read_bytes())
        (folder / TEXT.format(number)).write_text(text, encoding="utf-8")
        answers.append(answer)
    (folder / ANSWER).write_bytes(msgspec.json.encode(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
