"""The cases of the experts' benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from benchmarks.clusters import bytes_cluster
from benchmarks.experts import gpt as gpt_experts
from benchmarks.experts import llama as llama_experts
from benchmarks.experts import mlp as mlp_experts
from benchmarks.experts import moe as moe_experts
from benchmarks.experts import wide_resnet as wide_resnet_experts
from benchmarks.experts.base import compile_expert
from benchmarks.experts.compare import Case, compare, verdict
from benchmarks.footprint import footprint_bytes
from benchmarks.report import Report, Row, Say
from examples import gpt, llama, mlp, moe, wide_resnet

Meshes = tuple[tuple[int, ...] | None, ...]


def mlp_case(name: str, layers: int, hidden: int, batch: int, meshes: Meshes) -> Case:
    """A perceptron with Adam."""
    step, args = mlp.build("small", abstract=True, layers=layers, hidden=hidden, batch=batch, optimizer="adam")
    return Case(name, step, args, mlp_experts.experts(batch, hidden), bytes_cluster(), meshes)


def gpt_case(name: str, hidden: int, vocab: int, seq: int, batch: int, meshes: Meshes) -> Case:
    """A GPT of two layers and eight heads."""
    step, args = gpt.build("small", abstract=True, layers=2, hidden=hidden, vocab=vocab, seq=seq, batch=batch, heads=8)
    return Case(name, step, args, gpt_experts.experts(batch, seq, hidden, 8, vocab), bytes_cluster(), meshes)


def llama_case(name: str, hidden: int, vocab: int, seq: int, batch: int, meshes: Meshes) -> Case:
    """A LLaMA of two scanned, rematerialized layers and eight heads."""
    sizes = {"hidden": hidden, "ffn": 3 * hidden, "vocab": vocab, "seq": seq, "batch": batch}
    step, args = llama.build("tiny", abstract=True, **sizes)
    return Case(name, step, args, llama_experts.experts(batch, seq, hidden, vocab), bytes_cluster(), meshes)


def moe_case(name: str, hidden: int, ffn: int, seq: int, batch: int, meshes: Meshes) -> Case:
    """A dense layer and a mixture of eight experts with the top-2 gate; two sequences a group."""
    group, count = 2 * seq, 8
    sizes = {"hidden": hidden, "ffn": ffn, "vocab": 192, "seq": seq, "batch": batch, "group": group, "experts": count}
    step, args = moe.build("tiny", abstract=True, **sizes)
    written = moe_experts.Sizes(batch, seq, hidden, ffn, 192, count, group, 2 * group // count)
    return Case(name, step, args, moe_experts.experts(written), bytes_cluster(), meshes)


def wide_resnet_case(name: str, batch: int, meshes: Meshes) -> Case:
    """Two blocks, the second on half the image with twice the channels."""
    step, args = wide_resnet.build("tiny", abstract=True, batch=batch, image=32)
    return Case(name, step, args, wide_resnet_experts.experts(), bytes_cluster(), meshes)


def short_memory_case(name: str, layers: int, hidden: int, batch: int) -> Case:
    """A perceptron with as much memory as the compiled program of the FSDP expert needs."""
    case = mlp_case(name, layers, hidden, batch, (None, (8,)))
    fsdp = [e for e in case.experts if e.name.startswith("FSDP")]
    limit = min(footprint_bytes(compile_expert(e, case.step, case.args).memory_analysis()) for e in fsdp)
    return replace(case, memory_limit=limit)


CASES: Mapping[str, Callable[[], Case]] = MappingProxyType(
    {
        "mlp, small weights": lambda: mlp_case("mlp, small weights", 4, 256, 2048, (None, (8,))),
        "mlp, large weights": lambda: mlp_case("mlp, large weights", 4, 512, 64, (None, (8,))),
        "mlp, both": lambda: mlp_case("mlp, both", 4, 512, 384, (None, (2, 4))),
        "gpt, small weights": lambda: gpt_case("gpt, small weights", 128, 256, 128, 64, (None, (8,))),
        "gpt, large weights": lambda: gpt_case("gpt, large weights", 512, 512, 32, 4, (None, (8,))),
        "gpt, both": lambda: gpt_case("gpt, both", 256, 256, 64, 16, (None, (2, 4))),
        "llama, small weights": lambda: llama_case("llama, small weights", 128, 256, 128, 64, (None, (8,))),
        "llama, large weights": lambda: llama_case("llama, large weights", 512, 512, 32, 4, (None, (8,))),
        "moe, many tokens": lambda: moe_case("moe, many tokens", 64, 96, 128, 64, (None, (8,))),
        "moe, large experts": lambda: moe_case("moe, large experts", 128, 1024, 32, 32, (None, (8,))),
        "wide_resnet": lambda: wide_resnet_case("wide_resnet", 32, (None, (8,))),
        "mlp, short memory": lambda: short_memory_case("mlp, short memory", 4, 512, 2048),
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
        for row in rows:
            say(str(row))
        verdicts.append(verdict(case, rows))
        details.append((case.name, rows))
    return Report(
        "experts",
        "autopar's compiled program moves at most the bytes of the best expert's",
        tuple(verdicts),
        all(v["holds"] for v in verdicts),
        ("corrected: an all-reduce of gradients that are split at once counts as a reduce-scatter, half the bytes",),
        details=tuple(details),
    )
