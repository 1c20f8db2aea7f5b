"""`StageValue`: which value of the step an input or output of a stage's graph is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

#: "step": an input or output of the step, whole; "piece": a microbatch's shard of a batch input; "from": what another
#: stage sends in the loop; "late": what stages send each other after it; "send": what the stage sends in the loop;
#: "met": what is made where examples meet, for the backward passes of all microbatches.
StageValueKind: TypeAlias = Literal["step", "piece", "from", "late", "send", "met"]


@dataclass(frozen=True, slots=True)
class StageValue:
    """An input or output of a stage's graph; its text names it there, and in plans.

    Args:
        kind: how the stage comes by it, or passes it on.
        name: of the value in the step.
    """

    kind: StageValueKind
    name: str

    @property
    def of_microbatch(self) -> bool:
        """Whether each microbatch has one of its own."""
        return self.kind in ("piece", "from", "send")

    def __str__(self) -> str:
        return self.name if self.kind == "step" else f"{self.kind}/{self.name}"
