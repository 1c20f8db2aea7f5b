"""`TrainingPlan`: how a transformer is trained: degrees of parallelism, recomputation, microbatches, schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.errors import InfeasiblePlanError
from benchmarks.published.transformer.spec import TransformerSpec

#: What the backward pass computes again: nothing, the attention between its products with parameters, or layers.
Recompute = Literal["none", "selective", "full"]
#: Pipeline schedules that `benchmarks.published.transformer.pipeline` prices.
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How a transformer is spread over tp x cp x dp x pp devices.

    Devices are numbered with tp changing fastest, then cp, dp and pp, as Megatron-LM numbers them.

    Args:
        global_batch: examples of one step (B).
        microbatch: examples that one replica passes through the pipeline at once (b).
        tp: devices that share the matrices of a layer (t).
        pp: pipeline stages (p).
        dp: replicas that share the batch (d).
        cp: devices that share the tokens of one example.
        ep: devices, of those of dp, that share the experts of a layer.
        zero: ZeRO stage: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters are spread over dp.
        sequence_parallel: what lies between tensor-parallel regions is spread over tp.
        recompute: what the backward pass computes again.
        chunks: chunks of layers of each stage (v), for the interleaved schedule.
        schedule: one of `SCHEDULES`.
        offload: the optimizer's moments lie in host memory but while the update needs them.
        stages_together: pp changes before dp, so that stages are neighbours and replicas far apart.

    Raises:
        InfeasiblePlanError: the numbers do not fit each other.
    """

    global_batch: int
    microbatch: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    chunks: int = 1
    schedule: str = "1f1b"
    offload: bool = False
    stages_together: bool = False

    def __post_init__(self) -> None:
        for name in ("global_batch", "microbatch", "tp", "pp", "dp", "cp", "ep", "chunks"):
            if getattr(self, name) < 1:
                raise InfeasiblePlanError(f"{name} is {getattr(self, name)}", remedy="give 1 or more")
        if self.zero not in (0, 1, 2, 3):
            raise InfeasiblePlanError(f"zero is {self.zero}", remedy="ZeRO has the stages 0, 1, 2 and 3")
        if self.recompute not in ("none", "selective", "full"):
            raise InfeasiblePlanError(f"recompute is {self.recompute!r}", remedy="one of none, selective, full")
        if self.schedule not in SCHEDULES:
            raise InfeasiblePlanError(f"schedule is {self.schedule!r}", remedy=f"one of {', '.join(SCHEDULES)}")
        if self.dp % self.ep:
            raise InfeasiblePlanError(f"ep is {self.ep}, which does not divide dp, {self.dp}", remedy="ep divides dp")
        if self.global_batch % (self.dp * self.microbatch):
            raise InfeasiblePlanError(
                f"a batch of {self.global_batch} is no whole number of microbatches of {self.microbatch} on each of "
                f"{self.dp} replicas",
                remedy="another microbatch size, dp or batch",
            )
        if self.chunks > 1 and self.pp == 1:
            raise InfeasiblePlanError(f"{self.chunks} chunks on one stage", remedy="chunks=1, or pp above 1")

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def stage_stride(self) -> int:
        """Distance between devices of neighbouring stages, in device numbers."""
        return self.tp * self.cp * (1 if self.stages_together else self.dp)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one step on each replica (m)."""
        return self.global_batch // (self.dp * self.microbatch)

    def check(self, spec: TransformerSpec) -> None:
        """Raises InfeasiblePlanError where the plan cannot be carried out with ``spec``."""
        if self.pp * self.chunks > spec.layers + 2:  # embedding and output may have a chunk each
            raise InfeasiblePlanError(
                f"{spec.layers} layers are too few for {self.pp} stages of {self.chunks} chunks",
                remedy="fewer stages or chunks",
            )
        if spec.heads % self.tp:
            raise InfeasiblePlanError(
                f"tp is {self.tp}, which does not divide {spec.heads} heads", remedy="tp divides the heads"
            )
        if spec.seq % self.cp:
            raise InfeasiblePlanError(
                f"cp is {self.cp}, which does not divide {spec.seq} tokens", remedy="cp divides seq"
            )
        if spec.experts % self.ep:
            raise InfeasiblePlanError(
                f"ep is {self.ep}, which does not divide {spec.experts} experts", remedy="ep divides the experts"
            )
