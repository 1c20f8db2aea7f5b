"""The cases of the experts' benchmark. Missing yet: llama, mixture of experts, Wide-ResNet, short memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from benchmarks.clusters import bytes_cluster
from benchmarks.experts import gpt as gpt_experts
from benchmarks.experts import mlp as mlp_experts
from benchmarks.experts.compare import Case, compare, verdict
from benchmarks.report import Report, Row, Say
from examples import gpt, mlp

Meshes = tuple[tuple[int, ...] | None, ...]


def mlp_case(name: str, layers: int, hidden: int, batch: int, meshes: Meshes) -> Case:
    """A perceptron with Adam."""
    step, args = mlp.build("small", abstract=True, layers=layers, hidden=hidden, batch=batch, optimizer="adam")
    return Case(name, step, args, mlp_experts.experts(batch, hidden), bytes_cluster(), meshes)


def gpt_case(name: str, hidden: int, vocab: int, seq: int, batch: int, meshes: Meshes) -> Case:
    """A GPT of two layers and eight heads."""
    step, args = gpt.build("small", abstract=True, layers=2, hidden=hidden, vocab=vocab, seq=seq, batch=batch, heads=8)
    return Case(name, step, args, gpt_experts.experts(batch, seq, hidden, 8, vocab), bytes_cluster(), meshes)


CASES: Mapping[str, Callable[[], Case]] = MappingProxyType(
    {
        "mlp, small weights": lambda: mlp_case("mlp, small weights", 4, 256, 2048, (None, (8,))),
        "mlp, large weights": lambda: mlp_case("mlp, large weights", 4, 512, 64, (None, (8,))),
        "mlp, both": lambda: mlp_case("mlp, both", 4, 512, 384, (None, (2, 4))),
        "gpt, small weights": lambda: gpt_case("gpt, small weights", 128, 256, 128, 64, (None, (8,))),
        "gpt, large weights": lambda: gpt_case("gpt, large weights", 512, 512, 32, 4, (None, (8,))),
        "gpt, both": lambda: gpt_case("gpt, both", 256, 256, 64, 16, (None, (2, 4))),
    }
)


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` takes one tiny perceptron."""
    made = (lambda: mlp_case("mlp, tiny", 2, 32, 64, (None,)),) if quick else tuple(CASES.values())
    verdicts: list[Row] = []
    details: list[tuple[str, tuple[Row, ...]]] = []
    for make in made:
        case = make()
        say(f"experts: {case.name}")
        rows = compare(case)
        verdicts.append(verdict(case, rows))
        details.append((case.name, rows))
    return Report(
        "experts",
        "autopar's compiled program moves at most the bytes of the best expert's",
        tuple(verdicts),
        all(v["holds"] for v in verdicts),
        details=tuple(details),
    )
