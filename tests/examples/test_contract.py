"""What every example promises: shapes, dtypes, determinism, a loss that falls, published sizes."""

import ast
import functools
import inspect
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import gpt, llama, mlp, moe, wide_resnet
from examples._common import count_params
from examples._run import main
from tests.examples.quick import quick_jit, quick_metrics

MODULES = [mlp, gpt, llama, moe, wide_resnet]
TRANSFORMERS = [gpt, llama, moe]
each_module = pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.split(".")[-1])

# Billions of parameters: the figure published for the model where there is one, else its name's.
PUBLISHED = [
    (gpt, "125M", 0.125),
    (gpt, "350M", 0.355),
    (gpt, "760M", 0.760),
    (gpt, "1.3B", 1.3),
    (gpt, "2.6B", 2.6),
    (gpt, "6.7B", 6.7),
    (gpt, "15B", 15.4),
    (gpt, "39B", 39.1),
    (gpt, "76B", 76.1),
    (gpt, "175B", 174.6),
    (gpt, "1T", 1008.0),
    (llama, "8B", 8.03),
    (llama, "70B", 70.55),
    (llama, "405B", 405.85),
    (moe, "380M", 0.380),
    (moe, "690M", 0.690),
    (moe, "1.3B", 1.3),
    (moe, "2.4B", 2.4),
    (moe, "7.1B", 7.1),
    (moe, "10B", 10.0),
    (moe, "27B", 27.0),
    (moe, "70B", 70.0),
    (moe, "140B", 140.0),
    (wide_resnet, "250M", 0.250),
    (wide_resnet, "500M", 0.500),
    (wide_resnet, "1B", 1.0),
    (wide_resnet, "2B", 2.0),
    (wide_resnet, "4B", 4.0),
    (wide_resnet, "6.8B", 6.8),
    (wide_resnet, "13B", 13.0),
]


def signature(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype), leaf.weak_type), tree)


@functools.cache
def arguments(module: ModuleType) -> Any:
    """The arguments of the tiny preset."""
    return module.build()[1]


@functools.cache
def tiny_run(module: ModuleType) -> tuple[Any, Any, list[float]]:
    """The arguments, the last state and the losses of six steps of the tiny preset."""
    step, (state, batch) = module.build()
    compiled = quick_jit(step)
    losses = []
    last = state
    for _ in range(6):
        last, metrics = compiled(last, batch)
        losses.append(float(metrics["loss"]))
    return (state, batch), last, losses


@pytest.mark.few(2)
@each_module
def test_loss_falls_and_everything_stays_finite(module: ModuleType) -> None:
    _, last, losses = tiny_run(module)
    assert losses[-1] < losses[0] - 0.1
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(last["params"]))
    assert int(last["step"]) == 6


@each_module
def test_state_keeps_its_structure_shapes_and_dtypes(module: ModuleType) -> None:
    step, args = module.build(abstract=True)
    assert signature(jax.eval_shape(step, *args)[0]) == signature(args[0])


@each_module
def test_abstract_arguments_match_concrete_ones(module: ModuleType) -> None:
    args = arguments(module)
    _, shapes = module.build(abstract=True)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
    assert signature(shapes) == signature(args)


@each_module
def test_build_is_deterministic_and_the_seed_counts(module: ModuleType) -> None:
    args = arguments(module)
    again = module.build()[1]
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(args), jax.tree.leaves(again), strict=True))
    other = module.build(seed=1)[1]
    assert not all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(args), jax.tree.leaves(other), strict=True))


@pytest.mark.few(2)
@each_module
def test_float64_reaches_every_leaf(module: ModuleType) -> None:
    with jax.enable_x64(True):
        step, args = module.build(abstract=True, dtype=jnp.float64)
        state, metrics = jax.eval_shape(step, *args)
        leaves = jax.tree.leaves((args, state, metrics))
        assert {str(leaf.dtype) for leaf in leaves} == {"float64", "int32"}
        assert signature(state) == signature(args[0])


@pytest.mark.few(2)
@each_module
def test_float32_stays_float32_under_x64(module: ModuleType) -> None:
    with jax.enable_x64(True):
        step, args = module.build(abstract=True)
        state, metrics = jax.eval_shape(step, *args)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves((args, state, metrics))} == {"float32", "int32"}


@pytest.mark.slow
@pytest.mark.parametrize("module", TRANSFORMERS, ids=lambda m: m.__name__.split(".")[-1])
def test_float64_and_float32_agree(module: ModuleType) -> None:
    narrow = tiny_run(module)[2][0]
    with jax.enable_x64(True):
        # Drawn in float32, so that both runs start at the same point.
        state, batch = jax.tree.map(
            lambda leaf: leaf.astype("float64") if leaf.dtype == "float32" else leaf, tiny_run(module)[0]
        )
        step, _ = module.build(abstract=True, dtype="float64")
        wide = float(quick_metrics(step)(state, batch)["loss"])
    assert narrow == pytest.approx(wide, abs=1e-5)


