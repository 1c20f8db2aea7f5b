"""Figures of kinds of work fitted to times that known figures would give, and what a file holds of them."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import Cluster
from autopar.cluster.file import parse
from autopar.cost.calibrated_file import MeasuredGroup, file_text
from autopar.cost.calibrated_kinds import Kinds, fit_kinds
from autopar.cost.calibration import Sample, fit
from tests.cost.test_calibration import BANDWIDTH, CALL_S, FLOPS, HOW, LAUNCH_S, samples

NEW, EXP_S, PLAIN_S = 2e9, 3e-10, 1e-10


def _sample(what, name, amount, once_s, side_bytes=0, runs=1000, count=0):
    return Sample(what, name, amount, runs, 1, (CALL_S + runs * (LAUNCH_S + once_s),) * 3, side_bytes, count)


def _kinds(reached=0.5, stride_share=0.02, exp_s=EXP_S, new=NEW):
    found = []
    for share in (reached, 4 * reached):  # images of two sizes: their geometric mean
        found.append(_sample("convolution", "convolution", 2.0**27, 2.0**27 / (FLOPS * share)))
        found.append(_sample("convolution", "kernel gradient", 2.0**27, 2.0**27 / (FLOPS * share / 8)))
    # One feature reaches a fourth of what many do, of gradients a tenth, and one image a third of what two do.
    work = 2.0**27
    for kind, share, few in (("convolution", 2 * reached, 0.25), ("kernel gradient", reached / 4, 0.1)):
        found += [_sample("features", kind, work, work / (FLOPS * share * e), count=n) for n, e in ((1, few), (8, 1))]
    for images, part in ((1, 1), (2, 3)):
        found += [_sample("images", "kernel gradient", work, work / (FLOPS * 0.03 * part), count=images)]
    found += [_sample("reorder", "f32", 1e7, 1e7 / (BANDWIDTH * stride_share * k), 1024 // k) for k in (1, 2)]
    found += [_sample("reduction", "f32", 1e7, 1e7 / (BANDWIDTH * 0.1), 64)]
    found += [_sample("function", "", 1e5, 1e5 * PLAIN_S), _sample("function", "exp", 1e5, 1e5 * (PLAIN_S + exp_s))]
    found += [_sample("function", "erf", 1e5, 1e5 * PLAIN_S * 1.01)]
    # Read and written at the rate of memory, and for the first time.
    found += [_sample("first touch", "", 2.0**26, 2 * 2.0**26 / BANDWIDTH + 2.0**26 / new)]
    return found


@given(st.floats(0.05, 0.2), st.floats(0.01, 0.4), st.floats(1e-11, 1e-8), st.floats(1e8, 1e11))
def test_known_figures_are_found_again(reached, stride_share, exp_s, new):
    measured = [*samples(), *_kinds(reached, stride_share, exp_s, new)]
    found = fit_kinds(measured, fit(measured))
    assert found.convolution is not None and found.kernel_gradient is not None
    assert found.convolution.at(2.0**27) == pytest.approx(2 * reached, rel=1e-6)
    assert found.kernel_gradient.at(2.0**27) == pytest.approx(2 * reached / 8, rel=1e-6)
    assert found.features is not None and found.gradient_features is not None and found.gradient_images is not None
    assert [found.features.at(n) for n in (1, 8)] == pytest.approx([0.25, 1], rel=1e-6)
    assert [found.gradient_features.at(n) for n in (1, 8)] == pytest.approx([0.1, 1], rel=1e-6)
    assert [found.gradient_images.at(n) for n in (1, 2)] == pytest.approx([1 / 3, 1], rel=1e-6)
    assert found.reorder is not None and found.reduction is not None
    assert [found.reorder.at(n) for n in (1024, 512)] == pytest.approx([stride_share, 2 * stride_share], rel=1e-6)
    assert found.reduction.at(64) == pytest.approx(0.1, rel=1e-6)
    assert dict(found.function_s) == pytest.approx({"exp": exp_s, "exp2": exp_s}, rel=1e-4)
    assert found.first_touch_bandwidth == pytest.approx(new, rel=1e-3)
    assert dict(found.spreads) == dict.fromkeys(dict(found.spreads), 0.0) and len(found.spreads) == 9


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
        (d.convolution_efficiency, kinds.convolution),
        (d.kernel_gradient_efficiency, kinds.kernel_gradient),
        (d.reorder_efficiency, kinds.reorder),
        (d.reduction_efficiency, kinds.reduction),
    ):
        assert curve is not None and own is not None
        assert [x for p in curve.points for x in p] == pytest.approx([x for p in own.points for x in p], rel=2e-2)
    assert d.first_touch_bandwidth == pytest.approx(NEW, rel=1e-3)
    assert dict(d.function_s) == pytest.approx(dict(kinds.function_s), rel=1e-2)
    assert text.count("spread 0.0%") >= 6
