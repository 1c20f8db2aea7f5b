"""Values that are parameters in another form, and values that are gradients of parameters: `StateFlow`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.ir.graph import Graph, Operand, Operator
from autopar.ir.loops import Scan
from autopar.ir.phases import BACKWARD, phase_of
from autopar.ir.primitives import CASTS, PASSED_ON, VIEWS

#: Operators whose result is what they take in another form.
_FORMS = VIEWS | CASTS | {"transpose", "broadcast_in_dim", "slice", "pad"}
#: Operators that add gradients of one parameter.
_SUMS = frozenset({"add", "add_any"})


@dataclass(frozen=True)
class StateFlow:
    """Values of a step that are parameters in another form, or gradients.

    Keys have the enclosing regions' names in front.

    Args:
        parameters: parameters, their slices in loops over layers, and these in other types and shapes.
        gradients: what the backward pass makes for the update, and what is that in other types and shapes.
    """

    parameters: frozenset[str]
    gradients: frozenset[str]

    @staticmethod
    def of(graph: Graph) -> StateFlow:
        """The flow of a step, or of that of a stage."""
        flow = _Flow()
        flow.forward(graph, "", {i.name for i in graph.inputs if i.role == "parameter"})
        taken = {o for op in graph.operators if phase_of(op) == "update" and not op.regions for o in op.reads}
        flow.backward(graph, "", "update", taken | _names(o.operand for o in graph.outputs))
        return StateFlow(frozenset(flow.parameters), frozenset(flow.gradients))


@dataclass(frozen=True)
class _Flow:
    """See `StateFlow`."""

    parameters: set[str] = field(default_factory=set)
    gradients: set[str] = field(default_factory=set)

    def forward(self, graph: Graph, prefix: str, given: set[str]) -> set[str]:
        """Adds the parameters of a graph, of whose inputs those ``given`` are some, and returns their names."""
        known = set(given)
        for op in graph.operators:
            if op.primitive == "scan":
                body, inputs = op.region("body"), zip(op.region("body").inputs, op.operands, strict=True)
                inside = self.forward(body, f"{prefix}{op.id}/body/", {i.name for i, o in inputs if o in known})
                # What a loop stacks of its slices is the stack again.
                ends = list(zip(op.results, body.outputs, strict=True))[Scan.of(op).num_carry :]
                known.update(v.name for v, o in ends if o.operand in inside)
            elif op.primitive in PASSED_ON:
                known.update(v.name for v, o in zip(op.results, op.operands, strict=True) if o in known)
            elif op.primitive in _FORMS and op.reads and known.issuperset(op.reads):
                known.update(v.name for v in op.results)
        self.parameters.update(prefix + name for name in known)
        return known

    def backward(self, graph: Graph, prefix: str, enclosing: str, wanted: set[str]) -> None:
        """Adds the gradients of a graph that are, or become, some of its values ``wanted``."""
        wanted = set(wanted)
        for op in reversed(graph.operators):
            results = [v.name for v in op.results if v.name in wanted]
            if not results:
                continue
            phase = phase_of(op, enclosing)
            if op.primitive == "scan":
                self._loop(op, prefix, phase, wanted)
                continue
            if phase == BACKWARD:
                self.gradients.update(prefix + name for name in results)
            if op.primitive in PASSED_ON:
                wanted |= _names(o for v, o in zip(op.results, op.operands, strict=True) if v.name in wanted)
            elif op.primitive in _FORMS or op.primitive in _SUMS:
                wanted.update(op.reads)

    def _loop(self, op: Operator, prefix: str, phase: str, wanted: set[str]) -> None:
        """Goes on in the body of a loop, and with what it adds to."""
        scan = Scan.of(op)
        if phase == BACKWARD:
            self.gradients.update(prefix + v.name for v in op.results[scan.num_carry :] if v.name in wanted)
        ends = zip(op.results, scan.body.outputs, strict=True)
        inside = _names(o.operand for v, o in ends if v.name in wanted)
        self.backward(scan.body, f"{prefix}{op.id}/body/", phase, inside)


def _names(operands: Iterable[Operand]) -> set[str]:
    return {o for o in operands if isinstance(o, str)}