@pytest.mark.few(2)
@each_module
def test_half_precision_keeps_a_float32_master_copy(module: ModuleType) -> None:
    step, args = module.build(abstract=True, dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(args[0])} == {"float32", "int32"}
    assert "bf16" in str(jax.make_jaxpr(step)(*args))


def test_float64_without_x64_is_refused() -> None:
    with jax.enable_x64(False), pytest.raises(ValueError, match="jax_enable_x64"):
        mlp.build(dtype="float64")


@each_module
def test_unknown_override_names_the_known_ones(module: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"unknown override depth; known: .*batch, .*dtype"):
        module.build(depth=3)


@each_module
def test_unknown_preset_names_the_known_ones(module: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"no preset 'huge'; known: tiny, small"):
        module.build("huge")


@pytest.mark.slow
@pytest.mark.parametrize("module", TRANSFORMERS, ids=lambda m: m.__name__.split(".")[-1])
def test_transformer_overrides(module: ModuleType) -> None:
    sizes = {
        "layers": 4, "hidden": 48, "ffn": 80, "heads": 6, "kv_heads": 3, "vocab": 64, "seq": 8, "batch": 4,
    }  # fmt: skip
    extra = {"group": 8} if module is moe else {}
    step, (state, batch) = module.build(abstract=True, dtype="float32", **sizes, **extra)
    new, metrics = jax.eval_shape(step, state, batch)
    assert batch["tokens"].shape == batch["labels"].shape == (4, 8)
    shapes = {leaf.shape[-2:] for leaf in jax.tree.leaves(new["params"])}
    assert {(64, 48), (48, 48), (48, 24), (48, 80), (80, 48)} <= shapes
    assert metrics["loss"].shape == ()


@pytest.mark.parametrize("module", TRANSFORMERS, ids=lambda m: m.__name__.split(".")[-1])
def test_sizes_that_do_not_divide_are_refused(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="is not a multiple of"):
        module.build(heads=5)
    with pytest.raises(ValueError, match="heads by kv heads: 8 is not a multiple of 3"):
        module.build(heads=8, kv_heads=3)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("module", "preset", "billions"), PUBLISHED, ids=[f"{m.__name__.split('.')[-1]}-{p}" for m, p, _ in PUBLISHED]
)
def test_published_sizes(module: ModuleType, preset: str, billions: float) -> None:
    _, (state, _) = module.build(preset, abstract=True)
    assert count_params(state["params"]) / 1e9 == pytest.approx(billions, rel=0.04)


def test_every_published_preset_is_checked() -> None:
    named = {(module, preset) for module, preset, _ in PUBLISHED}
    presets = {(m, p) for m in MODULES for p in m.PRESETS if p not in ("tiny", "small", "large")}
    assert named == presets


@each_module
def test_module_level_step_takes_its_example_args(module: ModuleType) -> None:
    args = module.example_args()
    state, metrics = jax.eval_shape(module.train_step, *args)
    assert signature(state) == signature(args[0])
    assert "loss" in metrics


@each_module
def test_no_example_imports_autopar(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "jax" in names
    assert not any(name.split(".")[0] == "autopar" for name in names)


def test_command_line_trains(capsys: pytest.CaptureFixture[str]) -> None:
    losses = main(mlp.build, mlp.PRESETS, ["--steps", "3", "--set", "hidden=16", "--set", "optimizer=adam"])
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "1,088 parameters" in capsys.readouterr().out  # 4 layers of 16 * 16 + 16


@pytest.mark.parametrize("argument", ["bogus=1", "novalue", "optimizer=lion"])
def test_command_line_refuses_bad_overrides(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(mlp.build, mlp.PRESETS, ["--set", argument])
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        ("layers", (3, np.int64(3)), (None, "abc", 1e3, True, -1)),
        ("clip", (None, 2, 0.5, np.float32(0.5)), ("a", True)),
        ("kv_heads", (None, 2), (-1, 0.5)),
        ("scan", (True,), (1, "yes", None)),
    ],
)
def test_overrides_have_the_type_of_their_field(field: str, right: tuple[Any, ...], wrong: tuple[Any, ...]) -> None:
    for value in right:
        gpt.build(abstract=True, **{field: value})
    for value in wrong:
        with pytest.raises(TypeError, match=f"{field}=.* is no value of {field}"):
            gpt.build(abstract=True, **{field: value})
