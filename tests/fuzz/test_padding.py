"""Random programs with all dims padded that can be: for seven devices, which divide few of the sizes drawn."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import autopar
from autopar.errors import AutoparError
from autopar.frontend import Traced
from autopar.lower.padded import padded
from autopar.lower.retrace import Recorder, run_whole
from autopar.sharding.padding import candidates
from tests.fuzz.check import worst
from tests.fuzz.generate import generate
from tests.fuzz.program import arguments, load, source
from tests.search.problems import toy

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
#: Units of what is allowed; see `tests.fuzz.check.apart`. Sums of padded dims are added in another order.
MOST = 10.0


def results(traced: Traced, form: Traced, leaves: Any) -> Any:
    """What ``form`` of a function returns, as far as ``traced`` computes it."""

    def run(*arrays: Any) -> list[Any]:
        names = [i.name for i in form.graph.inputs]
        env = run_whole(form.program, dict(zip(names, arrays, strict=True)), Recorder.after(form.program))
        pairs = zip(form.graph.outputs, traced.graph.outputs, strict=True)
        return [env[str(new.operand)] for new, old in pairs if isinstance(old.operand, str)]

    given = [*leaves, *traced.closed_over]
    return jax.jit(run).lower(*given).compile(QUICK)(*given)


def padded_classes(seed: int, index: int) -> int:
    """How many classes of dims of a program were padded; AssertionError where its values are others then."""
    program = generate(seed, index)
    step = load(source(program))
    try:
        jax.jit(step).lower(*arguments(program))
    except Exception:  # of any type: the program is none that jax takes
        return 0
    pure = autopar.parallelize(step, cluster=toy(8))._plain
    try:
        signature, leaves = pure.resolve(arguments(program), {})
    except AutoparError:
        return 0  # refused before anything is padded
    traced = pure.traced(signature)
    classes = candidates(traced.graph, 7, 9.0)
    form = padded(traced, [d for c in classes for d in c.dims(traced.graph)])
    if classes:
        off, where = worst(results(traced, form, leaves), results(traced, traced, leaves))
        assert off <= MOST, (seed, index, off, where)
    return len(classes)


@pytest.mark.slow
def test_a_few_programs() -> None:
    with jax.enable_x64(True):
        assert sum(padded_classes(1, index) for index in range(2)) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_programs() -> None:
    with jax.enable_x64(True):
        assert sum(padded_classes(2, index) for index in range(300)) > 300
