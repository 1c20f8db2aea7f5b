"""`NamedLayouts`: which layouts of inputs suit a plan that a person names by its degrees of parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.ir import Graph, Input, Layout


@dataclass(frozen=True)
class NamedAxes:
    """The mesh axes of the degrees of parallelism; None, or none, where a degree is 1.

    Args:
        dp: those that share the batch, major first.
        ep: the last of ``dp``, where its devices share experts.
        cp: that of devices that share the tokens of an example.
        tp: that of devices that share the matrices of a layer.
    """

    dp: tuple[str, ...] = ()
    ep: str | None = None
    cp: str | None = None
    tp: str | None = None


@dataclass(frozen=True)
class NamedLayouts:
    """Layouts that inputs may have.

    Args:
        graph: what is planned.
        axes: what each mesh axis is for.
        zero: ZeRO stage, 0 to 3.
        tokens: by batch input the dim of its tokens, where it has one.
        experts: by parameter and optimizer state the dim of its experts, where it has one.
        small_state_share: of all parameters: less of state may stay whole under tensor parallelism.
    """

    graph: Graph
    axes: NamedAxes
    zero: int
    tokens: Mapping[str, int]
    experts: Mapping[str, int]
    small_state_share: float

    def allowed(self, i: Input, layouts: Sequence[Layout]) -> list[bool]:
        """Whether input ``i`` may have each layout; one or more are true."""
        axes = self.axes
        over_cp = (axes.cp,) if axes.cp else ()
        if i.role == "batch":
            wanted = [axes.dp, *[()] * (i.type.rank - 1)] if i.type.rank else []
            if i.name in self.tokens:
                wanted[self.tokens[i.name]] += over_cp
            return [k.dims == tuple(wanted) for k in layouts]
        if i.role not in ("parameter", "optimizer"):
            return [k.is_replicated for k in layouts]
        over_dp = self.zero >= (3 if i.role == "parameter" else 1)
        ok, free = [True] * len(layouts), (*axes.dp, *over_cp)
        expert = self.experts.get(i.name)
        if expert is not None:
            among = [k.dims[expert][:1] == (axes.ep,) for k in layouts]
            if any(among):
                ok, free = among, tuple(a for a in free if a != axes.ep)
        for axis in free:
            ok = _split(layouts, ok, axis, must=over_dp, may=over_dp)
        large = i.type.nbytes >= self.small_state_share * self._parameter_bytes
        return _split(layouts, ok, axes.tp, must=i.type.rank > 1 and large, may=True)

    @cached_property
    def _parameter_bytes(self) -> int:
        return sum(i.type.nbytes for i in self.graph.inputs if i.role == "parameter")


def _split(layouts: Sequence[Layout], ok: Sequence[bool], axis: str | None, *, must: bool, may: bool) -> list[bool]:
    """``ok`` where also ``axis`` splits the layout if it must (and some can), and does not unless it may."""
    has = [axis in k.axes for k in layouts]
    if must and any(a and b for a, b in zip(ok, has, strict=True)):
        return [a and b for a, b in zip(ok, has, strict=True)]
    return [a and (may or not b) for a, b in zip(ok, has, strict=True)]
