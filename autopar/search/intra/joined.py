"""Kernels that run inside of the one that makes what they read, as XLA for TPUs fuses elementwise operators and sums.

What reads the result of a product, or of an elementwise kernel, and besides it only what is there before that kernel
begins, is computed in it: that value is not read from memory again. A sum ends with its kernel, so that what reads the
sum begins after it: of a softmax the maximum is taken as scores are made, their exponentials are added up later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autopar.ir import Operator, TensorType
from autopar.ir.primitives import DENSE_CONTRACTIONS, is_fusible
from autopar.search.intra.draft import ValueDraft


@dataclass
class JoinedKernels:
    """Begin of the kernels that made the values so far.

    Args:
        begins: by key of a value that a kernel hands on as it computes it, the time of that kernel's beginning.
    """

    begins: dict[str, int] = field(default_factory=dict)

    def begin(self, op: Operator, keys: Iterable[str], time: int) -> None:
        """Notes that a product begins a kernel; arguments as of `read`."""
        if op.primitive in DENSE_CONTRACTIONS:
            self.begins.update(dict.fromkeys(keys, time))

    def read(
        self, op: Operator, keys: Iterable[str], stored: Iterable[str], values: Mapping[str, ValueDraft], time: int
    ) -> list[TensorType]:
        """Types of the values that a kernel reads from memory, those left out that its own kernel makes.

        Args:
            op: the operator that it ends in.
            keys: of the operator's results.
            stored: keys of the values in memory that its operands are computed from.
            values: all values.
            time: of the operator.
        """
        times = {key: values[key].time for key in sorted(stored)}
        last = max(times, key=lambda key: times[key], default="")
        begin = self.begins.get(last, time)
        joins = begin < time and all(at < begin for key, at in times.items() if self.begins.get(key) != begin)
        if not joins:
            begin = time
        if is_fusible(op):
            self.begins.update(dict.fromkeys(keys, begin))
        return [values[key].type for key in times if not joins or self.begins.get(key) != begin]
