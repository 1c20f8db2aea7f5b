from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar._compat import files
from autopar._compat.files import write_whole
from autopar.cluster import Cluster
from autopar.errors import PlanMismatchError
from autopar.plan import FORMAT_VERSION, CombinedBytes, HostMemory, Plan, Stage, StepForm
from tests.plan.plans import plans, small_plan


@given(plans)
def test_json_reads_back_to_an_equal_plan(plan: Plan) -> None:
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert Plan.from_json(text.encode()) == plan
    assert hash(again) == hash(plan)


def test_a_file_reads_back(tmp_path: Path) -> None:
    plan = small_plan()
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)).search.seconds is None
    assert plan.search.seconds == 1.75
    before = path.read_bytes()
    Plan.load(path).save(path)
    assert path.read_bytes() == before
    assert json.loads(before)["autopar_plan"] == FORMAT_VERSION


def test_times_of_the_search_are_not_in_the_file() -> None:
    plan = small_plan()
    assert Plan(plan.content) == plan
    assert Plan(plan.content).to_json() == plan.to_json()


@settings(max_examples=30)
@given(plans, st.data())
def test_text_cut_short_is_refused(plan: Plan, data: st.DataObject) -> None:
    text = plan.to_json().rstrip()
    with pytest.raises(PlanMismatchError, match="not a whole JSON document"):
        Plan.from_json(text[: data.draw(st.integers(0, len(text) - 1))])


@pytest.mark.parametrize("text", ["", "[]", "null", "3", "\x00", "{'a': 1}", b"\xff\xfe", '{"autopar_plan": 1'])
def test_what_is_no_plan_is_refused(text: str | bytes) -> None:
    with pytest.raises(PlanMismatchError):
        Plan.from_json(text)


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 0, "1", None, 1.5])
def test_another_version_is_refused_by_its_number(version: object) -> None:
    document = json.loads(small_plan().to_json()) | {"autopar_plan": version}
    with pytest.raises(PlanMismatchError, match=f"reads version {FORMAT_VERSION}") as caught:
        Plan.from_json(json.dumps(document))
    assert json.dumps(version) in caught.value.fact


def test_a_plan_of_the_first_format_is_read() -> None:
    old = Path(__file__).parent.parent / "golden" / "plan_format_1.json"
    plan = Plan.load(old)
    for content in (plan.content, *plan.content.parts):
        assert content.memory_bound
        stage = content.stages[0]
        assert (stage.activation_bytes, stage.weight_stash_bytes, stage.accumulation_bytes) == (4096, 1024, 512)
        assert stage.form.activations_offloaded and not content.stages[1].form.activations_offloaded
    assert plan.pipeline is not None
    assert [v.name for v in plan.pipeline.values] == [
        "state@0",
        "activations@0",
        "mlp/held@0",
        "stash@0",
        "gradients@0",
    ]
    assert plan.pipeline.works[2].reads == ("activations@0", "stash@0")
    assert plan.pipeline.transfers[0].value == "activations@0"
    assert json.loads(plan.to_json())["autopar_plan"] == FORMAT_VERSION
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("plan", [None, 3, {"stages": 3, "parts": 4, "pipeline": 5}, {"stages": [None], "parts": [7]}])
def test_a_broken_plan_of_the_first_format_is_refused(plan: object) -> None:
    with pytest.raises(PlanMismatchError, match="is not a plan"):
        Plan.from_json(json.dumps({"autopar_plan": 1, "plan": plan}))


def test_what_a_stage_was_turned_into_is_nested_and_read_from_format_3() -> None:
    """With the fields among those of the stage, as they were, and the microbatches of the plan."""
    form = {"remat": "full", "layer_ends": ["b"], "segment_layers": 2, "padded": [["w", 0, 8]], "slices_ahead": 1}
    document = json.loads(small_plan().to_json())
    stages = document["plan"]["stages"]
    for stage in stages:
        stage.pop("form", None)
    stages[0] |= form | {"combine_bytes": 5, "gather_bytes": 7}
    first, second = Plan.from_json(json.dumps({**document, "autopar_plan": 3})).stages
    count = document["plan"]["num_microbatches"]
    assert first.form == StepForm(count, "full", ("b",), segment_layers=2, padded=(("w", 0, 8),), slices_ahead=1)
    assert second.form == StepForm(count) and first.thresholds == CombinedBytes(5, 7)


def test_host_memory_of_format_4_is_nested_and_its_digest_proves_the_plan() -> None:
    document = json.loads(small_plan().to_json())
    document["plan"]["stages"][0]["host"] = {"bytes": 4096, "move_time": 0.5}
    new = Plan.from_json(json.dumps(document))
    document["plan"]["stages"][0] |= {"host_bytes": 4096, "host_time": 0.5}
    del document["plan"]["stages"][0]["host"], document["digest"]
    document["autopar_plan"] = 4
    digest = hashlib.sha256(msgspec.json.encode(document, order="deterministic")).hexdigest()
    old, changed = (Plan.from_json(json.dumps({**document, "digest": d})) for d in (digest, "0" * 64))
    assert old == changed == new and not old.unproven and changed.unproven
    assert old.stages[0].host == HostMemory(4096, 0.5) and (old.stages[0].host_bytes, old.stages[0].host_time) == (
        4096,
        0.5,
    )
    assert len(Stage.__struct_fields__) <= 18


