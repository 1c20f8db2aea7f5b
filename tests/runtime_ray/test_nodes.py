"""Tables of Ray nodes as clusters; no Ray runs."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cluster import Cluster
from autopar.errors import ClusterError
from autopar.runtime.ray.nodes import WorkerKind, WorkerPlacement, layout, machines, planned


def node(address: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    named = {
        "accelerator_type:" + name[5:].replace("_", "-") if name.startswith("type_") else name: n
        for name, n in resources.items()
    }
    return {"NodeID": address, "Alive": alive, "NodeManagerAddress": address, "Resources": {"CPU": 8.0, **named}}


TABLE = [
    node("10.0.0.3", GPU=8.0, type_H100=1.0),
    node("10.0.0.1", CPU=4.0),
    node("10.0.0.2", GPU=8.0, type_H100=1.0),
    node("10.0.0.4", alive=False, GPU=8.0, type_H100=1.0),
]


#: Machines of two types, and of two sizes of one of them.
MIXED = [
    node("10.0.1.1", GPU=4.0, type_A100=1.0),
    node("10.0.1.2", GPU=8.0, type_H100=1.0),
    node("10.0.1.3", GPU=4.0, type_H100=1.0),
    node("10.0.1.4", GPU=4.0, type_A100=1.0),
]


def test_machines_are_those_that_are_alive() -> None:
    found = machines(TABLE)
    assert [(m.address, m.cpus, m.gpus, m.type) for m in found] == [
        ("10.0.0.1", 4, 0, ""),
        ("10.0.0.2", 8, 8, "H100"),
        ("10.0.0.3", 8, 8, "H100"),
    ]


def test_gpus_are_taken_where_there_are_some() -> None:
    wanted = layout(machines(TABLE), "auto", None, None, None)
    assert (wanted.kind, wanted.workers) == ("gpu", (WorkerKind(2, 8, "dgx-h100", "H100"),))
    cluster = planned(wanted)
    assert (cluster.name, cluster.num_nodes, cluster.num_devices) == ("ray-dgx-h100", 2, 16)
    assert cluster.groups[0].device == Cluster.load("dgx-h100").groups[0].device
    (slot,) = wanted.slots
    assert slot.environment == {"JAX_PLATFORMS": "cuda"}
    assert slot.resources == {"num_cpus": 1, "num_gpus": 8}
    assert slot.bundle == {"CPU": 1.0, "GPU": 8.0}
    assert slot.of(4).resources["num_gpus"] == 4


def test_workers_may_have_a_part_of_a_machine() -> None:
    wanted = layout(machines(TABLE), "gpu", None, 2, None)
    assert wanted.workers == (WorkerKind(8, 2, "dgx-h100", "H100"),)
    assert wanted.room(machines(TABLE[:2])) == (4,)
    assert layout(machines(TABLE[:2]), "gpu", 4, None, None).workers[0].devices == 2  # one machine, shared


def test_tpus_and_cpus() -> None:
    tpus = machines([node("a", TPU=4.0, type_TPU_V5P=1.0), node("b", TPU=4.0, type_TPU_V5P=1.0)])
    wanted = layout(tpus, "auto", None, None, None)
    assert (wanted.kind, wanted.workers) == ("tpu", (WorkerKind(2, 4, "tpu-v5p", "TPU-V5P"),))
    assert wanted.slots[0].resources == {"num_cpus": 1, "resources": {"TPU": 4}}
    cpus = layout(machines(TABLE), "cpu", 3, 2, None)
    assert (cpus.workers, cpus.cluster_name()) == ((WorkerKind(3, 2, "local-cpu"),), "ray-cpu")
    assert cpus.slots[0].environment["XLA_FLAGS"].endswith("=2")
    assert cpus.slots[0].bundle == {"CPU": 1.0}


def test_the_number_of_devices_of_a_worker_is_not_that_of_the_driver(monkeypatch) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_force_host_platform_device_count=8")
    environment = layout(machines(TABLE), "cpu", 3, 2, None).slots[0].environment
    assert environment["JAX_NUM_CPU_DEVICES"] == "2"
    assert environment["XLA_FLAGS"].split() == ["--xla_dump_to=x", "--xla_force_host_platform_device_count=2"]


def test_the_memory_of_a_device_is_that_which_ray_names() -> None:
    found = machines([node("a", GPU=8.0, type_A100=1.0, type_A100_40G=1.0)])
    assert layout(found, "auto", None, None, None).workers[0].file == "dgx-a100-40gb"


@pytest.mark.parametrize(
    ("table", "arguments", "text"),
    [
        (TABLE[1:2], ("gpu", None, None, None), "no machine of the cluster has a GPU"),
        (TABLE, ("gpu", 3, 8, None), "room for 2"),
        (TABLE, ("gpu", None, 16, None), "room for 0"),
        (TABLE, ("fpga", None, None, None), "'fpga' is not a kind"),
        (TABLE, ("cpu", 99, None, None), "99 workers need a CPU each; Ray has 20"),
        ([node("a", GPU=1.0, type_L4=1.0)], ("auto", None, None, None), "type L4: no cluster file"),
        ([node("a", GPU=1.0)], ("auto", None, None, None), "type unknown"),
        ([TABLE[0], node("b", GPU=8.0, type_L4=1.0)], ("auto", None, None, None), "type L4: no cluster file"),
        (MIXED, ("gpu", None, [8, 8, 8], None), "3 workers of 8, 8, 8 GPUs .* room for 1"),
        (MIXED, ("gpu", 3, [8, 4], None), "names 2 workers, and workers=3"),
    ],
)
def test_what_cannot_be_had_is_told(table: list[dict[str, Any]], arguments: Any, text: str) -> None:
    with pytest.raises(ClusterError, match=text):
        layout(machines(table), *arguments)


def test_figures_of_unknown_devices_may_be_given() -> None:
    assert layout(machines([node("a", GPU=2.0)]), "auto", None, None, "h200").workers[0].file == "h200"


def test_each_kind_of_machine_is_a_group() -> None:
    """Devices of two types with figures of their own, and of machines of two sizes."""
    wanted = layout(machines(MIXED), "auto", None, None, None)
    assert wanted.workers == (
        WorkerKind(2, 4, "dgx-a100", "A100"), WorkerKind(1, 4, "dgx-h100", "H100"), WorkerKind(1, 8, "dgx-h100", "H100")
    )  # fmt: skip
    cluster = planned(wanted)
    assert cluster.name == "ray-dgx-a100-dgx-h100"
    assert [(g.count, g.devices_per_node) for g in cluster.groups] == [(2, 4), (1, 4), (1, 8)]
    assert [g.device for g in cluster.groups[:2]] == [
        Cluster.load(n).groups[0].device for n in ("dgx-a100", "dgx-h100")
    ]
    # A worker is on a machine of its own type.
    assert wanted.slots[1].bundle == {"CPU": 1.0, "GPU": 4.0, "accelerator_type:H100": 0.001}
    assert wanted.slots[1].resources["resources"] == {"accelerator_type:H100": 0.001}
    for left, room in ((MIXED, (2, 1, 1)), (MIXED[1:], (1, 1, 1)), (MIXED[:2], (1, 0, 1)), (MIXED[2:], (1, 1, 0))):
        assert wanted.room(machines(left)) == room


@pytest.mark.parametrize(
    ("each", "workers"),
    [
        ([4, 8], ((1, 4, "A100"), (1, 8, "H100"))),
        ([2, 8, 2], ((2, 2, "A100"), (1, 8, "H100"))),
        (4, ((2, 4, "A100"), (3, 4, "H100"))),
    ],
)
def test_sizes_of_single_workers_may_be_given(each: Any, workers: Any) -> None:
    wanted = layout(machines(MIXED), "gpu", None, each, None)
    assert tuple((w.count, w.devices, w.type) for w in wanted.workers) == workers


def test_cpus_may_be_of_several_kinds() -> None:
    """Virtual devices in unequal numbers, or with the figures of the machines that they are on."""
    wanted = layout(machines(TABLE), "cpu", None, [2, 4, 2], None)
    assert wanted == WorkerPlacement("cpu", (WorkerKind(2, 2, "local-cpu"), WorkerKind(1, 4, "local-cpu")))
    assert [s.machine for s in wanted.slots] == ["", ""]
    assert wanted.room(machines(TABLE)) == (2, 1)
    named = [node("a", type_OLD=1.0), node("b", type_NEW=1.0), node("c", type_NEW=1.0), node("d")]
    typed = layout(machines(named), "cpu", None, 2, {"OLD": "local-cpu", "NEW": "h200"})
    assert typed.workers == (WorkerKind(2, 2, "h200", "NEW"), WorkerKind(1, 2, "local-cpu", "OLD"))
    assert [s.machine for s in typed.slots] == ["accelerator_type:NEW", "accelerator_type:OLD"]
    assert typed.room(machines(named[:2])) == (2, 1)
    assert typed.room(machines(named[1:])) == (2, 0)
