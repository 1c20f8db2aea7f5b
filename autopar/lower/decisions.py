"""`Sharded`: a plan's decisions, as the interpreter follows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jax import lax

from autopar.ir import Layout, Operator
from autopar.lower.callbacks import Callbacks
from autopar.lower.localize.base import AxisIndex
from autopar.sharding.reshard import PathTables


@dataclass(frozen=True)
class Sharded:
    """The plan's decisions, parsed: layouts of operands (None: any) and results, shared copies.

    ``memory_bound`` is as in `autopar.sharding.routes.Routes`; ``index`` says which shard the interpreted one is;
    ``around`` is entered while an operator is applied; ``recomputes`` says that something is computed again, which a
    compiler must not merge with the first time; ``orders_collectives`` that collectives must not overlap with regions
    that have some inside (`autopar.lower.collective_barriers`); ``widened`` that products with a float32 result take
    float32 operands, for XLA's CPU compiler has none of narrow ones; ``hosted`` names inputs that are in host memory
    until they are read; ``host_results`` are, by loop, the numbers of results that are there; ``on_host`` are ids of
    operators on hosts, ``skips_masked`` of attention that leaves scores out; ``matmuls`` says of which tensor of a
    product blocks travel, ``in_steps`` that each message waits for a product; ``callbacks`` says how Python is called.
    """

    operands: Mapping[str, tuple[Layout | None, ...]]
    results: Mapping[str, tuple[Layout, ...]]
    copies: Mapping[str, Mapping[str, Layout]]
    tables: PathTables
    memory_bound: bool = False
    index: AxisIndex = lax.axis_index
    around: Callable[[Operator], AbstractContextManager[Any]] = nullcontext
    recomputes: bool = False
    orders_collectives: bool = False
    widened: bool = False
    hosted: frozenset[str] = frozenset()
    host_results: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    on_host: frozenset[str] = frozenset()
    skips_masked: frozenset[str] = frozenset()
    matmuls: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    in_steps: bool = False
    callbacks: Callbacks = field(default_factory=Callbacks)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each mesh axis."""
        return self.tables.mesh.sizes
