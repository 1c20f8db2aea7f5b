"""The table from primitive to localizer, assembled from the files next to this one.

A file holds a constant ``LOCALIZERS``, from primitive name to `Localizer`; a new file needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.extend.core import Primitive

from autopar.hooks import tables_of
from autopar.lower.localize.base import LocalContext, Localizer, run_unchanged

_NOT_TABLES = ("attention_passes", "base", "blocks", "halo", "registry")


LOCALIZERS: Mapping[str, Localizer] = tables_of(
    __name__.rpartition(".")[0], [str(Path(__file__).parent)], "LOCALIZERS", besides=_NOT_TABLES
)


def localize(primitive: Primitive, params: Mapping[str, Any], operands: list[Any], context: LocalContext) -> list[Any]:
    """Runs one operator on this device's shards; to be called inside of ``jax.shard_map``.

    Args:
        primitive: the operator's primitive.
        params: its parameters, as for the whole.
        operands: local shards, in ``context.operand_layouts``.
        context: where shards lie.

    Returns local shards of the results, in ``context.result_layouts``.
    """
    return LOCALIZERS.get(primitive.name, run_unchanged)(primitive, params, operands, context)
