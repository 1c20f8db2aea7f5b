"""Instructions and collectives of a compiled program, read from the text of its optimized HLO.

`parse_module` reads instructions, `collectives` those that communicate, `work` everything else. Seconds are estimated
in `autopar.lower.aot.estimates`.

Bytes follow the convention of `autopar.cost.collectives`, so that records compare with a plan's. They are worked out
from the operands, which the synchronous, the ``-start`` and the tuple forms have in common:

    all-reduce, reduce-scatter, collective-permute   an operand
    all-gather                                       an operand, times the devices of a group
    all-to-all                                       all operands of the tuple form together, times the devices

XLA may write groups by axes of a mesh; `listed_groups` writes them out as lists of devices:
``replica_groups=mesh['a'=2,'b'=4] {'b'}`` becomes ``replica_groups={{0,1,2,3},{4,5,6,7}}``. A part of an axis,
``'b':(2)2``, is the dim of size 2 after one of size 2 (its first number) in that axis. The devices of a mesh may be
in another order: ``device_ids=([2,4]T(1,0))`` is a transposed count, ``device_ids=(3,2,1,0)`` a list.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.cost.collectives import KINDS, wire_bytes

_FORM = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    r"(?:, *device_ids=\((?:\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<ids>[\d,\s]+))\))?"
    r" *\{(?P<chosen>[^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
#: Opcodes of collectives, and what each is counted as.
COLLECTIVES = {kind: kind for kind in KINDS if kind != "send"} | {
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "collective-permute",
}
_COMMENT = re.compile(r"/\*.*?\*/")
_METADATA = re.compile(r',? *metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_SCOPE = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_NAME = re.compile(r"\s+(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)"
    r"=(\{[^{}]*\}|%?[\w.\-]+)"
)
TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_TENSOR = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\]")
_BITS = re.compile(r"(?:bf|[sufc])(\d+)")
Groups = tuple[tuple[int, ...], ...]

CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_LISTED = re.compile(r"\breplica_groups=\{((?:\s*\{[\d,\s]*\}\s*,?)*)\}")
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\s*\{[\d,\s]*\}\s*,?)*)\}")
CHAIN = re.compile(r'\bchain_id="(\d+)"')


def listed_groups(text: str) -> str:
    """``text``, optimized HLO, with all replica groups as explicit lists of devices."""
    return _FORM.sub(_listed, text)


def _listed(match: re.Match[str]) -> str:
    sizes = {name: int(n) for name, n in _AXIS.findall(match["axes"])}
    # Each axis as dims of the device array: before, the part, after it.
    cuts: dict[str, set[int]] = {name: {1, n} for name, n in sizes.items()}
    wanted: list[tuple[str, int, int]] = []
    for name, before, part in _PART.findall(match["chosen"]):
        start = int(before or 1)
        stop = start * int(part or sizes[name])
        cuts[name] |= {start, stop}
        wanted.append((name, start, stop))
    dims: list[int] = []
    labels: list[tuple[str, int]] = []
    for name, points in cuts.items():
        ordered = sorted(points)
        for low, high in itertools.pairwise(ordered):
            labels.append((name, low))
            dims.append(high // low)
    matching = [i for w in wanted for i, (name, low) in enumerate(labels) if name == w[0] and w[1] <= low < w[2]]
    kept = [i for i in range(len(dims)) if i not in matching]
    numbers = _devices(match, math.prod(dims)).reshape(dims).transpose((*kept, *matching))
    groups = numbers.reshape(-1, math.prod(dims[i] for i in matching))
    return "replica_groups={" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups.tolist()) + "}"


def _devices(match: re.Match[str], count: int) -> np.ndarray[Any, Any]:
    """Numbers of a mesh's devices, in its order."""
    if match["ids"]:
        return np.array([int(n) for n in match["ids"].split(",")])
    numbers = np.arange(count)
    if match["shape"]:
        numbers = numbers.reshape([int(n) for n in match["shape"].split(",")])
        if match["order"]:
            numbers = numbers.transpose([int(n) for n in match["order"].split(",")])
    return numbers.reshape(-1)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Args:
        name: its name.
        shape: text of its result's type.
        opcode: what it does.
        operands: text between the brackets after the opcode.
        attributes: what follows, without metadata.
        scope: jax's name stack of the operation that it came from; "" where the text does not tell.
    """

    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str
    scope: str


@dataclass(frozen=True, slots=True)
class HloModule:
    """A program.

    Args:
        entry: name of the computation that runs.
        computations: instructions by name of the computation, in the order of the text.
        devices: how many devices run it.
    """

    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]
    devices: int


def parse_module(text: str) -> HloModule:
    """The instructions of a program, by computation.

    Args:
        text: optimized HLO.

    Raises:
        ValueError: the text is not the HLO of a compiled program.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current, devices = "", "", 1
    for raw in text.splitlines():
        bare = _COMMENT.sub("", raw)
        line = _METADATA.sub("", bare)
        if line.startswith("HloModule"):
            devices = math.prod(map(int, _DEVICES.findall(line)))
        elif line[:1].isspace() and current:
            instruction = _instruction(line, bare)
            if instruction is not None:
                computations[current].append(instruction)
        elif header := _HEADER.match(line):
            current = header[2]
            computations[current] = []
            entry = current if header[1] else entry
        elif line.startswith("}"):
            current = ""
    if not entry:
        raise ValueError("the text has no ENTRY computation, so it is not the HLO of a compiled program")
    return HloModule(entry, {name: tuple(body) for name, body in computations.items()}, devices)


