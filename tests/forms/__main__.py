"""``python -m tests.forms``: runs what has no outcome in ``outcomes.json`` yet, of which the coverage page is made.

Exits with 1 where a value was wrong, or an error none of autopar's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("AUTOPAR_CACHE_DIR", "off")

import jax

from tests.forms.cells import cells, keep, kept, run

_CLEAR = 20


def main() -> int:
    """1 where one failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.forms", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="CPU seconds after which none is begun")
    options = parser.parse_args()
    found, bad, said, some = kept(), 0, Counter[str](), cells()
    print(f"{len(some)} cells, {time.process_time():.0f} CPU s to find them", flush=True)
    for n, (cell, text) in enumerate(run(some, found), 1):
        said[text.partition(":")[0]] += 1
        if text.startswith(("wrong", "crash")):
            bad += 1
            print(f"{cell.name}: {text[:400]}", flush=True)
        if n % _CLEAR == 0:
            keep(found)
            jax.clear_caches()
        if time.process_time() > options.seconds:
            break
    keep(found)
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(said.items()))
    print(f"{sum(said.values())} run: {counts}; {time.process_time():.0f} CPU s", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
