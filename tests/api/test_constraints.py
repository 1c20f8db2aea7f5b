"""What the user fixes of where values lie is kept, priced and told; what cannot hold is an error that names it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autopar
from autopar import ConstraintError
from autopar.ir import Layout
from autopar.plan.arguments import path_matches
from autopar.search.problem_data import load_problem, save_problem
from benchmarks.fixed_plans import toy
from tests.api.steps import CLUSTER
from tests.end_to_end.compare import assert_trees_same

P = PartitionSpec
DEVICES = CLUSTER.num_devices


def args(hidden: int = 16):
    state = {"up": {"w": jnp.ones((8, hidden))}, "down": {"w": jnp.full((hidden, 8), 0.1)}}
    return state, np.linspace(-1, 1, 16 * 8, dtype=np.float32).reshape(16, 8)


def step(state, x):
    def loss(s):
        return jnp.mean((jnp.tanh(x @ s["up"]["w"]) @ s["down"]["w"]) ** 2)

    value, g = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda a, b: a - 0.1 * b, state, g), value


def shards(plan, path):
    (record,) = [r for r in plan.content.inputs if r.path == path]
    sizes = plan.stages[record.stage].mesh_shape
    return [int(np.prod([sizes[a] for a in axes])) for axes in Layout.parse(record.layout).dims]


UP, DOWN = "state['up']['w']", "state['down']['w']"


@pytest.mark.parametrize(
    ("pattern", "path", "same"),
    [
        ("state/up/w", UP, True),
        (UP, UP, True),
        ("state/*/w", DOWN, True),
        ("**/w", UP, True),
        ("state/**", UP, True),
        ("**", UP, True),
        ("state/**/up/**/w", UP, True),
        ("state/up", UP, False),
        ("*/w", UP, False),
        ("state.up.w", UP, True),
    ],
)
def test_paths(pattern, path, same):
    assert path_matches(pattern, path) is same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constraints", "up", "down"),
    [
        ({"state/up/w": (0,), "state/down/w": ()}, lambda n: n[0] > 1 and n[1] == 1, lambda n: n == [1, 1]),
        (
            {"state/up/w": (1,), "state/down/w": (0,)},
            lambda n: n[0] == 1 and n[1] > 1,
            lambda n: n[0] > 1 and n[1] == 1,
        ),
        ({"**/w": (0, 1)}, lambda n: min(n) > 1, lambda n: min(n) > 1),
        ({"**": (), "state/up/w": (1,)}, lambda n: n[1] > 1, lambda n: n == [1, 1]),
    ],
)
def test_dims_that_are_split(constraints, up, down):
    decorated = autopar.parallelize(step, cluster=CLUSTER, constraints=constraints)
    plan = decorated.plan(*args())
    assert up(shards(plan, UP)) and down(shards(plan, DOWN))
    assert_trees_same(decorated(*args()), step(*args()))


@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}, {"num_stages": 2, "num_microbatches": 2}])
def test_a_spec_on_a_named_mesh(options):
    axes = {"data": 2, "model": 2}
    plan = autopar.parallelize(
        step,
        cluster=CLUSTER,
        constraints={"state/up/w": P(None, "model"), "x": P("data"), "state/down/w": P("model", P.UNCONSTRAINED)},
        mesh_axes=axes,
        **options,
    ).plan(*args())
    assert shards(plan, UP) == [1, 2]
    assert shards(plan, DOWN)[0] == 2
    assert shards(plan, "x") == [2, 1]


def chain(weights, x):
    def loss(ws):
        y = x
        for w in ws:
            y = jnp.tanh(y @ w)
        return (y * y).mean()

    return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


CHAIN = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6, jax.ShapeDtypeStruct((16, 64), jnp.float32)


@pytest.mark.parametrize("layer", [2, 3])
def test_of_isomorphic_stages_one_alone_is_constrained(layer):
    options = {"cluster": toy(1, 8), "num_stages": 4, "num_microbatches": 2}
    plan = autopar.parallelize(chain, constraints={f"weights/{layer}": ()}, **options).plan(*CHAIN)
    assert shards(plan, f"weights[{layer}]") == [1, 1]
    stages = [r.stage for r in plan.content.inputs][: len(CHAIN[0])]
    others = [n for n, stage in enumerate(stages) if stage != stages[layer] and 0 < stage < 3]
    assert others and all(shards(plan, f"weights[{n}]") != [1, 1] for n in others)


@pytest.mark.slow
def test_a_constraint_that_holds_on_no_stage_leaves_one_stage():
    """The planner tries pipelines between nodes; a stage of two devices has no four shards."""
    pinned = {"constraints": {"weights/1": P("all")}, "mesh_axes": {"all": 4}}
    plan = autopar.parallelize(chain, cluster=toy(2, 2, inter=1e5), **pinned).plan(*CHAIN)
    assert plan.num_stages == 1 and shards(plan, "weights[1]") == [4, 1]
    with pytest.raises(ConstraintError, match="cannot hold"):
        autopar.parallelize(chain, cluster=toy(2, 2), num_stages=2, **pinned).plan(*CHAIN)


@pytest.mark.slow
def test_explain_takes_paths_as_constraints_do():
    plan = autopar.parallelize(step, cluster=CLUSTER).plan(*args())
    assert plan.explain("state/up/w") == plan.explain(UP)
    both = plan.explain("state/*/w")
    assert UP in both
    assert DOWN in both


@pytest.mark.slow
def test_explain_says_what_a_constraint_costs():
    asked = {"cluster": CLUSTER, "num_stages": 1, "num_microbatches": 1, "remat": "none"}
    free = autopar.parallelize(step, **asked).plan(*args(512))
    plan = autopar.parallelize(step, **asked, constraints={"state/up/w": (), "x": ()}).plan(*args(512))
    told = [n for n in plan.notes if n.startswith("constraint ")]
    assert [n.split(":")[0] for n in told] == ["constraint state/up/w", "constraint x"]
    assert all("against leaving it free" in n for n in told)
    assert all(n in plan.explain() for n in told)
    assert plan.step_time >= free.step_time


def test_an_entry_that_later_ones_make_void_is_told():
    pins = {"state/up/w": (0,), "state/*/w": (), "x": (0,), "state/down/w": (1,)}
    plan = autopar.parallelize(step, cluster=CLUSTER, constraints=pins).plan(*args())
    void = [n for n in plan.notes if "does nothing" in n]
    assert void == [
        "constraint state/up/w: (0,) does nothing: later entries replace it for every array that it matches (state/*/w)"
    ]
    assert len([n for n in plan.notes if n.startswith("constraint ")]) == 4
    assert void[0] in plan.explain()
    assert shards(plan, UP) == [1, 1]


@pytest.mark.parametrize(
    ("constraints", "mesh_axes", "text"),
    [
        ({"state/middle/w": ()}, None, r"state/middle/w.*path of no array argument(.|\n)*near names: .*state/"),
        ({"state/up/w": (2,)}, None, r"state/up/w: \(2,\) cannot hold on state\['up'\]\['w'\].*no dim 2"),
        ({"state/up/w": P("data", None, None)}, {"data": 2}, "has 2 dims, not 3"),
        ({"state/up/w": P("data")}, {"data": 3}, "devices cannot split its dims so"),
        ({"state/up/w": P("data")}, None, "names the mesh axis 'data'; mesh_axes has none"),
        ({"state/up/w": "split"}, None, "neither dims nor a PartitionSpec"),
        ({"state/up/w": P("data")}, {"data": 0}, r"mesh_axes\['data'\]=0 is no size"),
    ],
)
def test_what_cannot_hold_is_named(constraints, mesh_axes, text):
    with pytest.raises(ConstraintError, match=text):
        autopar.parallelize(step, cluster=CLUSTER, constraints=constraints, mesh_axes=mesh_axes).plan(*args())


def test_constraints_that_exclude_each_other():
    wanted = {"state/up/w": P("a"), "state/down/w": P(("a", "b"))}
    with pytest.raises(ConstraintError, match=r"cannot hold|no mesh keeps all"):
        autopar.parallelize(
            step, cluster=CLUSTER, constraints=wanted, mesh_axes={"a": 2, "b": DEVICES}, num_stages=1
        ).plan(*args(16))


# -- in the user's code -------------------------------------------------------------------------------

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def stated(spec, how):
    def loss(s, x):
        h = jnp.tanh(x @ s["up"]["w"])
        if how == "constraint":
            h = lax.with_sharding_constraint(h, NamedSharding(MESH, spec))
        else:
            h = jax.jit(lambda h: h * 1, out_shardings=NamedSharding(MESH, spec))(h)
        return jnp.mean((h @ s["down"]["w"]) ** 2)

    def step(state, x):
        value, g = jax.value_and_grad(loss)(state, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, state, g), value

    return step


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("how", "spec"),
    [
        ("constraint", P("data", "model")),
        ("constraint", P(("data", "model"))),
        ("constraint", P("model", P.UNCONSTRAINED)),
        ("jit", P(None, "model")),
    ],
)
def test_constraints_in_the_code_are_kept(how, spec):
    decorated = autopar.parallelize(stated(spec, how), cluster=CLUSTER)
    plan = decorated.plan(*args())
    names = [r for r in plan.content.operators if "sharding_constraint" in r.id]
    assert names
    sizes = plan.stages[0].mesh_shape
    for record in names:
        made = [int(np.prod([sizes[a] for a in axes])) for axes in Layout.parse(record.results[0]).dims]
        for entry, n in zip([*spec, None][:2], made, strict=True):
            if entry is not P.UNCONSTRAINED:
                assert n == {None: 1, "data": 2, "model": 4, ("data", "model"): 8}[entry]
    assert any("kept" in n and "test_constraints.py" in n for n in plan.notes)
    assert_trees_same(decorated(*args()), jax.jit(stated(spec, how))(*args()))


def test_a_constraint_in_the_code_that_no_mesh_says_is_told():
    decorated = autopar.parallelize(stated(P("data", "model"), "constraint"), cluster=CLUSTER, mesh_shape=(DEVICES,))
    plan = decorated.plan(*args())
    assert any("not kept: the mesh" in n and "test_constraints.py" in n for n in plan.notes)
    assert_trees_same(decorated(*args()), jax.jit(stated(P("data", "model"), "constraint"))(*args()))


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {"num_microbatches": 2, "num_stages": 2}])
def test_constraints_in_the_code_of_a_microbatch_are_kept_or_told(options):
    # Four shards of eight rows of a microbatch can be kept, and so can two on the four devices of a stage.
    spec = P("data", None)
    decorated = autopar.parallelize(stated(spec, "constraint"), cluster=CLUSTER, **options)
    plan = decorated.plan(*args())
    kept = [n for n in plan.notes if n.startswith("sharding_constraint to 2, 1 shards") and n.endswith("kept")]
    assert len(kept) == 1, plan.notes
    assert "test_constraints.py" in kept[0]
    records = [r for r in plan.content.operators if "sharding_constraint" in r.id]
    assert bool(records) == (plan.num_stages == 1)  # operators of stages are not in the record
    assert all(Layout.parse(r.results[0]).dims[0] and not Layout.parse(r.results[0]).dims[1] for r in records)
    assert_trees_same(decorated(*args()), jax.jit(stated(spec, "constraint"))(*args()))


def test_constraints_in_the_code_that_no_microbatch_can_keep_are_told():
    plan = autopar.parallelize(
        stated(P(("data", "model"), None), "constraint"), cluster=CLUSTER, num_microbatches=4
    ).plan(*args(16))
    assert any("to 8, 1 shards" in n and "not kept" in n for n in plan.notes)


def test_constraints_are_part_of_a_problem(tmp_path):
    decorated = autopar.parallelize(step, cluster=CLUSTER, constraints={"x": (0,)})
    pure = decorated._plain
    signature, _ = pure.resolve(args(), {})
    problem = pure.problem(pure.traced(signature), None)
    assert [(c.value, c.shards, c.text) for c in problem.job.constraints] == [("x", (0, 1), "x: (0,)")]
    save_problem(problem, tmp_path / "problem.json")
    assert load_problem(tmp_path / "problem.json").job.constraints == problem.job.constraints
