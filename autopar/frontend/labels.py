"""Origins of the operators of a function that is traced again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

_MARK = "autopar#"


@dataclass(frozen=True)
class Label:
    """A mark, and the function traced under it.

    Args:
        scope: of the operator.
        source: its line; None leaves that which jax recorded.
        id: of the operator that it stands for; None for none, or under a mark of an earlier trace.
        marks: what the operator is, see `autopar.ir.phases`.
    """

    scope: str
    source: str | None
    id: str | None
    marks: tuple[str, ...] = ()


@dataclass
class Labels:
    """Scopes, source lines, ids and marks of operators by the mark under which something is traced.

    A function that interprets a graph has jax record the interpreter's own lines; under a mark it records
    which operator it was at. Bodies of loops and branches keep the marks of the trace that they were made in: those of
    earlier traces stand for scopes, lines and marks alone.
    """

    entries: list[Label] = field(default_factory=list)
    known: dict[Label, int] = field(default_factory=dict)
    earlier: int = 0

    @staticmethod
    def behind(labels: Labels | None) -> Labels:
        """Marks for another trace of what was traced under ``labels``."""
        entries = [] if labels is None else list(labels.entries)
        return Labels(entries, earlier=len(entries))

    def mark(self, scope: str, source: str | None, id: str | None, marks: tuple[str, ...] = ()) -> str:
        """A name for ``jax.named_scope``; arguments as of `Label`."""
        entry = Label(scope, source, id, marks)
        if entry not in self.known:
            self.known[entry] = len(self.entries)
            self.entries.append(entry)
        return f"{_MARK}{self.known[entry]}"

    def origin(self, stack: str) -> Label | None:
        """The innermost mark in a name stack; None if there is none."""
        _, mark, rest = stack.rpartition(_MARK)
        if not mark:
            return None
        number = int(rest.partition("/")[0].partition(")")[0])
        label = self.entries[number]
        return replace(label, id=None) if number < self.earlier else label
