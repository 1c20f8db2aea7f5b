"""Instruction lists in rounds that all workers begin together, as one program on all devices carries them out.

`rounds_of` says what each worker does in each round. A worker runs one program at most in a round, and a value that is
sent in it is there when the next one begins. `permutes_of` joins what workers send after a round. Both know no shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from autopar.errors import ScheduleError
from autopar.schedule.instructions import Apply, Instruction, Recv, Run, Send, blocked_text

MessageT = TypeVar("MessageT")

#: What each worker does in a round, in order.
RoundParts = tuple[tuple[Instruction, ...], ...]


def rounds_of(lists: Sequence[Sequence[Instruction]]) -> tuple[RoundParts, ...]:
    """The instruction lists of all workers cut into rounds, between which workers exchange values.

    Args:
        lists: what each worker has to do, in order.

    Raises:
        ScheduleError: workers wait for each other.
    """
    at, arrived = [0] * len(lists), [set[int]() for _ in lists]
    rounds: list[RoundParts] = []
    while any(n < len(line) for n, line in zip(at, lists, strict=True)):
        parts = tuple(_turn(line, n, tags) for line, n, tags in zip(lists, at, arrived, strict=True))
        if not any(parts):
            stuck = [w for w, line in enumerate(lists) if at[w] < len(line)]
            raise ScheduleError(f"the instruction lists wait for each other: {blocked_text(lists, at, stuck)}")
        for worker, turn in enumerate(parts):
            at[worker] += len(turn)
            for i in turn:
                if isinstance(i, Send):
                    arrived[i.to].add(i.tag)
        rounds.append(parts)
    return tuple(rounds)


def _turn(line: Sequence[Instruction], at: int, arrived: set[int]) -> tuple[Instruction, ...]:
    """Instructions of a worker up to a second program, a value that is not there, or anything after a SEND."""
    done: list[Instruction] = []
    ran = sends = False
    for i in (line[n] for n in range(at, len(line))):
        if isinstance(i, Recv):
            if i.tag not in arrived:
                break
        elif isinstance(i, Send):
            sends = True
        elif sends or (ran and isinstance(i, Run | Apply)):
            break
        ran = ran or isinstance(i, Run | Apply)
        done.append(i)
    return tuple(done)


def permutes_of(messages: Sequence[tuple[int, int, str, MessageT]]) -> list[list[tuple[int, int, MessageT]]]:
    """Messages of a round by permute, in which each worker sends and receives once at most.

    Args:
        messages: (sender, receiver, dtype, what); a permute has one dtype.
    """
    groups: list[tuple[str, list[tuple[int, int, MessageT]]]] = []
    for source, to, dtype, what in messages:
        for kind, group in groups:
            if kind == dtype and not any(s == source or t == to for s, t, _ in group):
                group.append((source, to, what))
                break
        else:
            groups.append((dtype, [(source, to, what)]))
    return [group for _, group in groups]
