"""``ragged_all_to_all`` by gathers and an exchange of offsets: which row of which device each row of the result is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar.frontend.manual.collective import collective
from autopar.frontend.manual.kinds import AllToAll, Gather
from autopar.frontend.manual.parameters import collective_of


def ragged_all_to_all(params: Mapping[str, Any], operands: Sequence[Any], sizes: Mapping[str, int]) -> Any:
    """What a device receives, in place in its output; rows that nobody writes stay as they are.

    Args:
        params: of the equation.
        operands: rows to send, output, and by slice: where it begins, its size, where it goes, the size that comes.
        sizes: of the mesh axes by name.
    """
    rows, output, starts, lengths, targets, _ = operands
    like, _ = collective_of("all_to_all", {**params, "split_axis": 0, "concat_axis": 0}, sizes)
    exchange = AllToAll(like.axes, like.sizes, like.groups)
    # By slice that comes, senders in order: where it begins there, its size, where it goes here.
    start, length, target = (collective(x, exchange) for x in (starts, lengths, targets))
    of_all = collective(rows, Gather(like.axes, like.sizes, like.groups))
    place = jnp.arange(output.shape[0], dtype=start.dtype)[:, None]
    written = (place >= target) & (place < target + length)
    which = jnp.argmax(written, axis=1)
    row = jnp.clip(start[which] + place[:, 0] - target[which], 0, rows.shape[0] - 1)
    sender = which // (start.shape[0] // of_all.shape[0])
    there = written.any(axis=1).reshape(-1, *[1] * (output.ndim - 1))
    return jnp.where(there, of_all[sender, row], output)
