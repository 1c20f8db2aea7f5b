"""Published runs as plans: the model as a traced example at its size, its plan by `Manual`, its bill.

A plan of one stage on the devices of one stage says what a layer, the ends of the model and the update run and send on
each device. That holds for any number of layers, stages and microbatches, so that a sweep needs few of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.api.options import ParallelOptions
from autopar.api.pure import PureFunction
from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.cost.constants import Constants
from autopar.errors import InfeasiblePlanError
from autopar.lower.microbatch import microbatched
from autopar.search import Manual
from autopar.search.clock import Clock
from autopar.search.intra.extract import value_layouts
from benchmarks.published.bill import Bill, bill_of
from benchmarks.published.transformer import TrainingPlan, TransformerSpec
from benchmarks.published.transformer.plan import Recompute
from examples import gpt, llama

#: Layers of the traced model: arrays of all layers are told from others by a first dim that nothing else has.
LAYERS = 13
#: Microbatches of the traced step: so many that what is sent once a step is cheap next to what each microbatch sends.
MICROBATCHES = 32
_UNLIMITED = 10**15
#: Names that examples have of dtypes.
DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f8_e4m3fn": "bfloat16"}


@dataclass(frozen=True)
class Shape:
    """What a bill depends on.

    Args:
        spec: the model, with `LAYERS` layers.
        microbatch: examples of a replica at once.
        tp, cp: degrees of parallelism of a stage.
        recompute: what the traced step recomputes: what the backward pass reads of it is never written in the forward
            pass, and has lines of its own.
    """

    spec: TransformerSpec
    microbatch: int
    tp: int
    cp: int
    recompute: Recompute = "full"


@dataclass(frozen=True, eq=False)
class RunBill:
    """What one replica of a run does, and what it has.

    Args:
        bill: of a step.
        layer: elements of each parameter of a layer on one device.
        ends: the same of the parameters that are of no layer.
    """

    bill: Bill
    layer: tuple[float, ...]
    ends: tuple[float, ...]


def padded_vocab(spec: TransformerSpec, plan: TrainingPlan) -> int:
    """Rows of the embedding table: with tensor parallelism as many as Megatron-LM pads it to."""
    return spec.vocab if plan.tp == 1 else -(-spec.vocab // (128 * plan.tp)) * 128 * plan.tp


def shape_of(spec: TransformerSpec, plan: TrainingPlan, *, traced: bool = False) -> Shape:
    """The shape of a run. Replicas and ZeRO decide no size of a kernel: one replica stands for all of them.

    With ``traced`` the step recomputes what the plan does; else all layers, for others to leave lines of them out.
    """
    sized = replace(spec, layers=LAYERS, vocab=padded_vocab(spec, plan), dropout=False)
    return Shape(sized, plan.microbatch, plan.tp, plan.cp, plan.recompute if traced else "full")


def make_bill(shape: Shape, cluster: Cluster, constants: Constants) -> RunBill:
    """The bill of one step of `MICROBATCHES` microbatches.

    What is recomputed has lines of its own, so that plans which recompute less leave some of them out.

    Args:
        shape: what it depends on.
        cluster: as many devices as the shape has.
        constants: that what `Manual` leaves open is decided with.

    Raises:
        InfeasiblePlanError: the plan does not suit the model.
    """
    spec = shape.spec
    sizes = {
        "layers": spec.layers, "hidden": spec.hidden, "ffn": spec.ffn, "heads": spec.heads, "kv_heads": spec.kv_heads,
        "vocab": spec.vocab, "seq": spec.seq, "batch": shape.microbatch * MICROBATCHES,
        "dtype": DTYPES[spec.dtype], "remat": shape.recompute == "full",
    }  # fmt: skip
    if spec.gated:
        fn, args = llama.build(abstract=True, **sizes)
    else:
        selective = shape.recompute == "selective"
        fn, args = gpt.build(abstract=True, scan=True, tied=spec.tied, clip=1.0, remat_attention=selective, **sizes)
    function = PureFunction(fn, ParallelOptions(cluster=cluster, memory_limit_bytes=_UNLIMITED))
    signature, _ = function.resolve(args, {})
    step = microbatched(function._traced[signature], MICROBATCHES)
    problem = function.problem(step, _UNLIMITED, MICROBATCHES)
    problem = replace(problem, cost_model=CostModel(cluster, constants=constants))
    named = Manual(tp=shape.tp, cp=shape.cp)
    answer = named.solve(problem, Clock())
    if not answer.solution.found:
        raise InfeasiblePlanError(f"no plan of {shape}")
    sharding_problem, choice = answer.sharding_problem, answer.solution.choice
    made = value_layouts(sharding_problem, choice)
    shapes = [
        made[i.name].local_shape(i.type.shape, sharding_problem.mesh.sizes)
        for i in problem.graph.inputs
        if i.role == "parameter"
    ]
    layer = tuple(float(math.prod(s[1:])) for s in shapes if s and s[0] == LAYERS)
    ends = tuple(float(math.prod(s)) for s in shapes if not (s and s[0] == LAYERS))
    return RunBill(bill_of(problem, sharding_problem, choice), layer, ends)


def stage_cluster(cluster: Cluster, devices: int) -> Cluster:
    """So many devices of a cluster of one group, as one node: what a stage sends is named, wherever its devices are."""
    (group,) = cluster.groups
    return Cluster(cluster.name, (replace(group, count=1, devices_per_node=devices),), stack=cluster.stack)
