"""`Compiled`: a planned, lowered and compiled function for one signature.

`CallInfo` says what arguments and results of a call are, as `jax.stages` does, the same for every step to a program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.stages import ArgInfo

from autopar._compat.dtypes import jax_dtype
from autopar._compat.primitives import typed
from autopar._compat.xla import floating_point_error
from autopar.api.mutable import split_mutable
from autopar.api.user_mesh import as_traced, concrete, on_mesh, outside, relabelled
from autopar.errors import AutoparError
from autopar.errors.base import as_kind
from autopar.frontend import SignatureOptions, Traced, flatten_call
from autopar.plan import Plan
from autopar.runtime.loaded import LoadedProgram


class CallInfo:
    """Base of what stands for a call: traced, lowered or compiled. Static arguments are in none of the trees."""

    def _call(self) -> tuple[Traced, tuple[int, ...]]:
        """The traced function, and the indices of its traced leaves that are donated."""
        raise NotImplementedError

    def __copy__(self) -> Any:
        """Itself, as copies of decorated functions are: nothing of it changes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Itself, as deep copies of decorated functions are."""
        return self

    def __reduce__(self) -> Any:
        """Raises AutoparError, which is a TypeError too, as jax's objects of a call do."""
        error = AutoparError(
            f"{type(self).__name__} holds programs of this process and cannot be pickled",
            remedy="pickle the decorated function, or its plan: parallelize(f, plan=plan) compiles it without a search",
        )
        raise as_kind(error, TypeError)

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


@dataclass(frozen=True, eq=False)
class Compiled(CallInfo):
    """A compiled step, from `ParallelFunction.compile`; takes arguments of the signature it was made for.

    Static arguments may be left out of a call, as they are of calls of jax's compiled objects.

    Args:
        plan: what runs.
        traced: the function's graph.
        local: the compiled program.
        function: the user's function.
        signature_options: how its arguments are read.
    """

    plan: Plan
    traced: Traced
    local: LoadedProgram
    function: Any
    signature_options: SignatureOptions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step. Raises AutoparError for arguments of other shapes, dtypes or structure."""
        args, kwargs, mutable = split_mutable(args, kwargs)
        leaves = self.leaves_of(args, kwargs)
        with as_traced(self.traced.signature):
            result = self.run(leaves)
        return mutable.joined(result)

    def leaves_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The traced leaves of a call. Raises AutoparError for arguments of other shapes, dtypes or structure."""
        signature = self.traced.signature
        options = replace(self.signature_options, static_numbers=signature.static_numbers)
        given, leaves = flatten_call(self.function, *signature.with_static(args, kwargs), options)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            error = AutoparError(
                f"{self.traced.graph.name} is compiled, and jax cannot transform it",
                cause="a call inside of jit, grad, vmap or the body of a loop",
                remedy="call the decorated function itself there",
            )
            raise as_kind(error, TypeError)
        if not signature.takes(given):
            error = AutoparError(
                f"{self.traced.graph.name} was compiled for other arguments",
                cause="shapes, dtypes, structure or static values differ",
                remedy="call the decorated function itself, which compiles once for each signature",
            )
            raise as_kind(error, TypeError)
        return leaves

    def run(self, leaves: list[Any]) -> Any:
        """Runs a step on the traced leaves of a call."""
        with self._outside():
            placed = self.local.place_all(leaves)
        return self.run_placed(placed, leaves)

    def run_placed(self, placed: list[Any], leaves: list[Any]) -> Any:
        """Runs a step on leaves that lie as the plan wants; ``leaves`` are those that the caller gave."""
        if self.traced.signature.mesh is None:
            return self.traced.results(self._typed(self._ran(placed, leaves)))
        with outside():
            arrays = self._typed(self._ran(placed, leaves))
        return self.traced.results(list(map(relabelled, arrays, self._on_user_mesh)))

    def _typed(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Results, weakly typed where the function's are. Those of one program are already."""
        if self.plan.num_stages == 1:
            return arrays
        return [
            typed(a, weak) if isinstance(a, jax.Array) else a for a, weak in zip(arrays, self.traced.weak, strict=True)
        ]

    def _ran(self, placed: list[Any], leaves: list[Any]) -> Sequence[Any]:
        try:
            return self.local.run(placed, leaves)
        except Exception as error:
            plain = floating_point_error(error, self.traced.graph.name)
            if plain is None:
                raise
            raise plain from error

    def _outside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.traced.signature.mesh is None else outside()

    @cached_property
    def _on_user_mesh(self) -> Sequence[NamedSharding | None]:
        """Shardings of the results on the mesh that is around the calls; None where it cannot say them."""
        program, outputs = self.local.program, self.traced.graph.outputs
        mesh = concrete(self.traced.signature.mesh, jax.devices()) if self.local.here else None
        if mesh is None:
            return [None] * len(outputs)
        return [on_mesh(s, o.type.rank, mesh) for s, o in zip(program.output_shardings, outputs, strict=True)]

    def repeated(self, leaves: list[Any]) -> list[Any] | None:
        """The traced ones of all leaves of a call of the same structure; None where a static one changed."""
        if not self._statics:
            return leaves
        if not all(entry.is_still(leaves[i]) for i, entry in self._statics):
            return None
        return [leaves[i] for i in self.traced.signature.traced]

    @cached_property
    def _statics(self) -> tuple[tuple[int, Any], ...]:
        entries, traced = self.traced.signature.entries, set(self.traced.signature.traced)
        return tuple((i, entry) for i, entry in enumerate(entries) if i not in traced)

    @property
    def input_shardings(self) -> Any:
        """``(args, kwargs)`` with a `NamedSharding` for each array; by path where a container refuses them."""
        shardings = self.local.program.input_shardings
        try:
            return self.traced.signature.arguments(shardings)
        except Exception:
            return {path: s for (path, _, _), s in zip(self.traced.arguments, shardings, strict=False)}

    @property
    def output_shardings(self) -> Any:
        """A pytree like the result with a `NamedSharding` for each array."""
        return self.traced.results(self.local.program.output_shardings)

    def _call(self) -> tuple[Traced, tuple[int, ...]]:
        return self.traced, self.local.donated

    @property
    def input_formats(self) -> Any:
        """``(args, kwargs)`` with a `jax.experimental.layout.Format` for each array, of a program of one stage."""
        return self.traced.signature.dynamic(self._flat(self.local.executable.input_formats))

    @property
    def output_formats(self) -> Any:
        """A pytree like the result with a `jax.experimental.layout.Format` for each array, of one stage's program."""
        return self.traced.results(self._flat(self.local.executable.output_formats))

    def _flat(self, formats: Any) -> list[Any]:
        return list(jax.tree.leaves(formats))

    def runtime_executable(self) -> Any:
        """XLA's own object of a program of one stage, or None."""
        return self.local.executable.runtime_executable()

    def cost_analysis(self) -> Any:
        """jax's cost statistics of the program; for several stages a dict by program.

        Raises:
            AutoparError: the programs are on workers, which do not send them.
        """
        return self.local.executable.cost_analysis()

    def as_text(self) -> str:
        """Text of the HLO that XLA optimized, of the stage program."""
        return str(self.local.executable.as_text())

    def memory_analysis(self) -> Any:
        """jax's memory statistics of the stage program (bytes a device)."""
        return self.local.executable.memory_analysis()
