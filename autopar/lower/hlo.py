"""Collectives of a compiled program, read from the text of its optimized HLO.

Bytes follow the convention of `autopar.cost.collectives`, so that records compare with a plan's. They are
worked out from the operands, which the synchronous, the ``-start`` and the tuple forms have in common:

    all-reduce, reduce-scatter, collective-permute   an operand
    all-gather                                       an operand, times the devices of a group
    all-to-all                                       all operands of the tuple form together, times the devices
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost.collectives import wire_bytes
from autopar.lower.hlo_text import COLLECTIVES, Instruction, parse_module, runs_of, split_operands, tensors_of
from autopar.lower.replica_groups import listed_groups

Groups = tuple[tuple[int, ...], ...]

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_LISTED = re.compile(r"\breplica_groups=\{((?:\s*\{[\d,\s]*\}\s*,?)*)\}")
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\s*\{[\d,\s]*\}\s*,?)*)\}")
_CHAIN = re.compile(r'\bchain_id="(\d+)"')


@dataclass(frozen=True, slots=True)
class HloCollective:
    """One collective instruction, or one operand of an instruction that does several at once.

    Args:
        kind: as in a plan's records.
        dtype: jaxpr name of the dtype that is sent: a backend may widen what the program asked for.
        operand_bytes: what one device gives.
        full_bytes: bytes of the full tensor as one group of devices sees it.
        group_size: devices in the largest group; 2 for collective-permute.
        groups: device numbers of each group; (source, target) pairs for collective-permute.
        times: runs of it in one run of the program.
        exact: whether ``times`` is certain: not in a branch, nor in a loop whose trips the text does not tell.
        name: name of the instruction.
        scope: jax's name stack of the operation that it came from; "" where the text does not tell.
    """

    kind: str
    dtype: str
    operand_bytes: int
    full_bytes: int
    group_size: int
    groups: Groups
    times: float
    exact: bool
    name: str
    scope: str = ""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends, all ``times`` together."""
        return self.times * wire_bytes(self.kind, self.full_bytes, self.group_size)


def collectives(text: str, *, unknown_trips: float = 1.0) -> tuple[HloCollective, ...]:
    """The collectives of a program, in the order of the text.

    Args:
        text: optimized HLO, as ``compiled.as_text()`` gives it.
        unknown_trips: trips assumed of loops whose number of trips is not in the text.

    Each of the k branches of a conditional counts as 1/k of a run, as plans count it.

    Raises:
        ValueError: the text is not an HLO module, or uses a form of groups that is not known here.
    """
    module = parse_module(listed_groups(text))
    runs = runs_of(module, unknown_trips)
    collected: list[HloCollective] = []
    chains: set[tuple[str, str, str, float]] = set()
    for name, instructions in module.computations.items():
        if name in runs:
            times, exact = runs[name]
            shapes = {i.name: i.shape for i in instructions}
            for i in instructions:
                chain = _CHAIN.search(i.attributes)
                if chain is not None:
                    # The TPU compiler runs it bit by bit in several fusions with computations; each repeats it.
                    part = (chain[1], i.opcode, i.shape.partition("{")[0], times)
                    if part in chains:
                        continue
                    chains.add(part)
                read = read_collectives(i, shapes, module.devices, times, exact)
                collected.extend(as_emitted(c, name) for c in read)
    return tuple(collected)


@dataclass(frozen=True, slots=True)
class HloWork:
    """Work of a program besides its collectives.

    Args:
        fusions: fusion instructions in the text.
        cycles: estimated cycles of one run of the program; None where the compiler says none (only TPU's does).
    """

    fusions: int
    cycles: float | None


