"""Dims of tokens: those of the batch that products with parameters treat in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import InfeasiblePlanError
from autopar.ir import Graph, Layout
from autopar.search.origins import Label, Origins, origins


def token_dims(graph: Graph) -> dict[str, int]:
    """Dim of the tokens of each value of the step, inputs among them; the first of several.

    A dim of a batch input is one of tokens where it is not the first, which is of examples, where products with
    parameters keep it, so that each index along it meets the same matrix, and where none sums over it, as over
    features. What it meets in sums and products (that of the labels, of a mask) is one of tokens too. What lies inside
    loops is not among the values.

    Args:
        graph: a whole train step: its backward pass tells features of labels from tokens.
    """
    labels_of = origins(graph)
    tokens = _token_labels(labels_of)
    by_value: dict[str, int] = {}
    for name in graph.types:
        for d, labels in enumerate(labels_of.dims.get(name, ())):
            if labels & tokens:
                by_value.setdefault(name, d)
    return by_value


def _token_labels(labels_of: Origins) -> frozenset[Label]:
    classes = _classes(labels for dims in labels_of.dims.values() for labels in dims if labels)
    return frozenset(
        label
        for members in classes
        for label in members
        if members & labels_of.kept and not members & labels_of.summed and all(d for _, d in members)
    )


def _classes(sets: Iterable[frozenset[Label]]) -> list[frozenset[Label]]:
    """Labels by class: those that are in one of ``sets`` together, and what these are together with."""
    classes: list[frozenset[Label]] = []
    for labels in sorted(set(sets), key=sorted):
        touching = [c for c in classes if c & labels]
        classes = [c for c in classes if not c & labels] + [labels.union(*touching)]
    return classes


@dataclass(frozen=True)
class SharedTokens:
    """Layouts in which values may be made where the devices along a mesh axis share the tokens of examples.

    The axis splits no dim of examples, which would make it one of data parallelism, and products of the batch with
    parameters have their tokens split over it, where they can.

    Args:
        axis: the mesh axis.
        examples: by value, with the ids of enclosing operators and regions before its name, the dims that number
            examples.
        products: by such a name the dim of tokens of products with parameters.
    """

    axis: str
    examples: Mapping[str, frozenset[int]]
    products: Mapping[str, int]

    @staticmethod
    def of(graph: Graph, tokens: Mapping[str, int], axis: str) -> SharedTokens:
        """Finds the tokens of a graph.

        Args:
            graph: a train step or a stage of one; the first dim of its batch inputs numbers examples.
            tokens: by batch input the dim of its tokens, where it has one.
            axis: the mesh axis.
        """
        labels_of, labels = origins(graph), frozenset(tokens.items())
        examples = {
            key: frozenset(d for d, come in enumerate(dims) if any(n == 0 for _, n in come))
            for key, dims in labels_of.dims.items()
        }
        products: dict[str, int] = {}
        for key in sorted(labels_of.products.keys() & labels_of.dims.keys()):
            of_tokens = [d for d, come in enumerate(labels_of.dims[key]) if come & labels]
            if of_tokens:
                products[key] = of_tokens[0]
        return SharedTokens(axis, examples, products)

    def allowed(self, key: str, layouts: Sequence[Layout]) -> list[bool]:
        """Whether the value ``key`` may be made in each layout; one or more are true."""
        examples, tokens = self.examples.get(key, frozenset()), self.products.get(key)
        ok = [not any(self.axis in k.dims[d] for d in examples) for k in layouts]
        if tokens is None:
            return ok
        split = [a and self.axis in k.dims[tokens] for a, k in zip(ok, layouts, strict=True)]
        return split if any(split) else ok


@dataclass(frozen=True)
class SharedMatrices:
    """Layouts in which values may be made where the devices along a mesh axis share the matrices of layers.

    The axis splits no dim of examples, and of products of the batch with parameters no dim of the batch: each device
    has a part of the matrix and all that meets it (Shoeybi et al., "Megatron-LM", 2019).

    Args:
        axis: the mesh axis.
        whole: by value, with the ids of enclosing operators and regions before its name, the dims that the axis may
            not split.
    """

    axis: str
    whole: Mapping[str, frozenset[int]]

    @staticmethod
    def of(graph: Graph, axis: str) -> SharedMatrices:
        """Finds the tokens of a train step or a stage of one, whose batch inputs' first dim numbers examples."""
        labels_of = origins(graph)
        whole: dict[str, frozenset[int]] = {}
        for key, dims in labels_of.dims.items():
            examples = {d for d, come in enumerate(dims) if any(n == 0 for _, n in come)}
            # Of a product with a parameter the last dim is the parameter's; where the others are from is lost where the
            # batch was cut into microbatches.
            batch = range(len(dims) - 1) if key in labels_of.products and len(dims) > 2 else ()
            whole[key] = frozenset({*examples, *batch})
        return SharedMatrices(axis, whole)

    def allowed(self, key: str, layouts: Sequence[Layout]) -> list[bool]:
        """Whether the value ``key`` may be made in each layout; one or more are true."""
        whole = self.whole.get(key, frozenset())
        ok = [not any(self.axis in k.dims[d] for d in whole) for k in layouts]
        return ok if any(ok) else [True] * len(layouts)


def check_tokens(graph: Graph, dims: Mapping[str, int], parts: int) -> None:
    """Raises InfeasiblePlanError unless ``parts`` devices can share the tokens of every batch argument that has some.

    Args:
        graph: a whole train step.
        dims: from `token_dims`.
        parts: devices.
    """
    held = [i for i in graph.inputs if i.role == "batch" and i.name in dims]
    if not held:
        raise InfeasiblePlanError(
            f"{graph.name} has no tokens that cp={parts} devices can share: no batch argument has a dim of them",
            cause="tokens are a dim next to that of the examples, which products with parameters keep and do not sum",
            remedy="leave cp out, and give its devices to dp or tp",
        )
    for i in held:
        size = i.type.shape[dims[i.name]]
        if size % parts:
            possible = [n for n in range(2, size + 1) if size % n == 0]
            raise InfeasiblePlanError(
                f"{i.name} {i.type} has {size} tokens an example, which cp={parts} devices do not divide",
                cause="context parallelism gives each device the same number of tokens",
                remedy=f"cp={', '.join(map(str, possible[:8]))}, or examples of {(size // parts + 1) * parts} tokens "
                "(tokens and labels as arguments of their own, not one text that is cut in the step)",
            )
