"""Checkpoints of segments in host memory: where neither all activations fit there nor what enters layers on devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autopar import Cluster, Plan, parallelize
from autopar.errors import InfeasiblePlanError
from tests.end_to_end.test_segments import activations
from tests.end_to_end.test_update_in_backward import OPTIONS, assert_trained, compiled
from tests.search.problems import toy

BYTES = 8 * 128 * 3 * 8  # of what enters a layer


def cluster(devices: int, host_bytes: float) -> Cluster:
    """Devices with a fast link to hosts that have so much memory for each of them."""
    plain = toy(devices, flops=1e12, bandwidth=1e11)
    (group,) = plain.groups
    hosts = {"host_bandwidth": 1e11, "host_memory_bytes": int(host_bytes * devices)}
    return dataclasses.replace(plain, groups=(dataclasses.replace(group, **hosts),))


def planned(step: Any, args: Any, devices: int, limit: float, host_bytes: float = 1e9, **options: Any) -> Plan:
    """The plan within a limit."""
    asked = {**OPTIONS, "remat": "auto", "memory_limit": int(limit), "batch_argnums": 1, "offload": "auto", **options}
    return parallelize(step, cluster=cluster(devices, host_bytes), **asked).plan(*args)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_checkpoints_wait_on_hosts(x64: None, devices: int) -> None:
    step, args = activations(remat=False)
    on_devices = least(step, args, devices, offload="none")
    share, layers = (0.55, 20) if devices == 1 else (0.6, 16)  # of two devices hosts have no room for state besides
    plan = planned(step, args, devices, share * on_devices, layers * BYTES / devices)
    stage = plan.stages[0]
    assert stage.form.segment_layers and stage.host_bytes and plan.peak_memory <= share * on_devices
    assert not any(i.memory == "host" for i in plan.content.inputs)
    loaded = Plan.from_json(plan.to_json())
    assert loaded == plan
    assert_trained(compiled(step, loaded, args)[1], step, args)


def least(step: Any, args: Any, devices: int, **options: Any) -> int:
    """Bytes that the least plan needs, by the error of one that has far too few."""
    with pytest.raises(InfeasiblePlanError) as error:
        planned(step, args, devices, 1000, **options)
    assert error.value.least_bytes is not None
    return error.value.least_bytes
