"""Matplotlib figures: their data, that names lie over nothing, and the error where Matplotlib is missing."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from fuseplan.report import figures
from fuseplan.report.figures import MissingMatplotlibError, points_of
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.workloads import get_workload

X = jax.ShapeDtypeStruct((512, 256), "float32")


@pytest.fixture(scope="module", params=["gpt2_block", "cross_entropy_grad", "mlp"])
def plan(request):
    f, args = get_workload(request.param).build()
    return fuseplan.make_plan(f, device="h200", planner="greedy")(*args)


def extent(figure, text):
    return text.get_window_extent(figure.canvas.get_renderer())


def test_names_in_a_roofline_lie_over_no_dot_and_no_other_name(plan):
    pytest.importorskip("matplotlib")
    figure = plan.roofline_figure()
    (axes,) = figure.axes
    figure.draw_without_rendering()
    boxes = [extent(figure, text) for text in axes.texts if text.get_text()]  # others are lines to names
    assert boxes, "no kernel has a name"
    inside = axes.get_window_extent(figure.canvas.get_renderer())
    for i, box in enumerate(boxes):
        assert inside.x0 <= box.x0
        assert box.x1 <= inside.x1
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])
    n_dots = 0
    for dots in axes.collections:
        centres = axes.transData.transform(dots.get_offsets())
        radii = np.sqrt(dots.get_sizes()) / 2 * figure.dpi / 72
        n_dots += len(centres)
        for (x, y), radius in zip(centres, radii, strict=True):
            for box in boxes:
                nearest = np.clip([x, y], [box.x0, box.y0], [box.x1, box.y1])
                assert np.hypot(*(nearest - [x, y])) > radius, "a name lies over a dot"
    assert n_dots == len(points_of(plan))
    (legend,) = figure.legends
    assert not legend.get_window_extent(figure.canvas.get_renderer()).overlaps(inside)


def test_dots_lie_at_the_attained_rates_below_the_roofs(plan):
    pytest.importorskip("matplotlib")
    (axes,) = plan.roofline_figure().axes
    found = {tuple(xy) for dots in axes.collections for xy in np.asarray(dots.get_offsets()).tolist()}
    assert found == {(p.intensity, p.flops_per_s) for p in points_of(plan)}
    device = plan.device
    for point in points_of(plan):
        assert point.flops_per_s <= point.intensity * device.hbm_bytes_per_s * (1 + 1e-9)


def test_a_timeline_has_every_kernel_and_the_peak(plan):
    pytest.importorskip("matplotlib")
    figure = plan.timeline_figure()
    top, below = figure.axes
    n_bars = sum(len(collection.get_paths()) for collection in top.collections)
    assert n_bars == sum(kernel.cost.time_ps > 0 for kernel in plan.kernels)
    (line,) = below.lines
    unit, scale = figures._bytes_unit(plan.peak_bytes)
    assert max(line.get_ydata()) == pytest.approx(plan.peak_bytes / scale)
    assert unit in below.get_ylabel()
    assert line.get_xdata()[-1] == pytest.approx(plan.objective_us)
    figure.draw_without_rendering()
    edges = top.transData.transform([(x, 0) for x in line.get_xdata()])[:, 0]
    for text in top.texts:
        box = extent(figure, text)
        middle = (box.x0 + box.x1) / 2
        k = int(np.searchsorted(edges, middle)) - 1
        assert edges[k] <= box.x0
        assert box.x1 <= edges[k + 1], "a name reaches out of its bar"


@pytest.mark.parametrize("f", [lambda x: x, lambda x: x.T, lambda x: jnp.tanh(x)])
def test_small_plans_have_figures(f):
    pytest.importorskip("matplotlib")
    plan = fuseplan.make_plan(f, device="h200")(X)
    assert plan.roofline_figure().axes
    assert plan.timeline_figure().axes


def test_a_study_has_a_panel_for_each_device_and_a_mark_for_each_plan():
    pytest.importorskip("matplotlib")
    frame = fuseplan.study(["softmax", "mlp"], ["h200", "tpu_v5e"], ["unfused", "greedy", "solver"])
    figure = fuseplan.study_figure(frame)
    assert [axes.get_title() for axes in figure.axes] == ["h200, float32", "tpu_v5e, float32"]
    for axes in figure.axes:
        solid = [dots for dots in axes.collections if dots.get_label() in ("unfused", "greedy")]
        assert sum(len(dots.get_offsets()) for dots in solid) == 4
        assert min(x for dots in solid for x, _ in dots.get_offsets()) >= 1.0
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["unfused", "greedy"]


def test_a_frame_of_something_else_is_refused():
    pytest.importorskip("matplotlib")
    plan = fuseplan.make_plan(jax.nn.softmax, device="h200")(X)
    with pytest.raises(InvalidArgumentError, match=r"expected a frame of fuseplan\.study"):
        fuseplan.study_figure(plan.to_frame())
    frame = fuseplan.study("softmax", "h200", "greedy")
    with pytest.raises(InvalidArgumentError, match="baseline 'solver'"):
        fuseplan.study_figure(frame)


def test_without_matplotlib_the_error_says_how_to_install_it(monkeypatch):
    plan = fuseplan.make_plan(jax.nn.softmax, device="h200")(X)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (plan.roofline_figure, plan.timeline_figure):
        with pytest.raises(MissingMatplotlibError, match=r"pip install 'fuseplan\[report\]'"):
            draw()
