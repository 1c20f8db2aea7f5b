"""What a program computes, by an interpreter that shares nothing with the verifier.

Values are expressions: what was applied to what. Workers are taken in a random order, messages are found by their tag
in boxes without limit, given-up buffers are really gone. A program is right if every result is the expression that one
machine gets that runs one microbatch after the other.
"""

from __future__ import annotations

import random
from typing import Any

from autopar.schedule import Dataflow, Program


class Wrong(Exception):
    """The program cannot be carried out."""


class Terms:
    """Expressions as numbers, equal where the expressions are."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def of(self, *parts: Any) -> int:
        return self.numbers.setdefault(parts, len(self.numbers))


def expected(program: Program, terms: Terms) -> dict[tuple[str, int], Any]:
    """Every result as one machine computes it, for every worker that has its stage."""
    flow, table = program.dataflow, program.table
    env: dict[Any, Any] = {}
    for v in flow.values:
        if v.stages:
            for k in [None] if v.lifetime == "step" else range(table.num_microbatches):
                env[v.name, k] = terms.of("input", v.name, k)
    contributions: dict[str, list[tuple[int, int]]] = {}
    todo = [(s, None) for s in flow.works if s.work.kind in ("before", "update")]
    todo += [
        (s, k) for s in flow.works if s.work.kind not in ("before", "update") for k in range(table.num_microbatches)
    ]
    while todo:
        later = []
        for spec, k in todo:
            inputs = []
            for name in spec.reads:
                lifetime = flow.by_name[name].lifetime
                if lifetime == "accumulator":
                    found = contributions.get(name, [])
                    whole = len(found) == table.num_microbatches
                    inputs.append(join(flow, name, found, terms) if whole else None)
                else:
                    inputs.append(env.get((name, None if lifetime == "step" else k)))
            if None in inputs:
                later.append((spec, k))
                continue
            for name, value in zip((*spec.writes, *spec.accumulates), outputs(spec, inputs, terms), strict=True):
                if flow.by_name[name].lifetime == "accumulator":
                    contributions.setdefault(name, []).append((k, value))
                else:
                    env[name, k] = value
        assert len(later) < len(todo), "the dataflow has a circle"
        todo = later
    found = {}
    for v in flow.values:
        if v.result:
            value = join(flow, v.name, contributions[v.name], terms) if v.reduce else env[v.name, None]
            for worker in table.workers_of_stage(flow.writers[v.name].stage):
                found[v.name, worker] = value
    return found


def outputs(spec, inputs, terms):
    return [
        terms.of("result", spec.work.kind, spec.work.stage, spec.work.part, i, *inputs)
        for i in range(len(spec.writes) + len(spec.accumulates))
    ]


def join(flow: Dataflow, name: str, found: list[tuple[int, int]], terms: Terms) -> int:
    """Concatenation knows the order of microbatches, the others do not."""
    reduce = flow.by_name[name].reduce
    parts = sorted(found) if reduce == "concatenate" else sorted(value for _, value in found)
    return terms.of(reduce, *parts)


class Joined:
    """An accumulator under way: pieces with the microbatch that the instruction says."""

    def __init__(self, name: str, pieces: list[tuple[int, int]]) -> None:
        self.name = name
        self.pieces = pieces


def interpret(program: Program, terms: Terms, seed: int = 0) -> dict[tuple[str, int], Any]:
    """Every result as the instruction lists compute it. Wrong where they cannot be carried out."""
    order = random.Random(seed)
    flow, table = program.dataflow, program.table
    envs: list[dict[Any, Any]] = [{} for _ in program.workers]
    kept: list[set[Any]] = [set() for _ in program.workers]
    for v in flow.values:
        for s in v.stages:
            for k in [-1] if v.lifetime == "step" else range(table.num_microbatches):
                for row, tasks in enumerate(table.rows):
                    if any(t.stage == s and k in (-1, t.microbatch) for t in tasks):
                        value = terms.of("input", v.name, None if k == -1 else k)
                        envs[row][v.name, k, -1] = value
                        if not v.donated:
                            kept[row].add((v.name, k, -1))
    boxes: dict[int, Any] = {}
    at = [0] * len(program.workers)
    while True:
        able = [
            w for w, p in enumerate(program.workers)
            if at[w] < len(p.instructions)
            and (type(i := p.instructions[at[w]]).__name__ != "Recv" or i.tag in boxes)
        ]  # fmt: skip
        if not able:
            break
        w = order.choice(able)
        carry_out(program.workers[w].instructions[at[w]], envs[w], kept[w], boxes, flow, terms)
        at[w] += 1
    if any(at[w] < len(p.instructions) for w, p in enumerate(program.workers)):
        raise Wrong("somebody waits for ever")
    if boxes:
        raise Wrong("a message is left")
    found = {}
    for v in flow.values:
        if v.result:
            for worker in table.workers_of_stage(flow.writers[v.name].stage):
                value = envs[worker].get((v.name, -1, -1))
                found[v.name, worker] = flat(value, flow, terms)
    return found


def flat(value, flow, terms):
    return join(flow, value.name, value.pieces, terms) if isinstance(value, Joined) else value


def key(b):
    return (b.value, b.microbatch, b.origin)


def take(env, kept, b):
    if key(b) in kept:
        raise Wrong(f"{b} is the caller's")
    if env.pop(key(b), None) is None:
        raise Wrong(f"{b} is not there")


def look(env, b):
    if key(b) not in env:
        raise Wrong(f"{b} is not there")
    return env[key(b)]


def carry_out(i, env, kept, boxes, flow, terms):
    name = type(i).__name__
    if name in ("Run", "Apply"):
        spec = flow.by_work.get(i.work)
        if spec is None or len(i.reads) != len(spec.reads):
            raise Wrong("no such program")
        inputs = [flat(look(env, b), flow, terms) for b in i.reads]
        for b in i.donate:
            take(env, kept, b)
        made = outputs(spec, inputs, terms)
        if len(made) != len(i.writes):
            raise Wrong("other results")
        env.update({key(b): v for b, v in zip(i.writes, made, strict=True)})
    elif name == "Accumulate":
        value = look(env, i.value)
        pieces = list(value.pieces) if isinstance(value, Joined) else [(i.value.microbatch, value)]
        if not i.first:
            there = look(env, i.into)
            if not isinstance(there, Joined):
                raise Wrong("not an accumulator")
            pieces += there.pieces
        if i.donate:
            take(env, kept, i.value)
        env[key(i.into)] = Joined(i.into.value, pieces)
    elif name == "Send":
        boxes[i.tag] = look(env, i.value)
    elif name == "Recv":
        env[key(i.value)] = boxes.pop(i.tag)
    elif name == "Free":
        for b in i.values:
            take(env, kept, b)
    else:
        raise Wrong(f"{name} does not occur here")
