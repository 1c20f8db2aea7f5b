from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar.ir.text as text_module
from autopar.ir import (
    Graph,
    GraphSyntaxError,
    Input,
    Literal,
    Operator,
    Output,
    TensorType,
    Value,
    graph_text,
    operator_text,
    parse_graph,
    verify,
)
from tests.ir.strategies import FEW, attrs, graphs, names

F32 = TensorType((), "f32")


@FEW
@given(graphs())
def test_the_text_reads_back_to_an_equal_graph(graph: Graph) -> None:
    text = graph_text(graph)
    again = parse_graph(text)
    assert again == graph
    assert graph_text(again) == text
    text.encode("ascii")


@FEW
@given(graphs(depth=1), st.randoms(use_true_random=False))
def test_blanks_and_comments_between_lines_do_not_count(graph: Graph, random) -> None:
    lines = [
        " " * random.randrange(4) + line.strip() + random.choice(["", "  ", " # a comment"])
        for line in graph_text(graph).split("\n")
    ]
    assert parse_graph("\n".join(lines)) == graph


@given(names, names, attrs(), st.text(max_size=4), st.text(max_size=4), st.lists(st.text(max_size=3), max_size=2))
def test_any_strings_survive(name: str, other: str, attributes, role: str, text: str, effects: list[str]) -> None:
    type = TensorType((2, -1), "f8_e4m3fn")
    op = Operator(
        other,
        role,
        (name, Literal(text, type)),
        (Value(other, type), Value(name, F32)),
        attributes,
        ((role, Graph(name, (), ())), (name, Graph("", (), ()))),
        role,
        name,
        tuple(effects),
    )
    graph = Graph(role, (Input(name, type, role),), (op,), (Output(Literal(role, type), role, F32, name),))
    assert parse_graph(graph_text(graph)) == graph


@pytest.mark.parametrize(
    "value", [1, 1.0, True, "1", None, (), (1,), ((1,), ()), -0.0, float("inf"), float("nan"), 1e-300, '"\\\n\0']
)
def test_attributes_keep_their_kind(value) -> None:
    graph = Graph("g", (), (Operator("a", "p", (), (), (("k", value),)),))
    (op,) = parse_graph(graph_text(graph)).operators
    assert repr(op.attr("k")) == repr(value)


def test_example_of_the_documentation() -> None:
    doc = text_module.__doc__ or ""
    example = textwrap.dedent(doc[doc.index('    graph "step"') : doc.index("The grammar")]).strip() + "\n"
    graph = parse_graph(example)
    verify(graph)
    assert graph_text(graph) == example
    assert graph.outputs[0].updates == "state.w"


def test_an_operator_is_one_readable_line() -> None:
    op = Operator(
        "jvp()/mul.0",
        "mul",
        ("b['x']", Literal("2.0", F32)),
        (Value("jvp()/mul.0", F32),),
        (("out_dtype", None),),
        (),
        "f.py:3 (g)",
        "jvp()",
    )
    assert operator_text(op) == (
        '%jvp()/mul.0: f32[] = mul(%b[\'x\'], 2.0: f32[]) {out_dtype=None} scope "jvp()" source "f.py:3 (g)"'
    )


GOOD = """graph "g"(
  %a: f32[2] batch,
) {
  %b: f32[2] = neg(%a) {y=(1,)}
  return (
    %b: f32[2] at "",
  )
}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "column"),
    [
        ("graph", "graf", 1, 1),
        ('"g"', "g", 1, 7),
        ("f32[2] batch", "f32[x] batch", 2, 11),
        ("f32[2] batch", "f32[2]", 2, 13),
        ("%b: f32[2] =", "b: f32[2] =", 4, 3),
        ("= neg", "neg", 4, 14),
        ("neg(%a)", "neg(%a", 4, 23),
        ("{y=(1,)}", "{y=(1)}", 4, 29),
        ("{y=(1,)}", "{y=1..2}", 4, 27),
        ("{y=(1,)}", "{y=Nonesuch}", 4, 27),
        ("{y=(1,)}", "{y=(1,)} scope x", 4, 39),
        ("return", "retrun", 5, 10),
        ('at ""', 'at "\\q"', 6, 19),
        ("}\n", "}\nmore", 9, 1),
    ],
)
def test_errors_name_line_and_column(old: str, new: str, line: int, column: int) -> None:
    parse_graph(GOOD)
    head, found, tail = GOOD.rpartition(old) if old == "}\n" else GOOD.partition(old)
    assert found
    with pytest.raises(GraphSyntaxError, match=f"line {line}, column {column}: expected") as caught:
        parse_graph(head + new + tail)
    assert (caught.value.line, caught.value.column) == (line, column)


@FEW
@given(graphs(depth=1), st.data())
def test_a_text_cut_short_is_an_error(graph: Graph, data: st.DataObject) -> None:
    text = graph_text(graph).rstrip()
    with pytest.raises(GraphSyntaxError, match="expected"):
        parse_graph(text[: data.draw(st.integers(0, len(text) - 1))])


def test_a_dtype_without_a_size_is_a_fault_of_the_text() -> None:
    with pytest.raises(GraphSyntaxError, match=r"expected a dtype whose size is known.*'f7'"):
        parse_graph(graph_text(Graph("f", (Input("x", F32),), (), ())).replace("f32", "f7"))
