"""Runs a traced function by jax's own primitives, with nothing split."""

from __future__ import annotations

import jax
import numpy as np

from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.ir import Literal
from autopar.ir.verify import verify
from autopar.lower.localize.base import scalar
from autopar.lower.microbatch import microbatched
from autopar.lower.retrace import Recorder, run_whole


def traced(fn, args):
    signature, leaves = flatten_call(fn, args, {}, SignatureOptions())
    return trace(fn, signature), leaves


def run(found, leaves):
    graph = found.graph
    verify(graph)

    def flat(*arrays):
        env = dict(zip((i.name for i in graph.inputs), arrays, strict=True))
        env = run_whole(found.program, env, Recorder())
        return [scalar(o.operand) if isinstance(o.operand, Literal) else env[o.operand] for o in graph.outputs]

    return jax.jit(flat)(*leaves, *found.closed_over)


def numbers(x):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def step_of(loss):
    """``(p, x) -> (p less a part of the gradient, loss)``."""

    def step(p, x):
        value, grads = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value

    return step


def assert_same_in_microbatches(fn, args, counts, rtol=1e-12, rewrite=lambda traced: traced):
    """``fn`` in each number of microbatches returns what it returns at once, to ``rtol`` of each leaf's norm.

    Args:
        fn: a step.
        args: its arguments.
        counts: numbers of microbatches.
        rtol: relative to each leaf's norm.
        rewrite: what is done with the traced step before.
    """
    plain, leaves = traced(fn, args)
    plain = rewrite(plain)
    wanted = [numbers(x) for x in jax.tree.leaves(jax.jit(fn)(*args))]
    for count in counts:
        got = [numbers(x) for x in run(microbatched(plain, count), leaves)]
        assert len(got) == len(wanted)
        for a, b, o in zip(got, wanted, plain.graph.outputs, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype, o.path
            if b.dtype.kind in "fc":
                assert np.linalg.norm(a - b) <= rtol * max(np.linalg.norm(b), 1e-12), (count, o.path)
            else:
                assert np.array_equal(a, b), (count, o.path)
    return plain
