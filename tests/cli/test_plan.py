"""``autopar plan`` where it does what was asked."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autopar.plan import FORMAT_VERSION, Plan
from autopar.search import registry
from tests.cli.conftest import TRAIN, Run, Spawn

TARGET = "train.py:train_step"
CLUSTER = ("--cluster", "dgx-a100")


def planned(run: Run, *args: str) -> Plan:
    """The plan that ``--format json`` prints."""
    result = run("plan", *args, "--format", "json")
    assert result.exit_code == 0, result.output
    return Plan.from_json(result.stdout)


@pytest.mark.usefixtures("folder")
def test_text_is_the_plan_as_text(run: Run) -> None:
    result = run("plan", TARGET, *CLUSTER)
    assert result.exit_code == 0, result.output
    assert "dgx-a100: 1 x 8 A100" in result.stdout and "state['w']" in result.stdout
    assert "tracing" in result.stderr and "tracing" not in result.stdout


@pytest.mark.usefixtures("folder")
def test_alternatives_are_among_what_was_considered(run: Run) -> None:
    plan = planned(run, TARGET, *CLUSTER, "--alternatives", "--microbatches", "1")
    rows = {o.name: o for o in plan.content.search.considered}
    for name in ("data-parallel", "zero1", "zero2", "zero3", "megatron", "fsdp-tp"):
        seconds, memory = rows[name].step_time, rows[name].peak_memory
        assert seconds is not None and memory is not None
        assert seconds >= plan.step_time * (1 - 1e-9), name
    assert (rows["zero3"].peak_memory or 0) < (rows["data-parallel"].peak_memory or 0)
    assert rows["zero3"].peak_memory == planned(run, TARGET, *CLUSTER, "--search", "zero3").peak_memory


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_text_and_pages_are_against_alternatives_unless_asked_not_to(run: Run) -> None:
    step = (TARGET, *CLUSTER, "--microbatches", "1")
    assert "against alternatives" in run("plan", *step, "-o", "plan.json").stdout
    assert "megatron" not in Path("plan.json").read_text(encoding="utf-8")
    assert "against alternatives" not in run("plan", *step, "--no-alternatives").stdout
    page = run("plan", *step, "--format", "json", "-o", "page.html")
    assert "megatron" in Path("page.html").read_text(encoding="utf-8") and "megatron" not in page.stdout


def test_json_is_one_document_and_the_file_is_the_same(run: Run, folder: Path) -> None:
    result = run("plan", TARGET, *CLUSTER, "--format", "json", "-o", "plan.json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["autopar_plan"] == FORMAT_VERSION
    assert (folder / "plan.json").read_text(encoding="utf-8") == result.stdout
    assert Plan.load(folder / "plan.json").content.program == "train_step"


def test_html_goes_where_it_is_sent(run: Run, folder: Path) -> None:
    result = run("plan", TARGET, *CLUSTER, "--format", "html", "-o", "plan.json")
    assert result.exit_code == 0, result.output
    HTMLParser().feed(result.stdout)
    assert result.stdout.startswith("<!DOCTYPE html>")
    assert Plan.load(folder / "plan.json").num_stages == 1
    result = run("plan", TARGET, *CLUSTER, "--format", "html", "-o", "page.html")
    assert (result.exit_code, result.stdout) == (0, "")
    assert (folder / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.usefixtures("folder")
def test_quiet_says_nothing_but_the_result(run: Run) -> None:
    assert run("plan", TARGET, *CLUSTER, "-q").stderr == ""


@pytest.mark.usefixtures("folder")
def test_options_reach_the_plan(run: Run) -> None:
    plan = planned(run, TARGET, *CLUSTER, "--mesh", "8", "--donate", "0", "--search", "data-parallel", "--nodes", "1")
    assert plan.stages[0].mesh_shape == {"x": 8}
    assert plan.content.donated == ("state['w']",)
    assert plan.search.strategy == "data-parallel"
    assert planned(run, TARGET, *CLUSTER, "--nodes", "2", "--search", "replicated").stages[0].mesh_shape == {"x": 16}


@pytest.mark.usefixtures("folder")
def test_precision_and_formats_reach_the_plan(run: Run) -> None:
    asked = ("--search", "zero3", "--wire", "gradients=int8", "--wire", "weights=int4", "--precision", "bf16")
    plan = planned(run, TARGET, *CLUSTER, *asked)
    assert any("int4 in blocks of 256" in note for note in plan.content.notes)
    assert any("bf16" in r.type for r in plan.content.inputs) is False  # masters stay
    assert plan.content.fingerprint != planned(run, TARGET, *CLUSTER, "--search", "zero3").content.fingerprint


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--wire", "gradients", "is not ROLE=FORMAT"),
        ("--wire", "activations=int8", "not a role"),
        ("--wire", "weights=int3", "not a wire format"),
        ("--precision", "f64", "no precision"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_formats_that_are_none_are_wrong_usage(run: Run, option: str, value: str, says: str) -> None:
    result = run("plan", TARGET, *CLUSTER, option, value)
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.usefixtures("folder")
def test_options_of_a_pipeline_reach_the_plan(run: Run) -> None:
    sizes = ("--preset", "tiny", "--set", "layers=4", "--set", "hidden=32", "--set", "batch=32")
    cut = ("--stages", "2", "--microbatches", "4", "--schedule", "gpipe", "--remat", "full")
    plan = planned(run, "examples.mlp", "--cluster", "local-cpu", *sizes, *cut)
    assert (plan.num_stages, plan.num_microbatches, plan.schedule) == (2, 4, "gpipe")
    assert [s.form.remat for s in plan.stages] == ["full", "full"]


@pytest.mark.usefixtures("folder")
def test_a_module_is_as_good_as_its_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    by_file = planned(run, TARGET, *CLUSTER)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    assert planned(run, "train:train_step", *CLUSTER) == by_file
    monkeypatch.delitem(sys.modules, "train", raising=False)


def test_arguments_may_be_a_tuple_or_have_another_name(run: Run, folder: Path) -> None:
    text = TRAIN + "\nVALUES = example_args()\nstep_args = lambda: list(VALUES)\ndel example_args\n"
    (folder / "other.py").write_text(text, encoding="utf-8")
    wanted = planned(run, TARGET, *CLUSTER)
    assert planned(run, "other.py:train_step", *CLUSTER, "--args", "VALUES") == wanted
    assert planned(run, "other.py:train_step", *CLUSTER, "--args", "step_args") == wanted


def test_a_decorated_function_keeps_its_options(run: Run, folder: Path) -> None:
    text = TRAIN.replace(
        "def train_step", '@autopar.parallelize(donate_argnums=0, search="replicated")\ndef train_step'
    )
    (folder / "decorated.py").write_text("import autopar\n" + text, encoding="utf-8")
    plan = planned(run, "decorated.py:train_step", *CLUSTER)
    assert (plan.content.donated, plan.search.strategy) == (("state['w']",), "replicated")
    plan = planned(run, "decorated.py:train_step", *CLUSTER, "--search", "data-parallel")
    assert (plan.content.donated, plan.search.strategy) == (("state['w']",), "data-parallel")


def test_a_strategy_that_the_file_registers_is_known(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", registry.built_in())
    text = TRAIN + "\nimport autopar.search as s\ns.register('of-the-file')(s.strategy_named('replicated'))\n"
    (folder / "own.py").write_text(text, encoding="utf-8")
    assert planned(run, "own.py:train_step", *CLUSTER, "--search", "of-the-file").search.strategy == "replicated"


def test_build_makes_the_function_and_shapes(run: Run, folder: Path) -> None:
    text = TRAIN + (
        "\nPRESETS = {'tiny': 32, 'big': 128}\n"
        "def build(preset='tiny', *, abstract=False, rows=None):\n"
        "    assert abstract\n"
        "    SHAPES['x'] = SHAPES['y'] = (rows or PRESETS[preset], 64)\n"
        "    return train_step, example_args()\n"
    )
    (folder / "model.py").write_text(text, encoding="utf-8")
    sizes = {
        options: planned(run, "model.py", *CLUSTER, *options).content.inputs[1].type
        for options in [(), ("--preset", "big"), ("--set", "rows=16")]
    }
    assert list(sizes.values()) == ["f32[32,64]", "f32[128,64]", "f32[16,64]"]
    assert run("plan", "model.py", *CLUSTER, "--preset", "bigg").exit_code == 2
    assert "big" in run("plan", "model.py", *CLUSTER, "--preset", "bigg").stderr


def test_a_file_of_a_package_may_import_from_it(run: Run, folder: Path) -> None:
    package = folder / "models_of_test"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "parts.py").write_text(TRAIN, encoding="utf-8")
    (package / "whole.py").write_text("from .parts import example_args, train_step\n", encoding="utf-8")
    assert planned(run, "models_of_test/whole.py:train_step", *CLUSTER) == planned(run, TARGET, *CLUSTER)


@pytest.mark.usefixtures("folder")
def test_the_process_is_left_as_it_was(run: Run) -> None:
    before = list(sys.path), list(sys.argv)
    run("plan", TARGET, *CLUSTER, "-q")
    run("plan", "train.py:nothing")
    assert (list(sys.path), list(sys.argv)) == before


@pytest.mark.slow
def test_prints_of_the_user_do_not_reach_the_document(spawn: Spawn, folder: Path) -> None:
    noise = (
        "import os, subprocess, sys\nprint('noise 1')\nos.write(1, b'noise 2\\n')\n"
        "subprocess.run([sys.executable, '-c', 'print(\"noise 3\")'])\n"
    )
    text = noise + TRAIN.replace("    value, grad", "    print('noise 4')\n    value, grad")
    (folder / "loud.py").write_text(text, encoding="utf-8")
    # Neither the devices of the cluster nor several of the process are there.
    done = spawn(
        "plan", "loud.py:train_step", "--cluster", "dgx-h100", "--nodes", "4", "--search", "data-parallel", "--format",
        "json", JAX_PLATFORMS=None, XLA_FLAGS=None,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Plan.from_json(done.stdout).stages[0].mesh_shape == {"x": 32}
    assert [f"noise {i}" in done.stderr for i in range(1, 5)] == [True] * 4


@pytest.mark.usefixtures("folder")
def test_without_a_cluster_the_devices_of_the_process_are_taken(run: Run) -> None:
    plan = planned(run, TARGET)
    assert plan.content.cluster_name.startswith("local-cpu") and len(plan.stages[0].devices) == 8
