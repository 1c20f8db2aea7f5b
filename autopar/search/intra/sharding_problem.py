"""`ShardingProblem`: the numbers of a `ChoiceProblem` with what they are of.

`Draft` collects the parts of it while `autopar.search.intra.build` states the problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import LogicalMesh
from autopar.cost import KernelWork
from autopar.ir import Layout, Operator, TensorType
from autopar.sharding import Strategy
from autopar.solver import ChoiceProblem

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Use:
    """Some consumer needs a value in a layout that depends on the consumer's choice.

    Args:
        node: the consumer's node.
        required: for each of its strategies the layout in which it takes the value.
        weight: how often a step the value is taken there.
        time: when.
        consumer: name of the operator (or output) for messages and records.
        phase: "forward", "backward" or "update".
        heavy: whether the consumer needs the value in memory as it takes it (it is no elementwise operator).
        stacked: whether the consumer is a loop that takes slices of it; a loop never gathers a whole stack
            of parameters unless the copy is accounted for.
        as_made: for each strategy of the consumer whether the value must be made in the layout that it takes; empty
            where none demands that.
        until: when the consumer has no more need of it, where that is a loop and later than ``time``.
        there: whether the consumer is an operator that runs on the host.
    """

    node: int
    required: tuple[Layout, ...]
    weight: float
    time: int
    consumer: str
    phase: str
    stacked: bool = False
    heavy: bool = False
    until: int = 0
    as_made: tuple[bool, ...] = ()
    there: bool = False

    @property
    def done(self) -> int:
        """The first time at which the consumer has no more need of it."""
        return max(self.time + 1, self.until)


@dataclass
class ValueDraft:
    """A value: where its layout is decided, and who takes it.

    Args:
        key: its name with enclosing regions before it.
        type: shape and dtype of the value.
        node: node that decides its layout; None for a value that is made on demand in any layout.
        layouts: for each strategy of the node the layout that the value is made in.
        time: when it is made.
        weight: how often a step.
        zero: made on demand and all zeros, so that it may stand for a partial sum.
        source: name of the input that it is, or "".
        fused: made by an elementwise operator for an only reader that is elementwise too: costs no time to pass on.
        transient: made by an elementwise operator, and taken on the fly by its readers: needs no memory.
        basis: bytes of the stored values that it is computed from, if it is transient.
        stored: if it is transient, keys of the values in memory that a kernel reads to have it.
        constant: constants alone decide it, so that it is computed where it is read.
        alias: another name of a value that is accounted for elsewhere.
        in_rows: a stack that a loop of segments takes and gives whole, whose body reads and writes rows of it.
        wire: text of the `autopar.ir.formats.WireFormat` in which it is sent, or "": as it is.
        halved: its readers are products that take half of its bits, which is all that the compiler sends.
        widened: dtype to which the only reader of a product converts it: it is stored so. "" of others.
        phase: part of the step in which it is made.
        arriving: it comes with every microbatch, placed as the loop over them takes it.
        hosted: of what may be kept in host memory, for each strategy whether it is; else empty.
        made_there: an operator on the host makes it.
        replaced_there: an operator on the host makes what replaces it.
        replaced: of such a stack whether a loop makes it, or what replaces it.
        trips: of a stack that loops alone take and make, whose slices move one at a time, the number of slices; of
            what moves whole 1.
        view: the input of which it is another shape, or "": the same bytes, where both have one layout.
    """

    key: str
    type: TensorType
    node: int | None
    layouts: tuple[Layout, ...]
    time: int
    weight: float
    zero: bool = False
    source: str = ""
    fused: bool = False
    transient: bool = False
    basis: float = 0.0
    stored: frozenset[str] = frozenset()
    constant: bool = False
    alias: bool = False
    in_rows: bool = False
    wire: str = ""
    halved: bool = False
    widened: str = ""
    phase: str = ""
    view: str = ""
    arriving: bool = False
    hosted: tuple[bool, ...] = ()
    made_there: bool = False
    replaced_there: bool = False
    replaced: bool = False
    trips: int = 1
    uses: list[Use] = field(default_factory=list)

    @property
    def kept(self) -> TensorType:
        """Type in which it is stored between its maker and its readers in other passes."""
        return TensorType(self.type.shape, self.widened) if self.widened else self.type

    @property
    def sent(self) -> TensorType:
        """Type in which it is sent, and stored where one pass alone makes and reads it."""
        return TensorType(self.type.shape, "bf16") if self.halved else self.type


@dataclass
class NodeDraft:
    """A choice to make.

    Args:
        name: for messages.
        costs: by strategy.
        label: what a strategy is called.
        members: who follows it.
        copy_of: the value that it is a shared copy of, or "".
    """

    name: str
    costs: Array
    label: Callable[[int], str]
    members: list[str] = field(default_factory=list)
    copy_of: str = ""


@dataclass(frozen=True)
class SiteDraft:
    """An operator, what it does, its phase, and for each choice of its node its strategy and busy seconds a step.

    ``shared`` tells of operands whose edges neighbours may have sent before: (operand, index of the site that had them
    first, its operand).
    """

    id: str
    op: Operator
    types: tuple[TensorType, ...]
    work: KernelWork
    node: int
    strategies: tuple[Strategy, ...]
    seconds: Array
    weight: float
    time: int
    phase: str = ""
    shared: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class RegionSite:
    """An operator with regions: for each operand and result the node that decides its layout, and the layouts."""

    id: str
    op: Operator
    operands: tuple[tuple[int, tuple[Layout, ...]], ...]
    results: tuple[tuple[int, tuple[Layout, ...]], ...]
    weight: float
    time: int


@dataclass(frozen=True)
class CopyDraft:
    """A shared copy of a value: for each strategy of ``node`` its layout.

    ``phases`` names the phases that make a copy each ("" for one copy that all share).
    """

    key: str
    node: int
    layouts: tuple[Layout, ...]
    phases: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class UsageDraft:
    """Bytes a device of a value (or its copy) by strategy of ``node``, live during [start, stop)."""

    node: int
    start: int
    stop: int
    bytes: Array
    kind: str
    key: str


#: Numbers that take as many bytes as a draft does: a kilobyte.
_NUMBERS_OF_DRAFT = 128


@dataclass(frozen=True)
class ShardingProblem:
    """A `ChoiceProblem` and what its nodes mean.

    Args:
        problem: the numbers.
        mesh: the logical mesh that it is for.
        nodes: name, members and strategy labels of each node.
        values: every value by key.
        sites: every operator without regions, in running order.
        region_sites: every operator with regions.
        copies: shared copies of values.
        usages: what the problem's usages are of, in the same order.
        outputs: (node, layouts by strategy) of each top-level output; None for literals.
        notes: lines for the user.
        memory_bound: the memory limit binds, as in `autopar.plan.PlanContent`.
        broken: names of inputs whose constraint cannot hold on the mesh.
    """

    problem: ChoiceProblem
    mesh: LogicalMesh
    nodes: tuple[NodeDraft, ...]
    values: dict[str, ValueDraft]
    sites: tuple[SiteDraft, ...]
    region_sites: tuple[RegionSite, ...]
    copies: tuple[CopyDraft, ...]
    usages: tuple[UsageDraft, ...]
    outputs: tuple[tuple[int, tuple[Layout, ...]] | None, ...]
    notes: tuple[str, ...]
    memory_bound: bool = False
    broken: tuple[str, ...] = ()

    @cached_property
    def entries(self) -> int:
        """Numbers in its arrays, about: those of its nodes, and as many as its drafts take. Edges are in tables."""
        drafts = len(self.nodes) + len(self.values) + len(self.sites) + len(self.copies) + len(self.usages)
        return sum(n.costs.size for n in self.nodes) + _NUMBERS_OF_DRAFT * drafts
