"""The plan's parts, as plain data that JSON holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal as OneOf

from autopar.plan.form import StepForm
from autopar.plan.record import Record

MemoryPlace = OneOf["device", "host"]
Travels = OneOf["", "lhs", "rhs", "result"]
AxisUse = OneOf["context", "data", "expert", "space", "tensor"]
CollectiveKind = OneOf["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "send"]


class Communication(Record, frozen=True):
    """Collectives of one kind, size and axis in one stage.

    Args:
        kind: what is done.
        bytes: bytes of the full tensor, as seen by one group of devices along ``axis``.
        axis: mesh axes taken together, joined by ``+``.
        count: how many a step.
        stage: the stage that does it.
        seconds: predicted seconds a step of all ``count`` of them.
        operators: ids of the operators that need it, at most a few.
    """

    kind: CollectiveKind
    bytes: int
    axis: str
    count: float
    stage: int
    seconds: float
    operators: tuple[str, ...] = ()


class Memory(Record, frozen=True):
    """Predicted bytes a device at the fullest moment of the step, by kind.

    Of a stage of a pipeline the other kinds are those while one microbatch runs; ``in_flight`` is what other
    microbatches in flight hold, and other stages on the same worker. The largest total is `Plan.peak_memory`.

    Args:
        parameters: parameters, as they lie between steps.
        optimizer: optimizer state.
        gradients: results of the backward pass that the update reads.
        activations: results of the forward pass that the backward pass reads, saved inputs of layers among them.
        temporaries: other results and copies in other layouts, as gathered parameters.
        batch: batch arguments.
        in_flight: activations of other microbatches in flight, and what other stages on the same worker hold.
    """

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0
    temporaries: int = 0
    batch: int = 0
    in_flight: int = 0

    @property
    def total(self) -> int:
        """Sum over the kinds."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


class CombinedBytes(Record, frozen=True):
    """Bytes up to which the compiler for GPUs is asked to send collectives as one.

    Args:
        sums: of all-reduces, and of reduce-scatters.
        gathers: of all-gathers.
    """

    sums: int
    gathers: int


class AxisRole(Record, frozen=True):
    """The use of a mesh axis in products of the batch with parameters.

    Args:
        axis: the mesh axis.
        use: the dim that it splits: "data", of examples; "context", of tokens; "space", of images; "expert", of
            matrices that are used side by side; "tensor", another dim of the parameter.
        share: of the FLOPs of these products those in which it splits such a dim, 0 to 1.
        gradients: of the gradients that microbatches add up the share that it splits, 0 to 1; 0 in plans of older
            versions.
    """

    axis: str
    use: AxisUse
    share: float
    gradients: float = 0.0


class HostMemory(Record, frozen=True):
    """Use of host memory by a stage.

    Args:
        bytes: bytes a device of inputs that lie in host memory between updates, and of stacks between loops.
        move_time: predicted seconds a step of moving them to the device and back; part of the stage's ``step_time``.
    """

    bytes: int = 0
    move_time: float = 0.0


