"""Sharding constraints in steps of public style are kept, or noted with their lines."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from pathlib import Path

import jax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding

import autopar
from autopar.frontend.attrs import shards
from autopar.ir import Layout
from tests.api import constrained_steps
from tests.api.steps import CLUSTER
from tests.end_to_end.compare import assert_trees_same

FILE = Path(constrained_steps.__file__)


def equations(jaxpr):
    """All equations, those of inner functions included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def asked(step, args):
    """Shards by dim of all constraints in the step's jaxpr."""
    found = set()
    for eqn in equations(jax.make_jaxpr(step)(*args).jaxpr):
        params = eqn.params
        given = [params["sharding"]] if eqn.primitive.name == "sharding_constraint" else params.get("out_shardings", ())
        found |= {shards(s, v.aval.ndim) for s, v in zip(given, eqn.outvars, strict=False) if not is_free(s)}
    return found


def is_free(sharding):
    return not isinstance(sharding, NamedSharding) or sharding.mesh.empty


@pytest.mark.few(3)
@pytest.mark.parametrize("build", constrained_steps.STEPS, ids=lambda build: build.__name__)
def test_constraints_are_kept(build):
    step, args = build()
    bare = build is constrained_steps.easylm_names_only
    with jax.set_mesh(constrained_steps.MESH) if bare else nullcontext():
        decorated = autopar.parallelize(step, cluster=CLUSTER)
        plan = decorated.plan(*args)
        notes = [n for n in plan.notes if " shards by dim " in n]
        noted = {tuple(int(k) for k in re.findall(r"to ([-\d, ]+) shards", n)[0].split(", ")) for n in notes}
        assert noted == asked(step, args) != set()
        assert all(FILE.name in n and n.endswith(": kept") for n in notes)
        sizes = plan.stages[0].mesh_shape
        for record in plan.content.operators:
            if "sharding_constraint" in record.id:
                dims = Layout.parse(record.results[0]).dims
                assert tuple(math.prod(sizes[a] for a in axes) for axes in dims) in noted
        assert_trees_same(decorated(*args), jax.jit(step)(*args))


@pytest.mark.slow
def test_constraints_of_a_step_that_no_mesh_keeps_are_named():
    step, args = constrained_steps.t5x_partitioner()
    decorated = autopar.parallelize(step, cluster=CLUSTER, mesh_shape=(8,))
    notes = [n for n in decorated.plan(*args).notes if " shards by dim " in n]
    assert len(notes) == 2
    assert all("not kept: the mesh" in n and FILE.name in n for n in notes)
    assert_trees_same(decorated(*args), jax.jit(step)(*args))
