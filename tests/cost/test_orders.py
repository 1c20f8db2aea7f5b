"""Which operands are copied in another order, against those that XLA for CPUs transposes; runs of reductions; kinds."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.cost import Reorder, kind_of, packed, reorders, run_bytes
from tests.cost.test_compute import _operator

TOKENS = (4, 8)


@pytest.mark.parametrize(
    ("spec", "left", "right", "expected"),
    [
        ("ij,jk->ik", (8, 16), (16, 4), ()),
        ("ji,jk->ik", (16, 8), (16, 4), ()),  # libraries take a transposed matrix
        ("ij,kj->ik", (8, 16), (4, 16), ()),
        ("bij,bjk->bik", (3, 8, 16), (3, 16, 4), ()),
        ("bji,bkj->bik", (3, 16, 8), (3, 4, 16), ()),
        ("bsi,ij->bsj", (*TOKENS, 16), (16, 4), ()),  # two dims stay, in the order already
        ("bsi,bsj->ij", (*TOKENS, 16), (*TOKENS, 32), ((0, 16 * 4),)),  # two are summed over: a weight's gradient
        ("bqhd,bshd->bhqs", (2, 8, 3, 16), (2, 4, 3, 16), ((0, 0), (1, 3 * 16 * 4))),
        ("bshi,hij->bsj", (2, 8, 3, 4), (3, 4, 16), ()),
        ("sbi,bij->sbj", (8, 3, 4), (3, 4, 5), ((0, 0),)),
        ("bsi,bsj->ij", (4, 1, 16), (4, 1, 32), ((0, 16 * 4),)),
        ("bsi,bsj->ij", (4, 8, 1), (4, 8, 32), ()),  # a dim of one element lies anywhere
        ("bsi,ji->bsj", (*TOKENS, 16), (4, 16), ()),  # a matrix is transposed by the library
    ],
)
def test_operands_of_products(spec, left, right, expected):
    op, types = _product(spec, left, right)
    assert reorders(op, types) == tuple(Reorder(*e) for e in expected)


def _product(spec, left, right):
    (lhs, rhs), out = spec.split("->")[0].split(","), spec.split("->")[1]
    summed = [c for c in lhs if c in rhs and c not in out]
    batch = [c for c in lhs if c in rhs and c in out]
    numbers = tuple(tuple(tuple(side.index(c) for c in dims) for side in (lhs, rhs)) for dims in (summed, batch))
    return _operator(lambda x, y: lax.dot_general(x, y, numbers), left, right)


def test_of_a_product_with_swapped_operands_the_other_one_is_copied():
    op, types = _product("bsi,bsj->ij", (*TOKENS, 16), (*TOKENS, 32))
    assert reorders(op, types, swapped=True) == (Reorder(1, 32 * 4),)


@pytest.mark.parametrize(
    ("spec", "left", "right", "swapped", "expected"),
    [
        ("bsi,bsj->ij", (*TOKENS, 16), (*TOKENS, 32), True, False),  # XLA turns the left one round itself
        ("bsi,bsj->ij", (*TOKENS, 16), (*TOKENS, 32), False, False),
        ("ji,jk->ik", (16, 8), (16, 4), True, True),
        ("ji,jk->ik", (16, 8), (16, 4), False, True),
        ("ij,jk->ik", (8, 16), (16, 4), False, False),
        ("ij,jk->ik", (8, 16), (16, 4), True, True),
        ("ij,kj->ik", (8, 16), (4, 16), True, False),
        ("bsi,ij->bsj", (*TOKENS, 16), (16, 4), False, False),
        ("bsi,bsj->ij", (*TOKENS, 1), (*TOKENS, 32), True, False),  # a vector
        ("bji,bjk->bik", (3, 16, 8), (3, 16, 4), True, False),
    ],
)
def test_products_whose_matrices_are_packed(spec, left, right, swapped, expected):
    op, types = _product(spec, left, right)
    assert [r.operand for r in packed(op, types, swapped=swapped)] == ([0, 1] if expected else [])


def test_xla_folds_the_transposition_of_a_gradient_into_its_product():
    # The fact about the compiler for which programs swap operands themselves (`autopar.ir.transposed_products`).
    def gradients(x, w):
        return jax.grad(lambda w: (jnp.sin(x @ w)).sum())(w)

    shapes = [jax.ShapeDtypeStruct((*TOKENS, 16), jnp.float32), jax.ShapeDtypeStruct((16, 24), jnp.float32)]
    text = jax.jit(gradients).lower(*shapes).compile().as_text()
    (gradient,) = re.findall(r"= f32\[16,24\]\S* dot\(.*", text)
    assert "lhs_contracting_dims={0}" in gradient and "rhs_contracting_dims={1}" in gradient, text


@pytest.mark.parametrize(("rows", "copies"), [((16,), 0), ((4, 4), 1)])
def test_xla_copies_what_is_reordered(rows, copies):
    # The fact about the compiler that `reorders` is made of, at one product with and one without a copy.
    def gradient(x, y):
        dims = tuple(range(len(rows)))
        return lax.dot_general(x, y, ((dims, dims), ((), ())))

    shapes = [jax.ShapeDtypeStruct((*rows, n), jnp.float32) for n in (8, 32)]
    text = jax.jit(gradient).lower(*shapes).compile().as_text()
    op, types = _operator(gradient, *(s.shape for s in shapes))
    found = len(re.findall(r"f32\[8,16\]\S* (?:fusion|copy|transpose)\(", text))
    assert (found > 0) == (copies > 0) == bool(reorders(op, types)), text


def _convolution(image, kernel, numbers=("NHWC", "HWIO", "NHWC"), pad=((1, 1), (1, 1))):
    return _operator(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), pad, dimension_numbers=numbers), image, kernel)


def test_convolutions():
    op, types = _convolution((2, 8, 8, 4), (3, 3, 4, 6))
    assert reorders(op, types) == () and kind_of(op, types) == "convolution"
    op, types = _convolution((2, 4, 8, 8), (6, 4, 3, 3), ("NCHW", "OIHW", "NCHW"))
    assert reorders(op, types) == (Reorder(0, 8 * 8 * 4), Reorder(1, 4 * 9 * 4))
    # The gradient of the kernel: features take the place of the batch, and the window is the whole image.
    op, types = _convolution((2, 8, 8, 4), (2, 8, 8, 6), ("CHWN", "IHWO", "HWNC"))
    assert kind_of(op, types) == "kernel gradient"
    assert reorders(op, types) == (Reorder(0, 8 * 8 * 4 * 4), Reorder(1, 0))


def test_others_have_no_order_and_no_kind():
    op, types = _operator(lambda x: jnp.transpose(x, (1, 0)), (4, 8))
    assert reorders(op, types) == () and kind_of(op, types) == "" and run_bytes(op, types) == 0


@pytest.mark.parametrize(
    ("shape", "axes", "elements"),
    [
        ((2, 3, 5, 16), (3,), 16),
        ((2, 3, 5, 16), (2, 3), 5 * 16),
        ((2, 3, 5, 16), (1, 3), 16),
        ((2, 3, 5, 16), (0,), 3 * 5 * 16),
        ((2, 3, 5, 16), (0, 1), 5 * 16),
        ((2, 3, 5, 16), (0, 1, 2, 3), 2 * 3 * 5 * 16),
        ((2, 1, 16), (0, 2), 2 * 16),  # a dim of one element parts nothing
        ((2, 0), (1,), 0),
    ],
)
def test_runs_of_reductions(shape, axes, elements):
    op, types = _operator(lambda x: lax.reduce_max(x, axes), shape)
    assert run_bytes(op, types) == 4 * elements
