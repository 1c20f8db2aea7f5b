"""Drawn convolutions to time: of each kind, form and number of spatial dims (`autopar.cost.convolutions`).

Sizes are those of parts as well: a device has a half or a quarter of some dims, with the edges of its neighbours in
place of padding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.cluster import ConvolutionKind
from autopar.cost import Convolution, convolution_of, kind_of, met_share
from autopar.cost.calibrated_kinds import MOST_DIMS
from autopar.frontend import SignatureOptions, flatten_call, trace

#: Lengths of spatial dims by their number, and by what they are divided.
_SIDES: Mapping[int, tuple[int, ...]] = MappingProxyType({1: (64, 128, 256, 512), 2: (8, 16, 32, 64), 3: (4, 8, 16)})
_PARTS = (1, 1, 2, 4)
_FEATURES = (1, 3, 4, 8, 16, 32, 64, 128, 256)
_IMAGES, _WINDOWS = (1, 2, 4, 8, 16), (1, 3, 3, 3, 5)
_NUMBERS: Mapping[int, tuple[str, str, str]] = MappingProxyType(
    {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
)
#: Multiplications at least, as a share of those at most.
_LEAST = 1 / 1000
#: How much longer than a multiplication of a product an element of windows takes to pack, at most, and a multiplication
#: of a loop, about: what takes longer than the most multiplications is left out.
_PACKED, _LOOPED = 100, 30


_Function = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Drawn:
    """A convolution.

    Args:
        function: of arrays of two shapes.
        shapes: of float32.
        kind: "kernel gradient" where the window is larger than the result.
        sizes: of the convolution.
    """

    function: _Function
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    kind: ConvolutionKind
    sizes: Convolution


def drawn_convolutions(count: int, multiplications: float) -> list[Drawn]:
    """So many of each kind, form and number of spatial dims, and of loops of any; the same in each process.

    Args:
        count: of each.
        multiplications: of one at most.
    """
    random, loops, every = np.random.default_rng(0), list[Drawn](), list[Drawn]()
    kinds: tuple[ConvolutionKind, ...] = get_args(ConvolutionKind)
    for kind, dilated, dims in itertools.product(kinds, (False, True), _SIDES):
        some: list[Drawn] = []
        while len(some) < count:
            drawn = _drawn(random, dims, kind, dilated, multiplications)
            if drawn is not None and drawn.sizes.form == "loop":
                loops.append(drawn)
            elif drawn is not None and drawn.kind == kind:
                some.append(drawn)
        every += some
    while len(loops) < count:
        drawn = _drawn(random, MOST_DIMS, "convolution", False, multiplications)
        loops += [drawn] if drawn is not None and drawn.sizes.form == "loop" else []
    return [*every, *loops[:count]]


def _drawn(random: np.random.Generator, dims: int, kind: ConvolutionKind, dilated: bool, most: float) -> Drawn | None:
    """A convolution of ``kind`` mostly; None where it is empty, or has too few or too many multiplications."""
    length, window = int(random.choice(_SIDES[dims])), int(random.choice(_WINDOWS))
    sides = [length // int(random.choice(_PARTS)) for _ in range(dims)]
    taken, features = (int(random.choice(_FEATURES)) for _ in range(2))
    images, stride = int(random.choice(_IMAGES)), 2 if dilated else 1
    padded = [bool(random.integers(2)) for _ in range(dims)]
    padding = [(window // 2, window // 2) if p else (0, 0) for p in padded]
    outer = [side if p else side + window - 1 for side, p in zip(sides, padded, strict=True)]
    inner = [(n + sum(pads) - window) // stride + 1 for n, pads in zip(outer, padding, strict=True)]
    image, kernel, result = (images, *outer, taken), (*(window,) * dims, taken, features), (images, *inner, features)
    if min(inner) < 1 or (dilated and window == 1):
        return None

    def convolve(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (stride,) * dims, padding, dimension_numbers=_NUMBERS[dims])

    def of_kernel(x: Any, y: Any) -> Any:
        return jax.linear_transpose(lambda w: convolve(x, w), jnp.zeros(kernel, jnp.float32))(y)[0]

    def of_image(y: Any, w: Any) -> Any:
        return jax.linear_transpose(lambda x: convolve(x, w), jnp.zeros(image, jnp.float32))(y)[0]

    choices: Mapping[tuple[str, bool], tuple[_Function, tuple[Any, Any], list[int]]] = {
        ("convolution", False): (convolve, (image, kernel), inner),
        ("convolution", True): (of_image, (result, kernel), outer),
        ("kernel gradient", False): (of_kernel, (image, result), inner),
        ("kernel gradient", True): (of_kernel, (image, result), inner),
    }
    function, shapes, places = choices[kind, dilated]
    if not _LEAST * most <= images * math.prod(places) * window**dims * taken * features <= most:
        return None
    arguments = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    graph = trace(function, flatten_call(function, arguments, {}, SignatureOptions())[0]).graph
    op = next(op for op in graph.operators if op.primitive == "conv_general_dilated")
    types = [graph.types[o] for o in op.reads]
    of_operands, of_result = [t.shape for t in types], op.results[0].type.shape
    sizes = convolution_of(op, of_operands, of_result, met_share=met_share(op, of_operands, of_result))
    assert sizes is not None
    if (_LOOPED * sizes.met if sizes.form == "loop" else _PACKED * sizes.windows) > most:
        return None
    return Drawn(
        function, shapes, "kernel gradient" if kind_of(op, types) == "kernel gradient" else "convolution", sizes
    )
