"""The command line of the examples: train a preset on one device or on all of them."""

import argparse
import ast
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from ._common import TrainStep, Tree, count_params


class Build(Protocol):
    """The function ``build`` of an example."""

    def __call__(
        self, preset: str = "tiny", *, abstract: bool = False, **overrides: Any
    ) -> tuple[TrainStep, tuple[Tree, Tree]]:
        """The train step and its arguments."""


def main(build: Build, presets: Mapping[str, object], argv: Sequence[str] | None = None) -> list[float]:
    """Train for some steps on one fixed batch and print the loss of each.

    Args:
        build: The example's ``build``.
        presets: The example's ``PRESETS``.
        argv: Arguments of the command line; None takes those of the process.

    Returns:
        The losses, one a step.
    """
    parser = argparse.ArgumentParser(description="Train an example on one fixed batch of random data.")
    parser.add_argument("--preset", choices=list(presets), default="tiny")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--parallel", action="store_true", help="decorate the train step with autopar.parallelize")
    parser.add_argument("--devices", type=int, default=None, metavar="N", help="make N virtual CPU devices")
    parser.add_argument(
        "--set", action="append", default=[], type=_override, metavar="NAME=VALUE", help="override a field"
    )
    options = parser.parse_args(argv)
    if options.devices is not None:
        jax.config.update("jax_num_cpu_devices", options.devices)

    try:
        step, (state, batch) = build(options.preset, **dict(options.set))
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    print(f"{options.preset}: {count_params(state['params']):,} parameters, {jax.device_count()} devices")
    run = _parallel(step, state, batch) if options.parallel else jax.jit(step)
    losses: list[float] = []
    for index in range(options.steps):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
        print(f"step {index}: loss {losses[-1]:.6f}")
    return losses


def _parallel(step: TrainStep, state: Tree, batch: Tree) -> TrainStep:
    # Imported here: without --parallel an example needs jax only.
    import autopar

    function: Any = autopar.parallelize(step)
    print(function.plan(state, batch))
    parallel: TrainStep = function
    return parallel


def _override(text: str) -> tuple[str, object]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
