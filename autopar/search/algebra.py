"""Products that are computed in another order, and the plan's notes on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.cost.compute import as_flops, operator_bytes, operator_flops
from autopar.ir.algebra import Change, ChangedOperator
from autopar.search.policy import AlgebraPolicy


def flops_and_bytes(works: Iterable[ChangedOperator], num_devices: int = 1) -> tuple[float, float]:
    """FLOPs and bytes of operators on one of ``num_devices``, which share what is computed of the batch."""
    priced = [
        (operator_flops(w.op, w.types), operator_bytes(w.op, w.types), num_devices if w.of_batch else 1) for w in works
    ]
    return sum(f / share for f, _, share in priced), sum(b / share for _, b, share in priced)


def pays(change: Change, policy: AlgebraPolicy, num_devices: int) -> bool:
    """Whether products in another order save enough of the FLOPs and bytes of the operators that differ.

    Each device computes all operators on parameters alone, as a weight that is a sum, and its share of operators on the
    batch.

    Args:
        change: the operators before and after.
        policy: share that has to be saved.
        num_devices: devices that share the batch.
    """
    before, after = (flops_and_bytes(works, num_devices) for works in (change.before, change.after))
    return as_flops(*after) <= (1 - policy.least_gain) * as_flops(*before)


def change_notes(changes: Sequence[Change], num_devices: int) -> tuple[str, ...]:
    """A line on changes of each kind: how many, the first of them, FLOPs and bytes before and after."""
    kinds = (
        (False, "chains of products reassociated, as (p q) z -> p (q z)"),
        (True, "sums with a product not made, as x (w + p q) -> x w + (x p) q"),
    )
    by_kind = [(text, [c for c in changes if c.distributed is kind]) for kind, text in kinds]
    return tuple(_note(text, of, num_devices) for text, of in by_kind if of)


def _note(text: str, changes: Sequence[Change], num_devices: int) -> str:
    before = flops_and_bytes((w for c in changes for w in c.before), num_devices)
    after = flops_and_bytes((w for c in changes for w in c.after), num_devices)
    first = changes[0].source or changes[0].product
    return (
        f"{len(changes)} {text} (first at {first}): {after[0]:.3g} FLOPs in place of {before[0]:.3g}, "
        f"{after[1]:.3g} bytes in place of {before[1]:.3g} a device that has a share of the examples"
    )
