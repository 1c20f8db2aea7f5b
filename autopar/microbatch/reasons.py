"""Why an operator cannot run on one microbatch's examples alone, and what to do about it: by its primitive."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir import Operator, TensorType
from autopar.ir.primitives import CALLBACKS
from autopar.sharding import rule_for

_LOOPS = ("scan", "while")
_ORDERING = ("sort", "approx_top_k", "top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev")
_RESHAPING = ("reshape", "slice", "concatenate", "pad", "dynamic_slice", "dynamic_update_slice", "gather", "squeeze")
_WHOLE = "num_microbatches=1"


@dataclass(frozen=True)
class Reason:
    """Text of an error: the usual cause, and what the user can do."""

    cause: str
    remedy: str


def reason(op: Operator, types: tuple[TensorType, ...]) -> Reason:
    """Why ``op``, whose operands have ``types``, needs the examples of all microbatches."""
    if op.primitive in CALLBACKS:
        return Reason(
            f"{op.primitive} calls a Python function with whole arrays; that function could mix examples",
            f"jax operators in its place, a custom call with a rule, or {_WHOLE}",
        )
    if not op.regions and not rule_for(op, types)[1]:
        return Reason(
            f"{op.primitive} has no sharding rule, so it cannot be told whether it mixes examples",
            f'autopar.sharding.register_rule("{op.primitive}", ...), which says how it may be split, or {_WHOLE}',
        )
    if op.primitive in _LOOPS:
        return Reason(
            "a loop that carries more than sums from one example, or one chunk of the batch, to the next; or chunks "
            "whose number the microbatches do not divide",
            f"jax.vmap over examples, a loop that only adds to what it carries, or {_WHOLE}",
        )
    if op.primitive == "cond":
        return Reason(
            "a branch that mixes examples; or a predicate that depends on them; or, inside another cond, branches that "
            "save an array over examples and a parameter of the same shape, which jax keeps in one buffer",
            f"jnp.where in place of jax.lax.cond, a batch size that is no size of a parameter, or {_WHOLE}",
        )
    if op.primitive in _ORDERING:
        return Reason(
            "an order or a running total over the examples of the batch",
            f"the same within groups of examples (jax.vmap over groups), or {_WHOLE}",
        )
    if op.primitive in _RESHAPING:
        return Reason(
            "examples that are regrouped, shifted, cut off or merged with another dim, so that those of one "
            "microbatch no longer lie together",
            f"the dim of examples first in a merge, kept apart by jax.vmap, or {_WHOLE}",
        )
    return Reason(
        "a statistic over the batch that depends on parameters (batch norm, a contrastive loss, a loss that is "
        "balanced over all tokens)",
        f"num_stages=1, which runs a step with few of these in several loops, {_WHOLE}, or a statistic over a part of "
        "the batch (group norm, groups of tokens)",
    )
