"""``python -m benchmarks.search.make``: writes the files of `problems` again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from autopar import Cluster
from autopar.cost import CostModel
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.search import Job, Problem, strategy_named
from autopar.search.problem_data import save_problem
from benchmarks.search import unet
from examples import gpt, llama, moe, wide_resnet

FOLDER = Path(__file__).resolve().parent / "problems"


@dataclass(frozen=True)
class Case:
    """A problem: its model, cluster, mesh, and the part of the free plan's memory that it may use."""

    build: Callable[..., Any]
    cluster: str
    nodes: int = 1
    preset: str | None = "tiny"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    mesh: tuple[int, ...] | None = None
    memory: float | None = None


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "gpt-tiny-a100x8": Case(gpt.build, "dgx-a100"),
        "gpt-tiny-v100x16": Case(gpt.build, "p3.16xlarge", 2),
        "gpt-tiny-a100x8-short": Case(gpt.build, "dgx-a100", memory=0.9),
        "gpt-small-a100x8": Case(gpt.build, "dgx-a100", preset="small", overrides={"layers": 2}),
        "llama-tiny-a100x8": Case(llama.build, "dgx-a100"),
        "llama-small-h100x16": Case(llama.build, "dgx-h100", 2, "small", {"layers": 2}),
        "moe-tiny-a100x8": Case(moe.build, "dgx-a100"),
        "moe-small-v100x16": Case(moe.build, "p3.16xlarge", 2, "small", {"layers": 2}),
        "wide-resnet-tiny-a100x8": Case(wide_resnet.build, "dgx-a100"),
        "unet-tiny-a100x8": Case(unet.build, "dgx-a100", preset=None),
        "unet-small-v100x16": Case(
            unet.build, "p3.16xlarge", 2, None, {"channels": 64, "depth": 3, "image": 64, "batch": 32}
        ),
    }
)


def problem_of(case: Case) -> Problem:
    """The problem of a case."""
    preset = {} if case.preset is None else {"preset": case.preset, "abstract": True}
    step, args = case.build(**preset, **case.overrides)
    signature, _ = flatten_call(step, args, {}, SignatureOptions())
    traced = trace(step, signature)
    donated = frozenset(path for path, argument, _ in traced.arguments if argument == 0)
    cluster = Cluster.load(case.cluster, case.nodes)
    problem = Problem(traced.graph, cluster, CostModel(cluster), job=Job(mesh_shape=case.mesh, donated=donated))
    if case.memory is None:
        return problem
    free = strategy_named("alpa")(problem)
    return replace(problem, job=replace(problem.job, memory_limit_bytes=int(case.memory * free.peak_memory)))


def main() -> None:
    """Writes all files."""
    jax.config.update("jax_platforms", "cpu")
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        path = FOLDER / f"{name}.json.gz"
        save_problem(problem_of(case), path)
        print(name, path.stat().st_size)


if __name__ == "__main__":
    main()
