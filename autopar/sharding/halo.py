"""`Halo`: what shards of a dim need of their neighbours where windows slide over it.

Window number ``o`` of a dim covers ``extent`` positions from ``o * step - pad`` on; element ``i`` of the dim lies at
position ``i * dilation``, between elements and beyond the ends there is nothing. Each of n devices has an n-th of the
elements and an n-th of the windows: it needs the elements under its windows, some of which are its neighbours'.
The edges that travel are the halo (or ghost) cells of stencil codes; spatial parallelism of convolutions by them is
that of Dryden et al., "Improving strong-scaling of CNN training by exploiting finer-grained parallelism" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Reach:
    """Rows that each shard needs.

    Args:
        left: elements that a shard gets from the one before it.
        right: elements that it gets from the one after it.
        starts: by shard, where in ``left + shard + right`` the elements under its windows begin.
        width: number of elements under its windows.
        low: positions before the first of them that its windows cover.
        high: positions after the last of them.
        outside: whether some windows cover elements that would lie beyond an end of the whole dim.
    """

    left: int
    right: int
    starts: tuple[int, ...]
    width: int
    low: int
    high: int
    outside: bool

    @property
    def sends(self) -> bool:
        """Whether shards get anything from neighbours."""
        return self.left > 0 or self.right > 0


@dataclass(frozen=True, slots=True)
class Halo:
    """Windows that slide over a dim, as of a convolution: which elements each covers.

    Args:
        size: elements of the dim.
        count: number of windows.
        step: positions between the starts of two windows.
        extent: positions that a window covers.
        pad: positions before the first element where the first window starts; may be negative.
        dilation: positions between two elements.
        returns: what is computed for windows goes back to the elements under them (gradients).
        least: elements and windows that a shard has at least, for what lies beyond the ends is made of them.
        wraps: whether what lies beyond an end is the other end.
    """

    size: int
    count: int
    step: int
    extent: int
    pad: int
    dilation: int = 1
    returns: bool = False
    least: int = 0
    wraps: bool = False

    @staticmethod
    def sliding(size: int, count: int, taps: int, steps: tuple[int, int, int], low: int) -> Halo:
        """Windows of ``taps`` elements.

        Args:
            size: elements of the dim.
            count: number of windows.
            taps: elements of a window.
            steps: from one window to the next, from one tap to the next, from one element to the next.
            low: padding before the first element.
        """
        step, spread, dilation = steps
        return Halo(size, count, step, (taps - 1) * spread + 1, low, dilation)

    @staticmethod
    def padded(size: int, count: int, config: tuple[int, int, int]) -> Halo:
        """Windows of one position each: the elements of a padded dim.

        Args:
            size: elements of the dim.
            count: elements with padding.
            config: positions before, after and between elements, as `jax.lax.pad` takes them.
        """
        return Halo(size, count, 1, 1, config[0], config[2] + 1)

    @staticmethod
    def taken(size: int, count: int, start: int, stride: int) -> Halo:
        """Windows of one element each: those of a slice that takes ``count`` of them, each ``stride``-th."""
        return Halo(size, count, stride, 1, -start)

    @property
    def after(self) -> int:
        """Positions after the last element that windows cover; negative where they leave out the last positions."""
        return (self.count - 1) * self.step + self.extent - 1 - (self.size - 1) * self.dilation - self.pad

    def reach(self, shards: int) -> Reach | None:
        """Elements that each of ``shards`` needs of its neighbours; None where neighbours do not have them all."""
        return _reach(self, shards)


@lru_cache(maxsize=4096)
def _reach(halo: Halo, shards: int) -> Reach | None:
    if shards < 1 or halo.size % shards or halo.count % shards or not halo.size or not halo.count:
        return None
    size, windows, dilation = halo.size // shards, halo.count // shards, halo.dilation
    if windows * halo.step % dilation or min(size, windows) < halo.least:
        return None
    covered = (windows - 1) * halo.step + halo.extent
    begins = [n * windows * halo.step - halo.pad for n in range(shards)]
    firsts = [-(-begin // dilation) for begin in begins]
    width = (begins[0] + covered - 1) // dilation - firsts[0] + 1
    if width < 1:
        return None
    left = max(0, *(n * size - first for n, first in enumerate(firsts)))
    right = max(0, *(first + width - (n + 1) * size for n, first in enumerate(firsts)))
    outside = firsts[0] < 0 or firsts[-1] + width > halo.size
    if left > size or right > size:
        return None
    low = firsts[0] * dilation - begins[0]
    high = covered - low - (width - 1) * dilation - 1
    starts = tuple(first - n * size + left for n, first in enumerate(firsts))
    return Reach(left, right, starts, width, low, high, outside)


@dataclass(frozen=True, slots=True, order=True)
class HaloExchange:
    """Edges of shards of one operand that travel to neighbours before (or back, after) an operator runs.

    Args:
        operand: index of the operand.
        dim: its dim that is split.
        axes: mesh axes that split it, major first.
        left: elements that each shard gets from the one before it.
        right: elements that it gets from the one after it.
        returns: as many elements of the first result travel back afterwards.
        wraps: edges go around the circle of devices, which are others than those that do not.
    """

    operand: int
    dim: int
    axes: tuple[str, ...]
    left: int
    right: int
    returns: bool = False
    wraps: bool = False


def messages(
    exchanges: tuple[HaloExchange, ...], operand: int, shape: tuple[int, ...]
) -> list[tuple[int, tuple[str, ...]]]:
    """(elements that one device sends, mesh axes) of every collective-permute of exchanges of one operand.

    Edges of a second dim have those of the first with them: corners come from diagonal neighbours in two steps.

    Args:
        exchanges: of a strategy.
        operand: index of the operand.
        shape: of one device's shard of it.
    """
    sent = []
    grown = list(shape)
    for e in exchanges:
        if e.operand != operand:
            continue
        rest = 1
        for dim, n in enumerate(grown):
            rest *= n if dim != e.dim else 1
        sent += [(rest * n, e.axes) for n in (e.left, e.right) if n for _ in range(2 if e.returns else 1)]
        grown[e.dim] += e.left + e.right
    return sent