def _instruction(line: str, with_metadata: str) -> Instruction | None:
    named = _NAME.match(line)
    if not named:
        return None
    start = named.end()
    end = _closing(line, start) if line.startswith("(", start) else line.find(" ", start)
    opcode = _OPCODE.match(line, end) if end > start else None
    if not opcode:
        return None
    close = _closing(line, opcode.end() - 1)
    scope = _SCOPE.search(with_metadata)
    return Instruction(
        named[1], line[start:end], opcode[1], line[opcode.end() : close - 1], line[close:], scope[1] if scope else ""
    )


def _closing(line: str, start: int) -> int:
    """Index after the bracket that closes the one at ``start``."""
    depth = 0
    for k in range(start, len(line)):
        depth += (line[k] in "([{") - (line[k] in ")]}")
        if depth == 0:
            return k + 1
    return len(line)


def runs_of(module: HloModule, unknown_trips: float) -> dict[str, tuple[float, bool]]:
    """Number of runs, and whether it is certain, by computation that runs."""
    calls = {name: list(called(module, body, unknown_trips)) for name, body in module.computations.items()}
    runs: dict[str, tuple[float, bool]] = {module.entry: (1.0, True)}
    for name in _callers_first(module.entry, calls):
        times, exact = runs[name]
        for callee, factor, certain in calls[name]:
            before, was_exact = runs.get(callee, (0.0, True))
            runs[callee] = (before + times * factor, was_exact and exact and certain)
    return runs


def called(module: HloModule, body: tuple[Instruction, ...], unknown_trips: float) -> Iterator[tuple[str, float, bool]]:
    """Computations that a computation calls: name, runs of it in one run of the caller, whether that is certain."""
    for i in body:
        # Some texts repeat the computation of an asynchronous operation on all its parts. That of a collective
        # is either the sum or maximum that it takes, or once more the collective itself.
        if i.opcode.endswith(("-update", "-done")) or i.opcode.removesuffix("-start") in COLLECTIVES:
            continue
        trips = _trips(module, body, i) if i.opcode == "while" else None
        for key, value in _CALLED.findall(i.attributes):
            callees = [c for c in re.findall(r"[\w.\-]+", value) if c in module.computations]
            for callee in callees:
                if i.opcode == "while":
                    count = unknown_trips if trips is None else float(trips)
                    yield callee, count + (key == "condition"), trips is not None
                elif i.opcode == "conditional":
                    yield callee, 1 / (2 if key in ("true_computation", "false_computation") else len(callees)), False
                else:
                    yield callee, 1.0, True


