"""Copies of a value, and the one that each reader takes. Planning counts them, and lowering emits them."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir import Layout, TensorType
from autopar.sharding.reshard import PathTables


@dataclass
class Routes:
    """The layouts in which one value exists so far.

    Args:
        tables: resharding paths of the mesh.
        type: type of the value.
        layout: layout that it is made in.
        copies: by phase ("" for all) the layout of its shared copy.
        memory_bound: memory is short: what one phase made for itself is not kept for another.
    """

    tables: PathTables
    type: TensorType
    layout: Layout
    copies: dict[str, Layout]
    memory_bound: bool = False
    known: set[tuple[str, Layout]] = field(default_factory=set)

    def take(self, required: Layout, phase: str) -> list[tuple[tuple[str, Layout], tuple[str, Layout]]]:
        """Conversions to do, in order, before a reader in ``phase`` can take the value in ``required``.

        Each is (from, to); an end is (phase of the copy, layout); the value as made is ``("", made)``.
        The last ``to`` is where the reader finds it; an empty list means that `found` already exists.
        """
        origin = ("", self.layout)
        group = phase if phase in self.copies else ""
        target = self.place(required, phase)
        if target == origin or target in self.known:
            return []
        steps = []
        source = origin
        copy = self.copies.get(group)
        if copy is not None and copy != self.layout:
            via = (group, copy)
            if self.tables.seconds(self.type, copy, required) < self.tables.seconds(self.type, self.layout, required):
                source = via
                if via not in self.known:
                    steps.append((origin, via))
                    self.known.add(via)
        if source != target:
            steps.append((source, target))
            self.known.add(target)
        return steps

    def pending(self, required: Layout, phase: str) -> bool:
        """Whether a reader would have to wait for a conversion."""
        place = self.place(required, phase)
        return place != ("", self.layout) and place not in self.known

    def place(self, required: Layout, phase: str) -> tuple[str, Layout]:
        """Place of the value in ``required`` for a reader in ``phase``."""
        if required == self.layout:
            return ("", self.layout)
        if required == self.copies.get(""):
            return ("", required)
        return (phase if self.memory_bound or phase in self.copies else "", required)
