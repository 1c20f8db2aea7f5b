"""Instructions of a compiled program, read from the text of its optimized HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.cost.collectives import KINDS

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
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_TENSOR = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\]")
_BITS = re.compile(r"(?:bf|[sufc])(\d+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Args:
        name: its name.
        shape: text of its result's type.
        opcode: what it does.
        operands: text between the brackets behind the opcode.
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
    """The program of a text.

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
    """Index behind the bracket that closes the one at ``start``."""
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
    if said := _TRIPS.search(loop.attributes):
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
