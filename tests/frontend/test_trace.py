"""Shape of the graph: what is opened, kept, removed and named."""

from __future__ import annotations

import enum
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.config import remat3

from autopar.errors import TraceError
from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.frontend.attrs import attrs_of
from autopar.ir import Literal, fingerprint, graph_text
from tests.frontend.reference import check, primitives, traced

X = jnp.ones((3, 3))


def test_calls_are_opened() -> None:
    inner = jax.jit(lambda x: jax.jit(jnp.sin)(x) + 1)
    assert primitives(traced(lambda x: inner(x) * 2, X)) == ["sin", "add", "mul"]
    assert primitives(traced(jax.nn.relu, X)) == ["max"]


def test_remat_keeps_a_barrier_where_it_is_differentiated() -> None:
    block = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    found = traced(jax.grad(lambda x: block(x).sum()), X)
    assert primitives(found).count("optimization_barrier") == 1
    assert all("recomputed" in op.marks for op in found.graph.operators if op.primitive == "sin")
    assert "optimization_barrier" not in primitives(traced(block, X))
    free = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=False)
    assert "optimization_barrier" not in primitives(traced(jax.grad(lambda x: free(x).sum()), X))


def test_remat_in_jaxs_newer_form_is_lowered_to_arrays() -> None:
    with remat3(True):
        block = jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))
        assert jax.make_jaxpr(block)(X).jaxpr.is_high
        assert primitives(traced(block, X)) == ["cos", "sin"]


def test_tokens_among_the_results_are_an_error() -> None:
    with pytest.raises(TraceError, match="returns a token"):
        traced(jax.lax.create_token, X)


def test_loops_and_branches_keep_regions() -> None:
    found = traced(lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x), X)
    (scan,) = (op for op in found.graph.operators if op.primitive == "scan")
    assert [name for name, _ in scan.regions] == ["body"]
    assert scan.attrs == (("length", 3), ("num_carry", 1), ("num_consts", 0), ("reverse", False))
    found = traced(lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, x)), X)
    (loop,) = found.graph.operators
    assert [name for name, _ in loop.regions] == ["cond", "body"]
    assert [v.name for v in loop.results] == ["while.0:0", "while.0:1"]
    found = traced(lambda x, i: lax.switch(i, [jnp.sin, jnp.cos, lambda x: x], x), X, 1)
    assert [name for name, _ in found.graph.operators[-1].regions] == ["0", "1", "2"]


def test_dead_code_is_removed_and_effects_are_kept() -> None:
    def fn(x: Any) -> Any:
        jnp.cos(x) @ x
        jax.debug.print("sum {}", x.sum())
        return jnp.sin(x)

    found = traced(fn, X)
    assert primitives(found) == ["reduce_sum", "debug_print", "sin"]
    assert found.graph.operators[1].effects != ()
    assert found.graph.operators[1].results == ()


def test_arrays_that_the_function_closes_over_are_inputs() -> None:
    table = jnp.arange(9.0).reshape(3, 3)
    found = traced(lambda x: x @ table + np.ones((3, 3), np.float32), X)
    assert [(i.name, i.role) for i in found.graph.inputs][1:] == [
        ("closed_over.0", "constant"),
        ("closed_over.1", "constant"),
    ]
    assert [c.shape for c in found.closed_over] == [(3, 3), (3, 3)]


@pytest.mark.slow
def test_static_arguments_by_position_and_by_name() -> None:
    def fn(x: Any, mode: str, times: int) -> Any:
        return sum([x * len(mode)] * times)

    ways = [
        ((X, "ab", 2), {}, SignatureOptions(static_argnums=(2,))),
        ((X, "ab", 2), {}, SignatureOptions(static_argnames=("times",))),
        ((X, "ab"), {"times": 2}, SignatureOptions(static_argnums=(2,))),
        ((X,), {"times": 2, "mode": "ab"}, SignatureOptions(static_argnames=("times", "mode"))),
        ((X, "ab", 2), {}, SignatureOptions(static_argnums=(-1,))),
        ((X, "ab", 2), {}, SignatureOptions(static_numbers=True)),
    ]
    prints = {fingerprint(check(fn, *args, options=options, **kwargs).graph) for args, kwargs, options in ways}
    assert len(prints) == 1
    assert primitives(traced(fn, X, "ab", 2, options=ways[0][2])).count("add") >= 1


