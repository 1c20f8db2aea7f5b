"""The table from primitive to localizer, assembled from the files next to this one.

A file holds a constant ``LOCALIZERS``, from primitive name to `Localizer`; a new file needs nothing else.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax.extend.core import Primitive

from autopar.lower.localize.base import LocalContext, Localizer, run_unchanged

_NOT_TABLES = ("attention_passes", "base", "blocks", "causal", "halo", "halves", "registry")


def _assembled() -> Mapping[str, Localizer]:
    """All ``LOCALIZERS`` of the files next to this one; ValueError where two files know one primitive."""
    table: dict[str, Localizer] = {}
    package = __name__.rpartition(".")[0]
    names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    for name in sorted(n for n in names if n not in _NOT_TABLES):
        localizers: Mapping[str, Localizer] = import_module(f"{package}.{name}").LOCALIZERS
        twice = sorted(table.keys() & localizers.keys())
        if twice:
            raise ValueError(f"localizers of {', '.join(twice)} are in two files; the second is {name}")
        table.update(localizers)
    return MappingProxyType(table)


LOCALIZERS: Mapping[str, Localizer] = _assembled()


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
