"""`CallInfo`: arguments and results of a call as `jax.stages` tells them, the same for every step to a program."""

from __future__ import annotations

from typing import Any

import jax
from jax.stages import ArgInfo

from autopar._compat.dtypes import jax_dtype
from autopar.frontend import Traced


class CallInfo:
    """Base of what stands for a call: traced, lowered or compiled. Static arguments are in none of the trees."""

    def _call(self) -> tuple[Traced, tuple[int, ...]]:
        """The traced function, and the indices of its traced leaves that are donated."""
        raise NotImplementedError

    @property
    def in_tree(self) -> Any:
        """Structure of ``(args, kwargs)``."""
        return jax.tree.structure(self.in_avals)

    @property
    def in_avals(self) -> Any:
        """``(args, kwargs)`` with the abstract value of each array."""
        traced, _ = self._call()
        return traced.signature.dynamic([jax.typeof(a) for a in traced.signature.avals()])

    @property
    def args_info(self) -> Any:
        """``(args, kwargs)`` with a `jax.stages.ArgInfo` for each array, which says whether it is donated."""
        traced, donated = self._call()
        avals = traced.signature.avals()
        return traced.signature.dynamic([ArgInfo(jax.typeof(a), i in donated) for i, a in enumerate(avals)])

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Indices of the donated arrays among those of the arguments, in order."""
        return self._call()[1]

    @property
    def out_info(self) -> Any:
        """A pytree like the result, with a `jax.ShapeDtypeStruct` for each array."""
        traced, _ = self._call()
        outputs = zip(traced.graph.outputs, traced.weak, strict=True)
        return traced.results(
            [jax.ShapeDtypeStruct(o.type.shape, jax_dtype(o.type.dtype), weak_type=weak) for o, weak in outputs]
        )

    @property
    def out_tree(self) -> Any:
        """Structure of the result."""
        return self._call()[0].out_treedef
