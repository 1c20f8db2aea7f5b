"""Labels of a node's strategies: functions of lists and a number, which another process can be sent."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir import Layout
from autopar.search.intra.host import IN_HOST_MEMORY
from autopar.sharding import Strategy


def layout_label(layouts: Sequence[Layout], k: int) -> str:
    """The k-th of ``layouts``: ``[x,.]``."""
    return str(layouts[k])


def stack_label(layouts: Sequence[Layout], on_devices: int, k: int) -> str:
    """The k-th of ``layouts``; those from ``on_devices`` on are of a stack in host memory."""
    return f"{layouts[k]}{IN_HOST_MEMORY if k >= on_devices else ''}"


def strategy_label(strategies: Sequence[Strategy], k: int) -> str:
    """Layouts of the k-th of ``strategies``: ``[x,.],[.,.] -> [x,.]``."""
    strategy = strategies[k]
    return f"{','.join(map(str, strategy.operand_layouts))} -> {','.join(map(str, strategy.result_layouts))}"


def input_label(pairs: Sequence[tuple[Layout, Layout]], on_devices: int, k: int) -> str:
    """Layouts of the k-th of ``pairs``, as stored and as gathered; those from ``on_devices`` on lie in host memory."""
    stored, read = pairs[k]
    where = IN_HOST_MEMORY if k >= on_devices else ""
    return (f"{stored}" if stored == read else f"{stored}, gathered to {read}") + where
