"""StableHLO in, annotated StableHLO out: values of the reader, what is written, what XLA makes of it."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax import export, lax

import autopar
from autopar.api.annotate import compile_annotated
from autopar.cli import main
from autopar.errors import TraceError
from autopar.frontend.stablehlo import read_module, traced_module
from autopar.frontend.stablehlo.interpret import ModuleInterpreter
from autopar.ir import Layout
from examples import gpt

HERE = Path(__file__).parent
TORCH = ("torch_mlp", "torch_conv", "torch_transformer")
S = jax.ShapeDtypeStruct
RANDOM = np.random.default_rng(0)


def mlp(p, x):
    for w in p:
        x = jax.nn.relu(x @ w)
    return x


def train_step(state, batch):
    def loss(p):
        return jnp.mean((mlp(p, batch["x"]) - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt"], grads)
    return {"params": jax.tree.map(lambda a, m: a - 0.1 * m, state["params"], momentum), "opt": momentum}, value


PARAMS = [S((512, 2048), "float32"), S((2048, 512), "float32")]
STEP = ({"params": PARAMS, "opt": PARAMS}, {"x": S((256, 512), "float32"), "y": S((256, 512), "float32")})


def scanned(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w[0]) @ w[1], jnp.sum(h)), x, p)


def many_operations(x, n, words):
    """Operations of many kinds, on small arrays."""
    y = jnp.pad(x[:, ::2], ((1, 0), (0, 1))) + lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 2), "SAME")[:1, :1]
    top, at = lax.top_k(x, 3)
    table = jnp.zeros((9, 4)).at[n].add(1.5).at[0, 1].set(jnp.max(x))
    z = lax.cond(n[0] > 2, lambda: jnp.cumsum(x, 1), lambda: jnp.flip(x, 0) ** 2)
    image = lax.conv_general_dilated(x[None, :, :, None], jnp.ones((2, 2, 1, 3)), (1, 1), "SAME",
                                     dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
    bits = lax.bitcast_convert_type(x, jnp.uint32) >> jnp.uint32(3) ^ words
    return (
        [y, top, at, table[n], z, image, bits, jnp.sort(x, axis=1), jnp.argmax(x, 1), jax.nn.gelu(x)],
        {"norm": jnp.linalg.norm(x), "while": lax.while_loop(lambda c: c < 50, lambda c: c * 2 + 1, n[1])},
        lax.dynamic_update_slice(x, x[:2, :2] * 2, (n[0], n[1])).astype(jnp.bfloat16),
    )


def arrays_of(shapes):
    return jax.tree.map(lambda s: jnp.asarray(RANDOM.standard_normal(s.shape), s.dtype), shapes)


def run(module, leaves):
    return jax.jit(ModuleInterpreter(module).run)(*leaves)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(("computation", "values", "start"), [
    (lax.max, [-9, -7], -3), (lax.min, [9, 7], 5), (lax.max, [-9.0, -7.0], -3.0), (lax.max, [-9, -7], -(2**31)),
    (lax.min, [9, 7], 2**31 - 1), (lax.max, [-9.0, -7.0], -np.inf),
])  # fmt: skip
def test_a_reduction_begins_where_the_program_says(computation, values, start, windows):
    def reduced(x):
        first = jnp.asarray(start, x.dtype)
        if windows:
            return lax.reduce_window(x, first, computation, (2,), (1,), "VALID")
        return lax.reduce(x, first, computation, (0,))

    x = jnp.asarray(values, jnp.int32 if isinstance(start, int) else jnp.float32)
    module = read_module(export.export(jax.jit(reduced))(x).mlir_module())
    (found,) = jax.tree.leaves(run(module, [x]))
    assert found.tolist() == reduced(x).tolist()


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (train_step, STEP),
        (scanned, ([S((3, 8, 16), "float32"), S((3, 16, 8), "float32")], S((4, 8), "float32"))),
    ],
    ids=["train_step", "scanned"],
)
def test_what_is_read_computes_the_same(fn, args):
    given = arrays_of(args)
    exported = export.export(jax.jit(fn))(*given)
    for source in (exported.mlir_module(), exported.mlir_module_serialized):
        got = run(read_module(source), jax.tree.leaves(given))
        for a, b in zip(got, jax.tree.leaves(fn(*given)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_operations_of_many_kinds_compute_the_same():
    x = jnp.asarray(RANDOM.standard_normal((6, 8)), jnp.float32)
    given = (x, jnp.asarray([3, 1, 8], jnp.int32), jnp.arange(48, dtype=jnp.uint32).reshape(6, 8))
    exported = export.export(jax.jit(many_operations))(*given)
    got = run(read_module(exported.mlir_module_serialized), given)
    for a, b in zip(got, jax.tree.leaves(many_operations(*given)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-5, atol=1e-6)


def test_roles_and_lines_are_those_of_the_step():
    module = read_module(export.export(jax.jit(train_step))(*STEP).mlir_module_serialized)
    graph = traced_module(module).graph
    roles = {i.name: i.role for i in graph.inputs}
    assert roles["state['params'][1]"] == "parameter" and roles["state['opt'][0]"] == "optimizer"
    assert roles["batch['x']"] == roles["batch['y']"] == "batch"
    product = next(op for op in graph.operators if op.primitive == "dot_general")
    assert re.match(r"test_annotate\.py:\d+ \(mlp\)", product.source)


def test_an_unknown_operation_is_named_with_its_line():
    text = """
