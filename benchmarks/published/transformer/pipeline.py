"""Seconds of a pipeline from the seconds of its stages: fill, steady state and drain by schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one microbatch on one stage, all its chunks together.

    Args:
        forward_s: forward pass.
        backward_s: backward pass, recomputation included.
        weights_s: the part of ``backward_s`` that makes gradients of parameters, which zero-bubble schedules put
            off.
        send_s: what waiting for other stages' values adds.
    """

    forward_s: float
    backward_s: float
    weights_s: float
    send_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the steady state."""
        return self.forward_s + self.backward_s + self.send_s


def pipeline_s(
    stages: Sequence[StageTime], microbatches: int, schedule: str, chunks: int, *, awaits_sends: bool = True
) -> float:
    """Seconds from the first forward to the last backward.

    With stages of t_i and the slowest of t: gpipe and 1f1b take sum(t_i) + (m - 1) t; interleaved
    m t + (sum(t_i) - t) / v (SC21, section 2.2); the zero-bubble schedules fill the gaps of 1f1b with gradients of
    parameters: idle (p - 1)(F + B - W) for H1, (p - 1)(F + B - 2W) for H2, B without W here, and for V what
    makes F, B and W unequal (Qi et al., "Zero bubble pipeline parallelism", 2024).

    A program that awaits no send sends while it computes where the schedule leaves time: gpipe passes microbatch
    after microbatch on, interleaved has a pass of another chunk between a value's arrival and its use (SC21's warm-up
    of 2 (p - rank - 1) + (v - 1) p passes). 1f1b has none: the last stage waits for both ways.

    Args:
        stages: seconds of each stage.
        microbatches: m.
        schedule: one of `benchmarks.published.transformer.plan.SCHEDULES`.
        chunks: v, of the interleaved schedule.
        awaits_sends: whether a stage waits until what it sends is sent.
    """
    slowest = max(stages, key=lambda s: s.total_s)
    others_s = sum(s.total_s for s in stages) - slowest.total_s
    hides = not awaits_sends and schedule in ("gpipe", "interleaved")
    hidden_s = min(slowest.send_s, 2 * slowest.forward_s) if hides else 0.0
    busy_s = microbatches * (slowest.total_s - hidden_s)
    gaps = len(stages) - 1
    inputs_s = slowest.backward_s - slowest.weights_s
    match schedule:
        case "interleaved":
            return busy_s + others_s / chunks
        case "zb-h1":
            idle_s = gaps * (slowest.forward_s + inputs_s - slowest.weights_s)
        case "zb-h2":
            idle_s = gaps * (slowest.forward_s + inputs_s - 2 * slowest.weights_s)
        case "zb-v":
            passes = (slowest.forward_s, inputs_s, slowest.weights_s)
            idle_s = gaps * (max(passes) - min(passes))
        case _:
            return busy_s + others_s
    return busy_s + min(others_s, max(0.0, idle_s))
