"""Rows of ``data/measured_training_points.csv`` as models, plans and clusters."""

from __future__ import annotations

import csv
import dataclasses
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autopar.cluster import Cluster, LinkSpec
from autopar.errors import InfeasiblePlanError
from benchmarks.published.transformer import Constants, TrainingPlan, TransformerSpec, load_constants, peak_memory
from benchmarks.published.transformer.plan import Recompute

DATA = Path(__file__).resolve().parent / "data"
POINTS = DATA / "measured_training_points.csv"

#: Which training program made the runs of a dataset, by the start of its name; see `_stack` for others.
STACKS = {
    "Alpa": "xla-2021",
    "vTrain": "megatron-deepspeed",
    "BLOOM": "megatron-deepspeed",
}
#: Cluster file by what a row's hardware has in its text; the first that is found.
CLUSTERS = {
    "A800": "dgx-a800",
    "H800": "dgx-h800",
    "T4": "t4",
    "A100": "dgx-a100",
    "GH200": "h200",
    "H200": "h200",
    "H100": "dgx-h100",
    "B200": "b200",
    "V100": "p3.16xlarge",
    "v4": "tpu-v4",
    "v5e": "tpu-v5e",
    "v5p": "tpu-v5p",
    "v6e": "tpu-v6e",
}
#: Datasets of which nothing is fitted.
HELD_OUT = frozenset(
    {
        "DS3Lab V100 Megatron",
        "Korthikanti 6.3",
        "Megatron-LM 2020 README",
        "TeraPipe Table 1 (w/o TeraPipe)",
    }
)
#: Where the CRC-32 begins that splits the others into what is fitted and what is held out: another seed, another split,
#: which needs a fit of its own.
SEED = 0
#: Datasets that are split by model, batch and cluster.
BY_GROUP = frozenset({"vTrain single-node", "vTrain multi-node", "BLOOM sweep"})


@dataclass(frozen=True)
class Run:
    """One published run.

    Args:
        point: its number in the file.
        dataset: where it is from.
        spec: the model.
        plans: the plan; several where the source does not say how the devices were split: the best counts.
        cluster: where it ran.
        stack: name of the training program.
        measured_s: seconds of a step, or None where it did not run or was not timed.
        out_of_memory: it did not fit.
        group: runs of one model on one cluster, which are ranked among each other.
        fitted: it belongs to the part that constants are fitted to.
    """

    point: int
    dataset: str
    spec: TransformerSpec
    plans: tuple[TrainingPlan, ...]
    cluster: Cluster
    stack: str
    measured_s: float | None
    out_of_memory: bool
    group: str
    fitted: bool


@dataclass(frozen=True)
class Points:
    """What a file of runs says.

    Args:
        runs: those that can be predicted, in its order.
        skipped: number of rows that were left out, by reason.
    """

    runs: tuple[Run, ...]
    skipped: Mapping[str, int]


class _SkippedRowError(Exception):
    """A row that cannot be predicted; its text is the reason."""


def read(file: Path = POINTS) -> Points:
    """The runs of ``file`` on known hardware with plans that are possible, and why other rows are left out."""
    constants = load_constants()
    runs: list[Run] = []
    skipped: Counter[str] = Counter()
    uncertain: set[int] = set()
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            try:
                runs.append(_run(row))
            except _SkippedRowError as reason:
                skipped[str(reason)] += 1
                continue
            if row["recompute"] in _UNCERTAIN:
                uncertain.add(runs[-1].point)
    return Points(tuple(_one_reading(runs, uncertain, constants)), dict(sorted(skipped.items())))


def load(file: Path = POINTS) -> tuple[Run, ...]:
    """The runs of `read`."""
    return read(file).runs


def _run(row: dict[str, str]) -> Run:
    if not any(text in row["hardware"] for text in CLUSTERS):
        raise _SkippedRowError("no cluster file for the hardware")
    spec = _spec(row)
    out_of_memory = "OOM" in row["status"] or "printed OOM" in row["note"]
    timed = not out_of_memory and re.fullmatch(r"[\d.eE+-]+", row["iteration_s"])
    point = _integer(row, "point_id")
    cluster = _cluster(row)
    dataset = row["dataset"]
    group = "/".join((dataset, row["hardware"], row["inter_node_GBps_per_node"], row["devices"], *_model(row)))
    plans = tuple(_possible(_plans(row, spec), spec))
    if not plans:
        raise _SkippedRowError("no plan of these numbers is possible")
    return Run(
        point,
        dataset,
        spec,
        plans,
        cluster,
        _stack(row),
        float(row["iteration_s"]) if timed else None,
        out_of_memory,
        group,
        _fitted(dataset, group, row["point_id"]),
    )


