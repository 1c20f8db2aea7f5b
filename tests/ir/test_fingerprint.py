from __future__ import annotations

import string
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.ir import (
    Graph,
    Input,
    Literal,
    Operator,
    Output,
    TensorType,
    Value,
    fingerprint,
    graph_text,
    parse_graph,
    structural_hash,
)
from tests.ir.strategies import FEW, graphs

F32 = TensorType((), "f32")


def renamed(graph: Graph, top: bool = True, mark: str = "new ") -> Graph:
    """The same program under other ids, names of values, scopes, source lines and names of graphs."""
    kept = {i.name: i.name if top else mark + i.name for i in graph.inputs}
    names = kept | {v.name: f"{mark}{n}" for n, v in enumerate(v for op in graph.operators for v in op.results)}

    def operand(o: str | Literal) -> str | Literal:
        return o if isinstance(o, Literal) else names[o]

    operators = tuple(
        replace(
            op,
            id=f"{mark}id {n}",
            operands=tuple(map(operand, op.operands)),
            results=tuple(Value(names[v.name], v.type) for v in op.results),
            regions=tuple((k, renamed(r, top=False)) for k, r in op.regions),
            source=op.source + "x",
            scope=op.scope + "y",
            marks=("forward",),
        )
        for n, op in enumerate(graph.operators)
    )
    inputs = tuple(replace(i, name=names[i.name]) for i in graph.inputs)
    outputs = tuple(replace(o, operand=operand(o.operand)) for o in graph.outputs)
    return Graph(graph.name + "z", inputs, operators, outputs)


@FEW
@given(graphs())
def test_names_scopes_and_lines_do_not_count(graph: Graph) -> None:
    print_ = fingerprint(graph)
    assert len(print_) == 64
    assert set(print_) <= set(string.hexdigits.lower())
    assert fingerprint(renamed(graph)) == print_
    assert fingerprint(parse_graph(graph_text(graph))) == print_


def changes(graph: Graph) -> list[Graph]:
    """Graphs that differ from ``graph`` in one thing that counts, at the top level."""
    found = [
        replace(graph, inputs=(replace(i, **{key: value}), *graph.inputs[1:]))
        for i in graph.inputs[:1]
        for key, value in (("type", TensorType((99,), "f32")), ("role", "batch" if i.role != "batch" else "other"))
    ]
    found.append(replace(graph, inputs=(*graph.inputs, Input("one more", F32))))
    found.append(replace(graph, outputs=(*graph.outputs, Output(Literal("0.0", F32), "one more", F32))))
    for at, o in enumerate(graph.outputs):
        updates = graph.inputs[0].name if o.updates is None else None
        changed = {"path": o.path + "x", "updates": updates, "type": TensorType((9,), "u8")}
        for key, value in changed.items():
            other = replace(o, **{key: value})
            found.append(replace(graph, outputs=(*graph.outputs[:at], other, *graph.outputs[at + 1 :])))
    five = Literal("5.0", F32)
    for at, op in enumerate(graph.operators):
        others = [
            replace(op, primitive=op.primitive + "x"),
            replace(op, attrs=(*op.attrs, ("zzzzzzz", 1))),
            replace(op, effects=(*op.effects, "E")),
            replace(op, operands=(*op.operands, graph.inputs[0].name)),
            *(
                replace(op, operands=(Literal(o.text + "0", F32) if isinstance(o, Literal) else five, *op.operands[1:]))
                for o in op.operands[:1]
            ),
            *(replace(op, results=(Value(v.name, TensorType((99,), "u8")), *op.results[1:])) for v in op.results[:1]),
            *(
                replace(op, regions=((name, body), *op.regions[1:]))
                for name, region in op.regions[:1]
                for body in changes(region)[2:3]
            ),
            *(replace(op, regions=(("other name", region), *op.regions[1:])) for _, region in op.regions[:1]),
        ]
        found += [replace(graph, operators=(*graph.operators[:at], o, *graph.operators[at + 1 :])) for o in others]
    return found


@FEW
@given(graphs(depth=1))
def test_every_change_of_meaning_counts(graph: Graph) -> None:
    prints = [fingerprint(g) for g in (graph, *changes(graph))]
    assert prints[0] not in prints[1:]


@FEW
@given(graphs(depth=0), st.data())
def test_wiring_counts(graph: Graph, data: st.DataObject) -> None:
    places = [(at, k) for at, op in enumerate(graph.operators) for k, o in enumerate(op.operands) if isinstance(o, str)]
    assume(places)
    at, k = data.draw(st.sampled_from(places))
    op = graph.operators[at]
    before = [i.name for i in graph.inputs] + [v.name for p in graph.operators[:at] for v in p.results]
    others = [n for n in before if n != op.operands[k]]
    assume(others)
    operands = list(op.operands)
    operands[k] = data.draw(st.sampled_from(others))
    rewired = replace(op, operands=tuple(operands))
    changed = replace(graph, operators=(*graph.operators[:at], rewired, *graph.operators[at + 1 :]))
    assert fingerprint(changed) != fingerprint(graph)


def operator(*operands: str | Literal, attrs: tuple = (("y", 2),), type: TensorType = F32) -> Operator:
    return Operator("a", "p", operands, (Value("a", type),), attrs)


def test_kinds_of_attributes_differ() -> None:
    values = [1, 1.0, True, "1", None, (1,), ((1,),), (), 0.0, -0.0, float("nan"), float("inf"), "inf", "1.0"]
    values += [("float", "1.0"), (("float", "1.0"),)]
    prints = {fingerprint(Graph("g", (), (operator(attrs=(("k", v),)),))) for v in values}
    assert len(prints) == len(values)


def test_repeated_layers_have_one_structural_hash() -> None:
    first = structural_hash(operator("x"), (F32,))
    again = replace(operator("y"), id="b", source="s", scope="t", results=(Value("b", F32),))
    assert structural_hash(again, (F32,)) == first
    half, one, zero = (Literal(t, F32) for t in ("0.5", "1.0", "0.0"))
    assert structural_hash(operator(half), (F32,)) == structural_hash(operator(one), (F32,))
    others = [
        structural_hash(operator("x"), (TensorType((2,), "f32"),)),
        structural_hash(operator("x", attrs=(("y", 3),)), (F32,)),
        structural_hash(operator("x", type=TensorType((2,), "f32")), (F32,)),
        structural_hash(operator(half), (F32,)),
        structural_hash(operator(zero), (F32,)),
        structural_hash(operator("x", "x"), (F32, F32)),
        structural_hash(replace(operator("x"), primitive="q"), (F32,)),
    ]
    assert len({first, *others}) == len(others) + 1


@FEW
@given(graphs(depth=2))
def test_structural_hash_follows_renaming_and_regions(graph: Graph) -> None:
    for op, other in zip(graph.operators, renamed(graph).operators, strict=True):
        types = graph.operand_types(op)
        found = structural_hash(op, types)
        assert structural_hash(other, types) == found
        for name, region in op.regions[:1]:
            body = replace(region, operators=(*region.operators, Operator("one more", "p", (), ())))
            assert structural_hash(replace(op, regions=((name, body), *op.regions[1:])), types) != found
