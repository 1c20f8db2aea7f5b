"""Random graphs for hypothesis: well formed, with regions, odd names and attributes of all kinds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from autopar.ir import ROLES, Attr, Graph, Input, Literal, Operator, Output, TensorType, Value

#: Graphs are big examples: fewer of them than hypothesis makes by itself.
FEW = settings(max_examples=40)

#: Sizes of dims; few and small, so that types often agree.
SIZES = (1, 2, 3)
SCALARS = {"f32": ("0.0", "-1.5", "inf", "-inf", "nan", "1e-30"), "i32": ("0", "-7", "2147483647")}

#: Names as the frontend makes them, and names that no grammar expects.
plain_names = st.from_regex(r"[a-z]{1,6}(\.[a-z]{1,3})?\.[0-9]", fullmatch=True)
odd_names = st.one_of(
    st.sampled_from(
        ["jvp()/add.0", "a['b'].c", "x:0", "a b", "%", '"', "a)", "(", "\u00e9", "\n", "return", "a[0][1]", "#"]
    ),
    st.text(max_size=6),
)
names = st.one_of(plain_names, odd_names)
words = st.one_of(st.sampled_from(["axes", "scope", "return", "scatter-add"]), st.text(max_size=5))

scalars: st.SearchStrategy[Attr] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False),
    st.text(max_size=8),
)
attr_values: st.SearchStrategy[Attr] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6
)


@st.composite
def attrs(draw: st.DrawFn) -> tuple[tuple[str, Attr], ...]:
    """Sorted attributes with any names and values."""
    return tuple(sorted(draw(st.dictionaries(words, attr_values, max_size=3)).items(), key=lambda item: item[0]))


@st.composite
def tensor_types(draw: st.DrawFn, max_rank: int = 3) -> TensorType:
    """Types of a few dtypes, small shapes."""
    shape = draw(st.lists(st.sampled_from(SIZES), max_size=max_rank))
    return TensorType(tuple(shape), draw(st.sampled_from(["f32", "f32", "f32", "bf16", "i32", "key<fry>"])))


class _Maker:
    """Draws one graph operator by operator."""

    def __init__(self, draw: st.DrawFn, names: st.SearchStrategy[str]) -> None:
        self.draw = draw
        self.names = names
        self.used: set[str] = set()
        self.types: dict[str, TensorType] = {}
        self.operators: list[Operator] = []

    def name(self) -> str:
        name = self.draw(self.names)
        while name in self.used:
            name += "'"
        self.used.add(name)
        return name

    def value(self, type: TensorType) -> str | None:
        """A value of ``type``, or None where there is none."""
        found = [n for n, t in self.types.items() if t == type]
        return self.draw(st.sampled_from(found)) if found else None

    def add(self, primitive: str, operands: tuple, types: tuple[TensorType, ...], attributes=(), regions=()) -> None:
        id = self.name()
        one = len(types) == 1 and self.draw(st.booleans())
        results = tuple(Value(id if one else self.name(), t) for t in types)
        text = st.sampled_from(["", "", "jvp(layer0)/attention", 'file.py:12 (f) "'])
        effects = self.draw(st.sampled_from([(), (), ("DebugEffect",), ("A", "B")]))
        self.operators.append(
            Operator(
                id,
                primitive,
                operands,
                results,
                tuple(attributes),
                tuple(regions),
                self.draw(text),
                self.draw(text),
                effects,
                self.draw(st.sampled_from([(), (), ("forward",), ("backward", "recomputed")])),
            )
        )
        self.types.update((v.name, v.type) for v in results)

    def any(self) -> tuple[str, TensorType]:
        name = self.draw(st.sampled_from(list(self.types)))
        return name, self.types[name]

    def step(self, depth: int) -> None:
        kind = self.draw(
            st.sampled_from(
                ["add", "literal", "compare", "transpose", "reduce", "reshape", "opaque", "constant"]
                + ["scan", "while", "cond"] * (depth > 0)
            )
        )
        getattr(self, f"make_{kind}")(*([depth] if kind in ("scan", "while", "cond") else []))

    def make_add(self) -> None:
        name, type = self.any()
        self.add("add", (name, self.value(type)), (type,))

    def make_literal(self) -> None:
        name, type = self.any()
        if type.dtype in SCALARS:
            text = self.draw(st.sampled_from(SCALARS[type.dtype]))
            self.add("mul", (Literal(text, TensorType((), type.dtype)), name), (type,), [("out_dtype", None)])

    def make_compare(self) -> None:
        name, type = self.any()
        self.add("lt", (name, name), (TensorType(type.shape, "bool"),))

    def make_transpose(self) -> None:
        name, type = self.any()
        order = tuple(self.draw(st.permutations(range(type.rank))))
        self.add(
            "transpose",
            (name,),
            (TensorType(tuple(type.shape[d] for d in order), type.dtype),),
            [("permutation", order)],
        )

    def make_reduce(self) -> None:
        name, type = self.any()
        axes = tuple(d for d in range(type.rank) if self.draw(st.booleans()))
        kept = tuple(n for d, n in enumerate(type.shape) if d not in axes)
        self.add("reduce_max", (name,), (TensorType(kept, type.dtype),), [("axes", axes)])

    def make_reshape(self) -> None:
        name, type = self.any()
        self.add(
            "reshape",
            (name,),
            (TensorType((type.size, 1), type.dtype),),
            [("dimensions", None), ("new_sizes", (type.size, 1))],
        )

    def make_opaque(self) -> None:
        operands = tuple(self.any()[0] for _ in range(self.draw(st.integers(0, 3))))
        types = tuple(self.draw(st.lists(tensor_types(), max_size=3)))
        self.add("opaque", operands, types, self.draw(attrs()))

    def make_constant(self) -> None:
        self.add("constant", (), (self.draw(tensor_types()),))

    def make_scan(self, depth: int) -> None:
        const, carry = self.any(), self.any()
        rows = [(n, t) for n, t in self.types.items() if t.rank]
        xs = [self.draw(st.sampled_from(rows))] if rows else []
        length = xs[0][1].shape[0] if xs else 4
        row = tuple(TensorType(t.shape[1:], t.dtype) for _, t in xs)
        body = self.body("body", (const[1], carry[1], *row), (carry[1],), depth)
        ys = tuple(TensorType((length, *o.type.shape), o.type.dtype) for o in body.outputs[1:])
        self.add(
            "scan",
            (const[0], carry[0], *(n for n, _ in xs)),
            (carry[1], *ys),
            [("length", length), ("num_carry", 1), ("num_consts", 1)],
            [("body", body)],
        )

    def make_while(self, depth: int) -> None:
        const, carry = self.any(), self.any()
        flag = TensorType((), "bool")
        test = Operator("p.0", "predicate", ("in.0",), (Value("p.0", flag),))
        cond = Graph("cond", (Input("in.0", carry[1]),), (test,), (Output("p.0", "out.0", flag),))
        body = self.body("body", (const[1], carry[1]), (carry[1],), depth, more=False)
        self.add(
            "while",
            (const[0], carry[0]),
            (carry[1],),
            [("body_nconsts", 1), ("cond_nconsts", 0)],
            [("cond", cond), ("body", body)],
        )

    def make_cond(self, depth: int) -> None:
        name, type = self.any()
        branches = [(str(i), self.body(str(i), (type,), (type,), depth, more=False)) for i in range(2)]
        self.add("cond", (Literal("1", TensorType((), "i32")), name), (type,), (), branches)

    def body(
        self, name: str, takes: tuple[TensorType, ...], returns: tuple[TensorType, ...], depth: int, more: bool = True
    ) -> Graph:
        inner = _Maker(self.draw, self.names)
        return inner.graph(name, takes, returns, depth - 1, more)

    def graph(
        self, name: str, takes: tuple[TensorType, ...], returns: tuple[TensorType, ...], depth: int, more: bool
    ) -> Graph:
        roles = st.sampled_from(ROLES)
        inputs = tuple(Input(self.name(), t, self.draw(roles)) for t in takes)
        self.types.update((i.name, i.type) for i in inputs)
        for _ in range(self.draw(st.integers(0, 5 if depth > 0 else 2))):
            self.step(depth)
        outputs = [Output(self.value(t), f"out.{i}", t) for i, t in enumerate(returns)]
        if more:
            updated: set[str] = set()
            for i in range(self.draw(st.integers(0, 3))):
                operand, type = self.any()
                free = [j.name for j in inputs if j.type == type and j.name not in updated]
                updates = self.draw(st.sampled_from([None, *free]))
                updated |= {updates} if updates is not None else set()
                outputs.append(Output(operand, f"more['{i}']", type, updates))
            if self.draw(st.booleans()):
                zero = TensorType((), "f32")
                outputs.append(Output(Literal("0.0", zero), "zero", zero))
        return Graph(name, inputs, tuple(self.operators), tuple(outputs))


@st.composite
def graphs(draw: st.DrawFn, names: st.SearchStrategy[str] = names, depth: int = 2) -> Graph:
    """A well formed graph.

    Args:
        names: strategy of names of inputs, operators and values; `plain_names` for readable ones.
        depth: how deep loops and branches nest.
    """
    takes = tuple(draw(st.lists(tensor_types(), min_size=1, max_size=3)))
    return _Maker(draw, names).graph(draw(st.sampled_from(["step", 'a "b"'])), takes, (), depth, True)
