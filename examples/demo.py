"""Train a small GPT twice, decorated on eight virtual CPU devices and plain on one, and compare the losses.

    python -m examples.demo

Sets ``JAX_PLATFORMS=cpu`` and eight virtual devices, then prints the plan and the losses side by side.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

DEVICES = 8


def configure(devices: int) -> None:
    """Ask XLA for virtual CPU devices; has an effect only before jax starts.

    Args:
        devices: How many.
    """
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"])
    os.environ["JAX_PLATFORMS"] = "cpu"


def losses(step: Any, state: Any, batch: Any, steps: int) -> list[float]:
    """The loss of each of ``steps`` steps on one batch, from ``state`` on."""
    result: list[float] = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        result.append(float(metrics["loss"]))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration.

    Args:
        argv: Arguments of the command line; None takes those of the process.

    Returns:
        0 where the losses agree to the tolerance, else 1.
    """
    parser = argparse.ArgumentParser(description="Compare a decorated train step with the plain one.")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest difference of a loss that is accepted")
    options = parser.parse_args(argv)

    # Imported here: the environment is read when jax starts.
    configure(DEVICES)
    import jax
    from rich.console import Console
    from rich.table import Table

    import autopar

    from . import gpt

    train_step, (state, batch) = gpt.build(
        "tiny", layers=options.layers, hidden=options.hidden, vocab=512, seq=64, batch=16
    )
    step: Any = autopar.parallelize(train_step)
    plan = step.plan(state, batch)
    compiled = step.compile(state, batch)

    # stdout is as wide as the plan's table needs where it is not a terminal.
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(str(plan), highlight=False, markup=False)
    parallel = losses(compiled, state, batch, options.steps)
    plain = losses(jax.jit(train_step), state, batch, options.steps)

    console.print(f"\nlosses: autopar on {jax.device_count()} devices, jax.jit on one", highlight=False)
    table = Table()
    for title in ("step", "autopar", "jax.jit", "difference"):
        table.add_column(title, justify="right")
    for index, (a, b) in enumerate(zip(parallel, plain, strict=True)):
        table.add_row(str(index), f"{a:.6f}", f"{b:.6f}", f"{a - b:+.1e}")
    console.print(table)
    worst = max(abs(a - b) for a, b in zip(parallel, plain, strict=True))
    agree = worst <= options.tolerance
    console.print(f"largest difference {worst:.1e}: {'within' if agree else 'above'} {options.tolerance:g}")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
