"""A small network trained on workers of Ray; it goes on where its last checkpoint is.

    python -m examples.train_ray FOLDER --workers 2

Without `RAY_ADDRESS` Ray is started on this machine. SIGTERM, to this process or to a worker, saves and exits with 0.
"""

from __future__ import annotations

import argparse
import logging
import time

import jax
import numpy as np

import autopar
from autopar.runtime.ray.cluster import RayCluster

from . import mlp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="of checkpoints, which driver and workers share")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--devices", type=int, help="of each worker; None takes all GPUs of a machine")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--metrics", type=int, default=0, help="port for Prometheus; 0 opens none")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")

    checkpoints = autopar.Checkpoints(options.folder, keep=2)
    train_step, (state, batch) = mlp.build("tiny", layers=4, hidden=16, batch=8)
    with autopar.Cluster.ray(workers=options.workers, devices_per_worker=options.devices, recover=True) as cluster:
        assert isinstance(cluster, RayCluster)
        if options.metrics:
            registry = cluster.workers.metrics.registry  # says what to install where prometheus-client is missing
            from prometheus_client import start_http_server

            start_http_server(options.metrics, registry=registry)
        step = autopar.parallelize(train_step, cluster=cluster, num_microbatches=2)
        first = checkpoints.steps[-1] + 1 if checkpoints.steps else 0
        if first:
            state = checkpoints.restore(state)
        print(f"begins at step {first}", flush=True)
        with checkpoints.preemption(cluster=cluster) as is_ending:
            for number in range(first, options.steps):
                draw = np.random.default_rng(number)
                examples = jax.tree.map(lambda x, draw=draw: draw.normal(size=x.shape).astype(x.dtype), batch)
                state, metrics = step(state, examples)
                ending = is_ending()
                if ending or number % options.every == options.every - 1 or number == options.steps - 1:
                    checkpoints.save(number, state)
                    print(f"step {number}: loss {float(metrics['loss']):.6f}, saved", flush=True)
                if ending:
                    return
                time.sleep(options.pause)


if __name__ == "__main__":
    main()
