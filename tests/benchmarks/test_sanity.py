"""Free plans have nothing absurd that no price explains; the search for it finds what is there."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.plan.types import Communication, InputRecord, Memory, Stage
from benchmarks.families import by_adam
from benchmarks.sanity import Model, draw, findings, judged
from tests.search.problems import f32, toy


def perceptron(batch: int) -> Any:
    def loss(p: Any, b: Any) -> Any:
        return ((b["x"] @ p["up"] @ p["down"]) ** 2).mean()

    return by_adam(loss, {"up": (64, 128), "down": (128, 64)}, {"x": f32(batch, 64)})


def test_a_plan_of_a_perceptron_has_nothing_absurd() -> None:
    model = Model("perceptron", lambda: perceptron(256), toy(8))
    assert judged(model)["findings"] == ""


def sent(kind: Any, count: float) -> Communication:
    return Communication(kind, 16 * 16 * 4, "x", count, 0, 1e-6)


@pytest.mark.parametrize(
    ("batch", "collectives", "what"),
    [
        ("[x,.]", (sent("all-gather", 2), sent("reduce-scatter", 2)), ["gathered and scattered twice"]),
        ("[x,.]", (sent("all-gather", 2), sent("reduce-scatter", 1)), []),
        ("[.,x]", (sent("all-gather", 1),), ["batch whole while weights travel"]),
        ("[.,x]", (), []),
        ("[x,.]", (sent("all-to-all", 2),), ["all-to-alls between neighbours"]),
        ("[x,.]", (sent("all-to-all", 1),), []),
    ],
)
def test_absurd_layouts_and_collectives_are_found(
    batch: str, collectives: tuple[Communication, ...], what: list[str]
) -> None:
    operators = ("dot_general.0", "dot_general.1", "dot_general.2")
    stage = Stage((("x", 8),), tuple(range(8)), operators, 1e-3, 1e-3, Memory(), collectives)
    weights = InputRecord("w", "f32[16,16]", "parameter", "[x,.]")
    split = InputRecord("x", "f32[8,16]", "batch", batch)
    assert [f.what for f in findings(_Plan((stage,), (weights, split)))] == what  # type: ignore[arg-type]


class _Plan:
    """The part of a plan that is searched."""

    num_microbatches = 1

    def __init__(self, stages: tuple[Stage, ...], inputs: tuple[InputRecord, ...]) -> None:
        self.stages, self.inputs = stages, inputs

    @property
    def content(self) -> _Plan:
        return self


def test_a_stage_with_little_work_is_found() -> None:
    stages = tuple(Stage((("x", 4),), tuple(range(4)), (), s, s, Memory()) for s in (1.0, 1.0, 0.2))
    assert [f.instead for f in findings(_Plan(stages, ()))] == [{"num_stages": 1}, {"num_stages": 2}]  # type: ignore[arg-type]


def test_a_drawn_model_is_the_same_for_the_same_seed() -> None:
    assert [draw(1, n).name for n in range(5)] == [draw(1, n).name for n in range(5)]
    assert len({draw(1, n).name.partition(",")[0] for n in range(30)}) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
def test_findings_in_free_plans_are_explained_by_prices(number: int) -> None:
    row = judged(draw(0, number))
    assert not row["faults"]
