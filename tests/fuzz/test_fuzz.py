"""A short run of the fuzzer, and what it rests on: programs from numbers, noise, shrinking, written tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests.fuzz.__main__ import Supervisor, _options, summary
from tests.fuzz.check import PADDED_EVERY, apart, check, check_program, configs, worst
from tests.fuzz.generate import generate
from tests.fuzz.operators import OPERATORS
from tests.fuzz.program import Program, Statement, Type, arguments, load, source
from tests.fuzz.shrink import shrunk
from tests.fuzz.terms import with_zero_terms
from tests.fuzz.worker import ENVIRONMENT
from tests.fuzz.written import as_test

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_short_run(tmp_path):
    command = [sys.executable, "-m", "tests.fuzz", "--programs", "6", "--plans", "1", "--seed", "1", "--seconds", "25"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sum(r["kind"] == "ok" for r in records) >= min(2, len(records)), summary(records)
    more = subprocess.run(
        [*command, "--out", str(tmp_path), "--resume", "--seconds", "0"], cwd=ROOT, capture_output=True, text=True
    )
    assert f"{len(records)} programs" in more.stdout


@pytest.mark.slow
def test_some_programs_run_with_dims_padded_inside():
    (plan,) = configs(PADDED_EVERY, 1)
    with jax.enable_x64(True):
        outcome = check_program(generate(301, PADDED_EVERY), (plan,))
    assert outcome.kind == "ok" and "dims padded inside" in outcome.primitives


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_longer_run(tmp_path):
    command = [sys.executable, "-m", "tests.fuzz", "--programs", "400", "--seed", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("said", "kind"), [((), "died"), (("start",), "invalid"), (("start", "plain"), "died")])
def test_only_a_death_in_the_plain_run_is_no_failure(tmp_path, said, kind):
    worker = tmp_path / "worker.py"
    lines = [f"print('{json.dumps({word: 0})}', flush=True)" for word in said]
    worker.write_text("\n".join(["import os", *lines, "os.abort()"]))
    found = Supervisor(_options(["--programs", "1", "--out", str(tmp_path)]), [str(worker)]).run()
    assert [r["kind"] for r in found] == [kind]


def test_a_number_is_a_program(x64):
    texts = [source(generate(3, n)) for n in range(3)]
    assert texts == [source(generate(3, n)) for n in range(3)]
    assert len(set(texts)) == 3


def test_programs_run(x64):
    for number in range(3):
        program = generate(8, number)
        args = arguments(program)
        shapes = jax.eval_shape(load(source(program)), *args)
        assert jax.tree.structure(shapes) == jax.tree.structure(jax.eval_shape(load(source(program, 0)), *args))


@pytest.mark.slow
def test_every_operator_is_made(x64):
    made = {s.operator for n in range(25) for s in generate(7, n).statements}
    assert len(made) > len(OPERATORS) // 2


def test_plans_take_turns():
    assert all(len(configs(n, count)) == count for n in range(8) for count in (1, 2, 4))
    assert {c for n in range(8) for c in configs(n, 1) if c[1] is None} == {((8,), None), ((2, 4), None)}


def test_differences():
    x = jnp.arange(4.0)
    assert apart(x, x) == 0
    assert apart(x.at[1].add(1e-3), x) > 1
    assert apart(x.at[1].set(jnp.nan), x) == float("inf")
    assert apart(x[:2], x) == float("inf")
    assert apart(jnp.arange(3), jnp.array([0, 1, 3])) == float("inf")


def test_wrong_unstable_and_invalid_are_told_apart(monkeypatch):
    x = jnp.arange(4.0)
    monkeypatch.setattr("tests.fuzz.check.run_planned", lambda fn, args, config: (fn(*args) * 1.1, set()))
    plans = [((8,), None)]
    assert check(jnp.sin, (x,), plans).kind == "wrong"
    assert check(jnp.sin, (x,), plans, [jnp.sin, lambda v: jnp.sin(v) * 2]).kind == "unstable"
    assert check(jnp.sin, (x,), plans, [jnp.sin]).kind == "wrong"
    assert check(lambda v: v @ jnp.ones(3), (x,), plans).kind == "invalid"

    def broken(fn, args, config):
        raise KeyError("gone")

    monkeypatch.setattr("tests.fuzz.check.run_planned", broken)
    assert check(jnp.sin, (x,), plans).kind == "crash"


def _scaled(x):
    scaled = jnp.sin(x) / jnp.zeros(())
    return scaled, jnp.log(jnp.zeros(4)), jnp.tanh(scaled)


_INF, _NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("scaled", "other", "finite", "kind"),
    [
        (_INF, -_INF, 0.0, "ok"),
        (_NAN, -_INF, 0.0, "unstable"),
        (-_INF, -_INF, 0.0, "wrong"),  # the other infinity
        (1.0, -_INF, 0.0, "wrong"),
        (_INF, _NAN, 0.0, "wrong"),  # it comes of no product
        (_NAN, -_INF, _NAN, "wrong"),
        (_NAN, -_INF, 1e-3, "wrong"),
    ],
)
def test_only_products_of_what_is_not_finite_explain_nan(monkeypatch, scaled, other, finite, kind):
    def planned(fn, args, config):
        a, b, c = fn(*args)
        return (a.at[1].set(scaled), b.at[1].set(other), c.at[1].add(finite)), set()

    monkeypatch.setattr("tests.fuzz.check.run_planned", planned)
    assert check(_scaled, (jnp.arange(1.0, 4.0),), [((8,), None)]).kind == kind


@pytest.mark.slow
def test_a_zero_in_every_factor_changes_no_finite_value():
    def step(x, w):
        def loss(w):
            hidden = jax.checkpoint(lambda v: jax.nn.relu(v @ w) * 0.5)(x)
            return jnp.mean(jax.lax.scan(lambda c, r: (c * r, c), jnp.ones(8), hidden)[1] / 3)

        return {"loss": jax.value_and_grad(loss)(w), "count": jnp.arange(4) * 2}

    args = (jnp.arange(24.0).reshape(4, 6) / 24, jnp.ones((6, 8)))
    assert worst(with_zero_terms(step)(*args), step(*args))[0] == 0


def _chain() -> Program:
    kind = Type("float", (4,))
    lines = [Statement("unary", ((f"v{n + 1}", kind),), f"jnp.{f}({'v' + str(n) if n else 'a0'})") for n, f in
             enumerate(("sin", "tanh", "exp", "cos"))]  # fmt: skip
    return Program((("a0", kind),), tuple(lines), ("v4",), "adam")


def test_shrinking_keeps_what_fails():
    small = shrunk(_chain(), lambda p: "jnp.exp" in source(p))
    assert [s.text for s in small.statements if s.operator != "given"] == ["jnp.exp(v2)"]
    assert small.mode == "forward"


def test_a_written_test_runs(x64):
    text = as_test(replace(_chain(), mode="grad"), ((8,), None), "an example")
    scope = {}
    exec(compile(text, "test_written.py", "exec"), scope)
    params, moments, data = scope["arguments"]()
    assert params[0].shape == (4,) and moments == () and data == ()
    assert "jnp.exp" in text and ENVIRONMENT["JAX_ENABLE_X64"] == "1"
