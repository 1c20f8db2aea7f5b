"""Train a small GPT as a pipeline of two worker processes; one of them is killed on the way, and training goes on.

    python -m examples.demo_ray [--transport world]

Starts Ray on this machine (loopback only), trains with and without autopar, and compares the losses. Exits with 1 where
they differ, or where no worker had to be replaced.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from .demo import configure

WORKERS, DEVICES = 2, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration.

    Args:
        argv: Arguments of the command line; None takes those of the process.

    Returns:
        0 where the losses agree to the tolerance and a worker was replaced, else 1.
    """
    parser = argparse.ArgumentParser(description="Train a pipeline on Ray, kill a worker, and compare the losses.")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--kill-before", type=int, default=5, help="step before which a worker is killed")
    parser.add_argument("--transport", default="auto", help="of arrays between workers: auto, sockets, direct, world")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest difference of a loss that is accepted")
    options = parser.parse_args(argv)

    configure(1)
    import jax
    from rich.console import Console
    from rich.table import Table

    import autopar

    from . import gpt

    say = Console(stderr=True, highlight=False, markup=False).print
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    train_step, (state, batch) = gpt.build(
        "tiny", layers=options.layers, hidden=options.hidden, vocab=256, seq=32, batch=8
    )
    plain_step, plain_state, plain = jax.jit(train_step), state, []
    for _ in range(options.steps):
        plain_state, metrics = plain_step(plain_state, batch)
        plain.append(float(metrics["loss"]))

    with autopar.Cluster.ray(
        workers=WORKERS,
        devices_per_worker=DEVICES,
        recover=True,
        copy_every=3,
        deadline_s=60,
        transport=options.transport,
    ) as cluster:
        step: Any = autopar.parallelize(
            train_step, cluster=cluster, num_stages=WORKERS, num_microbatches=4, schedule="1f1b", progress=say
        )
        compiled = step.compile(state, batch)
        console.print(str(compiled.plan))
        parallel = []
        for number in range(options.steps):
            if number == options.kill_before:
                say(f"killing worker 1, process {cluster.processes[1]}")
                os.kill(cluster.processes[1], signal.SIGKILL)
            state, metrics = compiled(state, batch)
            parallel.append(float(metrics["loss"]))
            say(f"step {number}: loss {parallel[-1]:.6f}")
        replaced = compiled.local.runtime.recoveries
        weight = next(leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 2)
        console.print(f"\na parameter: {weight!r}")

    console.print(f"\nlosses: autopar on {WORKERS} worker processes, jax.jit on one device")
    table = Table()
    for title in ("step", "autopar", "jax.jit", "difference"):
        table.add_column(title, justify="right")
    for index, (a, b) in enumerate(zip(parallel, plain, strict=True)):
        table.add_row(str(index), f"{a:.6f}", f"{b:.6f}", f"{a - b:+.1e}")
    console.print(table)
    worst = max(abs(a - b) for a, b in zip(parallel, plain, strict=True))
    agree = worst <= options.tolerance
    console.print(f"workers replaced: {replaced} time{'s' * (replaced != 1)}")
    console.print(f"largest difference {worst:.1e}: {'within' if agree else 'above'} {options.tolerance:g}")
    return 0 if agree and replaced else 1


if __name__ == "__main__":
    raise SystemExit(main())
