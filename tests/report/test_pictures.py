"""Small pictures: well-formed, without scripts or references, and readable on light and dark grounds."""

import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan.report.pictures import BOUND_COLOURS, OTHER_COLOUR, line_of_memory, strip_of_time

X = jax.ShapeDtypeStruct((512, 256), "float32")


def program(x):
    with jax.named_scope("<script>alert('x')</script>"):
        y = jnp.sort(jnp.exp(x), axis=0)
    return y / y.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def plan():
    return fuseplan.make_plan(program, device="h200")(X)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", [*BOUND_COLOURS.values(), OTHER_COLOUR])
@pytest.mark.parametrize("ground", ["#ffffff", "#1e1e1e", "#16181b"])
def test_bars_contrast_with_light_and_dark_grounds(colour, ground):
    assert contrast(colour, ground) >= 3  # WCAG 2.2, 1.4.11: graphical objects


def test_a_notebook_gets_pictures_without_scripts(plan):
    html = plan._repr_html_()
    assert "<script" not in html
    assert not re.search(r"""\b(?:href|src|on\w+)\s*=""", html)
    assert "url(" not in html
    assert html.count("<svg role=") == 2
    tree = ElementTree.fromstring(f"<div>{html}</div>")
    (strip, memory) = (svg for svg in tree.iter("svg") if svg.get("role") == "img")
    assert len(strip) == sum(kernel.cost.time_ps > 0 for kernel in plan.kernels)
    assert "at the peak" in memory.get("aria-label")
    for svg in (strip, memory):
        for drawn in svg.iter():
            colours = {drawn.get("fill"), drawn.get("stroke")} - {None}
            assert colours <= {"currentColor", *BOUND_COLOURS.values(), OTHER_COLOUR}, "follows no theme"


def test_bars_are_as_wide_as_times(plan):
    rects = list(ElementTree.fromstring(strip_of_time(plan, width=1000)))
    lefts = [float(rect.get("x")) for rect in rects]
    timed = [kernel.cost.time_ps for kernel in plan.kernels if kernel.cost.time_ps]
    for i, ps in enumerate(timed):
        end = lefts[i + 1] if i + 1 < len(lefts) else 1000
        assert end - lefts[i] == pytest.approx(1000 * ps / plan.objective_ps, abs=0.02)
    assert all(rect.find("title").text for rect in rects)


def test_many_kernels_share_bars():
    def many(x):
        for _ in range(500):
            x = jnp.sort(x, axis=0)
        return x

    plan = fuseplan.make_plan(many, device="h200", planner="unfused")(X)
    rects = list(ElementTree.fromstring(strip_of_time(plan, width=1000)))
    assert 1 <= len(rects) < 100
    last = rects[-1]
    assert float(last.get("x")) + float(last.get("width")) == pytest.approx(1000, abs=0.1)
    assert "kernels 0 to 499" in rects[0].find("title").text


def test_a_plan_of_nothing_has_pictures_too():
    plan = fuseplan.make_plan(lambda x: x, device="h200")(X)
    assert ElementTree.fromstring(strip_of_time(plan)).get("role") == "img"
    assert ElementTree.fromstring(line_of_memory(plan)).get("role") == "img"


def test_a_documents_picture_is_a_whole_file_for_both_themes(plan, tmp_path):
    plan.to_svg(tmp_path / "plan.svg", "a <title> & more")
    text = (tmp_path / "plan.svg").read_text()
    tree = ElementTree.fromstring(text)
    assert tree.tag == "{http://www.w3.org/2000/svg}svg"
    assert tree.get("aria-label") == "a <title> & more"
    assert "prefers-color-scheme: dark" in text
    assert "<script" not in text
    assert not re.search(r"""(?:href|src|url\()""", text)
    bars = [rect for rect in tree.iter("{http://www.w3.org/2000/svg}rect") if rect.find("*") is not None]
    alone = fuseplan.make_plan(program, device="h200", planner="unfused")(X)
    timed = sum(kernel.cost.time_ps > 0 for each in (plan, alone) for kernel in each.kernels)
    assert len(bars) == timed
    assert "each operation by itself" in text
    assert "planned by solver, proven optimal" in text
    plan.to_svg(tmp_path / "again.svg", "a <title> & more")
    assert (tmp_path / "again.svg").read_text() == text


def test_repr_is_one_line(plan):
    text = repr(plan)
    assert re.fullmatch(r"<fuseplan.Plan h200 solver: \d+ kernels?, [\d.,]+ µs, OPTIMAL>", text)
