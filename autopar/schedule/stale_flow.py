"""`StaleFlow`: what a pipeline without a flush carries out, and how buffers are named between its calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from autopar.schedule.dataflow import Dataflow, Work, WorkSpec
from autopar.schedule.instructions import NONE, Buffer
from autopar.schedule.versions import VersionMap

#: Parts of the update of a stage: new state; metrics of a call; state that other stages return and this one reads.
STATE, METRICS, SHARED = 0, 1, 2


@dataclass(frozen=True)
class StaleFlow:
    """A pipeline without a flush; stage s is on worker s.

    Args:
        dataflow: its works; the update has the parts `STATE`, `METRICS` and `SHARED`.
        versions: which version each pass reads.
        microbatches: m, brought by each call.
        replaces: by value that the update writes the input that it is the next of.
    """

    dataflow: Dataflow
    versions: VersionMap
    microbatches: int
    replaces: Mapping[str, str]

    @property
    def stages(self) -> int:
        """Number of stages, p."""
        return self.versions.stages

    @property
    def lag(self) -> int:
        """Slots by which the first stage's backward pass is behind its forward pass."""
        return self.stages - 1

    @property
    def steady(self) -> int:
        """The first call whose list is that of all later ones."""
        return math.ceil(self.lag / self.microbatches)

    def spec(self, kind: str, stage: int, part: int = 0) -> WorkSpec | None:
        """A work that reads or writes something; None where there is none."""
        return self.dataflow.by_work.get(Work(kind, stage, part))  # type: ignore[arg-type]

    def number(self, microbatch: int, call: int) -> int:
        """Number of a microbatch in the names of a call."""
        return microbatch - call * self.microbatches + self.lag

    def unclamped(self, stage: int, microbatch: int) -> int:
        """The version that a microbatch would read had there been updates before the first."""
        if self.versions.name == "2bw":
            return microbatch // self.microbatches - 1
        return microbatch - (self.stages - 1 - (stage if self.versions.name == "pipedream" else 0))

    @property
    def step(self) -> int:
        """Updates of a stage a call."""
        return self.microbatches // self.versions.update_every

    def index(self, version: int, call: int) -> int:
        """Index of a version in the names of a call."""
        return version - call * self.step + 2 * self.lag + 1

    @cached_property
    def state(self) -> frozenset[str]:
        """Inputs that the update replaces."""
        return frozenset(self.replaces.values())

    @cached_property
    def versioned(self) -> Mapping[int, tuple[str, ...]]:
        """Values that have versions, by stage: state that passes read, and values computed from it before them."""
        versioned: dict[int, tuple[str, ...]] = {}
        for s in range(self.stages):
            names: dict[str, None] = {}
            before = self.spec("before", s)
            if before is not None and self.state.isdisjoint(before.reads):
                before = None  # what it makes is the same for all versions
            for kind in ("forward", "backward"):
                spec = self.spec(kind, s)
                for n in () if spec is None else spec.reads:
                    if n in self.state or (before is not None and n in before.writes):
                        names[n] = None
            versioned[s] = tuple(names)
        return MappingProxyType(versioned)

    def is_carried(self, buffer: Buffer) -> bool:
        """Whether a buffer that is left when a call ends is handed to the next one; the caller has the others."""
        value = self.dataflow.by_name[buffer.value]
        if not value.is_input or buffer.microbatch != NONE:
            return True
        return any(n == buffer.value for w, n in self.replaces.items() if _is_shared(self.dataflow, w))

    def shifted(self, buffer: Buffer) -> Buffer:
        """The name in a call of what is called ``buffer`` in the call before."""
        if buffer.microbatch == NONE:
            return buffer
        by = self.microbatches
        if buffer.origin != NONE:
            by = 1
        elif self.dataflow.by_name[buffer.value].lifetime == "step":
            by = self.step
        return Buffer(buffer.value, buffer.microbatch - by, buffer.origin)


def _is_shared(dataflow: Dataflow, name: str) -> bool:
    return dataflow.writers[name].part == SHARED
