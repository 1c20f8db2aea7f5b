"""Programs of a pipeline's stages, compiled for the devices of this process.

`compiled_stages` compiles those of all workers, each a `Loaded`; `LoadedTexts` says what they are, as jax's compiled
object does. `lowered_stage` lowers one. The lists that call them are carried out in `autopar.runtime.pipeline`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autopar._compat.dtypes import jax_dtype
from autopar._compat.meshes import device_mesh
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.pipeline.stage_program import StageProgram, donated, given_up
from autopar.runtime.launches import runnable
from autopar.schedule import Work


@dataclass(frozen=True, eq=False)
class Loaded:
    """A program on a worker's devices.

    Args:
        program: what it is.
        mesh: the devices.
        compiled: jax's compiled object: (number of the microbatch, arrays) -> tuple of arrays.
        shardings: of the arrays that it takes.
        donated: names of the values whose buffers it writes results into.
    """

    program: StageProgram
    mesh: Mesh
    compiled: Any
    shardings: tuple[NamedSharding, ...]
    donated: frozenset[str] = frozenset()

    @staticmethod
    def compile(program: StageProgram, mesh: Mesh, given_up: Set[str] = frozenset()) -> Loaded:
        """Compiles ``program`` for ``mesh``.

        Args:
            program: of a stage.
            mesh: the devices.
            given_up: values that are not used again once it has run.
        """
        shardings = tuple(p.sharding(mesh) for p in program.reads)
        compiled, at = None, donated(program, given_up, {str(a): int(n) for a, n in mesh.shape.items()})
        if program.results:
            stage = lowered_stage(program, mesh, at)
            compiled = runnable(stage.function, stage.lowered.compile(), stage.dtypes)
        return Loaded(program, mesh, compiled, shardings, frozenset(program.reads[n].name for n in at))


def clocked(loaded: Loaded, note: Callable[[Work, float], None]) -> Loaded:
    """The program, waited for.

    Args:
        loaded: the program.
        note: called with it and its seconds each time that it ran.
    """

    def call(*arguments: Any) -> Any:
        jax.block_until_ready(arguments)
        start = time.perf_counter()
        outputs = jax.block_until_ready(loaded.compiled(*arguments))
        note(loaded.program.work, time.perf_counter() - start)
        return outputs

    return loaded if loaded.compiled is None else dataclasses.replace(loaded, compiled=call)


@dataclass(frozen=True, eq=False)
class LoweredStage:
    """A program of a stage, lowered by jax.

    Args:
        function: jitted.
        lowered: jax's lowered object.
        dtypes: of the arrays that it takes.
    """

    function: Any
    lowered: Any
    dtypes: tuple[Any, ...]


def lowered_stage(program: StageProgram, mesh: Mesh, at: Sequence[int] = ()) -> LoweredStage:
    """``program`` lowered for ``mesh``.

    Args:
        program: of a stage.
        mesh: the devices.
        at: indices of the arrays whose buffers it writes results into.
    """
    sizes = {str(a): int(n) for a, n in mesh.shape.items()}
    shapes = [
        jax.ShapeDtypeStruct(p.shape(sizes), jax_dtype(p.type.dtype), sharding=p.sharding(mesh)) for p in program.reads
    ]
    function = program.jitted(mesh, at)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return LoweredStage(function, function.lower(number, *shapes), tuple(s.dtype for s in shapes))


@dataclass(frozen=True, eq=False)
class LoadedTexts:
    """The interface of jax's compiled object that `Compiled` uses, for all programs of a pipeline in this process.

    Args:
        loaded: programs by (worker, work).
    """

    loaded: Mapping[tuple[int, Work], Loaded]

    def as_text(self) -> str:
        """Optimized HLO of every stage program, one after the other."""
        return "\n".join(f"// {name}\n{compiled.as_text()}" for name, compiled in self._by_program.items())

    def memory_analysis(self) -> dict[str, Any]:
        """jax's memory statistics (bytes a device) by program."""
        return {name: compiled.memory_analysis() for name, compiled in self._by_program.items()}

    def cost_analysis(self) -> dict[str, Any]:
        """jax's cost statistics by program."""
        return {name: compiled.cost_analysis() for name, compiled in self._by_program.items()}

    @property
    def _by_program(self) -> dict[str, Any]:
        return {
            f"{work} on worker {worker}": loaded.compiled
            for (worker, work), loaded in sorted(self.loaded.items(), key=lambda e: e[0])
            if loaded.program.results
        }


def worker_meshes(lowered: LoweredPipeline, devices: Sequence[Any]) -> dict[tuple[int, int], Mesh]:
    """Devices on which a worker runs a stage, by (worker, stage)."""
    table = lowered.table
    return {
        (w, s): stage_mesh(lowered, w, s, devices) for w in range(table.num_workers) for s in table.stages_of_worker(w)
    }


def compiled_stages(
    lowered: LoweredPipeline, meshes: Mapping[tuple[int, int], Mesh], spared: Set[str]
) -> dict[tuple[int, Work], Loaded]:
    """Programs with devices of this process, by worker and work, compiled in one order by each process of a worker.

    Args:
        lowered: the pipeline.
        meshes: by (worker, stage) the devices on which the worker runs the stage.
        spared: values into whose buffers no program may write.
    """
    loaded: dict[tuple[int, Work], Loaded] = {}
    unused = [given_up(lowered.instructions, worker) for worker in range(lowered.table.num_workers)]
    for program in lowered.programs:
        stage = program.work.stage
        for worker in lowered.table.workers_of_stage(stage):
            mesh = meshes[worker, stage]
            if mesh.local_devices:
                names = unused[worker].get(program.work, frozenset()) - spared
                loaded[worker, program.work] = Loaded.compile(program, mesh, names)
    return loaded


def stage_mesh(lowered: LoweredPipeline, worker: int, stage: int, devices: Sequence[Any]) -> Mesh:
    """The mesh on which a worker runs a stage."""
    mesh: Mesh = device_mesh(lowered.mesh_axes(stage), [devices[i] for i in lowered.devices(worker, stage)])
    return mesh
