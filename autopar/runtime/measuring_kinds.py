"""Programs for kinds of work that FLOPs and bytes do not explain: convolutions, other orders, functions, new memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from autopar.cost.calibration import What
from autopar.runtime.cases import Case, Effort, looped, program

#: By primitive; those that take no longer than an addition are left out.
_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "exp": jnp.exp,
        "log": jnp.log,
        "log1p": jnp.log1p,
        "logistic": lax.logistic,
        "tanh": jnp.tanh,
        "erf": lax.erf,
        "sin": jnp.sin,
        "cos": jnp.cos,
        "pow": lambda y: y**1.7,
        "rsqrt": lax.rsqrt,
    }
)
_IMAGES, _FEATURES = 16, 2048
_ROWS, _SUMMED, _MOST_BYTES = 2048, 4, 1 << 23
_WIDTH = 256
#: Features of the operand of a convolution with few of its own, and of one that sums over few images.
_FEW_TAKEN, _FEW_FEATURES = 16, 8
_GROUPS = 8


def special_cases(mesh: Mesh, effort: Effort) -> list[Case]:
    """All of them.

    Args:
        mesh: of one axis, all devices.
        effort: sizes.
    """
    return [
        *_convolutions(mesh, effort),
        *_few(mesh, effort),
        *_reorders(mesh, effort),
        *_sums(mesh, effort),
        *_functions(mesh, effort),
        _first_touch(mesh, effort),
    ]


def _convolutions(mesh: Mesh, effort: Effort) -> list[Case]:
    """Images to images and gradients of kernels, of 3 x 3 and 1 x 1, with operands in the order of the library."""

    def convolve(left: Any, right: Any, pad: int) -> Any:
        return lax.conv_general_dilated(
            left, right, (1, 1), ((pad, pad), (pad, pad)), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def case(name: str, side: int, window: int) -> Case:
        features = max(4, _FEATURES // side)
        image = (_IMAGES, side, side, features)
        if name == "convolution":
            shapes = (image, (window, window, features, features))
        else:  # features of what went in are the batch; what the images are is summed over
            shapes = ((features, side, side, _IMAGES), (side, side, _IMAGES, features))
        flops = 2.0 * _IMAGES * side**2 * features**2 * window**2

        def make(runs: int) -> Callable[[], Any]:
            def body(x: Any, w: Any) -> Any:
                return convolve(x, w, window // 2)

            return program(mesh, body, [(shape, jnp.float32) for shape in shapes])

        return Case("convolution", name, flops, 1, make, repeated=False)

    kinds = ("convolution", "kernel gradient")
    return [case(name, side, window) for name in kinds for side in effort.images for window in (1, 3)]


def _few(mesh: Mesh, effort: Effort) -> list[Case]:
    """Convolutions of 3 x 3 with few features, and gradients of their kernels, also of few images."""

    def convolve(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def case(what: What, name: str, images: int, features: int, count: int) -> Case:
        side, taken = effort.feature_side, _FEW_TAKEN if what == "features" else features
        image, kernel = (images, side, side, taken), (3, 3, taken, features)
        result = (images, side, side, features)
        flops = 2.0 * images * side**2 * 9 * taken * features

        def gradient(x: Any, y: Any) -> Any:
            return jax.linear_transpose(lambda w: convolve(x, w), jnp.zeros(kernel, jnp.float32))(y)[0]

        def make(runs: int) -> Callable[[], Any]:
            body, second = (convolve, kernel) if name == "convolution" else (gradient, result)
            return program(mesh, body, [(image, jnp.float32), (second, jnp.float32)])

        return Case(what, name, flops, 1, make, repeated=False, count=count)

    kinds = ("convolution", "kernel gradient")
    few = [case("features", name, max(effort.summed_images), n, n) for name in kinds for n in effort.features]
    return few + [case("images", kinds[1], n, _FEW_FEATURES, n) for n in effort.summed_images]


def _reorders(mesh: Mesh, effort: Effort) -> list[Case]:
    """Sums of a few arrays with their last dim first, as XLA makes a product's operand out of a residual stream."""

    def case(stride_bytes: int) -> Case:
        rows = min(_ROWS, max(_IMAGES, _MOST_BYTES // stride_bytes))
        shape = (_IMAGES, rows // _IMAGES, stride_bytes // 4)

        def make(runs: int) -> Callable[[], Any]:
            def body(x: Any, *others: Any) -> Any:
                def step(y: Any) -> Any:
                    return jnp.transpose(sum(others, y), (2, 0, 1)).reshape(shape)

                return looped(step, runs)(x)

            return program(mesh, body, [(shape, jnp.float32)] * _SUMMED)

        read_bytes = float(_SUMMED * rows * stride_bytes)
        return Case("reorder", "f32", read_bytes, 1, make, side_bytes=stride_bytes)

    return [case(stride_bytes) for stride_bytes in effort.strides]


def _sums(mesh: Mesh, effort: Effort) -> list[Case]:
    """Sums over pixels and the features of a group, of which more groups lie in between."""

    def case(side_bytes: int) -> Case:
        run = side_bytes // 4
        shape = (_IMAGES, effort.summed_bytes // 4 // (_IMAGES * _GROUPS * run), _GROUPS, run)

        def make(runs: int) -> Callable[[], Any]:
            def body(x: Any) -> Any:
                # The result goes into the next operand, so that none is left out.
                start = jnp.zeros((_IMAGES, _GROUPS), jnp.float32)
                return looped(lambda y: jnp.sum(jnp.maximum(x, y[0, 0]), axis=(1, 3)), runs)(start)

            return program(mesh, body, [(shape, jnp.float32)])

        return Case("reduction", "f32", float(effort.summed_bytes), 1, make, side_bytes=side_bytes)

    return [case(side_bytes) for side_bytes in effort.runs_bytes]


def _functions(mesh: Mesh, effort: Effort) -> list[Case]:
    """Functions of numbers between 0.4 and 2, and the line that brings their results back there by itself."""

    def line(y: Any) -> Any:
        return 0.1 * y + 0.5

    def case(name: str, function: Callable[[Any], Any]) -> Case:
        def make(runs: int) -> Callable[[], Any]:
            shape = (effort.elements // _WIDTH, _WIDTH)
            return program(mesh, looped(lambda y: function(line(y)), runs), [(shape, jnp.float32)])

        return Case("function", name, float(effort.elements), 1, make)

    return [case("", lambda y: y), *(case(name, function) for name, function in _FUNCTIONS.items())]


def _first_touch(mesh: Mesh, effort: Effort) -> Case:
    """An array that is too large for the process to keep its memory from call to call."""

    def make(runs: int) -> Callable[[], Any]:
        return program(mesh, lambda y: y * 2, [((effort.first_touch // 4 // _WIDTH, _WIDTH), jnp.float32)])

    return Case("first touch", "", float(effort.first_touch), 1, make, repeated=False)
