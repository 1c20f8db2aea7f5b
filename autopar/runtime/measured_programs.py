"""Programs to time, for `autopar.runtime.measuring`: kinds of work, and collectives in groups of several sizes.

Every device of a mesh does the same on arrays of its own, once or many times in a loop: a `Case`. `special_cases` are
kinds of work on CPUs that FLOPs and bytes do not explain: convolutions, other orders, functions, new memory.
`collective_cases` are collectives of each kind and size, in groups as the axes of meshes make them. All groups of a
node run side by side, as in a step: of neighbours, as those of a last axis, and of devices as far apart as those of a
first one.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar._compat.meshes import device_mesh
from autopar.cluster.mesh import prime_factors
from autopar.cost import Convolution
from autopar.cost.calibration import What
from autopar.lower.reshard import scattered_sum
from autopar.runtime.measured_convolutions import Drawn, drawn_convolutions

AXIS = "x"
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
_IMAGES = 16
_ROWS, _SUMMED, _MOST_BYTES = 2048, 4, 1 << 23
_WIDTH = 256
_GROUPS = 8
#: Side of matrices between whose products there are collectives, and elements of these.
_SIDE, _SMALL = 256, 256
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Effort:
    """Extent of measurements.

    Args:
        products: sizes n of products of n x n matrices, and of as much arithmetic in other shapes.
        copies: bytes of arrays that are read and written.
        collectives: bytes a device of collectives.
        least_s: seconds that a program should take: short work is done several times in it.
        repeats: how often each program, and each transfer, is timed.
        convolutions: convolutions drawn of each kind, form and number of spatial dims.
        multiplications: multiplications of one of them at most.
        strides: bytes between elements that a copy in another order brings side by side.
        runs_bytes: bytes side by side that a sum adds up.
        summed_bytes: of a sum's operand.
        elements: of elementwise functions.
        first_touch: bytes of memory that is written for the first time.
        transfers: bytes of arrays that workers send to each other.
        pairs: of workers between which they are sent at most.
    """

    products: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    copies: tuple[int, ...] = tuple(4**k for k in range(6, 13))
    collectives: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
    least_s: float = 2e-2
    repeats: int = 9
    convolutions: int = 16
    multiplications: float = 1.5e8
    strides: tuple[int, ...] = (128, 512, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 16, 1 << 19)
    runs_bytes: tuple[int, ...] = (32, 64, 256, 1024)
    summed_bytes: int = 1 << 22
    elements: int = 1 << 18
    first_touch: int = 1 << 26
    transfers: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
    pairs: int = 28

    def on_accelerators(self) -> Effort:
        """Sizes that fill a GPU or TPU, with the same repetitions: smaller work is little but the start of a kernel."""
        return replace(self, products=(4096, 8192), copies=(1 << 28, 1 << 30), collectives=(1 << 12, 1 << 18, 1 << 26))


QUICK = Effort(
    products=(32, 256),
    copies=(1 << 12, 1 << 20),
    collectives=(1 << 12, 1 << 18),
    least_s=2e-4,
    repeats=3,
    convolutions=4,
    multiplications=1e7,
    strides=(1024, 4096),
    runs_bytes=(64, 1024),
    summed_bytes=1 << 18,
    elements=1 << 12,
    transfers=(1 << 10, 1 << 16, 1 << 22),
    pairs=6,
)
#: Seconds of measuring, for plans on the machine that measures.
HERE = Effort(
    products=(64, 512),
    copies=(1 << 12, 1 << 16, 1 << 21),
    collectives=(1 << 12, 1 << 18),
    least_s=1e-3,
    repeats=3,
    convolutions=10,
    multiplications=3e7,
    strides=(1024, 4096),
    runs_bytes=(64, 1024),
    summed_bytes=1 << 19,
    elements=1 << 14,
    first_touch=1 << 24,
)


@dataclass(frozen=True)
class Case:
    """A program to time; ``make(runs)`` compiles it and returns what runs it.

    Args:
        what: kind of the sample.
        name: dtype of a product, kind of a collective, or what else tells samples of a kind apart.
        amount: of one run.
        group: devices that a collective runs over.
        make: compiles it.
        repeated: whether it is run so often that it takes long enough.
        side_bytes: of a copy in another order or a sum.
        convolution: its sizes.
    """

    what: What
    name: str
    amount: float
    group: int
    make: Callable[[int], Callable[[], Any]]
    repeated: bool = True
    side_bytes: int = 0
    convolution: Convolution | None = None


def _equal_numbers(shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, 1e-3, np.float32)


def _drawn_numbers(shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of which a product by a square matrix keeps the size; cores of GPUs run faster on equal ones."""
    return np.random.default_rng(0).standard_normal(shape, np.float32) / math.sqrt(shape[-1])


