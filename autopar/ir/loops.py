"""Loops and branches: which operands are constants, which are carried on and which are cut into slices.

A scan takes (constants, carries, stacks) and returns (carries, stacks); its body takes a slice of each stack.
A while loop takes (constants of the condition, constants of the body, carries) and returns the carries.
A cond takes the number of a branch and what each branch takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from autopar.ir.graph import Graph, Operator
from autopar.ir.phases import MICROBATCHES

_T = TypeVar("_T")

#: Iterations assumed of a loop whose number of iterations is decided while it runs.
ASSUMED_ITERATIONS: Final = 8.0


@dataclass(frozen=True, slots=True)
class Scan:
    """The parts of a scan.

    Args:
        body: what runs in each iteration.
        length: number of iterations.
        num_consts: number of operands that every iteration takes whole.
        num_carry: number of operands that an iteration takes from the one before.
    """

    body: Graph
    length: int
    num_consts: int
    num_carry: int

    @staticmethod
    def of(op: Operator) -> Scan:
        """The parts of ``op``, a scan."""
        return Scan(op.region("body"), op.integer("length"), op.integer("num_consts"), op.integer("num_carry"))

    @property
    def num_whole(self) -> int:
        """Number of operands that are not cut into slices: the first ones."""
        return self.num_consts + self.num_carry

    def split(self, operands: Sequence[_T]) -> tuple[list[_T], list[_T], list[_T]]:
        """(constants, carries, stacks) of a list with an item an operand of the scan, or an input of its body."""
        consts, whole = self.num_consts, self.num_whole
        return list(operands[:consts]), list(operands[consts:whole]), list(operands[whole:])

    def split_results(self, results: Sequence[_T]) -> tuple[list[_T], list[_T]]:
        """(carries, stacks) of a list with an item a result of the scan, or an output of its body."""
        return list(results[: self.num_carry]), list(results[self.num_carry :])


@dataclass(frozen=True, slots=True)
class While:
    """The parts of a while loop.

    Args:
        cond: decides whether there is another iteration.
        body: what runs in each iteration.
        cond_consts: number of operands that every run of the condition takes.
        body_consts: number of operands that every iteration takes whole.
    """

    cond: Graph
    body: Graph
    cond_consts: int
    body_consts: int

    @staticmethod
    def of(op: Operator) -> While:
        """The parts of ``op``, a while loop."""
        return While(op.region("cond"), op.region("body"), op.integer("cond_nconsts"), op.integer("body_nconsts"))

    @property
    def num_consts(self) -> int:
        """Number of operands that are not carried: the first ones."""
        return self.cond_consts + self.body_consts

    def split(self, operands: Sequence[_T]) -> tuple[list[_T], list[_T], list[_T]]:
        """(constants of the condition, of the body, carries) of a list with an item an operand of the loop."""
        cond, consts = self.cond_consts, self.num_consts
        return list(operands[:cond]), list(operands[cond:consts]), list(operands[consts:])


def runs_inside(op: Operator, runs: float = 1.0) -> float:
    """Expected runs of each region of ``op`` while ``op`` runs ``runs`` times.

    A scan runs its body ``length`` times, a while loop its regions `ASSUMED_ITERATIONS` times, and of the branches of
    a cond each is equally likely.
    """
    if op.primitive == "scan":
        return runs * op.integer("length")
    if op.primitive == "while":
        return runs * ASSUMED_ITERATIONS
    return runs / len(op.regions) if op.primitive == "cond" else runs


def microbatch_loops(graph: Graph) -> int:
    """Number of loops over microbatches in a step of one stage: several where examples meet."""
    return sum(MICROBATCHES in op.marks for op in graph.operators)