def _one_reading(runs: Sequence[Run], uncertain: Collection[int], constants: Constants) -> Iterator[Run]:
    """Runs whose source does not say what was recomputed: one reading for all runs of one model on one cluster.

    All keep their activations where those of all that ran fit, else all recompute layers.
    """
    kept: dict[str, bool] = {}
    for run in runs:
        if run.point in uncertain and not run.out_of_memory:
            limit = run.cluster.groups[0].device.memory_bytes
            stack = constants.stack(run.stack)
            fits = min(peak_memory(run.spec, plan, stack).total_bytes for plan in run.plans) <= limit
            kept[run.group] = kept.get(run.group, True) and fits
    for run in runs:
        if run.point in uncertain and not kept.get(run.group, True):
            plans = tuple(dataclasses.replace(plan, recompute="full") for plan in run.plans)
            yield dataclasses.replace(run, plans=plans)
        else:
            yield run


def _possible(plans: Iterator[TrainingPlan], spec: TransformerSpec) -> Iterator[TrainingPlan]:
    """Those that suit the model."""
    for plan in plans:
        try:
            plan.check(spec)
        except InfeasiblePlanError:
            continue
        yield plan


def _stack(row: dict[str, str]) -> str:
    for start, stack in STACKS.items():
        if row["dataset"].startswith(start):
            return stack
    if _is_fsdp(row):
        return "fsdp"
    if any(f"v{n}" in row["hardware"] for n in ("4", "5e", "5p", "6e")):
        return "xla"
    return "megatron" if "V100" in row["hardware"] or "A100" in row["hardware"] else "megatron-core"


def _fitted(dataset: str, group: str, point: str) -> bool:
    """Whole groups are held out, so that ranking is judged on models never seen; single runs of small datasets."""
    if dataset in HELD_OUT:
        return False
    return zlib.crc32((group if dataset in BY_GROUP else point).encode(), SEED) % 2 == 0


def _model(row: dict[str, str]) -> list[str]:
    return [row[c] for c in ("layers", "hidden", "ffn", "heads", "seq", "global_batch")]


def _integer(row: dict[str, str], column: str) -> int:
    if not row[column].strip().isdigit():
        raise _SkippedRowError(f"{column} is no number")
    return int(row[column])


def _number(row: dict[str, str], column: str, default: int) -> int:
    return _integer(row, column) if row[column].strip() else default