def program(mesh: Mesh, body: Callable[..., Any], shapes: Sequence[tuple[tuple[int, ...], Any]]) -> Callable[[], Any]:
    """A program in which every device runs ``body`` on arrays of its own, of these shapes and dtypes."""
    n = mesh.size
    spec = PartitionSpec(mesh.axis_names)
    fill = _equal_numbers if mesh.devices.flat[0].platform == "cpu" else _drawn_numbers
    placed = [
        jax.device_put(fill((n * shape[0], *shape[1:])), NamedSharding(mesh, spec)).astype(dtype)
        for shape, dtype in shapes
    ]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * len(shapes), out_specs=spec, check_vma=False)
    compiled: Any = jax.jit(mapped).lower(*placed).compile()
    return lambda: compiled(*placed)


def looped(step: Callable[[Any], Any], runs: int) -> Callable[[Any], Any]:
    """``step`` done ``runs`` times, each on the result of the one before."""
    return lambda x: lax.fori_loop(0, runs, lambda _, y: step(y), x) if runs > 1 else step(x)


def special_cases(mesh: Mesh, effort: Effort) -> list[Case]:
    """All of them.

    Args:
        mesh: of one axis, all devices.
        effort: sizes.
    """
    return [
        *(_convolution(mesh, drawn) for drawn in drawn_convolutions(effort.convolutions, effort.multiplications)),
        *_reorders(mesh, effort),
        *_sums(mesh, effort),
        *_functions(mesh, effort),
        _first_touch(mesh, effort),
    ]


def _convolution(mesh: Mesh, drawn: Drawn) -> Case:
    def make(runs: int) -> Callable[[], Any]:
        return program(mesh, drawn.function, [(shape, jnp.float32) for shape in drawn.shapes])

    amount = 2 * drawn.sizes.multiplications
    return Case("convolution", drawn.kind, amount, 1, make, repeated=False, convolution=drawn.sizes)


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


def layouts(devices: int) -> tuple[tuple[int, int, int], ...]:
    """Shapes of meshes whose second axis is the group: each size that a division of ``devices`` has, near and far.

    Sizes are products of the first prime factors: 2, 4 and 8 of eight devices.
    """
    sizes = itertools.accumulate(prime_factors(devices), operator.mul)
    near_and_far = ((n, ((devices // n, n, 1), (1, n, devices // n))) for n in sizes)
    return tuple(shape for _, shapes in near_and_far for shape in dict.fromkeys(shapes))


def collective_cases(devices: Sequence[Any], effort: Effort) -> list[Case]:
    """Programs of all kinds, sizes and groups.

    Args:
        devices: two or more.
        effort: sizes.
    """
    names = ("far", AXIS, "near")
    meshes = [device_mesh(list(zip(names, shape, strict=True)), devices) for shape in layouts(len(devices))]
    collectives = [_case(mesh, kind, size) for kind in KINDS for mesh in meshes for size in effort.collectives]
    by_size = {mesh.shape[AXIS]: mesh for mesh in meshes}
    return [*collectives, _between(meshes[0], ""), *(_between(mesh, "all-reduce") for mesh in by_size.values())]


def _between(mesh: Mesh, kind: str) -> Case:
    """Products of one device, and after each an all-reduce of what is small."""

    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        product, small = state
        product = product @ product
        small = small + product[0, 0]
        return product, lax.psum(small, AXIS) if kind else small * 2

    def make(runs: int) -> Callable[[], Any]:
        def body(x: Any, y: Any) -> Any:
            return looped(step, runs)((x, y))[1]

        return program(mesh, body, [((_SIDE, _SIDE), jnp.float32), ((_SMALL,), jnp.float32)])

    return Case("between", kind, 4.0 * _SIDE**2, mesh.shape[AXIS] if kind else 1, make)


def _case(mesh: Mesh, kind: str, size: int) -> Case:
    n = mesh.shape[AXIS]
    # As many elements as every device can split evenly.
    length = max(n, size // 4 // n * n)
    full = {"all-gather": length * n, "all-to-all": length * n}

    def step(y: Any) -> Any:
        match kind:
            case "all-reduce":  # sums that overflow take no longer
                return lax.psum(y, AXIS)
            case "reduce-scatter":
                return lax.dynamic_update_slice(y, scattered_sum(y, AXIS, 0, n), (0,))
            case "all-gather":
                return lax.all_gather(y, AXIS, tiled=True)[:length]
            case "all-to-all":
                return lax.all_to_all(y, AXIS, 0, 0, tiled=True)
            case _:
                return lax.ppermute(y, AXIS, [(i, (i + 1) % n) for i in range(n)])

    def make(runs: int) -> Callable[[], Any]:
        return program(mesh, looped(step, runs), [((length,), jnp.float32)])

    return Case("collective", kind, 4.0 * full.get(kind, length), n, make)
