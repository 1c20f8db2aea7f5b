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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from autopar.cost.collectives import KINDS, wire_bytes
from autopar.lower.replica_groups import listed_groups

Groups = tuple[tuple[int, ...], ...]

# The opcode, and what it is counted as.
_KINDS = {kind: kind for kind in KINDS if kind != "send"} | {
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "collective-permute",
}
_COMMENT = re.compile(r"/\*.*?\*/")
_METADATA = re.compile(r',? *metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_SCOPE = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
_NAME = re.compile(r"\s+(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_TENSOR = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\]")
_BITS = re.compile(r"(?:bf|[sufc])(\d+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)"
    r"=(\{[^{}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_LISTED = re.compile(r"\breplica_groups=\{((?:\s*\{[\d,\s]*\}\s*,?)*)\}")
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\s*\{[\d,\s]*\}\s*,?)*)\}")
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


@dataclass(frozen=True, slots=True)
class Collective:
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


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str
    scope: str


@dataclass(frozen=True, slots=True)
class _Module:
    entry: str
    computations: Mapping[str, tuple[_Instruction, ...]]
    devices: int


def collectives(text: str, *, unknown_trips: float = 1.0) -> tuple[Collective, ...]:
    """The collectives of a program, in the order of the text.

    Args:
        text: optimized HLO, as ``compiled.as_text()`` gives it.
        unknown_trips: trips assumed of loops whose number of trips is not in the text.

    Each of the k branches of a conditional counts as 1/k of a run, as plans count it.

    Raises:
        ValueError: the text is not an HLO module, or uses a form of groups that is not known here.
    """
    module = _parse(listed_groups(text))
    runs = _runs(module, unknown_trips)
    found: list[Collective] = []
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
                found.extend(_read(i, shapes, module.devices, times, exact))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class HloWork:
    """What a program is made of besides its collectives.

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
    module = _parse(text)
    runs = _runs(module, unknown_trips)
    fusions, cycles, said = 0, 0.0, False
    for name, instructions in module.computations.items():
        for i in instructions:
            fusions += i.opcode == "fusion"
            estimate = _CYCLES.search(i.attributes)
            if estimate and name in runs:
                cycles, said = cycles + runs[name][0] * int(estimate[1]), True
    return HloWork(fusions, cycles if said else None)


def total_wire_bytes(found: Iterable[Collective]) -> float:
    """Bytes that one device sends in all of ``found``."""
    return math.fsum(c.wire_bytes for c in found)


def _parse(text: str) -> _Module:
    computations: dict[str, list[_Instruction]] = {}
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
    return _Module(entry, {name: tuple(body) for name, body in computations.items()}, devices)


def _instruction(line: str, with_metadata: str) -> _Instruction | None:
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
    return _Instruction(
        named[1], line[start:end], opcode[1], line[opcode.end() : close - 1], line[close:], scope[1] if scope else ""
    )


def _closing(line: str, start: int) -> int:
    """Where the bracket that opens at ``start`` has been closed: the index behind it."""
    depth = 0
    for k in range(start, len(line)):
        depth += (line[k] in "([{") - (line[k] in ")]}")
        if depth == 0:
            return k + 1
    return len(line)


def _runs(module: _Module, unknown_trips: float) -> dict[str, tuple[float, bool]]:
    """By computation that runs: how often, and whether that is certain."""
    calls = {name: list(_calls(module, body, unknown_trips)) for name, body in module.computations.items()}
    runs: dict[str, tuple[float, bool]] = {module.entry: (1.0, True)}
    for name in _callers_first(module.entry, calls):
        times, exact = runs[name]
        for callee, factor, certain in calls[name]:
            before, was_exact = runs.get(callee, (0.0, True))
            runs[callee] = (before + times * factor, was_exact and exact and certain)
    return runs


def _calls(module: _Module, body: tuple[_Instruction, ...], unknown_trips: float) -> Iterator[tuple[str, float, bool]]:
    """Computations that a computation calls: name, runs of it in one run of the caller, whether that is certain."""
    for i in body:
        # Some texts repeat the computation of an asynchronous operation on all its parts. That of a collective
        # is either the sum or maximum that it takes, or once more the collective itself.
        if i.opcode.endswith(("-update", "-done")) or i.opcode.removesuffix("-start") in _KINDS:
            continue
        trips = _TRIPS.search(i.attributes) if i.opcode == "while" else None
        for key, value in _CALLED.findall(i.attributes):
            callees = [c for c in re.findall(r"[\w.\-]+", value) if c in module.computations]
            for callee in callees:
                if i.opcode == "while":
                    count = float(trips[1]) if trips else unknown_trips
                    yield callee, count + (key == "condition"), trips is not None
                elif i.opcode == "conditional":
                    yield callee, 1 / (2 if key in ("true_computation", "false_computation") else len(callees)), False
                else:
                    yield callee, 1.0, True


def _callers_first(entry: str, calls: Mapping[str, list[tuple[str, float, bool]]]) -> list[str]:
    """The computations that ``entry`` leads to, each behind all that call it."""
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


def _read(i: _Instruction, shapes: Mapping[str, str], devices: int, times: float, exact: bool) -> Iterator[Collective]:
    kind = _KINDS.get(i.opcode.removesuffix("-start"))
    if kind is None:
        return
    operands = [_operand(o, shapes) for o in _split(i.operands)]
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
        yield Collective(kind, dtype, given, given * scale, size, groups, times, exact, i.name, i.scope)


def _split(operands: str) -> list[str]:
    """Operands of an instruction, apart."""
    found, start, depth = [], 0, 0
    for k, c in enumerate(operands):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            found.append(operands[start:k])
            start = k + 1
    return [o for o in (*found, operands[start:]) if o.strip()]


def _operand(text: str, shapes: Mapping[str, str]) -> tuple[tuple[str, float], ...]:
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


def _numbers(pattern: re.Pattern[str], i: _Instruction) -> Groups:
    found = pattern.search(i.attributes)
    if not found:
        return ()
    return tuple(tuple(map(int, re.findall(r"\d+", g))) for g in re.findall(r"\{([^{}]*)\}", found[1]))


def _groups(i: _Instruction, devices: int) -> Groups:
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
