"""Plans for tests: one written out, and random ones."""

from __future__ import annotations

import math

import msgspec
from hypothesis import strategies as st

from autopar.plan import (
    Choice,
    Communication,
    Considered,
    Copy,
    InputRecord,
    Memory,
    OperatorRecord,
    OutputRecord,
    Plan,
    PlanContent,
    SearchContent,
    Stage,
)


def small_plan() -> Plan:
    """A plan of two stages with something in every part."""
    first = Stage(
        mesh_axes=(("data", 2), ("model", 2)),
        devices=(0, 1, 2, 3),
        operators=("dot_general.0", "tanh.0"),
        step_time=0.0012,
        compute_time=0.001,
        memory=Memory(parameters=2_000_000, optimizer=4_000_000, gradients=2_000_000, activations=999, batch=512),
        collectives=(
            Communication("all-reduce", 1_500_000, "data", 1, 0, 0.00015, ("dot_general.0",)),
            Communication("all-gather", 2_048, "data+model", 8, 0, 0.00005),
        ),
    )
    second = Stage((("data", 4),), (4, 5, 6, 7), ("reduce_sum.0",), 0.0009, 0.0009, Memory(temporaries=10**12))
    content = PlanContent(
        program="train_step",
        fingerprint="0123456789abcdef" * 4,
        cluster='{"name":"two hosts"}',
        cluster_name="two hosts",
        step_time=0.0021,
        peak_memory=8_001_511,
        num_microbatches=8,
        schedule="1f1b",
        stages=(first, second),
        inputs=(
            InputRecord("state.params['w']", "f32[16,32]", "parameter", "[.,model]"),
            InputRecord("state.opt_state[0].count", "i32[]", "optimizer", "[]"),
            InputRecord("batch['x']", "bf16[8,16]", "batch", "[data,.]", 1),
        ),
        outputs=(
            OutputRecord("[0].params['w']", "f32[16,32]", "[.,model]", "state.params['w']"),
            OutputRecord("[1]['loss']", "f32[]", "[]", None, 1),
        ),
        operators=(
            OperatorRecord("dot_general.0", ("[data,.]", "[.,model]"), ("[data,model]",)),
            OperatorRecord("reduce_sum.0", ("[data,.]", ""), ("[]+sum(data)",), 1),
        ),
        copies=(Copy("dot_general.0", "[data,.]", "forward"),),
        choices=(
            Choice("dot_general.0", ("tanh.0",), "[data,model] from [data,.] [.,model]", 0.0011, "[data,.]", 0.0019),
            Choice("batch['x']", (), "[data,.]", 0.0, "", None),
            Choice("reduce_sum.0", tuple(f"exp.{i}" for i in range(8)), "[]", 0.0003, "[.]", 0.0004),
        ),
        search=SearchContent(
            "alpa", 0.0021, 0.002, (Considered("4 x 2", 0.003, 10**9), Considered("8", None, None, "needs 90 GB"))
        ),
        notes=("dim 0 of batch['x'] is 8, which 3 does not divide",),
        donated=("state.params['w']",),
    )
    return Plan(content, (("trace", 0.25), ("solve", 1.5)))


_texts = st.text(max_size=6)
_names = st.lists(_texts, max_size=3).map(tuple)
_counts = st.integers(0, 2**53)
_seconds = st.floats(0, 1e6) | st.sampled_from([0.1, 1e-9, 5e-324])


def _records(kind: type, *fields: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(st.builds(kind, *fields), max_size=2).map(tuple)


_kinds = st.sampled_from(["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "send"])
_memory = st.builds(Memory, *[_counts] * 6)
_collectives = _records(Communication, _kinds, _counts, _texts, _seconds, _counts, _seconds, _names)
_axes = st.lists(st.tuples(_texts, st.integers(1, 8)), max_size=2).map(tuple)
_typed = st.sampled_from([("f32[8,4]", "[x,.]"), ("i32[]", "[]"), ("bf16[6]", "[x+y]"), ("f32[2]", "[.]+sum(x)")])


def _on_its_mesh(stage: Stage) -> Stage:
    axes = {"x": 2, "y": 1, **dict(stage.mesh_axes)}  # those of `_typed` are there
    return msgspec.structs.replace(stage, mesh_axes=tuple(axes.items()), devices=tuple(range(math.prod(axes.values()))))


def _leaves(kind: type, *fields: st.SearchStrategy) -> st.SearchStrategy:
    """Records of arrays, of one stage: fields behind the path are strategies, the type and the layout fit."""
    return st.lists(st.builds(lambda path, typed, *rest: (path, typed, rest), _texts, _typed, *fields), max_size=2).map(
        lambda made: tuple(_leaf(kind, *m) for m in made)
    )


def _leaf(kind: type, path: str, typed: tuple[str, str], rest: tuple) -> InputRecord | OutputRecord:
    of, layout = typed
    return kind(path, of, rest[0], layout, 0) if kind is InputRecord else kind(path, of, layout, rest[0], 0)


_stages = st.lists(
    st.builds(Stage, _axes, st.just(()), _names, _seconds, _seconds, _memory, _collectives).map(_on_its_mesh),
    min_size=1,
    max_size=2,
).map(tuple)
_considered = _records(Considered, _texts, st.none() | _seconds, st.none() | _counts, _texts)

plans = st.builds(
    PlanContent,
    program=_texts,
    fingerprint=_texts,
    cluster=_texts,
    cluster_name=_texts,
    step_time=_seconds,
    peak_memory=_counts,
    num_microbatches=st.integers(1, 1 << 20),
    schedule=_texts,
    stages=_stages,
    inputs=_leaves(InputRecord, _texts),
    outputs=_leaves(OutputRecord, st.none() | _texts),
    operators=_records(OperatorRecord, _texts, _names, _names, st.just(0)),
    copies=_records(Copy, _texts, _typed.map(lambda typed: typed[1]), _texts),
    choices=_records(Choice, _texts, _names, _texts, _seconds, _texts, st.none() | _seconds),
    search=st.builds(SearchContent, _texts, _seconds, st.none() | _seconds, _considered),
    notes=_names,
    donated=_names,
).map(Plan)
