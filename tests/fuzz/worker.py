"""The process that runs programs: one line of JSON on standard output before and after each.

It starts with the variables of `ENVIRONMENT`; what hangs it or kills it is for its parent to notice.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax

from tests.fuzz.check import Config, Outcome, check_program, configs
from tests.fuzz.generate import generate
from tests.fuzz.program import Program, all_statements
from tests.fuzz.shrink import shrunk
from tests.fuzz.written import as_test

# Newer jax has no such choice, compiles as fast without it, and ends the process at a flag that it does not know.
_NO_FUSION_EMITTERS = "--xla_cpu_use_fusion_emitters=false " if jax.__version_info__ < (0, 11) else ""
# Programs run once: compiling is nearly all of the time, and unfused, unoptimized code compiles five times faster.
# Without fused multiply-add: with it XLA may compute a value in two ways, and x == max(x, y) fails where it is true.
ENVIRONMENT = MappingProxyType(
    {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
        "--xla_llvm_disable_expensive_passes=true "
        f"{_NO_FUSION_EMITTERS}--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_max_isa=AVX",
    }
)
_CLEAR = 25


@dataclass(frozen=True)
class Job:
    """What a worker does.

    Args:
        seed: of the programs.
        first: number of the first one.
        stop: number after the last one.
        plans: how many plans to run each with, as `configs` counts.
        shrink: at most how many smaller programs to try for one that fails.
        dtype: of floats.
    """

    seed: int
    first: int
    stop: int
    plans: int = 2
    shrink: int = 60
    dtype: str = "float64"


def _say(**record: object) -> None:
    print(json.dumps(record), flush=True)


def _same_failure(outcome: Outcome) -> str:
    """What tells one failure from another: its kind and the first words of its message."""
    return outcome.kind + ("" if outcome.kind == "wrong" else " " + outcome.detail.split("\n")[0][:30])


def _shrunk(program: Program, outcome: Outcome, config: Config, tries: int, number: int) -> tuple[Program, Config]:
    """A smaller program and the plan that it fails with; a random plan of a smaller program is another plan."""
    wanted = _same_failure(outcome)
    mesh, seed = config
    plans: list[Config] = [config] + [(mesh, k) for k in range(4 if seed is not None else 0)]
    failing = config

    def fails(candidate: Program) -> bool:
        nonlocal failing
        _say(alive=number)
        for plan in plans:
            try:
                same = _same_failure(check_program(candidate, (plan,))) == wanted
            except Exception:
                return False
            if same:
                failing = plan
                return True
        return False

    return shrunk(program, fails, tries), failing


def run(job: Job) -> None:
    """Runs the programs of a job, saying how each went."""
    for number in range(job.first, job.stop):
        _say(start=number)
        began = time.monotonic()
        program = generate(job.seed, number, job.dtype)
        ran_plain = partial(_say, plain=number)
        outcome = check_program(program, configs(number, job.plans), f"program_{number}.py", ran_plain)
        record = {
            "number": number,
            "kind": outcome.kind,
            "mode": program.mode,
            "dtype": job.dtype,
            "detail": outcome.detail[:2000],
            "config": outcome.config,
            "primitives": outcome.primitives,
            "operators": dict(Counter(s.operator for s in all_statements(program.statements))),
            "seconds": round(time.monotonic() - began, 2),
        }
        if outcome.failed and outcome.config is not None:
            small, config = _shrunk(program, outcome, outcome.config, job.shrink, number)
            record["test"] = as_test(small, config, outcome.detail.split("\n")[0][:80].replace('"""', "'''"))
        _say(**record)
        if number % _CLEAR == 0:
            jax.clear_caches()


if __name__ == "__main__":
    seed, first, stop, plans, shrink = map(int, sys.argv[1:6])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    run(Job(seed, first, stop, plans, shrink, sys.argv[6]))
