"""`TokenState`: what a slice of tokens has of a value; `TokenSlicing`: what the analysis says of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

#: What is known of scores of a position with later ones: nothing, or that they are all of one kind. "low" and "high"
#: are numbers that a maximum or a minimum with any score leaves out; truth values are "zero" and "one".
Fill: TypeAlias = Literal["any", "zero", "one", "low", "high"]


@dataclass(frozen=True, slots=True)
class TokenState:
    """The part of a value that a slice has.

    Args:
        rows: the dim of which it has its own positions; None: no dim is one of tokens.
        keys: the dim of which it has all positions up to its own last one.
        fill: value of the entries whose key is later than their row, as 0 of masked scores; of values with both dims.
        terms: how the values of all slices are reduced ("sum", "max" ..); "" for a value that is no term.
        product: id of the product that made scores, as long as no mask has shown which of its dims are rows.
    """

    rows: int | None = None
    keys: int | None = None
    fill: Fill = "any"
    terms: str = ""
    product: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it is the same for all slices."""
        return self.rows is None and self.keys is None and not self.terms

    @property
    def is_pair(self) -> bool:
        """Whether it has rows and keys: scores."""
        return self.rows is not None and self.keys is not None

    @property
    def turned(self) -> TokenState:
        """The state with rows and keys swapped, as of a transposed product."""
        return TokenState(self.keys, self.rows, "any", self.terms, self.product)


WHOLE = TokenState()


@dataclass(frozen=True, slots=True)
class OperatorSlice:
    """An operator on a slice.

    Args:
        operands: how each operand is taken; None for literals.
        results: what the slice then has.
        owed: whether the result is a term for all positions up to the slice's last one: what later slices owe is added.
        tail: whether of the result, made for all positions up to the last one, the slice's own are kept.
        padded: whether operands are the slice's own with zeros for all earlier positions.
        spread: whether operands are the slice's own with zeros for all other positions, so that results are terms.
    """

    operands: tuple[TokenState | None, ...]
    results: tuple[TokenState, ...]
    owed: bool = False
    tail: bool = False
    padded: bool = False
    spread: bool = False


@dataclass(frozen=True)
class TokenSlicing:
    """A graph whose positions read only earlier ones, and how it runs slice by slice.

    Args:
        tokens: positions of a sequence.
        inputs: batch inputs with the dim of tokens.
        states: what a slice has of every value that is known in the loop over slices.
        operators: how each operator of the loop runs, by id.
        forward: ids of operators that run from the first slice to the last, in running order.
        backward: ids of those that run from the last slice to the first.
        whole: ids of operators on values that all slices share, in running order; of data alone they may be among
            those of the loop too (the sum of a mask that the backward pass divides by).
        after: ids of operators that run once, after the loop.
        joined: values of the loop that ``after`` and the outputs read: terms are reduced, rows concatenated.
        kept: values of which a slice reads the rows of earlier slices too, in running order: keys and values.
        owed: results that get terms from later slices.
    """

    tokens: int
    inputs: Mapping[str, int]
    states: Mapping[str, TokenState]
    operators: Mapping[str, OperatorSlice]
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    whole: tuple[str, ...]
    after: tuple[str, ...]
    joined: tuple[str, ...]
    kept: tuple[str, ...]
    owed: tuple[str, ...]
