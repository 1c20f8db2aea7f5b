"""Figures of kinds of work fitted to times that known figures would give, and what a file holds of them."""

import itertools
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import Cluster
from autopar.cluster import ConvolutionRate
from autopar.cluster.file import parse
from autopar.cost import Convolution
from autopar.cost.calibrated_file import MeasuredGroup, file_text
from autopar.cost.calibrated_kinds import Kinds, fit_kinds
from autopar.cost.calibration import Sample, fit
from tests.cost.test_calibration import BANDWIDTH, CALL_S, FLOPS, HOW, LAUNCH_S, samples

NEW, EXP_S, PLAIN_S = 2e9, 3e-10, 1e-10


#: Rates that measured times are made of, in the order of those that are found.
RATES = (
    ConvolutionRate("convolution", 3, 8 / FLOPS, 1e-7, 3e-9, form="dilated"),
    ConvolutionRate("convolution", 3, 40 / FLOPS, 0.0, 0.0, 1e-7, form="loop"),
    ConvolutionRate("convolution", 2, 2.5 / FLOPS, 1e-9, 0.0, 2e-9, 0.0, 3e-8),
    ConvolutionRate("convolution", 3, 8 / FLOPS, 1e-8, 3e-9, 0.0, 1e-7),
    ConvolutionRate("kernel gradient", 1, 2 / FLOPS, 4e-9, 5e-9, 1e-9, 3e-8),
    ConvolutionRate("kernel gradient", 2, 2 / FLOPS, 4e-9, 5e-9, 1e-9, 1e-9, 2e-8),
)
SIZES = [(m, k, n) for m in (64, 4096) for k in (9, 144, 2304) for n in (1, 16, 256)]


def _sample(what, name, amount, once_s, side_bytes=0, runs=1000, convolution=None):
    return Sample(what, name, amount, runs, 1, (CALL_S + runs * (LAUNCH_S + once_s),) * 3, side_bytes, convolution)


def _sizes(rate):
    cases = zip(SIZES, itertools.cycle((3, 9, 24, 64)), itertools.cycle((0.1, 0.3, 0.8)))
    for (m, k, n), run, share in cases:
        yield Convolution.of(rate.spatial_dims, m, k // 3, 3, n, run=run, form=rate.form, met_share=share)


def _kinds(slower=1.0, stride_share=0.02, exp_s=EXP_S, new=NEW):
    found = []
    for rate in RATES:
        for sizes in _sizes(rate):
            seconds = slower * sizes.seconds(rate)
            found.append(_sample("convolution", rate.kind, 2 * sizes.multiplications, seconds, convolution=sizes))
    found += [_sample("reorder", "f32", 1e7, 1e7 / (BANDWIDTH * stride_share * k), 1024 // k) for k in (1, 2)]
    found += [_sample("reduction", "f32", 1e7, 1e7 / (BANDWIDTH * 0.1), 64)]
    found += [_sample("function", "", 1e5, 1e5 * PLAIN_S), _sample("function", "exp", 1e5, 1e5 * (PLAIN_S + exp_s))]
    found += [_sample("function", "erf", 1e5, 1e5 * PLAIN_S * 1.01)]
    # Read and written at the rate of memory, and for the first time.
    found += [_sample("first touch", "", 2.0**26, 2 * 2.0**26 / BANDWIDTH + 2.0**26 / new)]
    return found


@given(st.floats(1, 5), st.floats(0.01, 0.4), st.floats(1e-11, 1e-8), st.floats(1e8, 1e11))
def test_known_figures_are_found_again(slower, stride_share, exp_s, new):
    measured = [*samples(), *_kinds(slower, stride_share, exp_s, new)]
    found = fit_kinds(measured, fit(measured))
    for rate, known in zip(found.convolutions, RATES, strict=True):
        assert (rate.kind, rate.form, rate.spatial_dims) == (known.kind, known.form, known.spatial_dims)
        for sizes in _sizes(known):
            assert sizes.seconds(rate) == pytest.approx(slower * sizes.seconds(known), rel=0.05)
    assert found.convolution_error < 0.01
    assert found.reorder is not None and found.reduction is not None
    assert [found.reorder.at(n) for n in (1024, 512)] == pytest.approx([stride_share, 2 * stride_share], rel=1e-6)
    assert found.reduction.at(64) == pytest.approx(0.1, rel=1e-6)
    assert dict(found.function_s) == pytest.approx({"exp": exp_s, "exp2": exp_s}, rel=1e-4)
    assert found.first_touch_bandwidth == pytest.approx(new, rel=1e-3)
    assert dict(found.spreads) == dict.fromkeys(dict(found.spreads), 0.0) and len(found.spreads) == 6


def test_what_was_not_measured_is_left_out():
    plain = samples()
    assert fit_kinds(plain, fit(plain)) == Kinds()
    group = Cluster.load("local-cpu").groups[0]
    assert file_text("m", [MeasuredGroup(group, fit(plain), HOW, kinds=Kinds())]) == file_text(
        "m", [MeasuredGroup(group, fit(plain), HOW)]
    )


def test_new_memory_that_is_no_slower_is_left_out():
    measured = [*samples(), _sample("first touch", "", 2.0**26, 1.9 * 2.0**26 / BANDWIDTH)]
    assert fit_kinds(measured, fit(measured)).first_touch_bandwidth is None


def test_the_file_holds_them_and_their_spread():
    measured = [*samples(), *_kinds()]
    found = fit(measured)
    kinds = fit_kinds(measured, found)
    text = file_text("mine", [MeasuredGroup(Cluster.load("local-cpu").groups[0], found, HOW, kinds=kinds)])
    _, (group,) = parse(tomllib.loads(text), "mine.toml")
    d = group.device
    for curve, own in (
        (d.reorder_efficiency, kinds.reorder),
        (d.reduction_efficiency, kinds.reduction),
    ):
        assert curve is not None and own is not None
        assert [x for p in curve.points for x in p] == pytest.approx([x for p in own.points for x in p], rel=2e-2)
    assert len(d.convolutions) == len(kinds.convolutions) == len(RATES)
    for read, rate in zip(d.convolutions, kinds.convolutions, strict=True):
        assert (read.kind, read.form, read.spatial_dims) == (rate.kind, rate.form, rate.spatial_dims)
        assert read.window_s == pytest.approx(rate.window_s, rel=1e-2)
    assert d.first_touch_bandwidth == pytest.approx(NEW, rel=1e-3)
    assert dict(d.function_s) == pytest.approx(dict(kinds.function_s), rel=1e-2)
    assert text.count("spread 0.0%") >= 6
