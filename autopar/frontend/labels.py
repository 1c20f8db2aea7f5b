"""Where operators of a function that is traced again came from."""

from __future__ import annotations

from dataclasses import dataclass, field

_MARK = "autopar#"


@dataclass
class Labels:
    """Scopes, source lines and ids of operators by the mark under which something is traced.

    A function that interprets a graph has jax record the interpreter's own lines; under a mark it records
    which operator it was at. Bodies of loops and branches keep the marks of the trace that they were made in: those of
    earlier traces stand for scopes and lines alone.
    """

    entries: list[tuple[str, str, str]] = field(default_factory=list)
    known: dict[tuple[str, str, str], int] = field(default_factory=dict)
    earlier: int = 0

    @staticmethod
    def behind(labels: Labels | None) -> Labels:
        """Marks for another trace of what was traced under ``labels``."""
        entries = [] if labels is None else list(labels.entries)
        return Labels(entries, earlier=len(entries))

    def mark(self, scope: str, source: str, id: str) -> str:
        """A name for ``jax.named_scope``."""
        entry = (scope, source, id)
        if entry not in self.known:
            self.known[entry] = len(self.entries)
            self.entries.append(entry)
        return f"{_MARK}{self.known[entry]}"

    def origin(self, stack: str) -> tuple[str, str, str | None] | None:
        """(scope, source, id) of the innermost mark in a name stack; None if there is none.

        The id is None under a mark of an earlier trace.
        """
        _, mark, rest = stack.rpartition(_MARK)
        if not mark:
            return None
        number = int(rest.partition("/")[0].partition(")")[0])
        scope, source, id = self.entries[number]
        return scope, source, None if number < self.earlier else id
