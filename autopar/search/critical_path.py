"""The longest chain of operators of the forward and the backward pass that wait for each other, on whatever devices.

Works of stages run one after another where one takes what another makes, and the operators of one work do in any case.
So a step is no shorter than such a chain of one microbatch, were it on other devices at every step. Left out are
operators that do not depend on the batch and on what is trained: some run once, before all microbatches, and plans
count their seconds with the update, which stages do next to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from autopar.errors import MicrobatchError
from autopar.ir import Graph, Operator
from autopar.ir.analysis import dependents
from autopar.ir.loops import Scan
from autopar.ir.phases import phase_of
from autopar.microbatch import analyze, even_counts

#: Roles of inputs on both of which an operator of the chain depends.
_ROLES = ("batch", "parameter")


@dataclass(frozen=True)
class CriticalPath:
    """Chains of operators.

    Args:
        seconds: by id, after those of the loops that it is in, the least seconds of one run of an operator.
    """

    seconds: Mapping[str, float]

    def of_step(self, graph: Graph, in_loop: Set[str]) -> float:
        """Seconds of the longest chain of a step.

        Args:
            graph: a train step with roles.
            in_loop: ids of its operators that run in every microbatch.
        """
        of_role = ([i.name for i in graph.inputs if i.role == role] for role in _ROLES)
        of_batch, of_model = ({op.id for op in dependents(graph.operators, names)} for names in of_role)
        return max(self._lengths(graph, "", "update", of_batch & of_model & in_loop, {}).values(), default=0.0)

    def _lengths(
        self, graph: Graph, prefix: str, enclosing: str, on_chain: Set[str], begins: Mapping[str, float]
    ) -> dict[str, float]:
        """Seconds of the longest chain that ends in each value.

        Args:
            graph: a step or a body.
            prefix: ids of the loops around it.
            enclosing: phase of the operator whose body it is.
            on_chain: ids of operators that count.
            begins: values that chains begin in; where there are none they may begin anywhere.
        """
        lengths = dict(begins)
        for op in graph.operators:
            before = [lengths[o] for o in op.reads if o in lengths]
            if begins and not before:
                continue
            phase, own_s = phase_of(op, enclosing), 0.0
            if op.id in on_chain and phase != "update":
                loops = op.primitive == "scan" and op.regions
                own_s = self._of_scan(op, prefix, phase) if loops else self.seconds.get(prefix + op.id, 0.0)
            length = max(before, default=0.0) + own_s
            lengths.update((v.name, length) for v in op.results)
        return lengths

    def _of_scan(self, op: Operator, prefix: str, phase: str) -> float:
        """Seconds of the chain through all trips of a loop: of a value that is carried on, to itself."""
        scan = Scan.of(op)
        every, longest = {inner.id for inner in scan.body.operators}, 0.0
        for n in range(scan.num_carry):
            name, out = scan.body.inputs[scan.num_consts + n].name, scan.body.outputs[n].operand
            lengths = self._lengths(scan.body, f"{prefix}{op.id}/", phase, every, {name: 0.0})
            longest = max(longest, lengths.get(str(out), 0.0))
        return scan.length * longest


def in_every_microbatch(graph: Graph, most: int) -> frozenset[str]:
    """Ids of the operators of the forward and the backward pass that run in every microbatch, however many there are.

    Where a step cannot be cut those of the forward pass, which one microbatch has.

    Args:
        graph: a train step with roles.
        most: microbatches.
    """
    ids = frozenset(op.id for op in graph.operators if phase_of(op) != "update")
    if most == 1:
        return ids
    counts = [n for n in even_counts(graph) if 1 < n <= most]
    for count in {*counts[:1], *counts[-1:], most} - {1}:
        try:
            ids &= frozenset(analyze(graph, count).body)
        except MicrobatchError:
            ids &= frozenset(op.id for op in graph.operators if phase_of(op) == "forward")
    return ids
