"""Losses after many steps."""

from __future__ import annotations


def last_loss(run, state, batch, steps=300):
    """The loss of the last of some steps on one batch.

    Each is waited for: XLA's CPU collectives time out behind a long queue.

    Args:
        run: a step that returns the state and metrics.
        state: the first.
        batch: of all steps.
        steps: their number.
    """
    for _ in range(steps):
        state, metrics = run(state, batch)
        last = float(metrics["loss"])
    return last
