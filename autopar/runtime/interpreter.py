"""`Worker`: one worker's instruction list carried out, over whatever link joins it to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autopar.errors import ScheduleError
from autopar.lower.hosted import PINNED_HOST
from autopar.runtime.launches import LAUNCHES, few_at_once
from autopar.runtime.transport.base import WorkerLink
from autopar.runtime.transport.tiles import moved, taken_as_it_is
from autopar.schedule import Accumulate, Apply, Buffer, Fetch, Free, Instruction, Offload, Recv, Run, Send, Stash, Work

#: Called with the index of an instruction before it is carried out.
Before: TypeAlias = Callable[[int], None]
#: Called with the index of an instruction when it was, and with the arrays that a program made, perhaps not
#: computed yet.
After: TypeAlias = Callable[[int, tuple[Any, ...]], None]


@dataclass(frozen=True, eq=False)
class Ready:
    """A program that can be called.

    Args:
        reads: names of what it takes.
        shardings: how each of them has to lie.
        function: (number of the microbatch, arrays) -> arrays.
    """

    reads: tuple[str, ...]
    shardings: tuple[NamedSharding, ...]
    function: Callable[..., Sequence[Any]]

    @cached_property
    def few_at_once(self) -> frozenset[Any]:
        """CPU devices on which few launches of programs may be under way at once; empty for others."""
        return few_at_once(d for s in self.shardings[:1] for d in s.mesh.local_devices)


class Worker:
    """Values of one worker during a step, and the effects of instructions on them.

    Args:
        programs: by work; a work without a program does nothing.
        placements: how values that come from other workers are to lie, by name.
        link: connections to the other workers.
        start: what lies here when the step begins.
    """

    def __init__(
        self,
        programs: Mapping[Work, Ready],
        placements: Mapping[str, NamedSharding],
        link: WorkerLink,
        start: Mapping[Buffer, Any],
    ) -> None:
        self._programs = programs
        self.placements = placements
        self.link = link
        self.arrays: dict[Buffer, Any] = dict(start)
        self._rows: dict[Buffer, dict[int, Any]] = {}
        self._joining: dict[Buffer, tuple[Any, str]] = {}
        self._sent: set[Buffer] = set()
        self._homes: dict[Buffer, Any] = {}

    def ready(self, instruction: Instruction) -> bool:
        """Whether the instruction need not wait: a receiver for its value, a sender for room in the queue."""
        if isinstance(instruction, Recv):
            return self.link.ready(instruction.source)
        return not isinstance(instruction, Send) or self.link.has_room(instruction.to)

    def run(self, instructions: Sequence[Instruction], before: Before, after: After | None = None) -> None:
        """Carries out a whole list, waiting where it must.

        Raises what a program raises, and PeerLostError or SilentPeerError where a value does not come.
        """
        for index, instruction in enumerate(instructions):
            before(index)
            outputs = self.do(instruction)
            if after is not None:
                after(index, outputs)
        self.finish()

    def finish(self) -> None:
        """Completes what the last instructions left to be added up."""
        self._join()

    def do(self, instruction: Instruction) -> tuple[Any, ...]:
        """Carries out one instruction; returns the arrays that a program made, perhaps not computed yet."""
        if not isinstance(instruction, Accumulate | Free):
            self._join()
        match instruction:
            case Run(work=work, microbatch=number, reads=reads, writes=writes, donate=donate):
                return self._run(work, max(number, 0), reads, writes, donate)
            case Apply(work=work, reads=reads, writes=writes, donate=donate):
                return self._run(work, 0, reads, writes, donate)
            case Send(value=value, to=to, tag=tag):
                self.link.send(to, tag, self.read(value), value.value)
                self._sent.add(value)
            case Recv(value=value, source=source, tag=tag):
                self.arrays[value] = self.link.receive(source, tag, self.placements.get(value.value))
            case Accumulate(into=into, value=value, reduce=reduce, first=first, donate=donate):
                self._accumulate(into, value, reduce, first, donate)
                self._forget((value,) if donate else ())
            case Free(values=values):
                self._forget(values)
            case Stash(source=source, target=target):
                self.arrays[target] = self.read(source)
            case Offload(value=value):
                self._homes[value] = self.arrays[value].sharding
                self.arrays[value] = jax.device_put(
                    self.arrays[value], self._homes[value].with_memory_kind(PINNED_HOST)
                )
            case Fetch(value=value):
                self.arrays[value] = jax.device_put(self.arrays[value], self._homes.pop(value))
            case _:
                raise ScheduleError(f"{type(instruction).__name__} is not carried out by this runtime")
        return ()

    def _forget(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self.arrays.pop(buffer, None)
            self._rows.pop(buffer, None)

    def read(self, buffer: Buffer) -> Any:
        """The array of a buffer; rows of a concatenated one are stacked in the order of the microbatches."""
        rows = self._rows.get(buffer)
        if rows is not None:
            return jnp.stack([rows[k] for k in sorted(rows)])
        return self.arrays[buffer]

    def _run(
        self, work: Work, number: int, reads: Sequence[Buffer], writes: Sequence[Buffer], donate: Sequence[Buffer]
    ) -> tuple[Any, ...]:
        program = self._programs.get(work)
        if program is None:
            self._forget(donate)
            return ()
        by_name = {b.value: b for b in reads}
        given = []
        for name, wanted in zip(program.reads, program.shardings, strict=True):
            array = self.read(by_name[name])
            lies = getattr(array, "sharding", None)
            is_placed = lies is wanted or lies == wanted or taken_as_it_is(array, wanted)
            given.append(array if is_placed else moved(array, wanted))
        outputs = tuple(program.function(np.int32(number), *given))
        LAUNCHES.follow(program.few_at_once, outputs)
        self._forget(donate)
        for buffer, array in zip(writes, outputs, strict=True):
            self.arrays[buffer] = array
        return outputs

    def _accumulate(self, into: Buffer, value: Buffer, reduce: str, first: bool, given_up: bool) -> None:
        term = self.arrays[value]
        if reduce == "concatenate":
            self._rows.setdefault(into, {})[value.microbatch] = term
        elif first:
            # Totals are written over: a term that somebody still reads is not one.
            self.arrays[into] = term if given_up else jnp.copy(term)
        else:
            if into in self._joining:
                self._join()
            self._joining[into] = (term, reduce)

    def _join(self) -> None:
        """Adds up what consecutive ACCUMULATE instructions named, in one program: there is one for every parameter."""
        if not self._joining:
            return
        # Totals are written over, but for those that may still be on their way to another worker.
        totals = [jnp.copy(self.arrays[b]) if b in self._sent else self.arrays[b] for b in self._joining]
        terms = [
            term if term.sharding == total.sharding else jax.device_put(term, total.sharding)
            for total, (term, _) in zip(totals, self._joining.values(), strict=True)
        ]
        joined = _joined(tuple(reduce for _, reduce in self._joining.values()), totals, terms)
        self.arrays.update(zip(self._joining, joined, strict=True))
        self._joining.clear()


def _add_up(reduces: tuple[str, ...], totals: list[Any], terms: list[Any]) -> list[Any]:
    """Every total with its term."""
    joins = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}
    return [joins[reduce](total, term) for reduce, total, term in zip(reduces, totals, terms, strict=True)]


_joined = jax.jit(_add_up, static_argnums=0, donate_argnums=1)
