"""A small network trained by one script in any number of processes; it goes on where its last checkpoint is.

    autopar run --processes 2 --cpu-devices 4 -- python -m examples.train_hosts FOLDER

One process alone runs it too: ``python -m examples.train_hosts FOLDER``. With ``--stages 2`` it is a pipeline, whose
stages lie on devices of one process each where there are as many processes.
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import autopar

from . import mlp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="of checkpoints, which all processes share")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--stages", type=int, default=1, help="of the pipeline; 1 for none")
    parser.add_argument("--begins", action="store_true", help="also say when a step begins")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    options = parser.parse_args()

    autopar.initialize()
    train_step, (shapes, batch_shapes) = mlp.build("tiny", abstract=True)
    pipeline = {"num_microbatches": 4, "schedule": "1f1b"} if options.stages > 1 else {}
    step = autopar.parallelize(train_step, donate_argnums=0, num_stages=options.stages, **pipeline)
    step.compile(shapes, batch_shapes)
    mine = list(step.process_examples())
    checkpoints = str(Path(options.folder) / "checkpoints")
    first = 0
    try:
        state = step.restore(checkpoints)
        first = int(latest(checkpoints)) + 1
    except autopar.CheckpointError:
        state = step.init(lambda: mlp.build("tiny")[1][0])
    say(f"{jax.process_count()} processes with {jax.device_count()} devices begin at step {first}")
    metrics: dict[str, Any] = {}
    for at in range(first, options.steps):
        batch = step.local_batch(jax.tree.map(lambda x: x[mine], example(at, batch_shapes)))
        if options.begins:
            say(f"step {at} begins")
        state, metrics = step(state, batch)
        say(f"step {at}: loss {float(metrics['loss']):.6f}")
        stop = autopar.stopping(at)
        if stop or at % options.every == options.every - 1 or at == options.steps - 1:
            step.save(checkpoints, state, at=at, keep=2, wait=stop)
        if stop:
            say("told to end: saved")
            sys.exit(autopar.AGAIN)
        time.sleep(options.pause)
    step.wait_until_saved()
    write(Path(options.folder) / "result.json", state)


def example(at: int, shapes: Any) -> Any:
    """The global batch of a step: every process draws the same one, and takes its own examples of it."""
    numbers = np.random.default_rng(at)
    return jax.tree.map(lambda s: numbers.normal(size=s.shape).astype(s.dtype), shapes)


def latest(folder: str) -> int:
    return max(int(p.name) for p in Path(folder).iterdir() if p.name.isdigit())


def write(path: Path, state: Any) -> None:
    """Writes a hash of what all processes have of all leaves."""
    shards = (s.data for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards)
    own = hashlib.sha256(b"".join(np.asarray(s).tobytes() for s in shards))
    every = multihost_utils.process_allgather(np.frombuffer(own.digest(), np.uint8))
    if jax.process_index() == 0:
        digest = hashlib.sha256(np.asarray(every).tobytes()).hexdigest()
        path.write_text(json.dumps({"digest": digest, "processes": jax.process_count()}))


def say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
