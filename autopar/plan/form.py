"""`StepForm`: what a step, or a stage of one, is turned into before it is sharded.

Each technique of `TECHNIQUES` is one field of `StepForm`, in the order in which forms are told.
`autopar.lower.techniques` has what each does to a step, `autopar.search.techniques` where each may be tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal as OneOf
from typing import TypeAlias

from msgspec.structs import replace

from autopar.errors import InfeasiblePlanError
from autopar.plan.record import Record

Remat: TypeAlias = OneOf["none", "selective", "full"]

#: Fields of a form that say where things lie between uses; the graph does not depend on them.
NOT_OF_GRAPH = ("host_update", "activations_offloaded", "slices_ahead")


@dataclass(frozen=True)
class Technique:
    """A technique in words.

    Args:
        field: of `StepForm`. It is taken where the field has another value than by default.
        name: in words; ``{value}`` stands for the value of the field.
        preposition: before the name in a sentence.
    """

    field: str
    name: str
    preposition: str = "with"

    def name_in(self, form: object) -> str:
        """The name as a form has it; "" of a form without it."""
        value = getattr(form, self.field)
        return "" if value == getattr(type(form)(), self.field) else self.name.format(value=value)


TECHNIQUES = (
    Technique("microbatches", "{value} microbatches", "in"),
    Technique("remat", "remat={value!r}"),
    Technique("block_scores", "attention in blocks"),
    Technique("host_update", "the update on hosts"),
    Technique("layered_update", "layers updated one at a time"),
    Technique("padded", "padding"),
    Technique("backward_update", "layers updated in the backward loop"),
    Technique("segment_layers", "segments of {value} layers", "in"),
)


class StepForm(Record, frozen=True):
    """A form of a step. The search decides it, the source makes the graph of it, a stage of a plan records it.

    Args:
        microbatches: parts of the batch that run one after another.
        remat: what is held of the forward pass for the backward pass, which recomputes the rest: "none" (nothing is
            recomputed), "selective" or "full".
        layer_ends: ids of the last forward operator of each layer but the last, where something is recomputed; None
            where nothing is, or where layers are found when the form is made.
        segment_layers: layers of a segment of the loops over layers, of which what enters is kept, and which the
            backward pass runs again at once; 0 where loops run as the program says.
        block_scores: scores of one head from which attention runs in blocks; 0 where it runs as the program says.
        layered_update: whether the update of stacks of layers runs a layer at a time, in a loop of its own.
        backward_update: whether it runs inside of the backward loop over layers, as far as it may.
        padded: dims that are padded inside, one of each part of a class: (value, number of the dim, size with
            padding).
        host_update: whether the planner has hosts update the state that only the update reads.
        activations_offloaded: whether the activations of microbatches in flight, but for the one that runs and one
            more, are in host memory.
        slices_ahead: of stacks of layers in host memory how many layers ahead devices fetch their slices: 1, or 0 in a
            program for one device, which fetches a layer when its turn has come; None where there are no such stacks.
    """

    microbatches: int = 1
    remat: Remat = "none"
    layer_ends: tuple[str, ...] | None = None
    segment_layers: int = 0
    block_scores: int = 0
    layered_update: bool = False
    backward_update: bool = False
    padded: tuple[tuple[str, int, int], ...] = ()
    host_update: bool = False
    activations_offloaded: bool = False
    slices_ahead: int | None = None

    @property
    def count(self) -> int:
        """Number of microbatches, as `autopar.search.trials` asks for it."""
        return self.microbatches

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass runs parts of the forward pass again."""
        return self.remat != "none" or self.segment_layers > 0

    @property
    def changes_stage(self) -> bool:
        """Whether a stage of a pipeline has another graph in the form than as it is cut."""
        return self.recomputes or self.backward_update or bool(self.padded)

    @property
    def of_graph(self) -> StepForm:
        """The form without fields that leave the graph as it is: those that say what host memory holds."""
        plain = StepForm()
        return replace(self, **{field: getattr(plain, field) for field in NOT_OF_GRAPH})

    @property
    def asked(self) -> StepForm:
        """The form of a plan as one asks for it: layers are found again, and the plan says what hosts fetch."""
        return replace(self, layer_ends=None, slices_ahead=None)

    @property
    def words(self) -> tuple[str, ...]:
        """The form in a few words each, as ``in 4 microbatches``; nothing of a step as it is written."""
        names = ((technique.preposition, technique.name_in(self)) for technique in TECHNIQUES)
        return tuple(f"{preposition} {name}" for preposition, name in names if name)

    def described(self, error: InfeasiblePlanError) -> InfeasiblePlanError:
        """``error`` of planning a step in this form, which says so."""
        if not self.words:
            return error
        return InfeasiblePlanError(
            f"{error.fact}, {' '.join(self.words)}",
            cause=error.cause,
            remedy=error.remedy,
            source=error.source,
            least_bytes=error.least_bytes,
        )
