"""Layers into stages on submeshes: the dynamic program of Alpa (OSDI'22, section 5.2), with memory.

    minimize   sum_i t_i + (m - 1) * max_i b_i
    over       cuts of the layers 0..L-1 into consecutive stages, and a submesh for each, which together
               use all devices
    subject to fixed_i + min(m, stages from i to the last) * held_i <= limit   for every stage i

What a stage recomputes instead of keeping it is chosen with it: the fastest level that fits.

t_i is the time of one microbatch on stage i: forward, backward, what it sends, and its share 1/m of what is done once a
step. b_i is the time between two microbatches (`between_s`): sends run next to what is computed, where Alpa, which
sends between passes, has t_i. For every bound b_max on max b_i, in rising order, F(s, k, d), the least sum of t with
layers k..L-1 on d devices in s stages, is found from the last stage backward:

    F(s, k, d; b_max) = min over i, submesh of t(k..i) + F(s - 1, i + 1, d - |submesh|; b_max),  F(0, L, 0) = 0

The search begins at the least bound that has an answer, found by halving, and stops where (m - 1) * b_max and the
least sum under no bound reach the best objective found. Where the cluster has groups of
different devices, d counts those of each group, a submesh lies in one group, and the limit is that of its devices.

`submeshes` says which submeshes a stage may have, `placed` where on the cluster the chosen ones lie; `even_stages`
makes stages of equal time without a dynamic program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.stages import Layers


@dataclass(frozen=True, order=True)
class Submesh:
    """A kind of submesh.

    Args:
        group: node group of the cluster that it is of.
        size: devices.
    """

    group: int
    size: int


def submeshes(cluster: Cluster) -> list[Submesh]:
    """Powers of two inside a node, and whole nodes, of every node group (Alpa, OSDI'22, section 5.2)."""
    submeshes_of = []
    for g, group in enumerate(cluster.groups):
        inside = group.devices_per_node if group.inter != "intra" else group.size
        sizes = [2**k for k in range(inside.bit_length()) if inside % 2**k == 0 and 2**k < inside]
        nodes = group.size // inside
        sizes += [inside * n for n in range(1, nodes + 1) if n & (n - 1) == 0 or n == nodes]
        submeshes_of += [Submesh(g, size) for size in sizes]
    return submeshes_of


def worthwhile(cluster: Cluster, stages: int, uneven: int = 2) -> list[Submesh]:
    """The `submeshes` that ``stages`` of them, which together are all devices, may use.

    The even share is one of them if it is whole nodes, as 6 nodes each for 64 stages on 384. A stage with twice its
    share leaves the others with half of theirs; more uneven submeshes never paid in trials, and are taken only where
    there is nothing else.

    Args:
        cluster: all devices.
        stages: their number.
        uneven: how many times its share a stage may have, or the share may be of what it has.
    """
    every = submeshes(cluster)
    if len(cluster.groups) > 1:
        return every
    devices = cluster.num_devices
    even = devices / stages
    (group,) = cluster.groups
    if devices % stages == 0 and even % group.devices_per_node == 0:
        every = sorted({*every, Submesh(0, devices // stages)})
    for most in (uneven, 2, devices):
        near = [m for m in every if even / most <= m.size <= most * even and m.size <= devices]
        if usable := _usable(near, stages, devices):
            return usable
    return []


def _usable(kinds: Sequence[Submesh], stages: int, devices: int) -> list[Submesh]:
    """The ``kinds`` that some ``stages`` of them, adding up to ``devices``, may use."""
    sums = [{0}]
    for _ in range(stages - 1):
        sums.append({a + m.size for a in sums[-1] for m in kinds if a + m.size <= devices})
    return [m for m in kinds if devices - m.size in sums[stages - 1]]


def placed(cluster: Cluster, submeshes: Sequence[Submesh]) -> tuple[tuple[int, int], ...]:
    """(first device, number of devices) of each stage: in a group the largest first.

    Sizes inside a node are powers of two that divide it, so in this order they never straddle two nodes.
    """
    placements: dict[int, tuple[int, int]] = {}
    at = list(cluster.group_starts)
    for i in sorted(range(len(submeshes)), key=lambda i: (-submeshes[i].size, i)):
        group, size = submeshes[i].group, submeshes[i].size
        placements[i] = (at[group], size)
        at[group] += size
    return tuple(placements[i] for i in range(len(submeshes)))


def of_equal_nodes(cluster: Cluster, kinds: Sequence[Submesh], stages: int) -> list[Submesh]:
    """The submeshes of stages that have equal numbers of nodes.

    Args:
        cluster: all devices.
        kinds: of submeshes.
        stages: their number.
    """
    if len(cluster.groups) == 1:
        return [k for k in kinds if k.size * stages == cluster.num_devices]
    return [k for k in kinds if k.size * stages == cluster.groups[k.group].devices_per_node * cluster.num_nodes]


Array = NDArray[np.float64]

#: Sums that are made at a time: 32 MB.
_MOST_SUMS = 4_000_000


def between_s(computed_s: Array | float, sent_s: Array | float) -> Array:
    """Seconds between two microbatches in the middle of a step.

    A stage computes one while the next is sent, and each boundary sends in both directions at once. The stage before
    the last one has three microbatches in flight where it sends ahead (eager 1F1B), and each of them is away for two
    sends and two stages.

    Args:
        computed_s: seconds that a stage computes of one microbatch, forward and backward.
        sent_s: seconds of one of its messages in one direction.
    """
    between: Array = np.maximum(np.maximum(computed_s, sent_s), 2 * (computed_s + sent_s) / 3)
    return between


@dataclass(frozen=True)
class StageCosts:
    """Costs of every run of layers on every submesh.

    Args:
        sizes: devices of each kind of submesh.
        seconds: [kind, first, last] seconds of one microbatch on a stage of layers first..last; inf where it cannot be.
        fixed_bytes: likewise bytes a device that do not depend on the schedule.
        activation_bytes: likewise bytes a device of each microbatch in flight.
        groups: node group of each kind; all are of the first unless given.
        sent_s: [kind, first, last] seconds of ``seconds`` in which it sends.
        slowest_s: likewise those of a message across its slower boundary.
        others: the same stages where more is recomputed: slower, with fewer activations.
    """

    sizes: tuple[int, ...]
    seconds: Array
    fixed_bytes: Array
    activation_bytes: Array
    groups: tuple[int, ...] = ()
    sent_s: Array | float = 0.0
    slowest_s: Array | float = 0.0
    others: tuple[StageCosts, ...] = ()

    def fitting_s(self, in_flight: int, limit_bytes: Array) -> Array:
        """Seconds of each stage at its fastest level that fits with some microbatches in flight; inf where none does.

        Args:
            in_flight: microbatches.
            limit_bytes: bytes a device, to be broadcast to the stages.
        """
        fits = self.fixed_bytes + in_flight * self.activation_bytes <= limit_bytes
        levels = [np.where(fits, self.seconds, np.inf), *(o.fitting_s(in_flight, limit_bytes) for o in self.others)]
        fastest: Array = np.minimum.reduce(levels)
        return fastest

    def between_s(self, seconds: Array) -> Array:
        """Seconds between two microbatches of stages that take ``seconds``, at whatever level of recomputation."""
        return between_s(seconds - self.sent_s, self.slowest_s)

    @property
    def distinct_s(self) -> Array:
        """All finite seconds between two microbatches, rising."""
        every = [self.between_s(costs.seconds) for costs in (self, *self.others)]
        return np.unique(np.concatenate([s[np.isfinite(s)] for s in every]))

    def group(self, kind: int) -> int:
        """Node group of a kind of submesh."""
        return self.groups[kind] if self.groups else 0

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return int(self.seconds.shape[1])


@dataclass(frozen=True)
class Slice:
    """A stage: layers ``first`` to ``last`` (inclusive) on a submesh of kind ``kind``."""

    first: int
    last: int
    kind: int


@dataclass(frozen=True)
class Slicing:
    """An answer of `slice_layers`: its stages, the objective in seconds, and the sum of the stages' seconds."""

    stages: tuple[Slice, ...]
    objective: float
    sum_s: float


def slice_layers(
    costs: StageCosts,
    devices: int | Sequence[int],
    microbatches: int,
    limit_bytes: float | Sequence[float],
    num_stages: int | None = None,
) -> Slicing | None:
    """The slicing of the layers into stages that takes the least seconds; None where none fits the memory.

    Args:
        costs: of every run of layers on every kind of submesh.
        devices: number of devices, by node group where there are several; all are used.
        microbatches: their number.
        limit_bytes: memory of a device, by node group where there are several.
        num_stages: the only number of stages to consider, or None for any.
    """
    within = _answers(costs, devices, microbatches, limit_bytes, num_stages)
    if within is None:
        return None
    loosest = within(np.inf)
    if loosest is None:
        return None
    bounds = _distinct(costs.distinct_s)
    low, high = 0, len(bounds) - 1  # the first that has an answer is among these
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if within(float(bounds[middle])) is not None else (middle + 1, high)
    best = loosest
    for bound in bounds[low:]:
        if (microbatches - 1) * bound + loosest.sum_s >= best.objective:
            break
        slicing = within(float(bound))
        if slicing is not None and slicing.objective < best.objective * (1 - 1e-12):
            best = slicing
    return best


def can_be_sliced(
    costs: StageCosts,
    devices: int | Sequence[int],
    microbatches: int,
    limit_bytes: float | Sequence[float],
    num_stages: int | None = None,
) -> bool:
    """Whether some slicing of the layers into stages fits the memory, found in one pass of the dynamic program.

    Arguments are those of `slice_layers`.
    """
    within = _answers(costs, devices, microbatches, limit_bytes, num_stages)
    return within is not None and within(np.inf) is not None


def _answers(
    costs: StageCosts,
    devices: int | Sequence[int],
    microbatches: int,
    limit_bytes: float | Sequence[float],
    num_stages: int | None,
) -> Callable[[float], Slicing | None] | None:
    """Slicing of the least sum, by a bound of the seconds of each stage; None where there are too few layers."""
    counts = (devices,) if isinstance(devices, int) else tuple(devices)
    limits = (limit_bytes,) * len(counts) if isinstance(limit_bytes, (int, float)) else tuple(limit_bytes)
    most = min(costs.num_layers, sum(counts))
    if num_stages is not None and num_stages > most:
        return None
    most = num_stages or most
    limit_by_kind = np.array([limits[costs.group(kind)] for kind in range(len(costs.sizes))])[:, None, None]
    flying = {f: costs.fitting_s(f, limit_by_kind) for f in range(1, min(microbatches, most) + 1)}
    seconds = [flying[min(microbatches, s)] for s in range(1, most + 1)]
    counted, units = _in_units(costs, counts)

    def within(bound: float) -> Slicing | None:
        return _within(counted, units, microbatches, seconds, bound, num_stages)

    return within


def _distinct(values: Array) -> Array:
    """The rising ``values`` without those that differ from the next by rounding alone."""
    return values[np.append(values[1:] > values[:-1] * (1 + 1e-9), True)] if values.size else values


def _in_units(costs: StageCosts, devices: tuple[int, ...]) -> tuple[StageCosts, tuple[int, ...]]:
    """Sizes and devices counted in the largest number of devices that divides them all, group by group."""
    units = [
        math.gcd(count, *(n for kind, n in enumerate(costs.sizes) if costs.group(kind) == group))
        for group, count in enumerate(devices)
    ]
    sizes = tuple(n // units[costs.group(kind)] for kind, n in enumerate(costs.sizes))
    return replace(costs, sizes=sizes), tuple(n // unit for n, unit in zip(devices, units, strict=True))


def _within(
    costs: StageCosts,
    devices: tuple[int, ...],
    microbatches: int,
    seconds: Sequence[Array],
    bound: float,
    num_stages: int | None,
) -> Slicing | None:
    """The least sum of stage times with no stage above ``bound``, and its objective.

    ``seconds`` are those of stages that fit, by the number of stages from theirs to the last, less one.
    """
    n, most = costs.num_layers, len(seconds)
    between = [costs.between_s(some) for some in seconds]
    total = np.full((most + 1, n + 1, *(d + 1 for d in devices)), np.inf)
    total[(0, n, *(0 for _ in devices))] = 0.0
    last_of, kind_of = np.zeros(total.shape, np.int64), np.zeros(total.shape, np.int64)
    for s in range(1, most + 1):
        fits = np.isfinite(seconds[s - 1]) & (between[s - 1] <= bound)
        fits &= np.isfinite(total[s - 1].reshape(n + 1, -1)).any(axis=1)[1:]
        begin, end = max(0, (num_stages or s) - s), n + 1 - s
        for kind, size in enumerate(costs.sizes):
            group = costs.group(kind)
            lasts = np.flatnonzero(fits[kind, begin:end].any(axis=0))
            if not len(lasts) or size > devices[group]:
                continue
            before = tuple(slice(0, d + 1 - size if g == group else None) for g, d in enumerate(devices))
            after = tuple(slice(size if g == group else 0, None) for g in range(len(devices)))
            rest = total[s - 1][lasts + 1][(slice(None), *before)]
            step = max(1, _MOST_SUMS // rest.size)
            for first in range(begin, end, step):
                some = slice(first, min(end, first + step))
                # [first, last, devices left by group] -> sum
                stage_s = np.where(fits[kind], seconds[s - 1][kind], np.inf)[some, lasts]
                sums = stage_s.reshape(*stage_s.shape, *(1 for _ in devices)) + rest
                at = np.argmin(sums, axis=1)
                value = np.take_along_axis(sums, at[:, None], axis=1)[:, 0]
                index = (slice(None), *after)
                reached = total[s, some][index]
                better = value < reached
                reached[better] = value[better]
                last_of[s, some][index][better] = lasts[at[better]]
                kind_of[s, some][index][better] = kind
    choices = [num_stages] if num_stages is not None else range(1, most + 1)
    best = min(((float(total[(s, 0, *devices)]), s) for s in choices), default=(np.inf, 0))
    if not np.isfinite(best[0]):
        return None
    stages, times, slowest_s = [], [], 0.0
    s, k, free = best[1], 0, devices
    while s:
        last, kind = int(last_of[s, k, *free]), int(kind_of[s, k, *free])
        stages.append(Slice(k, last, kind))
        times.append(float(seconds[s - 1][kind, k, last]))
        slowest_s = max(slowest_s, float(between[s - 1][kind, k, last]))
        free = tuple(d - costs.sizes[kind] if g == costs.group(kind) else d for g, d in enumerate(free))
        s, k = s - 1, last + 1
    sum_s = float(sum(times))
    return Slicing(tuple(stages), sum_s + (microbatches - 1) * slowest_s, sum_s)


_ROUNDING = 1e-9


def even_stages(layers: Layers, stages: int) -> tuple[tuple[str, ...], ...]:
    """Ids of the operators of the forward pass, by stage; layers of about equal FLOPs."""
    ends = even_ends(layers.flops, stages)
    runs = zip((0, *ends), ends, strict=False)
    return tuple(tuple(id for layer in layers.members[a:b] for id in layer) for a, b in runs)


def even_ends(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Ends (exclusive) of ``count`` runs, none empty, whose heaviest is as light as can be; of those the most even.

    Of a stack of equal blocks whose number ``count`` divides, with less than a block before or after it, that is as
    many blocks for each.

    Args:
        weights: of the layers, as many as there are runs or more.
        count: number of runs.
    """
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    n = len(sums) - 1
    # [first, end]: weight of a run
    runs = np.where(np.arange(n + 1)[:, None] < np.arange(n + 1), sums - sums[:, None], np.inf)
    heaviest = runs[0]
    for _ in range(count - 1):
        heaviest = np.maximum(heaviest[:, None], runs).min(axis=0)
    squares = np.where(runs <= heaviest[n] * (1 + _ROUNDING), runs, np.inf) ** 2
    total, firsts = squares[0], [np.zeros(n + 1, np.int64)]
    for _ in range(count - 1):
        every = total[:, None] + squares
        firsts.append(np.argmin(every, axis=0))
        total = every.min(axis=0)
    ends = [n]
    for first in reversed(firsts[1:]):
        ends.append(int(first[ends[-1]]))
    return tuple(reversed(ends))
