"""Where new state is put: as a plan wants it, or split over all devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from autopar._compat.trees import partition_spec
from autopar.frontend.build import tensor_type
from autopar.ir import Layout
from autopar.lower.program import device_mesh
from autopar.plan import Plan
from autopar.runtime.local import default_sharding


def placement_of(plan: Plan, shapes: Any, devices: Sequence[Any]) -> Any:
    """Shardings of a pytree of shapes if some argument of ``plan`` has the same leaves; else None."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    wanted = [(jax.tree_util.keystr(path), str(tensor_type(leaf))) for path, leaf in leaves]
    records = plan.content.inputs
    for start in range(len(records) - len(wanted) + 1):
        window = records[start : start + len(wanted)]
        if all(r.type == t and r.path.endswith(p) for r, (p, t) in zip(window, wanted, strict=True)):
            mesh = device_mesh(plan, devices)
            specs = [NamedSharding(mesh, partition_spec(Layout.parse(r.layout))) for r in window]
            return jax.tree.unflatten(treedef, specs)
    return None


def default_placement(shapes: Any, devices: Sequence[Any]) -> Any:
    """Every leaf split over all devices where its dims allow."""
    mesh = Mesh(np.array(devices, dtype=object), ("x",), axis_types=(AxisType.Auto,))
    return jax.tree.map(lambda leaf: default_sharding(mesh, leaf.shape), shapes)