module @m {
  func.func public @main(%arg0: tensor<8x4xf32>) -> tensor<8x4xf32> {
    %0 = stablehlo.cosine %arg0 : tensor<8x4xf32>
    %1 = "stablehlo.cross-replica-sum"(%0) <{replica_groups = dense<0> : tensor<1x1xi64>}> :
      (tensor<8x4xf32>) -> tensor<8x4xf32>
    return %1 : tensor<8x4xf32>
  }
}
"""
    with pytest.raises(TraceError, match="cross-replica-sum") as error:
        autopar.annotate(text, cluster="local-cpu")
    assert "line 5" in str(error.value)


@pytest.mark.parametrize(
    ("source", "fact"),
    [
        ("module {\n  oh\n}", "cannot be read"),
        ("module {\n}", "no function"),
        ("module {\n func.func @main(%a: tensor<?xf32>) -> tensor<?xf32> {\n return %a : tensor<?xf32>\n}\n}", "shape"),
        (Path("/nowhere.mlir"), "cannot be read"),
    ],
)
def test_modules_that_cannot_be_planned(source, fact):
    with pytest.raises(TraceError, match=fact):
        autopar.annotate(source, cluster="local-cpu")


def layouts_in(text):
    return re.findall(r"sdy\.sharding = #sdy\.sharding<@mesh, (\[[^\]]*\])", text)


def sums_of(verification):
    return {
        (r.kind, r.axis, r.bytes): (r.predicted, r.compiled)
        for r in verification.rows
        if r.bytes > 64 and (r.predicted or r.compiled)
    }


def annotated(fn, *args, **options):
    return autopar.annotate(export.export(jax.jit(fn))(*args).mlir_module_serialized, cluster="local-cpu", **options)


def test_arguments_lie_as_the_plan_says():
    made = annotated(train_step, *STEP)
    sizes = made.plan.stages[0].mesh_shape
    for text, record in zip(layouts_in(made.text), made.plan.content.inputs, strict=False):
        dims = [tuple(re.findall(r'"(\w+)"', d)) for d in re.findall(r"\{([^}]*)\}", text)]
        assert Layout.parse(record.layout).dims == tuple(dims)
    assert f'<["x"={sizes["x"]}' in made.text and f"mhlo.num_partitions = {8}" in made.text


def test_gradients_send_the_bytes_of_the_plan():
    """XLA does a reduce-scatter, a sum over the other axis and a gather as one sum over both: the same bytes."""

    def gradients(p, x):
        return jax.grad(lambda p: jnp.mean(mlp(p, x) ** 2))(p)

    shapes = ([S((64, 128), "float32"), S((128, 64), "float32")], S((4096, 64), "float32"))
    found = compile_annotated(annotated(gradients, *shapes, batch=[2]))
    assert found.predicted_sent_bytes == pytest.approx(2 * 2 * 7 / 8 * 64 * 128 * 4)  # two sums over 8 devices
    assert found.sent_bytes == pytest.approx(found.predicted_sent_bytes)


def test_a_train_step_sends_at_most_twice_the_bytes_of_the_plan():
    found = compile_annotated(annotated(train_step, *STEP))
    assert 0 < found.sent_bytes <= 2 * found.predicted_sent_bytes


@pytest.mark.slow
def test_what_a_gpt_sends_more_than_planned_has_three_causes():
    """The figures of docs/command-line.md: sums for scatters on a CPU, sums at once, gathers that XLA adds."""
    step, args = gpt.build("tiny", abstract=True, layers=2)
    found = compile_annotated(annotated(step, *args))
    assert found.predicted_sent_bytes == pytest.approx(575e3, rel=0.02)
    assert found.sent_bytes == pytest.approx(1.06e6, rel=0.02)
    more = collections.defaultdict(float)
    for r in found.rows:
        more[r.kind] += r.compiled_wire_bytes - r.predicted_wire_bytes
    scatters_as_sums = found.sent_bytes - found.predicted_sent_bytes - sum(more.values())
    assert scatters_as_sums == pytest.approx(255e3, rel=0.05)
    assert more["all-reduce"] == pytest.approx(151e3, rel=0.05)
    assert more["all-gather"] == pytest.approx(125e3, rel=0.05)


def test_a_loop_over_layers_sums_once_an_iteration():
    shapes = ([S((4, 64, 256), "float32"), S((4, 256, 64), "float32")], S((256, 64), "float32"))
    made = annotated(lambda p, x: scanned(p, x)[0], *shapes, batch=[2])
    assert "stablehlo.while" in made.text
    rows = sums_of(compile_annotated(made))
    assert rows and all(planned == compiled for planned, compiled in rows.values())
    assert {count for count, _ in rows.values()} == {4.0}


def test_a_forward_pass_over_a_large_batch_sends_nothing():
    shapes = ([S((64, 128), "float32"), S((128, 64), "float32")], S((4096, 64), "float32"))
    assert not sums_of(compile_annotated(annotated(lambda p, x: mlp(p, x), *shapes, batch=[2])))


@pytest.mark.parametrize("name", TORCH)
def test_modules_from_pytorch_compile_to_the_planned_collectives(name):
    """Forward passes in eval mode, exported by torch 2.13 and torchax 0.0.13."""
    made = autopar.annotate(HERE / f"{name}.mlir", cluster="local-cpu")
    assert made.plan.stages[0].operators
    found = compile_annotated(made)
    if name == "torch_transformer":  # XLA gathers twice what the plan exchanges once
        assert found.sent_bytes <= 2 * found.predicted_sent_bytes
    else:
        assert all(planned == compiled for planned, compiled in sums_of(found).values())


def test_old_shardings_are_replaced(tmp_path):
    first = autopar.annotate(HERE / "torch_mlp.mlir", cluster="local-cpu")
    (tmp_path / "m.mlir").write_text(first.text)
    again = autopar.annotate(tmp_path / "m.mlir", cluster="local-cpu")
    assert again.text.count("sdy.mesh") == 1 and again.text.count("sdy.sharding") == first.text.count("sdy.sharding")
    assert any("replaced" in n for n in again.plan.notes)


def test_the_command_writes_module_and_plan(tmp_path):
    out, plan = tmp_path / "out.mlir", tmp_path / "plan.json"
    command = ["annotate", str(HERE / "torch_mlp.mlir"), "--cluster", "local-cpu", "-o", str(out), "--plan", str(plan)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert 'sdy.mesh @mesh = <["x"=' in out.read_text()
    assert autopar.Plan.load(plan).num_stages == 1
