"""Where operators of a function that is traced again came from."""

from __future__ import annotations

from dataclasses import dataclass, field

_MARK = "autopar#"


@dataclass
class Labels:
    """Scopes, source lines and ids of operators by the mark under which something is traced.

    A function that interprets a graph has jax record the interpreter's own lines; under a mark it records
    which operator it was at.
    """

    entries: list[tuple[str, str, str]] = field(default_factory=list)
    known: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def mark(self, scope: str, source: str, id: str) -> str:
        """A name for ``jax.named_scope``."""
        entry = (scope, source, id)
        if entry not in self.known:
            self.known[entry] = len(self.entries)
            self.entries.append(entry)
        return f"{_MARK}{self.known[entry]}"

    def origin(self, stack: str) -> tuple[str, str, str] | None:
        """(scope, source, id) of the innermost mark in a name stack; None if there is none."""
        _, mark, rest = stack.rpartition(_MARK)
        return self.entries[int(rest.partition("/")[0].partition(")")[0])] if mark else None