def _spec(row: dict[str, str]) -> TransformerSpec:
    llama = row["family"] == "llama"
    hidden = _integer(row, "hidden")
    # Where the source does not say: heads of about 128, in a multiple of 8 so that tp may divide them.
    heads = _number(row, "heads", max(8, next(n for n in range(hidden // 128 // 8 * 8, 0, -8) if hidden % n == 0)))
    return TransformerSpec(
        layers=_integer(row, "layers"),
        hidden=hidden,
        heads=heads,
        seq=_integer(row, "seq"),
        vocab=_vocab(row),
        ffn=_number(row, "ffn", 4 * hidden),
        kv_heads=_number(row, "kv_heads", heads),
        gated=llama,
        tied=not llama,
        learned_positions=not llama and "BLOOM" not in row["dataset"],
        dropout=not llama and not row["dataset"].startswith("Alpa"),
        dtype=_dtype(row),
    )


def _vocab(row: dict[str, str]) -> int:
    """Where the source assumes the size of the vocabulary, that size padded to 128 as Megatron-LM does.

    Where it says none, that of GPT-2, padded for eight shards.
    """
    size = _number(row, "vocab", 51200)
    return -(-size // 128) * 128 if "vocab assumed" in row["note"] else size


def _dtype(row: dict[str, str]) -> str:
    if re.search("fp8|float8", row["dtype"], re.IGNORECASE):
        return "f8_e4m3fn"
    # The BLOOM sweep went over from f16 to bf16 with f32 gradients: the memory printed in this round is 4 bytes and
    # more a parameter above that of the same plans before.
    return "bf16" if row["case"].startswith("Rebalancing layers") or row["dtype"].lower() == "bf16" else "f16"


#: Texts that do not tell what ran. vTrain's column tells what its simulator was set to; its runs on one node did not
#: recompute: with the FLOPs of full recomputation those of microbatches of 8 would have run above the device's peak.
_UNCERTAIN = ("not published", "full (per simulation config)")


#: Starts of texts of the column, and what they mean.
_RECOMPUTE: dict[str, Recompute] = {"selective": "selective", "full": "full", "none": "none"}


def _recompute(row: dict[str, str]) -> Recompute:
    text = row["recompute"].strip()
    if text in _UNCERTAIN:
        return "none"
    if text in ("", "not stated"):
        # TeraPipe keeps the values of its slices; the other runs would not fit without recomputation.
        return "none" if row["dataset"].startswith("TeraPipe") else "full"
    for start, meaning in _RECOMPUTE.items():
        if text.startswith(start):
            return meaning
    raise _SkippedRowError(f"unknown recomputation: {text}")


def _is_fsdp(row: dict[str, str]) -> bool:
    """Whether PyTorch's FSDP partitions the state."""
    text = row["fsdp_or_zero"]
    return "FSDP" in text or "fully sharded" in text.lower()


def _zero(row: dict[str, str]) -> int:
    text = row["fsdp_or_zero"].strip()
    if stage := re.match(r"ZeRO-([0-3])\b", text):
        return int(stage.group(1))
    if _is_fsdp(row):
        return 2 if "ZeRO-2" in text else 3
    if "distributed" in text:
        return 1
    if text in ("", "no", "none", "DDP", "0", "1"):
        return 0
    raise _SkippedRowError(f"unknown partition of the state: {text}")


def _schedule(row: dict[str, str], chunks: int) -> str:
    text = row["schedule"]
    if text in _ZERO_BUBBLE:
        return _ZERO_BUBBLE[text]
    return "interleaved" if chunks > 1 else "gpipe" if "GPipe" in text else "1f1b"


#: The paper's names of its schedules: with the memory of 1F1B, with twice that, in a V.
_ZERO_BUBBLE = {"ZB-1p": "zb-h1", "ZB-2p": "zb-h2", "ZB-V": "zb-v"}


def _chunks(row: dict[str, str], layers: int, pp: int) -> int:
    if "one layer per chunk" in row["vpp_chunks"]:
        return max(1, -(-layers // pp))
    return _number(row, "vpp_chunks", 1)


def _plans(row: dict[str, str], spec: TransformerSpec) -> Iterator[TrainingPlan]:
    batch, devices = _integer(row, "global_batch"), _integer(row, "devices")
    zero, pp, cp = _zero(row), _number(row, "pp", 1), _number(row, "cp", 1)
    chunks = _chunks(row, spec.layers, pp)
    schedule = _schedule(row, chunks)
    splits = [(_number(row, "tp", 1), _number(row, "dp", 1))]
    if not row["tp"]:
        splits = [
            (t, devices // pp // t) for t in range(1, devices + 1) if devices // pp % t == 0 and spec.heads % t == 0
        ]
    for tp, dp in splits:
        default = batch // dp if pp == 1 else 1
        microbatch = min(_number(row, "micro_batch", default), max(1, batch // dp))
        if batch % (dp * microbatch):
            continue
        yield TrainingPlan(
            global_batch=batch,
            microbatch=microbatch,
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            zero=zero,
            sequence_parallel=row["sequence_parallel"] == "yes",
            recompute=_recompute(row),
            chunks=chunks,
            schedule=schedule,
            stages_together=row["dataset"].startswith("TeraPipe"),
        )


@cache
def _listed(name: str) -> Cluster:
    """A cluster of `Cluster.load`, read once: hundreds of rows name the same few."""
    return Cluster.load(name)


def _cluster(row: dict[str, str]) -> Cluster:
    """The cluster file of the row's device, with the row's nodes, memory and network."""
    hardware = row["hardware"]
    name = next(file for text, file in CLUSTERS.items() if text in hardware)
    if name == "dgx-a100" and "2020" in row["dataset"] and not row["mem_gb_per_device"].strip():
        name = "dgx-a100-40gb"  # cards of 80 GB, which have more bandwidth too, came at the end of that year
    cluster = _listed(name)
    devices = _integer(row, "devices")
    per_node = min(devices, _number(row, "devices_per_node", cluster.groups[0].devices_per_node))
    group = cluster.groups[0]
    device = dataclasses.replace(group.device, memory_bytes=_memory(row, group.device.memory_bytes))
    intra, inter = group.intra, group.inter
    if "DGX-2" in hardware:
        intra = dataclasses.replace(intra, group_shares=())  # it has a switch between its V100s
    if isinstance(inter, LinkSpec):
        if row["inter_node_GBps_per_node"]:
            node = float(row["inter_node_GBps_per_node"]) * 1e9
            inter = dataclasses.replace(inter, bandwidth=min(inter.bandwidth, node), node_bandwidth=node)
        if delay := re.search(r"delay (\d+)ms", row["case"]):
            inter = dataclasses.replace(inter, latency_s=float(delay.group(1)) / 1e3)
    nodes = max(1, -(-devices // per_node))
    group = dataclasses.replace(group, count=nodes, devices_per_node=per_node, device=device, intra=intra, inter=inter)
    return Cluster(name, (group,))


#: Bytes that a program has of each gigabyte that a card is sold with: nvidia-smi tells 81,559 MiB of H100s of 80 GB,
#: 40,960 of A100s of 40 GB and 16,160 of V100s of 16 GB, so these are GiB, but for a hundredth at most.
_USABLE = 0.986 * 2**30


def _memory(row: dict[str, str], default: int) -> int:
    if row["mem_gb_per_device"].strip():
        return int(float(row["mem_gb_per_device"]) * _USABLE)
    return int(32 * _USABLE) if "DGX-2" in row["hardware"] else default
