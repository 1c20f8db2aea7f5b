"""Tables of Ray nodes as clusters; no Ray runs."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cluster import Cluster
from autopar.errors import ClusterError
from autopar.runtime.ray.nodes import layout, machines, planned


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


def test_machines_are_those_that_are_alive() -> None:
    found = machines(TABLE)
    assert [(m.address, m.cpus, m.gpus, m.type) for m in found] == [
        ("10.0.0.1", 4, 0, ""),
        ("10.0.0.2", 8, 8, "H100"),
        ("10.0.0.3", 8, 8, "H100"),
    ]


def test_gpus_are_taken_where_there_are_some() -> None:
    wanted = layout(machines(TABLE), "auto", None, None, None)
    assert (wanted.kind, wanted.workers, wanted.devices, wanted.file) == ("gpu", 2, 8, "dgx-h100")
    cluster = planned(wanted)
    assert (cluster.name, cluster.num_nodes, cluster.num_devices) == ("ray-dgx-h100", 2, 16)
    assert cluster.groups[0].device == Cluster.load("dgx-h100").groups[0].device
    slot = wanted.slot
    assert slot.environment == {"JAX_PLATFORMS": "cuda"}
    assert slot.resources == {"num_cpus": 1, "num_gpus": 8}
    assert slot.bundle == {"CPU": 1.0, "GPU": 8.0}
    assert slot.of(4).resources["num_gpus"] == 4


def test_workers_may_have_a_part_of_a_machine() -> None:
    wanted = layout(machines(TABLE), "gpu", None, 2, None)
    assert (wanted.workers, wanted.devices) == (8, 2)
    assert wanted.room(machines(TABLE[:2])) == 4
    assert layout(machines(TABLE[:2]), "gpu", 4, None, None).devices == 2  # one machine, shared


def test_tpus_and_cpus() -> None:
    tpus = machines([node("a", TPU=4.0, type_TPU_V5P=1.0), node("b", TPU=4.0, type_TPU_V5P=1.0)])
    wanted = layout(tpus, "auto", None, None, None)
    assert (wanted.kind, wanted.workers, wanted.devices, wanted.file) == ("tpu", 2, 4, "tpu-v5p")
    assert wanted.slot.resources == {"num_cpus": 1, "resources": {"TPU": 4}}
    cpus = layout(machines(TABLE), "cpu", 3, 2, None)
    assert (cpus.workers, cpus.devices, cpus.cluster_name()) == (3, 2, "ray-cpu")
    assert cpus.slot.environment["XLA_FLAGS"].endswith("=2")
    assert cpus.slot.bundle == {"CPU": 1.0}


def test_the_number_of_devices_of_a_worker_is_not_that_of_the_driver(monkeypatch) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_force_host_platform_device_count=8")
    environment = layout(machines(TABLE), "cpu", 3, 2, None).slot.environment
    assert environment["JAX_NUM_CPU_DEVICES"] == "2"
    assert environment["XLA_FLAGS"].split() == ["--xla_dump_to=x", "--xla_force_host_platform_device_count=2"]


def test_the_memory_of_a_device_is_that_which_ray_names() -> None:
    found = machines([node("a", GPU=8.0, type_A100=1.0, type_A100_40G=1.0)])
    assert layout(found, "auto", None, None, None).file == "dgx-a100-40gb"


@pytest.mark.parametrize(
    ("table", "arguments", "text"),
    [
        (TABLE[1:2], ("gpu", None, None, None), "no machine of the cluster has a GPU"),
        (TABLE, ("gpu", 3, 8, None), "room for 2"),
        (TABLE, ("gpu", None, 16, None), "room for 0"),
        (TABLE, ("fpga", None, None, None), "'fpga' is no kind"),
        (TABLE, ("cpu", 99, None, None), "99 workers need a CPU each; Ray has 20"),
        ([node("a", GPU=1.0, type_L4=1.0)], ("auto", None, None, None), "type L4: no one cluster file"),
        ([node("a", GPU=1.0)], ("auto", None, None, None), "type unknown"),
        ([TABLE[0], node("b", GPU=8.0, type_A100=1.0)], ("auto", None, None, None), "type A100, H100"),
    ],
)
def test_what_cannot_be_had_is_told(table: list[dict[str, Any]], arguments: Any, text: str) -> None:
    with pytest.raises(ClusterError, match=text):
        layout(machines(table), *arguments)


def test_figures_of_unknown_devices_may_be_given() -> None:
    assert layout(machines([node("a", GPU=2.0)]), "auto", None, None, "h200").file == "h200"
