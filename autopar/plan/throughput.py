"""Examples, tokens and dollars of a plan, and how much of the devices' peak rate the step's own products are.

`throughput` is the place to start. The figures follow from the predicted step time; they decide nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autopar.cluster import Cluster, NodeGroup
from autopar.errors import ClusterError
from autopar.plan.content import PlanContent
from autopar.plan.types import dtype_and_shape

_INTEGERS = re.compile(r"[iu]\d+$")
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Throughput:
    """Work of a step over its predicted seconds.

    Args:
        examples: examples of a step: the first dim that most of the batch arguments have; 0 without one.
        tokens: tokens of a step: examples times the second dim of the largest batch argument of integers; 0 without
            one.
        step_time: predicted seconds a step.
        peak_s: seconds that all devices together take for the products of the step, as it was written, at their peak
            rates; 0 where they were not counted.
        dollars_per_hour: price of all devices for an hour, or None where the cluster gives none.
    """

    examples: int
    tokens: int
    step_time: float
    peak_s: float
    dollars_per_hour: float | None

    @property
    def examples_per_s(self) -> float:
        """Examples that training takes in a second of predicted step time."""
        return self.examples / self.step_time if self.step_time else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens that training takes in a second of predicted step time."""
        return self.tokens / self.step_time if self.step_time else 0.0

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization (Chowdhery et al., "PaLM", 2022, appendix B), 0 to 1; None where it is not known."""
        return self.peak_s / self.step_time if self.peak_s and self.step_time else None

    @property
    def dollars_per_step(self) -> float | None:
        """Price of all devices for one step; None without a price."""
        return None if self.dollars_per_hour is None else self.dollars_per_hour * self.step_time / _HOUR_S

    @property
    def dollars_per_million(self) -> float | None:
        """Price of a million tokens, or examples where the batch has no tokens; None without a price or a batch."""
        step, count = self.dollars_per_step, self.tokens or self.examples
        return None if step is None or not count else step / count * 1e6


def throughput(c: PlanContent) -> Throughput:
    """The throughput of a plan.

    Args:
        c: the plan.
    """
    shapes = [dtype_and_shape(i.type) for i in c.inputs if i.role == "batch"]
    firsts = [shape[0] for _, shape in shapes if shape]
    examples = max(sorted(set(firsts)), key=firsts.count, default=0)
    sequences = [s for dtype, s in shapes if _INTEGERS.match(dtype) and len(s) >= 2 and s[0] == examples]
    tokens = examples * max(sequences, key=math.prod)[1] if sequences else 0
    groups = _groups(c)
    peak_s = sum(flops / sum(g.size * g.device.flops(d) for g in groups) for d, flops in c.product_flops if groups)
    prices = [g.size * g.device_dollars_per_hour for g in groups if g.device_dollars_per_hour is not None]
    price = sum(prices) if prices and len(prices) == len(groups) else None
    return Throughput(examples, tokens, c.step_time, peak_s, price)


def _groups(c: PlanContent) -> tuple[NodeGroup, ...]:
    """Node groups of the plan's cluster; none where its text describes no cluster."""
    try:
        return Cluster.from_json(c.cluster).groups
    except ClusterError:
        return ()


def throughput_text(t: Throughput) -> str:
    """``120,000 tokens/s, 60 examples/s, model FLOPs utilization 43.1%, $98.32 an hour``; "" where nothing is known."""
    rates = [f"{_count(t.tokens_per_s)} tokens/s"] if t.tokens else []
    rates += [f"{_count(t.examples_per_s)} examples/s"] if t.examples else []
    parts = [", ".join(rates)] if rates else []
    if t.utilization is not None:
        parts.append(f"model FLOPs utilization {t.utilization:.{1 if t.utilization >= 0.001 else 3}%}")
    if t.dollars_per_hour is not None:
        parts.append(f"${t.dollars_per_hour:,.2f} an hour")
        if (price := t.dollars_per_million) is not None:
            parts.append(f"${price:.3g} a million {'tokens' if t.tokens else 'examples'}")
    return ", ".join(parts)


def _count(value: float) -> str:
    """Three digits or more, with commas: ``1,230,000``, ``45.6``."""
    if value < 1000:
        return f"{value:.3g}"
    digits = len(str(int(value))) - 3
    return f"{round(value, -digits):,.0f}"