class Stage(Record, frozen=True):
    """A part of the program on a part of the cluster.

    Args:
        mesh_axes: (axis, size) of the stage's logical mesh, major first.
        devices: indices of its devices in the cluster, in mesh order.
        operators: ids of its operators.
        step_time: predicted busy seconds a step.
        compute_time: of which computing.
        memory: bytes a device by kind.
        collectives: what it communicates inside, dearest first.
        work_times: (kind of work, seconds a step) of a stage with a loop over microbatches: "forward", "backward",
            "update", and "weight": the part of "backward" that schedules which split it may put off; "meeting" where
            examples meet.
        activation_bytes: bytes a device that each microbatch in flight keeps for its backward pass.
        weight_stash_bytes: bytes a device that each microbatch keeps from its input gradients to its weight
            gradients, besides ``activation_bytes``, where a schedule puts the second off.
        accumulation_bytes: bytes a device of what microbatches add up, as gradients; what one of them adds is as
            large.
        state_bytes: bytes a device of parameters and optimizer state that lie there between steps.
        received_bytes: bytes a device that earlier stages send for each microbatch in flight.
        host: use of host memory.
        layers: of a model that loops over a stack of layers the first of this stage, the number after its last one,
            and the number of all; None where the stack is not cut into stages, or there is none.
        form: what the stage was turned into before it was sharded.
        thresholds: bytes up to which the compiler for GPUs is asked to send collectives as one; None for its own.
        axis_roles: uses of the mesh axes, from which the plan is named; empty in plans of older versions.
    """

    mesh_axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    operators: tuple[str, ...]
    step_time: float
    compute_time: float
    memory: Memory
    collectives: tuple[Communication, ...] = ()
    work_times: tuple[tuple[str, float], ...] = ()
    activation_bytes: int = 0
    host: HostMemory = HostMemory()
    weight_stash_bytes: int = 0
    accumulation_bytes: int = 0
    state_bytes: int = 0
    received_bytes: int = 0
    layers: tuple[int, int, int] | None = None
    form: StepForm = StepForm()
    thresholds: CombinedBytes | None = None
    axis_roles: tuple[AxisRole, ...] = ()

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Size by axis."""
        return dict(self.mesh_axes)

    @property
    def host_bytes(self) -> int:
        """Bytes a device in host memory."""
        return self.host.bytes

    @property
    def host_time(self) -> float:
        """Predicted seconds a step of moves between device and host."""
        return self.host.move_time


class InputPart(Record, frozen=True):
    """The part of an argument that one stage holds, of an argument that several stages hold.

    Args:
        stage: the stage.
        layout: layout of the part on the mesh of the stage.
        memory: memory that it is in between steps.
        slices: of a stack of layers, the first slice of the part along dim 0 and the number after its last one; null
            where the stage holds all of the argument.
    """

    stage: int
    layout: str
    memory: MemoryPlace = "device"
    slices: tuple[int, int] | None = None


class InputRecord(Record, frozen=True):
    """One argument leaf.

    Args:
        path: its path.
        type: its type as text.
        role: "parameter", "optimizer", "batch" or another use in the step.
        layout: its layout as text; of one that several stages hold that of the first part.
        stage: the stage that holds it, or the first one.
        memory: memory that it is in between steps, and in the step until the update reads it; its new value goes there.
        parts: of an argument that several stages hold, or one stage in several layouts, the part of each; else empty.
    """

    path: str
    type: str
    role: str
    layout: str
    stage: int = 0
    memory: MemoryPlace = "device"
    parts: tuple[InputPart, ...] = ()

    @staticmethod
    def in_parts(path: str, type: str, role: str, parts: Sequence[InputPart]) -> InputRecord:
        """The record of an argument in parts.

        Slices next to each other, on one stage and in one layout, are one part.

        Args:
            path: its path.
            type: its type as text.
            role: its use in the step.
            parts: one or more, in order of their slices or stages.
        """
        joined = list(parts[:1])
        for p in parts[1:]:
            last = joined[-1]
            same = (p.stage, p.layout, p.memory) == (last.stage, last.layout, last.memory)
            if same and p.slices is not None and last.slices is not None and p.slices[0] == last.slices[1]:
                joined[-1] = InputPart(p.stage, p.layout, p.memory, (last.slices[0], p.slices[1]))
            else:
                joined.append(p)
        first = joined[0]
        return InputRecord(
            path, type, role, first.layout, first.stage, first.memory, tuple(joined) if len(joined) > 1 else ()
        )

    @property
    def of_stages(self) -> tuple[InputRecord, ...]:
        """A record for each part, with the type of the part."""
        if not self.parts:
            return (self,)
        return tuple(
            InputRecord(self.path, sliced_type(self.type, p.slices), self.role, p.layout, p.stage, p.memory)
            for p in self.parts
        )


class OutputRecord(Record, frozen=True):
    """One result leaf; ``updates`` is the path of the argument that it replaces."""

    path: str
    type: str
    layout: str
    updates: str | None = None
    stage: int = 0


class OperatorRecord(Record, frozen=True):
    """The sharding of one operator.

    Args:
        id: the operator, with the ids of enclosing operators and regions before it (``scan.0/body/dot_general.1``).
        operands: layout in which each operand is used; "" for literals.
        results: layout in which each result is made.
        stage: where it runs.
        host_results: of a loop, numbers of the results whose slices go to host memory as they are made.
        on_host: whether the host computes it, of what lies in its memory.
        skips_masked: of causal attention in blocks, whether scores that the mask leaves empty are not made; on a ring
            each device then takes an early half of a block of tokens and a late one.
        collective_matmul: of a product in blocks the tensor whose blocks devices send on next to it: "lhs" or "rhs"
            instead of a gather before it, "result" instead of a scatter of sums after it; "" of others.
    """

    id: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    stage: int = 0
    host_results: tuple[int, ...] = ()
    on_host: bool = False
    skips_masked: bool = False
    collective_matmul: Travels = ""


class Copy(Record, frozen=True):
    """A shared copy of a value in another layout, from which its users take it.

    Args:
        value: name of the value with enclosing regions before it.
        layout: layout of the copy.
        phase: "forward" or "backward" where each phase makes its own, else "".
    """

    value: str
    layout: str
    phase: str = ""


class Choice(Record, frozen=True):
    """Why one thing was chosen.

    Args:
        name: the operator or argument that the choice is for.
        members: ids of operators that follow it.
        choice: what was chosen, as text.
        cost: seconds of it: its own and those of resharding to and from its neighbours.
        runner_up: the next best with everything else as it is, or "" where there was no other.
        runner_up_cost: its seconds.
        stage: the stage whose graph it is of.
    """

    name: str
    members: tuple[str, ...]
    choice: str
    cost: float
    runner_up: str
    runner_up_cost: float | None
    stage: int = 0


class Considered(Record, frozen=True):
    """An option that the search compared.

    Args:
        name: the option.
        step_time: estimate of its step in seconds: operators and messages added up, before what overlaps is priced.
            None where it is not possible.
        peak_memory: estimate of its bytes on the fullest device; None where it was not planned.
        note: "chosen", or what became of it.
    """

    name: str
    step_time: float | None
    peak_memory: int | None = None
    note: str = ""


def sliced_type(text: str, slices: tuple[int, int] | None) -> str:
    """The type of slices of an array along dim 0: ``f32[2,8]`` of ``f32[4,8]`` and ``(0, 2)``; all of it for None."""
    if slices is None:
        return text
    dtype, (_, *sizes) = dtype_and_shape(text)
    return f"{dtype}[{','.join(map(str, (slices[1] - slices[0], *sizes)))}]"


def dtype_and_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """The dtype and sizes that a record's type names: ``("i32", (16, 128))`` of ``i32[16,128]``."""
    dtype, _, dims = text.partition("[")
    inner = dims.removesuffix("]")
    return dtype, tuple(int(n) for n in inner.split(",")) if inner else ()
