from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autopar.ir import Graph, GraphError, Input, Operator, Output, TensorType, Value, parse_graph, verify
from tests.ir.strategies import FEW, graphs


def problems(graph: Graph) -> tuple[str, ...]:
    try:
        verify(graph)
    except GraphError as error:
        return error.problems
    return ()


@FEW
@given(graphs())
def test_well_formed_graphs_pass(graph: Graph) -> None:
    assert problems(graph) == ()


def with_operator(graph: Graph, at: int, op: Operator) -> Graph:
    return replace(graph, operators=(*graph.operators[:at], op, *graph.operators[at + 1 :]))


def drawn_operator(graph: Graph, data: st.DataObject, wanted: Callable[[Operator], bool]) -> tuple[int, Operator]:
    found = [(i, op) for i, op in enumerate(graph.operators) if wanted(op)]
    assume(found)
    return data.draw(st.sampled_from(found))


def repeated_operator(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    _, op = drawn_operator(graph, data, lambda op: True)
    return replace(graph, operators=(*graph.operators, op)), "2 operators have this id"


def repeated_value(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    extra = Operator("extra operator", "opaque", (), (Value(graph.inputs[0].name, TensorType((), "f32")),))
    return replace(graph, operators=(*graph.operators, extra)), "2 values have this name"


def repeated_input(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    return replace(graph, inputs=(*graph.inputs, graph.inputs[0])), "2 values have this name"


def repeated_path(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    assume(graph.outputs)
    return replace(graph, outputs=(*graph.outputs, replace(graph.outputs[0], updates=None))), "2 outputs have this path"


def unknown_operand(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    at, op = drawn_operator(graph, data, lambda op: bool(op.operands))
    return with_operator(graph, at, replace(op, operands=("no such value", *op.operands[1:]))), "which nothing makes"


def use_before_definition(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    at, op = drawn_operator(graph, data, lambda op: bool(op.operands) and bool(op.results))
    return with_operator(graph, at, replace(op, operands=(op.results[0].name, *op.operands[1:]))), "before it is made"


def unknown_role(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    return replace(graph, inputs=(replace(graph.inputs[0], role="weights"), *graph.inputs[1:])), "role 'weights'"


def unsorted_attrs(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    at, op = drawn_operator(graph, data, lambda op: len(op.attrs) > 1)
    return with_operator(graph, at, replace(op, attrs=op.attrs[::-1])), "not sorted"


def unknown_output(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    extra = Output("no such value", "new path", TensorType((), "f32"))
    return replace(graph, outputs=(*graph.outputs, extra)), "which nothing makes"


def wrong_output_type(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    extra = Output(graph.inputs[0].name, "new path", TensorType((99,), "f32"))
    return replace(graph, outputs=(*graph.outputs, extra)), "but what it returns has"


def updates_no_input(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    i = graph.inputs[0]
    return replace(graph, outputs=(*graph.outputs, Output(i.name, "new path", i.type, "no input"))), "is no input"


def updates_other_type(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    other = Input("another input", TensorType((77,), "f32"))
    i = graph.inputs[0]
    changed = replace(graph, inputs=(*graph.inputs, other))
    return replace(changed, outputs=(*graph.outputs, Output(i.name, "p", i.type, other.name))), "that it updates has"


def updated_twice(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    i = graph.inputs[0]
    two = tuple(Output(i.name, f"new path {n}", i.type, i.name) for n in range(2))
    return replace(graph, outputs=(*graph.outputs, *two)), "outputs update the input"


def wrong_result_type(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    at, op = drawn_operator(
        graph, data, lambda op: op.primitive in ("add", "mul", "lt", "transpose", "reduce_max", "reshape")
    )
    wrong = Value(op.results[0].name, TensorType((*op.results[0].type.shape, 5), op.results[0].type.dtype))
    return with_operator(graph, at, replace(op, results=(wrong,))), "its result has type"


def wrong_region_count(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    at, op = drawn_operator(graph, data, lambda op: bool(op.regions))
    attrs = tuple((k, v + 1 if isinstance(v, int) else v) for k, v in op.attrs)
    changed = replace(op, attrs=attrs) if attrs else replace(op, operands=(*op.operands, op.operands[0]))
    return with_operator(graph, at, changed), f"{op.id}: "


def region_takes_less(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    at, op = drawn_operator(graph, data, lambda op: bool(op.regions))
    name, body = op.regions[-1]
    changed = replace(body, inputs=(*body.inputs, Input("one too many", TensorType((), "f32"))))
    return with_operator(graph, at, replace(op, regions=(*op.regions[:-1], (name, changed)))), "input of"


def region_is_missing(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    at, op = drawn_operator(graph, data, lambda op: bool(op.regions))
    return with_operator(graph, at, replace(op, regions=())), "has regions" if op.primitive != "cond" else "no branches"


def fault_inside_a_region(graph: Graph, data: st.DataObject) -> tuple[Graph, str]:
    at, op = drawn_operator(graph, data, lambda op: bool(op.regions))
    name, body = op.regions[0]
    changed = replace(body, inputs=(replace(body.inputs[0], role="weights"), *body.inputs[1:]))
    return with_operator(graph, at, replace(op, regions=((name, changed), *op.regions[1:]))), f"{op.id}/{name}/"


MUTATIONS = (
    repeated_operator, repeated_value, repeated_input, repeated_path, unknown_operand, use_before_definition,
    unknown_role, unsorted_attrs, unknown_output, wrong_output_type, updates_no_input, updates_other_type,
    updated_twice, wrong_result_type, wrong_region_count, region_takes_less, region_is_missing, fault_inside_a_region,
)  # fmt: skip


@pytest.mark.few(5)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much])
@given(graph=graphs(), data=st.data())
def test_every_kind_of_fault_is_found(
    mutation: Callable[[Graph, st.DataObject], tuple[Graph, str]], graph: Graph, data: st.DataObject
) -> None:
    changed, expected = mutation(graph, data)
    found = problems(changed)
    assert any(expected in p for p in found), (expected, found)


def test_all_problems_are_listed() -> None:
    type = TensorType((2,), "f32")
    ops = (Operator("a", "neg", ("x",), (Value("a", type),)), Operator("a", "neg", ("a", "y"), (Value("b", type),)))
    graph = Graph("g", (Input("i", type, "weights"),), ops, (Output("z", "", type, "j"),))
    found = problems(graph)
    assert len(found) == 6
    with pytest.raises(GraphError) as caught:
        verify(graph)
    assert all(p in str(caught.value) for p in found)
    assert isinstance(caught.value, ValueError)


def one_operator(line: str) -> Graph:
    return parse_graph(
        f'graph "g"(%a: f32[2,3] other, %b: f32[3,4] other, %c: i32[2,3] other, %s: f32[] other, %o: f32[1,3] other)'
        f" {{ {line} return () }}"
    )


@pytest.mark.parametrize(
    ("line", "good"),
    [
        ("%r: f32[2,3] = add(%a, %s)", True),
        ("%r: f32[2,3] = add(%a, 1.0: f32[])", True),
        ("%r: f32[2,3] = add(%a, %c)", False),
        ("%r: f32[2,3] = add(%a, %b)", False),
        ("%r: f32[2,3] = add(%a, %o)", True),
        ("%r: f32[] = add(%a, %s)", False),
        ("%r: f32[2,3] = add(%a, x: f32[])", False),
        ("%r: f32[2,3] = add(%a, 1.0: f32[2,3])", False),
        ("%r: bool[2,3] = lt(%a, %a)", True),
        ("%r: f32[2,3] = lt(%a, %a)", False),
        ("%r: f32[2,3] = clamp(0.0: f32[], %a, %s)", True),
        ("%r: f32[2,3] = select_n(True: bool[], %a, %a)", True),
        ("%r: f32[2,3] = select_n(True: bool[], %a, %c)", False),
        ("%r: f32[2,3] = select_n(True: bool[], %c, %c)", False),
        ('%r: bf16[2,3] = convert_element_type(%a) {new_dtype="bf16"}', True),
        ('%r: f32[2,3] = convert_element_type(%a) {new_dtype="bf16"}', False),
        ("%r: bf16[2,3] = convert_element_type(%a)", False),
        ("%r: f32[3,2] = transpose(%a) {permutation=(1, 0)}", True),
        ("%r: f32[2,3] = transpose(%a) {permutation=(1, 0)}", False),
        ("%r: f32[3,2] = transpose(%a) {permutation=(1, 1)}", False),
        ("%r: f32[3,2] = transpose(%a) {permutation=(1,)}", False),
        ("%r: f32[3] = reduce_sum(%a) {axes=(0,)}", True),
        ("%r: f32[2] = reduce_sum(%a) {axes=(0,)}", False),
        ("%r: f32[3] = reduce_sum(%a) {axes=(2,)}", False),
        ("%r: f32[3] = reduce_sum(%a, %a) {axes=(0,)}", False),
        ("%r: f32[6] = reshape(%a) {new_sizes=(6,)}", True),
        ("%r: f32[5] = reshape(%a) {new_sizes=(5,)}", False),
        ("%r: f32[7,2,3] = broadcast_in_dim(%a) {broadcast_dimensions=(1, 2), shape=(7, 2, 3)}", True),
        ("%r: f32[7,3,3] = broadcast_in_dim(%a) {broadcast_dimensions=(1, 2), shape=(7, 3, 3)}", False),
        ("%r: f32[7,3] = broadcast_in_dim(%o) {broadcast_dimensions=(0, 1), shape=(7, 3)}", True),
        ("%r: f32[3] = squeeze(%o) {dimensions=(0,)}", True),
        ("%r: f32[1] = squeeze(%o) {dimensions=(1,)}", False),
        ("%r: f32[3,3] = concatenate(%a, %o) {dimension=0}", True),
        ("%r: f32[2,6] = concatenate(%a, %o) {dimension=1}", False),
        ("%r: f32[2,4] = dot_general(%a, %b) {dimension_numbers=(((1,), (0,)), ((), ()))}", True),
        ("%r: f32[2,4] = dot_general(%a, %b) {dimension_numbers=(((0,), (0,)), ((), ()))}", False),
        ("%r: f32[4,2] = dot_general(%a, %b) {dimension_numbers=(((1,), (0,)), ((), ()))}", False),
        ("%r: f32[2,4] = dot_general(%a, %b) {dimension_numbers=((1, 0), ((), ()))}", False),
        ("%r: f32[3,2,1] = dot_general(%a, %o) {dimension_numbers=(((), ()), ((1,), (1,)))}", True),
        ("%r -> () = neg(%a)", False),
        ("%r: u8[9] = of_another_library(%a)", True),
    ],
)
def test_results_of_known_primitives(line: str, good: bool) -> None:
    found = problems(one_operator(line))
    assert (found == ()) == good, found
