"""Messages to and from the process that compiles, as plain data."""

from __future__ import annotations

import msgspec

#: Files of the folder that the two processes share; of programs and texts there is one each, by number.
REQUEST, PROGRAM, ANSWER, TEXT = "request.json", "program-{}.bin", "answer.json", "program-{}.hlo"


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class ProgramRequest(_Message, frozen=True):
    """A program to compile.

    Args:
        mesh_axes: (axis, size) of the logical mesh.
        devices: numbers of the target's devices that it runs on, in mesh order; empty for all of them, arranged as the
            target does best.
        input_dims: for each input the mesh axes of each dim.
        output_dims: likewise.
        donated: indices of donated inputs.
        compiler_options: what XLA is told.
        host_inputs: indices of inputs that lie in host memory.
        host_outputs: indices of outputs that do.
        host_bytes: bytes a device of both, those that share a buffer once.
    """

    mesh_axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    input_dims: tuple[tuple[tuple[str, ...], ...], ...]
    output_dims: tuple[tuple[tuple[str, ...], ...], ...]
    donated: tuple[int, ...]
    compiler_options: dict[str, str | bool]
    host_inputs: tuple[int, ...] = ()
    host_outputs: tuple[int, ...] = ()
    host_bytes: int = 0


class CompileRequest(_Message, frozen=True):
    """A request to compile; the programs themselves, ``jax.export`` bytes, lie in files next to it.

    Args:
        target: text of the target.
        programs: one or several.
    """

    target: str
    programs: tuple[ProgramRequest, ...]


class CompiledCollective(_Message, frozen=True):
    """Collectives of the optimized HLO that are equal.

    Args:
        kind: as in a plan's records.
        axis: mesh axes that the groups lie along, joined by ``+`` in the order of the mesh; else what they are.
        bytes: bytes of the full tensor, as seen by one group.
        wire_bytes: bytes that a device sends in all ``count`` of them.
        count: runs of one a step; operands of one instruction count each.
        instructions: instructions that they are in.
        exact: whether ``count`` is certain.
        dtypes: what is sent.
        scopes: where they came from, in jax's name stack, at most a few.
    """

    kind: str
    axis: str
    bytes: int
    wire_bytes: float
    count: float
    instructions: int
    exact: bool
    dtypes: tuple[str, ...]
    scopes: tuple[str, ...]


class CompiledMemory(_Message, frozen=True):
    """Bytes a device that the compiler's buffer assignment has.

    ``alias`` is of outputs that reuse arguments; ``host`` of what lies in host memory and is counted all the same, as
    XLA's compiler for CPUs does. ``peak`` is what its compiler for TPUs says of the fullest moment, 0 of others: what
    loops write into is in its ``temporaries`` more than once.
    """

    arguments: int
    outputs: int
    temporaries: int
    alias: int
    host: int = 0
    peak: int = 0

    @property
    def total(self) -> int:
        """Bytes that the program needs at once: arguments, outputs with buffers of their own, temporaries; ``peak`` if
        less.
        """
        held = self.arguments + self.outputs + self.temporaries - self.alias - self.host
        return min(held, self.peak) if self.peak else held


class CompiledSummary(_Message, frozen=True):
    """Figures read from a compiled program.

    Args:
        device_kind: the compiler's name of the devices.
        collectives: in order of kind, axis and bytes.
        memory: bytes a device.
        fusions: number of fusions.
        cycles: cycles of a step as the compiler estimates them; None where it does not.
        compile_s: seconds that compiling took.
    """

    device_kind: str
    collectives: tuple[CompiledCollective, ...]
    memory: CompiledMemory
    fusions: int
    cycles: float | None
    compile_s: float
