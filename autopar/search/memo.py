"""`Memo`: what the problems of one search compute once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

#: Numbers in arrays beyond which all is dropped: 400 MB.
_MOST_ENTRIES = 50_000_000


class Counted(Protocol):
    """A kept value."""

    @property
    def entries(self) -> int:
        """Numbers in its arrays."""


@dataclass(eq=False)
class Memo:
    """Values by key. They follow from their keys, so that no plan depends on what is kept.

    Another process begins with none: a memo is pickled empty.

    Args:
        values: by key.
    """

    values: dict[Hashable, Counted] = field(default_factory=dict)

    def get(self, key: Hashable) -> Counted | None:
        """The value of a key; None where there is none."""
        return self.values.get(key)

    def keep(self, key: Hashable, value: Counted) -> None:
        """Keeps a value; others are dropped where they have grown large."""
        if sum(other.entries for other in self.values.values()) > _MOST_ENTRIES:
            self.values.clear()
        self.values[key] = value

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()
