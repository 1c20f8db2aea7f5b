"""The model against the formulas and tables that it stands on."""

import csv
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from autopar.cost.constants import load_constants
from benchmarks.published.transformer import (
    TrainingPlan,
    TransformerSpec,
    layer_activation_bytes,
    model_state,
    peak_memory,
)
from benchmarks.published.transformer.memory import layers_in_flight

DATA = Path(__file__).resolve().parents[3] / "benchmarks" / "published" / "data"
STAGES = {"P_os": 1, "P_os+g": 2, "P_os+g+p": 3}
SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}


def gpt(layers=24, hidden=2048, heads=16, seq=1024, vocab=51200):
    return TransformerSpec(layers, hidden, heads, seq, vocab)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(2, 64, 4), (24, 2304, 24), (105, 20480, 128)])
def test_parameters_are_those_of_the_formula(layers, hidden, heads):
    seq, vocab = 2048, 51200
    formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + seq) / (12 * layers * hidden))
    assert gpt(layers, hidden, heads, seq, vocab).parameters == pytest.approx(formula + 2 * hidden, rel=1e-12)


def test_flops_are_those_of_the_formula():
    spec, batch = gpt(), 512
    s, h, n, v = spec.seq, spec.hidden, spec.layers, spec.vocab
    formula = 72 * batch * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h))
    assert spec.model_flops(batch) == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activations_are_those_of_the_recomputation_paper(tp, recompute, sequence_parallel):
    spec = gpt(hidden=6144, heads=64, seq=2048)
    plan = TrainingPlan(4, 4, tp=tp, recompute=recompute, sequence_parallel=sequence_parallel)
    s, b, h, a, t = spec.seq, 4, spec.hidden, spec.heads, tp
    scores = 5 * a * s / h if recompute == "none" else 0
    split = t if sequence_parallel else 1
    formula = 2 * s * b * h / split if recompute == "full" else s * b * h * (10 / split + 24 / t + scores / t)
    assert layer_activation_bytes(spec, plan) == pytest.approx(formula, rel=1e-12)


def test_model_state_is_that_of_the_zero_paper():
    with (DATA / "zero_table1_memory_gb.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 54
    for row in rows:
        state = model_state(SIZES[row["model"]], int(row["dp_degree"]), STAGES[row["stage"]])
        printed = float(row["gb_per_device"])
        # The table rounds or cuts to about three digits.
        assert state.total_bytes / 1e9 == pytest.approx(printed, rel=0.012, abs=0.006), row


@pytest.mark.parametrize(
    ("cp", "dp", "seq", "batch"), [(1, 64, 8192, 2048), (1, 128, 8192, 2048), (16, 8, 131072, 128)]
)
def test_the_published_configurations_of_llama_3_405b_fit(cp, dp, seq, batch):
    """Llama Team, "The Llama 3 Herd of Models", 2024, table 4: nothing recomputed, optimizer and gradients sharded."""
    spec = TransformerSpec(
        layers=126, hidden=16384, heads=128, seq=seq, vocab=128256, ffn=53248, kv_heads=8, gated=True, tied=False,
        dropout=False, learned_positions=False, dtype="bf16",
    )  # fmt: skip
    plan = TrainingPlan(
        batch, 1, tp=8, pp=16, dp=dp, cp=cp, zero=2, sequence_parallel=True, chunks=8, schedule="interleaved"
    )
    stack = load_constants().stack("megatron-core")
    usable = 81_559 * 2**20  # what nvidia-smi tells of an H100
    assert 0.8 * usable < peak_memory(spec, plan, stack).total_bytes < usable
    unsharded = peak_memory(spec, dataclasses.replace(plan, zero=0), stack).total_bytes
    assert unsharded > 1.2 * usable


def test_selective_recomputation_keeps_no_scores():
    """Korthikanti et al., 2022, section 5: 34 s b h of the 22B model's layer stay, of 34 + 5 a s / h."""
    spec = TransformerSpec(layers=48, hidden=6144, heads=64, seq=2048, vocab=51200)
    plans = {r: TrainingPlan(4, 4, recompute=r) for r in ("none", "selective")}
    tokens = 4 * spec.seq * spec.hidden
    kept = {r: layer_activation_bytes(spec, plan) / tokens for r, plan in plans.items()}
    assert kept["selective"] == pytest.approx(34)
    assert kept["none"] == pytest.approx(34 + 5 * spec.heads * spec.seq / spec.hidden)
    fused = {r: layer_activation_bytes(spec, plan, fused_attention=True) for r, plan in plans.items()}
    assert fused["none"] == fused["selective"] == pytest.approx(34 * tokens)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "held"),
    [
        ("gpipe", 16, [16, 16, 16, 16]),
        ("1f1b", 16, [4, 3, 2, 1]),
        ("1f1b", 2, [2, 2, 2, 1]),
        ("zb-h2", 16, [7, 5, 3, 1]),
        ("zb-h2", 4, [4, 4, 3, 1]),
        ("zb-v", 16, [4, 4, 4, 4]),
    ],
)
def test_microbatches_in_flight_are_those_of_the_schedules(schedule, microbatches, held):
    plan = SimpleNamespace(schedule=schedule, num_microbatches=microbatches, pp=4, chunks=1)
    assert [layers_in_flight(plan, SimpleNamespace(index=i, layers=3)) for i in range(4)] == [3 * n for n in held]
