"""Targets: what they are written like, which clusters they are, and what is said where a compiler is missing."""

from __future__ import annotations

import pytest

from autopar import AutoparError, Cluster
from autopar.lower.aot import TARGETS, parse_target, target_of
from autopar.lower.aot.base import Target

GOOD = {
    "cpu": ("local-cpu", 8, "cpu"),
    "cpu:4": ("local-cpu", 4, "cpu"),
    "tpu:v4:2x2x4": ("tpu-v4", 16, "tpu"),
    "tpu:v5p:4x4x4": ("tpu-v5p", 64, "tpu"),
    "tpu:v5e:16x16": ("tpu-v5e", 256, "tpu"),
    "tpu:v5e:2x2": ("tpu-v5e", 4, "tpu"),
    "tpu:v6e:4x4": ("tpu-v6e", 16, "tpu"),
    "cuda:v100:1x8": ("p3.16xlarge", 8, "cuda"),
    "cuda:a100:2x8": ("dgx-a100", 16, "cuda"),
    "cuda:h100:8x8": ("dgx-h100", 64, "cuda"),
    "cuda:h200:1x4": ("h200", 4, "cuda"),
    "cuda:b200:1x8": ("b200", 8, "cuda"),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_target_keeps_the_contract(text: str) -> None:
    target = parse_target(text)
    name, devices, platform = GOOD[text]
    assert isinstance(target, Target) and target.text == text
    cluster = target.cluster()
    assert (cluster.name, cluster.num_devices, target.platform) == (name, devices, platform)
    assert target.num_devices in (devices, None)
    assert all(isinstance(v, str) for v in target.environment(devices).values())
    assert bool(target.extra) == bool(target.needs)


def test_every_word_has_a_target_here() -> None:
    assert {text.partition(":")[0] for text in GOOD} == set(TARGETS)


@pytest.mark.parametrize("text", [t for t in GOOD if t not in ("cpu", "tpu:v5e:2x2", "tpu:v4:2x2x4")])
def test_the_target_of_its_own_cluster(text: str) -> None:
    assert target_of(parse_target(text).cluster()) == parse_target(text)


@pytest.mark.parametrize(
    "text",
    ["gpu", "cpu:0", "cpu:x", "tpu", "tpu:v5p", "tpu:v5p:4x4", "tpu:v9:4x4", "tpu:v5e:0x4", "cuda:h100", "cuda:h100:64",
     "cuda:rtx:1x1", "cuda:h100:0x8"],
)  # fmt: skip
def test_other_texts_are_refused_with_forms_that_work(text: str) -> None:
    with pytest.raises(AutoparError) as caught:
        parse_target(text)
    assert text in caught.value.fact and caught.value.remedy


def test_a_mixed_or_unknown_cluster_has_no_target() -> None:
    group = Cluster.load("dgx-h100").groups[0]
    with pytest.raises(AutoparError, match="no compiler is known"):
        target_of(Cluster("mine", (group,)))


def test_what_is_missing_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.lower.aot.base.find_spec", lambda name: None)
    with pytest.raises(AutoparError, match=r"libtpu.*\n.*\n.*pip install 'autopar\[tpu\]'"):
        parse_target("tpu:v5p:4x4x4").check_installed()
    with pytest.raises(AutoparError, match=r"pip install 'autopar\[cuda12-aot\]'"):
        parse_target("cuda:h100:8x8").check_installed()
