"""Techniques that forms of a step are made of, each one field of `StepForm`, in the order in which forms are told.

`autopar.lower.techniques` has what each does to a step.
"""

from __future__ import annotations

from dataclasses import dataclass


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
