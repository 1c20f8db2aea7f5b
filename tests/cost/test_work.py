"""What kinds of work add to the roofline: each figure by its formula, and nothing where a device does not state it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, ConvolutionRate, Curve, Device, LinkSpec, NodeGroup
from autopar.cluster.catalog import available
from autopar.cost import Convolution, CostModel, KernelWork, LeastWork, convolution_of, met_share, product_dtype
from autopar.cost.model import KEPT_BYTES
from tests.search.problems import f32, graph_of

PLAIN = Device("D", 10**9, 1e11, (("f32", 1e12), ("bf16", 4e12)), launch_s=1e-6, memory_efficiency=Curve.constant(0.5))
SPECIAL = replace(
    PLAIN,
    convolution_efficiency=Curve.constant(0.5),
    kernel_gradient_efficiency=Curve(((1e6, 0.1), (1e9, 0.2))),
    reorder_efficiency=Curve(((1024, 0.1), (4096, 0.01))),
    reduction_efficiency=Curve(((64, 0.05), (1024, 1.0))),
    first_touch_bandwidth=2e9,
    function_s=(("exp", 3e-10), ("sin", 5e-9)),
)


def _model(*devices, **options):
    link = LinkSpec(1e9, 1e-6)
    return CostModel(Cluster("c", tuple(NodeGroup(1, 1, d, link, link) for d in devices)), **options)


WORKS = st.builds(
    KernelWork,
    st.floats(0, 1e12),
    st.floats(0, 1e9),
    st.sampled_from(["f32", "bf16"]),
    st.sampled_from(["", "convolution", "kernel gradient"]),
    st.sampled_from(["", "exp", "sin", "add"]),
    st.floats(0, 1e8),
    st.lists(st.tuples(st.floats(0, 1e8), st.sampled_from([0, 64, 4096])), max_size=2).map(tuple),
    st.sampled_from([0, 64, 4096]),
)


@given(WORKS, st.sampled_from([1, 2, 4]))
def test_a_device_that_states_nothing_is_as_before(work, parts):
    model = _model(PLAIN, replace(PLAIN, kind="E", peak_flops={"f32": 1e11}))
    assert model.work_s(work, parts) == model.operator_s(work.flops / parts, work.bytes / parts, work.dtype)
    assert model.first_touch_s(1e10) == 0


@given(WORKS)
def test_no_kind_of_work_makes_an_operator_faster(work):
    # All shares but that of convolutions are below those of other operators, and theirs is not above.
    assert _model(SPECIAL).work_s(work) >= _model(PLAIN).work_s(work)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(
    ("work", "more_s"),
    [
        (KernelWork(0, 4e6, "f32", function="exp", elements=1e6), 1e6 * 3e-10),
        (KernelWork(0, 4e6, "f32", function="add", elements=1e6), 0),
        (KernelWork(0, 4e6, "f32", reordered=((8e6, 1024),)), 8e6 / (1e11 * 0.1)),
        (KernelWork(0, 4e6, "f32", reordered=((8e6, 4096), (1e6, 1024))), 8e6 / (1e11 * 0.01) + 1e6 / (1e11 * 0.1)),
        (KernelWork(0, 4e6, "f32", reordered=((8e6, 0),)), 2 * 8e6 / (1e11 * 0.5)),
        (KernelWork(0, 4e6, "f32", run_bytes=64), 4e6 / (1e11 * 0.05) - 4e6 / (1e11 * 0.5)),
        (KernelWork(0, 4e6, "f32", run_bytes=1024), 0),  # no faster than others
    ],
)
def test_what_is_added(work, more_s, parts):
    plain_s = 1e-6 + 4e6 / parts / (1e11 * 0.5)
    assert _model(SPECIAL).work_s(work, parts) == pytest.approx(plain_s + more_s / parts)
    assert _model(SPECIAL, launch_s=0.0).work_s(work, parts) == pytest.approx(plain_s - 1e-6 + more_s / parts)


def test_convolutions_reach_their_own_share():
    flops = {
        k: _model(SPECIAL).work_s(KernelWork(1e9, 0, "f32", k)) - 1e-6 for k in ("", "convolution", "kernel gradient")
    }
    assert flops == pytest.approx({"": 1e-3, "convolution": 2e-3, "kernel gradient": 5e-3})
    only = replace(PLAIN, convolution_efficiency=Curve.constant(0.5))
    assert _model(only).work_s(KernelWork(1e9, 0, "f32", "kernel gradient")) == pytest.approx(2e-3 + 1e-6)


def test_the_slowest_device_counts_with_all_that_it_adds():
    slow = replace(PLAIN, kind="S", function_s=(("exp", 1e-8),))
    work = KernelWork(0, 4e6, "f32", function="exp", elements=1e6)
    assert _model(SPECIAL, slow).work_s(work) == _model(slow, SPECIAL).work_s(work) == _model(slow).work_s(work)


def test_nothing_takes_no_time_and_new_memory_only_where_there_is_much():
    assert _model(SPECIAL).work_s(KernelWork(0, 0, "f32")) == 0
    assert _model(SPECIAL).first_touch_s(KEPT_BYTES) == pytest.approx(KEPT_BYTES / 2e9)
    assert _model(SPECIAL).first_touch_s(KEPT_BYTES - 1) == 0
    assert _model(SPECIAL, PLAIN).first_touch_s(4e9) == pytest.approx(2)


RATES = replace(
    PLAIN,
    convolutions=(
        ConvolutionRate("convolution", 3, 2e-12, 1e-10),
        ConvolutionRate("convolution", 2, 1e-12, 1e-11, 1e-10, 1e-9, 1e-8, 1e-7),
        ConvolutionRate("kernel gradient", 2, 4e-12),
    ),
)
SIZES = Convolution(2, 1e9, 1e7, 1e5, 1e6, 1e5, 1e4)
IMAGES_S = 1e-3 + 1e-4 + 1e-5 + 1e-3 + 1e-3 + 1e-3


@pytest.mark.parametrize(
    ("kind", "dims", "seconds"),
    [
        ("convolution", 1, IMAGES_S),
        ("convolution", 2, IMAGES_S),
        ("convolution", 3, 2e-3 + 1e-3),
        ("convolution", 4, 2e-3 + 1e-3),
        ("kernel gradient", 2, 4e-3),
        ("kernel gradient", 3, 4e-3),
    ],
)
def test_convolutions_take_what_was_measured_of_their_sizes(kind, dims, seconds):
    """Of the fewest spatial dims that are enough, else of the most; devices without figures have peak and bytes."""
    work = KernelWork(2e9, 0.0, "f32", kind, convolution=replace(SIZES, spatial_dims=dims))
    assert _model(RATES).work_s(work) == pytest.approx(1e-6 + seconds)
    assert _model(PLAIN).work_s(work) == pytest.approx(1e-6 + 2e-3)
    assert _model(PLAIN, RATES).work_s(work) == pytest.approx(1e-6 + max(seconds, 2e-3))
    least = LeastWork(2e9, 4e6, ("f32",), kind, spatial_dims=dims)
    assert _model(RATES).least_s(least, 1) <= _model(RATES).work_s(work)
    assert _model(RATES).least_s(least, 4) >= _model(RATES).least_s(least, 1) / 4


@given(*(st.integers(1, n) for n in (3, 4, 4, 3)), st.sampled_from([1, 2]), st.booleans())
def test_sizes_of_convolutions(dims, images, taken, features, groups, of_images):
    """Windows are counted for each group of features or of images; those of one place are not packed."""
    side, window = 4, 3
    numbers = (("NC", "IO", "NC"), ("NCX", "IOX", "NCX"), ("NCXY", "IOXY", "NCXY"), ("NCXYZ", "IOXYZ", "NCXYZ"))[dims]
    batch_groups, feature_groups = (groups, 1) if of_images else (1, groups)
    x = jax.ShapeDtypeStruct((images * batch_groups, taken * feature_groups, *(side,) * dims), jnp.float32)
    w = jax.ShapeDtypeStruct((taken, features * groups, *(window,) * dims), jnp.float32)

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (1,) * dims,
            "SAME",
            dimension_numbers=numbers,
            feature_group_count=feature_groups,
            batch_group_count=batch_groups,
        )

    graph = graph_of(convolve, x, w)
    (op,) = (op for op in graph.operators if op.primitive == "conv_general_dilated")
    types = {v.name: v.type for v in graph.inputs}
    shapes = [types[v].shape for v in op.operands]
    found = convolution_of(op, shapes, op.results[0].type.shape)
    elements, depth = images * side**dims, taken * window**dims
    assert found == Convolution(
        dims,
        elements * features * groups * depth,
        elements * depth * groups * (dims > 0),
        taken * features * groups * window**dims,
        elements * features * groups,
        elements * depth * groups * (dims > 0) * min(1.0, 8 / (taken * (window if dims > 1 else 1))),
        elements * window**dims * groups * (1 - features / 24),
        met=elements * features * groups * depth,
    )


@pytest.mark.parametrize("last", [1, 0])
def test_gradients_of_kernels_of_few_features_are_slow_where_the_last_dim_is_padded(last):
    """As measured: columns that neighbours send are no padding, rows leave that of the columns."""

    def gradient(x, y):
        kernel = jnp.zeros((3, 3, 4, 8))
        numbers = ("NHWC", "HWIO", "NHWC")
        options = {"window_strides": (1, 1), "padding": ((1, 1), (last, last)), "dimension_numbers": numbers}
        convolve = partial(jax.lax.conv_general_dilated, x, **options)
        return jax.linear_transpose(convolve, kernel)(y)[0]

    graph = graph_of(gradient, f32(1, 16, 16 + 2 * (1 - last), 4), f32(1, 16, 16, 8))
    (op,) = (op for op in graph.operators if op.primitive == "conv_general_dilated")
    shapes, result = [graph.types[v].shape for v in op.operands], op.results[0].type.shape
    alone, rows, columns = (convolution_of(op, shapes, result, edges=edges) for edges in ((), (1,), (2,)))
    assert alone.narrow_runs == pytest.approx(last * 16 * 16 * 4 * 9 * (1 - 8 / 24))
    assert (alone.windows, alone.scattered) == (16 * 16 * 4 * 9, 0)
    assert rows == alone and columns == replace(alone, narrow_runs=0.0)
    assert convolution_of(op, shapes, result, edges=(1, 2)) == columns


def _gradient(image, kernel, result, stride, padding, of_kernel):
    """The gradient of a convolution of volumes by its image or by its kernel, and the operator that it is."""
    options = {"dimension_numbers": ("NDHWC", "DHWIO", "NDHWC"), "padding": padding}

    def gradient(other, y):
        def convolve(x, w):
            return jax.lax.conv_general_dilated(x, w, (stride,) * 3, **options)

        by = (lambda w: convolve(other, w)) if of_kernel else (lambda x: convolve(x, other))
        return jax.linear_transpose(by, jnp.zeros(kernel if of_kernel else image))(y)[0]

    shapes = [f32(*(image if of_kernel else kernel)), f32(*result)]
    graph = graph_of(gradient, *shapes)
    (op,) = (op for op in graph.operators if op.primitive == "conv_general_dilated")
    return gradient, shapes, op, [graph.types[v].shape for v in op.operands]


@pytest.mark.parametrize(
    ("image", "window", "stride", "padded", "of_kernel", "form", "met"),
    [
        ((1, 8, 8, 8, 4), 3, 2, True, False, "dilated", (11 / 24) ** 3),
        ((1, 8, 8, 8, 4), 3, 2, True, True, "dilated", (11 / 12) ** 3),
        ((1, 8, 8, 8, 4), 3, 1, False, True, "windows", 1.0),
        ((4, 4, 4, 4, 2), 5, 2, True, False, "loop", (7 / 20) ** 3),
        ((4, 16, 16, 16, 2), 5, 2, True, False, "dilated", (37 / 80) ** 3),
    ],
)
def test_forms_of_convolutions_are_those_of_the_compiler(image, window, stride, padded, of_kernel, form, met):
    """The compiler reverses the windows of loops alone; elements are met of which neither factor is a zero."""
    pad = window // 2 if padded else 0
    inner = [(n + 2 * pad - window) // stride + 1 for n in image[1:-1]]
    kernel, result = (window,) * 3 + (image[-1], 3), (image[0], *inner, 3)
    function, shapes, op, operands = _gradient(image, kernel, result, stride, ((pad, pad),) * 3, of_kernel)
    met_by_hand = met_share(op, operands, op.results[0].type.shape)
    found = convolution_of(op, operands, op.results[0].type.shape, met_share=met_by_hand)
    assert found is not None and found.form == form and found.met == found.multiplications * met_by_hand
    assert met_by_hand == pytest.approx(met)
    compiled = jax.jit(function).lower(*shapes).compile().as_text()
    assert ("rhs_reversal" in compiled) == (form == "loop")


def test_forms_have_rates_of_their_own():
    """Loops have one for all kinds; what was not measured is priced as windows are."""
    rates = (
        ConvolutionRate("convolution", 3, 1e-12, form="dilated"),
        ConvolutionRate("convolution", 3, 5e-9, form="loop"),
    )
    device = replace(RATES, convolutions=(*RATES.convolutions, *rates))
    sizes = replace(SIZES, spatial_dims=3, met=1e6)

    def seconds(kind, form, d=device):
        work = KernelWork(2e9, 0.0, "f32", kind, convolution=replace(sizes, form=form))
        return _model(d).work_s(work) - 1e-6

    assert seconds("convolution", "dilated") == pytest.approx(1e-3)
    assert seconds("convolution", "loop") == seconds("kernel gradient", "loop") == pytest.approx(5e-3)
    assert seconds("kernel gradient", "dilated") == seconds("kernel gradient", "windows")
    assert seconds("convolution", "loop", RATES) == seconds("convolution", "windows", RATES)
    least = LeastWork(2e9, 4e6, ("f32",), "convolution", spatial_dims=3, met_share=1e-3)
    assert _model(device).least_s(least, 1) == pytest.approx(1e-6 + min(2e-3, 5e-3))
    assert _model(RATES).least_s(least, 1) == pytest.approx(1e-6 + 2e-3)
    other = replace(least, kind="", spatial_dims=0)
    assert _model(device).least_s(other, 1) == _model(replace(device, convolutions=())).least_s(other, 1)
    dilated = replace(least, form="dilated", met_share=1e-4)
    assert _model(device).least_s(dilated, 1) == pytest.approx(1e-6 + 5e-4)


@pytest.mark.parametrize(
    ("precision", "rate"),
    [
        (None, "f32"),
        ("default", "f32"),
        ("high", "f32_high"),
        ("highest", "f32_highest"),
        ((jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST), "f32_highest"),
        ("TF32_TF32_F32", "f32"),
        ("BF16_BF16_F32", "bf16"),
        ("BF16_BF16_F32_X6", "bf16_x6"),
        ("F32_F32_F32", "f32_highest"),
        (jax.lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32), "f32_highest"),
    ],
)
def test_precision_decides_at_which_rate_products_of_float32_run(precision, rate):
    a, b = f32(8, 8), jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    wide, narrow = (graph_of(lambda x: jnp.dot(x, x, precision=precision), x).operators[0] for x in (a, b))
    assert product_dtype(wide, "f32") == rate
    assert product_dtype(narrow, "bf16") == "bf16"


def test_default_precision_and_convolutions_say_it_too():
    def conv(x, w):
        return jax.lax.conv(x, w, (1, 1), "SAME")

    with jax.default_matmul_precision("highest"):
        op = graph_of(conv, f32(1, 8, 8, 8), f32(8, 8, 3, 3)).operators[0]
    assert product_dtype(op, "f32") == "f32_highest"
    op = graph_of(conv, f32(1, 8, 8, 8), f32(8, 8, 3, 3)).operators[0]
    assert product_dtype(op, "f32") == "f32"


@pytest.mark.parametrize("cluster", available())
def test_rates_of_precisions(cluster):
    """GPUs have no tensor cores for the highest; TPUs take passes in bf16; others compute in float32 anyway."""
    (device,) = Cluster.load(cluster).device_types
    flops, listed = device.flops, dict(device.peak_flops)
    assert flops("bf16_x3") == flops("bf16") / 3
    if "TPU" in device.kind:
        assert flops("f32_high") == pytest.approx(flops("bf16") / 3, rel=1e-3)
        assert flops("f32_highest") == pytest.approx(flops("bf16") / 6, rel=1e-3)
        return
    assert flops("f32_high") == flops("f32")
    assert flops("f32_highest") < flops("f32") / 5 if "bf16" in listed else flops("f32_highest") == flops("f32")