def work(text: str, *, unknown_trips: float = 1.0) -> HloWork:
    """Fusions, and cycles that the compiler estimates, loops counted by their trips.

    Args:
        text: optimized HLO.
        unknown_trips: as in `collectives`.
    """
    module = parse_module(text)
    runs = runs_of(module, unknown_trips)
    fusions, cycles, said = 0, 0.0, False
    for name, instructions in module.computations.items():
        for i in instructions:
            fusions += i.opcode == "fusion"
            estimate = _CYCLES.search(i.attributes)
            if estimate and name in runs:
                cycles, said = cycles + runs[name][0] * int(estimate[1]), True
    return HloWork(fusions, cycles if said else None)


def operations(text: str) -> dict[str, tuple[str, str]]:
    """Instructions of a program by name: the opcode, and jax's name stack; of a loop those inside as well.

    Args:
        text: optimized HLO.
    """
    return {i.name: (i.opcode, i.scope) for body in parse_module(text).computations.values() for i in body}


def as_emitted(written: HloCollective, body: str) -> HloCollective:
    """A collective as the kind that runs: a reduce-scatter is written by the TPU compiler as an all-reduce and a slice.

    They are one fusion (``SingleInputAllReduceScatterFusion``), which sends what a reduce-scatter does.

    Args:
        written: the collective.
        body: name of the computation that it is in.
    """
    return replace(written, kind="reduce-scatter") if body.startswith("all-reduce-scatter") else written


def read_collectives(
    i: Instruction, shapes: Mapping[str, str], devices: int, times: float = 1.0, exact: bool = True
) -> Iterator[HloCollective]:
    """The collectives of an instruction, one for each operand; none of other instructions, and of those that end one.

    Args:
        i: the instruction.
        shapes: text of the type of each value of its computation.
        devices: of the program.
        times: runs of it in one run of the program.
        exact: whether ``times`` is certain.
    """
    kind = COLLECTIVES.get(i.opcode.removesuffix("-start"))
    if kind is None:
        return
    operands = [tensors_of(o, shapes) for o in split_operands(i.operands)]
    if kind == "collective-permute":
        groups = _numbers(_PAIRS, i) or _groups(i, devices)
        # The form that writes into a buffer has that and two offsets behind the data.
        in_place = len(operands) == 4 and all(t[0] == "i32" for o in operands[2:] for t in o)
        size, operands = 2, operands[: 1 if in_place else None]
    else:
        groups = _groups(i, devices)
        size = max(len(g) for g in groups)
    if i.opcode.startswith("ragged"):
        operands = operands[:1]
    if kind == "all-to-all":
        # The tuple form names what goes to each device; the other has one operand for all.
        operands = [tuple(t for o in operands for t in o)]
    if kind == "all-gather" and len(operands) == 1 and len(operands[0]) > 1:
        operands = [(t,) for t in operands[0]]
    scale = size if kind in ("all-gather", "all-to-all") else 1
    for tensors in operands:
        given = math.ceil(sum(n for _, n in tensors))
        dtype = tensors[0][0] if tensors else "token"
        yield HloCollective(kind, dtype, given, given * scale, size, groups, times, exact, i.name, i.scope)


def _numbers(pattern: re.Pattern[str], i: Instruction) -> Groups:
    match = pattern.search(i.attributes)
    if not match:
        return ()
    return tuple(tuple(map(int, re.findall(r"\d+", g))) for g in re.findall(r"\{([^{}]*)\}", match[1]))


def _groups(i: Instruction, devices: int) -> Groups:
    """The groups of a collective; without any that is one group of all."""
    if iota := _IOTA.search(i.attributes):
        shape, dims = ([int(n) for n in part.split(",")] for part in (iota[1], iota[2]))
        numbers = np.arange(math.prod(dims)).reshape(dims)
        if iota[3]:
            numbers = numbers.transpose([int(n) for n in iota[3].split(",")])
        return tuple(tuple(map(int, row)) for row in numbers.reshape(-1, shape[-1]))
    if "replica_groups=" in i.attributes and not _LISTED.search(i.attributes):
        raise ValueError(f"the groups of {i.name} are written in a form that is not known: {i.attributes[:200]}")
    return _numbers(_LISTED, i) or (tuple(range(devices)),)