def test_the_cluster_is_nested_and_its_text_of_format_2_is_read() -> None:
    cluster = Cluster.load("dgx-a100")
    plan = Plan(msgspec.structs.replace(small_plan().content, cluster=cluster.to_json()))
    document = json.loads(plan.to_json())
    assert document["plan"]["cluster"] == cluster.to_dict()
    assert Plan.from_json(plan.to_json()) == plan
    document["plan"]["cluster"] = cluster.to_json()
    form = StepForm(plan.num_microbatches)
    stages = tuple(msgspec.structs.replace(s, form=form) for s in plan.stages)
    expected = Plan(msgspec.structs.replace(plan.content, stages=stages))
    assert Plan.from_json(json.dumps({**document, "autopar_plan": 2})) == expected


def test_a_plan_without_version_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="version none"):
        Plan.from_json("{}")


PLACES = {
    "$": lambda d: d,
    "$.plan": lambda d: d["plan"],
    "$.plan.search": lambda d: d["plan"]["search"],
    "$.plan.stages[]": lambda d: d["plan"]["stages"][0],
    "$.plan.stages[].memory": lambda d: d["plan"]["stages"][0]["memory"],
    "$.plan.inputs[]": lambda d: d["plan"]["inputs"][1],
    "$.plan.choices[]": lambda d: d["plan"]["choices"][0],
}


@pytest.mark.parametrize("place", PLACES)
def test_unknown_fields_are_refused_by_name(place: str) -> None:
    document = json.loads(small_plan().to_json())
    PLACES[place](document)["colour"] = "red"
    with pytest.raises(PlanMismatchError, match="colour") as caught:
        Plan.from_json(json.dumps(document))
    assert place == "$" or place in re.sub(r"\[(\d+|\.\.\.)\]", "[]", caught.value.fact)


@pytest.mark.parametrize(
    ("field", "value"),
    [("step_time", "fast"), ("peak_memory", 1.5), ("stages", {}), ("inputs", [1]), ("search", None), ("program", 3)],
)
def test_wrong_values_are_refused_by_the_field(field: str, value: object) -> None:
    document = json.loads(small_plan().to_json())
    document["plan"][field] = value
    with pytest.raises(PlanMismatchError, match=rf"\$\.plan\.{field}"):
        Plan.from_json(json.dumps(document))


@pytest.mark.parametrize("field", ["step_time", "stages", "fingerprint"])
def test_missing_fields_are_refused_by_name(field: str) -> None:
    document = json.loads(small_plan().to_json())
    del document["plan"][field]
    with pytest.raises(PlanMismatchError, match=field):
        Plan.from_json(json.dumps(document))


def test_a_wrong_kind_of_collective_is_refused() -> None:
    document = json.loads(small_plan().to_json())
    document["plan"]["stages"][0]["collectives"][0]["kind"] = "broadcast"
    with pytest.raises(PlanMismatchError, match=r"collectives\[(\d+|\.\.\.)\]\.kind"):
        Plan.from_json(json.dumps(document))


def test_load_names_the_file(tmp_path: Path) -> None:
    for name, content in (("cut.json", "{"), ("other.json", "{}")):
        (tmp_path / name).write_text(content)
        with pytest.raises(PlanMismatchError, match=name):
            Plan.load(tmp_path / name)
    with pytest.raises(PlanMismatchError, match=r"nowhere\.json.*No such file"):
        Plan.load(tmp_path / "nowhere.json")
    with pytest.raises(PlanMismatchError, match="cannot read the plan"):
        Plan.load(tmp_path)


def test_a_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_whole(path, "old")

    def fails(*args: object) -> None:
        raise OSError("disk full")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, name, fails)
            with pytest.raises(PlanMismatchError, match="disk full"):
                small_plan().save(path)
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["plan.json"]
    small_plan().save(path)
    assert Plan.load(path) == small_plan()
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_numbers_that_json_does_not_know_are_not_written(number: float, tmp_path: Path) -> None:
    plan = small_plan()
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="step_time"):
        Plan(msgspec.structs.replace(plan.content, step_time=number)).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_saved_file_has_the_mode_of_any_new_file(tmp_path: Path, umask: int) -> None:
    """And that of the file that it replaces."""
    path, before = tmp_path / "plan.json", os.umask(umask)
    try:
        small_plan().save(path)
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
        path.chmod(0o640)
        small_plan().save(path)
        assert path.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_check_program_names_both() -> None:
    plan = small_plan()
    plan.check_program(plan.content.fingerprint, "any name")
    with pytest.raises(PlanMismatchError, match=r"train_step \(0123456789ab\), not for other \(fedcba987654\)"):
        plan.check_program("fedcba9876543210" * 4, "other")


def test_parts_are_frozen() -> None:
    plan = small_plan()
    with pytest.raises(AttributeError):
        plan.content = plan.content  # type: ignore[misc]
    with pytest.raises(AttributeError):
        plan.stages[0].memory.parameters = 1  # type: ignore[misc]
    assert msgspec.structs.replace(plan.content, schedule="gpipe") != plan.content
