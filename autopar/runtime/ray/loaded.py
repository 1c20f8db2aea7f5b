"""`LoadedFunction`: what a worker's process knows of a function: its instructions, and its programs, compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, NamedSharding

from autopar._compat.meshes import device_mesh
from autopar.lower.hosted import check_pinned
from autopar.lower.pipeline.exported import ExportedProgram, compile_program
from autopar.runtime.ampnet import AmpStage, run_stage
from autopar.runtime.interpreter import After, Before, Ready, Worker
from autopar.runtime.transport import WorkerLink
from autopar.runtime.transport.base import ArrivalLink
from autopar.runtime.transport.world import WorldLink
from autopar.schedule import Apply, Buffer, Instruction, Recv, Run, Send, Work
from autopar.schedule.without_flush.ampnet import AmpFlow


@dataclass(frozen=True, eq=False)
class LoadedFunction:
    """The compiled programs and the instructions of one worker process.

    Args:
        programs: compiled program of each work.
        placements: sharding of each value that the programs read or make, by name.
        instructions: the worker's list for one step.
        link: connections to the other workers.
        x64: whether 64-bit types are enabled.
        amp: data flow of AMPNet and the number of the stage, if passes run on arrival; else None.
    """

    programs: Mapping[Work, Ready]
    placements: Mapping[str, NamedSharding]
    instructions: tuple[Instruction, ...]
    link: WorkerLink
    x64: bool
    amp: tuple[AmpFlow, int] | None = None

    def run(self, start: Mapping[Buffer, Any], before: Before, after: After | None, order: str) -> tuple[Worker, str]:
        """Runs a step.

        Args:
            start: what lies here.
            before, after: called with the number of each instruction before and after it. Of AMPNet ``before`` is
            called with
                the number of passes, and ``after`` is not called.
            order: letters of passes in the order that they are to have; empty takes the first that can run, backward
                ones first.

        Returns the worker as it is then, and the order of AMPNet's passes.
        """
        worker = Worker(self.programs, self.placements, self.link, start)
        if isinstance(self.link, WorldLink):
            before, after = self.link.begin(self.instructions, before, after)
        if self.amp is None:
            worker.run(self.instructions, before, after)
            if isinstance(self.link, WorldLink):
                self.link.end()
            return worker, ""
        flow, stage = self.amp
        assert isinstance(self.link, ArrivalLink), "a world has no AMPNet: see `load_remote_ampnet`"
        return worker, run_stage(AmpStage(stage, flow, worker), self.link, before, order)

    def is_slow(self, index: int) -> bool:
        """Whether an instruction may take time."""
        if self.amp is not None or isinstance(self.instructions[index], Run | Apply | Recv):
            return True
        return isinstance(self.link, WorldLink) and isinstance(self.instructions[index], Send)

    def described(self) -> dict[str, tuple[str, dict[str, int]]]:
        """Optimized HLO and memory (bytes a device) of each program."""
        return {str(w): _described(p.function) for w, p in sorted(self.programs.items())}


def _described(compiled: Any) -> tuple[str, dict[str, int]]:
    memory = compiled.memory_analysis()
    names = (n for n in dir(memory) if n.endswith("_size_in_bytes"))
    return str(compiled.as_text()), {n: int(getattr(memory, n)) for n in names}


def load_programs(
    programs: Sequence[ExportedProgram], devices: Sequence[Any]
) -> tuple[dict[Work, Ready], dict[str, NamedSharding]]:
    """Programs compiled for devices.

    Args:
        programs: of one worker.
        devices: all that it has.

    Returns the programs by work, and how values lie that they read, or else make, by name.

    Raises:
        PlanMismatchError: something lies in host memory that the devices have no access to.
    """
    if any(port.host for p in programs for port in (*p.reads, *p.results)):
        check_pinned("the plan keeps state of this worker in host memory", devices)
    meshes: dict[tuple[tuple[str, int], ...], Mesh] = {}
    ready: dict[Work, Ready] = {}
    reads: dict[str, NamedSharding] = {}
    makes: dict[str, NamedSharding] = {}
    for p in programs:
        mesh = meshes.setdefault(p.axes, device_mesh(p.axes, devices))
        shardings = tuple(r.sharding(mesh) for r in p.reads)
        ready[p.work] = Ready(tuple(r.name for r in p.reads), shardings, compile_program(p, mesh))
        for port, sharding in zip(p.reads, shardings, strict=True):
            reads.setdefault(port.name, sharding)
        for port in p.results:
            makes.setdefault(port.name, port.sharding(mesh))
    return ready, {**makes, **reads}