def _trips(module: HloModule, body: tuple[Instruction, ...], loop: Instruction) -> int | None:
    """Trips of a while loop: as the text says, or of a number that is counted from 0 by 1; None where neither tells."""
    if said := TRIPS.search(loop.attributes):
        return int(said[1])
    parts = {key: module.computations.get(value.lstrip("%"), ()) for key, value in _CALLED.findall(loop.attributes)}
    condition, inside = parts.get("condition", ()), parts.get("body", ())
    if not condition or not inside or "direction=LT" not in condition[-1].attributes:
        return None
    count, last = (_source(condition, o) for o in (*split_operands(condition[-1].operands), "")[:2])
    place = _INDEX.search(count.attributes) if count is not None and count.opcode == "get-tuple-element" else None
    start = _source(body, loop.operands)
    if place is None or start is None or inside[-1].opcode != "tuple" or start.opcode != "tuple":
        return None
    first, then = (
        _source(c, split_operands(t.operands)[int(place[1])]) for c, t in ((body, start), (inside, inside[-1]))
    )
    if then is None or then.opcode != "add" or _constant(first) != 0:
        return None
    terms = [_source(inside, o) for o in split_operands(then.operands)]
    again = any(
        t is not None and t.opcode == "get-tuple-element" and place[0] in t.attributes.split(", ") for t in terms
    )
    return _constant(last) if again and 1 in map(_constant, terms) else None


def _source(computation: tuple[Instruction, ...], operand: str) -> Instruction | None:
    """The instruction of a computation that makes an operand, copies left out."""
    by_name = {i.name: i for i in computation}
    maker = by_name.get(operand.strip().rpartition(" ")[2].lstrip("%"))
    while maker is not None and maker.opcode == "copy":
        maker = by_name.get(maker.operands.strip().rpartition(" ")[2].lstrip("%"))
    return maker


def _constant(i: Instruction | None) -> int | None:
    return int(i.operands) if i is not None and i.opcode == "constant" and i.operands.strip().isdigit() else None


def _callers_first(entry: str, calls: Mapping[str, list[tuple[str, float, bool]]]) -> list[str]:
    """The computations that ``entry`` leads to, each after all that call it."""
    done: dict[str, None] = {}
    stack = [(entry, False)]
    while stack:
        name, left = stack.pop()
        if left:
            done.setdefault(name)
        elif name not in done:
            stack.append((name, True))
            stack.extend((callee, False) for callee, _, _ in calls[name] if callee not in done)
    return list(reversed(done))


def split_operands(operands: str) -> list[str]:
    """Operands of an instruction, apart."""
    parts, start, depth = [], 0, 0
    for k, c in enumerate(operands):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(operands[start:k])
            start = k + 1
    return [o for o in (*parts, operands[start:]) if o.strip()]


def tensors_of(text: str, shapes: Mapping[str, str]) -> tuple[tuple[str, float], ...]:
    """(dtype, bytes) of the tensors of an operand, which names a value, with or without its shape before it."""
    shape, _, name = text.strip().rpartition(" ")
    shape = shape or shapes.get(name.lstrip("%"), "")
    return tuple((_jax_name(dtype), _tensor_bytes(dtype, dims)) for dtype, dims in _TENSOR.findall(shape))


def _tensor_bytes(dtype: str, dims: str) -> float:
    bits = _BITS.match(dtype)
    item = 1.0 if dtype == "pred" else int(bits[1]) / 8 if bits else 0.0
    return item * math.prod(int(n) for n in re.findall(r"\d+", dims))


def _jax_name(dtype: str) -> str:
    """``i32`` for ``s32``, ``bool`` for ``pred``, ``f8_e4m3fn`` for ``f8e4m3fn``."""
    if dtype == "pred":
        return "bool"
    if re.fullmatch(r"s\d+", dtype):
        return f"i{dtype[1:]}"
    return re.sub(r"^(f[48])(e\w+)$", r"\1_\2", dtype)


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
                chain = CHAIN.search(i.attributes)
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
        unknown_trips: trips assumed of loops whose number of trips is not in the text.
    """
    module = parse_module(text)
    runs = runs_of(module, unknown_trips)
    fusions, cycles, said = 0, 0.0, False
    for name, instructions in module.computations.items():
        for i in instructions:
            fusions += i.opcode == "fusion"
            estimate = CYCLES.search(i.attributes)
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
        # The form that writes into a buffer has that and two offsets after the data.
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