def test_signatures_tell_programs_apart() -> None:
    def signature(*args: Any, **kwargs: Any) -> Any:
        return flatten_call(lambda *a, **k: None, args, kwargs, SignatureOptions())[0]

    assert signature(X, 1, k="a") == signature(X + 1, 2, k="a")
    assert hash(signature(X, 1, k="a")) == hash(signature(X + 1, 2, k="a"))
    assert signature(X) == signature(np.ones((3, 3))) == signature(jax.ShapeDtypeStruct((3, 3), jnp.float32))
    different = [
        signature(X), signature(X[0]), signature(X.astype(int)), signature(1.0), signature(1), signature(True),
        signature(1j), signature("1"), signature(None), signature([X]), signature((X,)), signature(x=X),
        signature(jnp.float32(1)), signature(b"a"),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_results_that_are_no_arrays_come_back_as_they_are() -> None:
    marker = object()
    found = traced(lambda x: {"a": x, "b": "text", "c": None, "d": (1, marker), "e": 2.5}, X)
    assert [o.path for o in found.graph.outputs] == ["['a']", "['d'][0]", "['e']"]
    assert found.results([X, 1, 2.5]) == {"a": X, "b": "text", "c": None, "d": (1, marker), "e": 2.5}


def test_names_are_deterministic_and_begin_with_the_scope() -> None:
    def fn(x: Any) -> Any:
        with jax.named_scope("layer0"):
            x = jnp.sin(x)
        return jax.grad(lambda x: jnp.cos(x).sum())(x)

    first, second = (traced(fn, X) for _ in range(2))
    assert graph_text(first.graph) == graph_text(second.graph)
    assert first.graph.operators[0].id == "layer0/sin.0"
    assert first.graph.operators[0].scope == "layer0"
    assert any("backward" in op.marks for op in first.graph.operators)


def test_a_change_elsewhere_keeps_ids() -> None:
    def fn(x: Any, more: bool) -> Any:
        with jax.named_scope("a"):
            x = jnp.sin(x)
        if more:
            with jax.named_scope("b"):
                x = jnp.sin(x) + 1
        with jax.named_scope("c"):
            return jnp.sin(x) * jnp.sin(x + 1)

    def ids(more: bool) -> set[str]:
        found = traced(fn, X, more, options=SignatureOptions(static_argnums=(1,)))
        return {op.id for op in found.graph.operators if op.scope != "b"}

    assert ids(True) == ids(False)


def test_source_lines_are_the_users() -> None:
    found = traced(lambda x: jnp.sin(x) @ x, X)
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert all(op.source.startswith(f"test_trace.py:{line}") for op in found.graph.operators)
    assert "/" not in found.graph.operators[0].source


def test_names_of_callables() -> None:
    class Model:
        def __call__(self, x: Any) -> Any:
            return x * 2

    def doubled(x: Any, by: Any = 2) -> Any:
        return x * by

    assert traced(doubled, X).graph.name == "doubled"
    assert traced(jax.jit(doubled), X).graph.name == "doubled"
    assert traced(Model(), X).graph.name == "Model"
    assert traced(functools.partial(doubled, by=3), X).graph.name == "doubled"
    assert [i.name for i in traced(doubled, X, by=4).graph.inputs] == ["x", "by"]


LITERALS = [
    (lambda x: x * jnp.inf, "inf"),
    (lambda x: x * -jnp.inf, "-inf"),
    (lambda x: x * jnp.nan, "nan"),
    (lambda x: x.astype(jnp.bfloat16) * 0.1, "0.10009765625"),
    (lambda x: x.astype(jnp.float16) * 65504.0, "65504.0"),
    (lambda x: x.astype(jnp.float8_e5m2) * jnp.float8_e5m2(0.1), "0.09375"),
    (lambda x: x.astype(jnp.uint32) * jnp.uint32(2**32 - 1), "4294967295"),
    (lambda x: x.astype(jnp.int4) * jnp.int4(-8), "-8"),
    (lambda x: x.astype(jnp.complex64) * (1 - 2j), "(1-2j)"),
    (lambda x: x.astype(bool) ^ True, "True"),
    (lambda x: x * -0.0, "-0.0"),
]


@pytest.mark.parametrize(("fn", "text"), LITERALS, ids=[text for _, text in LITERALS])
def test_text_of_literals(fn: Any, text: str) -> None:
    found = [o for op in check(fn, X).graph.operators for o in op.operands if isinstance(o, Literal)]
    assert [o.text for o in found] == [text]


def test_literals_of_64_bits(x64: None) -> None:
    def fn(x: Any, n: Any) -> Any:
        return n + (2**63 - 1), n + jnp.uint64(2**64 - 1).astype(int), x * 1e308, x + 0.1

    found = check(fn, np.ones(3), np.arange(3))
    texts = {o.text for op in found.graph.operators for o in op.operands if isinstance(o, Literal)}
    assert {str(2**63 - 1), "1e+308", "0.1"} <= texts


class Mode(enum.IntEnum):
    FAST = 3


def test_attributes_are_plain() -> None:
    plain = attrs_of({
        "mode": Mode.FAST, "number": np.float64(1.5), "flag": np.bool_(True), "text": np.str_("a"),
        "count": np.int32(3),
        "dtype": np.dtype("float32"), "kind": np.float16, "list": [1, (2.0, None)], "f": lambda: 0, "nothing": None,
        "one": np.array([5]),
    })  # fmt: skip
    assert plain == (
        ("count", 3), ("dtype", "f32"), ("flag", True), ("kind", "f16"), ("list", (1, (2.0, None))), ("mode", "FAST"),
        ("nothing", None), ("number", 1.5), ("one", 5), ("text", "a"),
    )  # fmt: skip
    assert {type(v) for _, v in plain} == {int, str, bool, tuple, type(None), float}


# -- errors -----------------------------------------------------------------------------------


def concrete_if(x: Any) -> Any:
    if x[0, 0] > 0:  # here
        return x
    return -x


def concrete_int(x: Any) -> Any:
    return x * int(x[0, 0])  # here


def concrete_numpy(x: Any) -> Any:
    return np.asarray(x) + 1  # here


def concrete_shape(x: Any) -> Any:
    return jnp.zeros(x[0, 0].astype(int))  # here


def concrete_slice(x: Any) -> Any:
    return x[: x[0, 0].astype(int)]  # here


def concrete_nonzero(x: Any) -> Any:
    return jnp.nonzero(x)  # here


def concrete_mask(x: Any) -> Any:
    return x[x > 0]  # here


def concrete_static(x: Any) -> Any:
    return jax.jit(lambda n: jnp.zeros(n), static_argnums=0)(x)  # here


ERRORS = [
    concrete_if,
    concrete_int,
    concrete_numpy,
    concrete_shape,
    concrete_slice,
    concrete_nonzero,
    concrete_mask,
    concrete_static,
]


@pytest.mark.parametrize("fn", ERRORS, ids=lambda f: f.__name__)
def test_values_that_are_not_known_are_errors_with_the_users_line(fn: Any) -> None:
    signature, _ = flatten_call(fn, (X,), {}, SignatureOptions())
    with pytest.raises(TraceError) as caught:
        trace(fn, signature)
    lines, first = inspect.getsourcelines(fn)
    line = first + next(n for n, text in enumerate(lines) if "# here" in text)
    assert caught.value.source == f"test_trace.py:{line} ({fn.__name__})"
    assert fn.__name__ in caught.value.fact
    assert caught.value.cause
    assert caught.value.remedy
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("error", [ValueError("mine"), TypeError("mine"), IndexError("mine"), KeyError("mine")])
def test_errors_of_the_function_itself_pass_through(error: Exception) -> None:
    def fn(x: Any) -> Any:
        raise error

    with pytest.raises(type(error), match="mine"):
        traced(fn, X)


def test_shape_errors_stay_jaxs() -> None:
    with pytest.raises(TypeError, match="contracting dimensions"):
        traced(lambda x: x @ jnp.ones((7, 7)), X)


def test_values_of_another_trace_are_errors() -> None:
    kept = []
    traced(lambda x: kept.append(x * 2) or x, X)
    with pytest.raises(TraceError, match="another trace"):
        traced(lambda x: x + kept[0], X)


def test_numbers_that_do_not_fit_are_errors() -> None:
    with pytest.raises(TraceError, match=str(2**80)):
        traced(lambda x, n: x * n, X, 2**80)


def test_arguments_that_cannot_be_hashed_are_errors() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(TraceError, match="cannot be hashed"):
        traced(lambda x, y: x, X, Unhashable())
    with pytest.raises(TraceError, match="cannot be hashed"):
        traced(lambda x, y: x, X, [1], options=SignatureOptions(static_argnums=(1,)))
