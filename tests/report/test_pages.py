"""Frames, pictures and pages: read back, and compared with the plans they show."""

import json
import os
import re
import stat
import sys
from dataclasses import replace
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel.calibrate import described_cpu
from costmodel.devices import DEVICES
from fuseplan.report.comparison import Compared
from fuseplan.report.explain import borders
from fuseplan.report.frames import compare_frame, devices_frame
from fuseplan.report.page import Page, Study, Table, render_page, write_page
from fuseplan.support.atomic_file import OutputError, check_writable, write_text
from fuseplan.targets import detect as local

SHAPES = (
    jax.ShapeDtypeStruct((4096, 128), "float32"),
    jax.ShapeDtypeStruct((128, 512), "float32"),
    jax.ShapeDtypeStruct((512, 64), "float32"),
)
VOID = {"meta", "br", "img", "link", "input", "hr"}
DRAWN_EMPTY = {"rect", "path", "use", "circle"}


def f(x, w, out):
    y = jax.nn.softmax(jnp.tanh(x @ w))
    return y @ out * y.max()


def make(planner, device="test"):
    return fuseplan.make_plan(f, device=device, planner=planner)(*SHAPES)


@pytest.fixture(scope="module")
def plans():
    return tuple(make(p) for p in ("unfused", "greedy", "solver"))


@pytest.fixture(scope="module")
def page(plans):
    tpu = tuple(make(p, "tpu_v5e") for p in ("unfused", "solver"))
    table = Table("Measured here", "Medians.", ("function", "ms"), (("f<1>", "1.5"),))
    return Page("A page <of> two & more", (Study("f", plans), Study("f", tpu)), (table,))


class Reader(HTMLParser):
    """Collects tables, links and ids; fails on tags that do not close."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tables, self.ids, self.hrefs, self.tags = [], [], [], [], []
        self.cell = None
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.hrefs += [attrs["href"]] if "href" in attrs else []
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and "table" in self.open:
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.cell = ""

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> where another tag is open"
        if tag in ("td", "th"):
            self.tables[-1][-1].append(self.cell)
            self.cell = None

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data


def data_of(html):
    """The document that the page's scripts draw."""
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1]
    )


# --- frames ----------------------------------------------------------------------------------


def test_compare_frame_has_the_documented_columns(plans):
    frame = compare_frame([Compared(plan.planner, plan, plan.objective_ps) for plan in plans])
    documented = re.search(r"``(planner, kernels[^`]*)``", fuseplan.compare.__doc__)
    assert list(frame.columns) == [c.strip() for c in documented[1].split(",")]
    assert list(frame.planner) == ["unfused", "greedy", "solver"]
    assert frame.ratio.iloc[0] == 1.0
    assert frame.ratio.iloc[2] == plans[2].objective_ps / plans[0].objective_ps < 1
    assert frame.bound_us.isna().tolist() == [True, True, False]
    assert frame.gap.iloc[2] == 0.0
    assert compare_frame([]).empty


def test_compare_is_a_function_before_and_after():
    frame = fuseplan.compare(f, device="test", planners=("solver", "unfused"))(*SHAPES)
    assert list(frame.planner) == ["solver", "unfused"]
    assert (frame.ratio.iloc[0], frame.ratio.iloc[1]) == (
        pytest.approx(frame.time_us[0] / frame.time_us[1]),
        1.0,
    )
    assert callable(fuseplan.compare)


def test_devices_frame_has_every_device_with_its_sources():
    frame = devices_frame(measure_cpu=False)
    assert list(frame.index) == list(DEVICES)
    assert frame.loc["h200", "hbm_gb_per_s"] == 4800
    assert frame.loc["h200", "ridge_point"] == pytest.approx(989.4e12 / 4.8e12)
    assert set(frame.attrs["sources"]) == set(frame.index)
    assert "datasheet" in frame.attrs["sources"]["h200"]["hbm_bytes_per_s"]
    assert not frame.isna().any(axis=None)


def test_devices_frame_s_cpu_is_the_one_that_is_planned_for(monkeypatch):
    monkeypatch.setattr(local, "local_cpu", lambda: replace(described_cpu(), vector_flops_per_s=7 * 10**12))
    assert devices_frame().loc["cpu", "vector_tflops"] == 7


def test_a_plan_without_arithmetic_has_no_roofline():
    plan = fuseplan.make_plan(lambda x: x.T, device="test")(SHAPES[0])
    kernels = data_of(render_page(Page("p", (Study("transpose", (plan,)),))))["studies"][0]["plans"][0][
        "kernels"
    ]
    assert kernels["flops"] == [[0, 0, 0]], "the page draws none"


# --- the page --------------------------------------------------------------------------------


def test_page_is_well_formed_and_needs_no_network(page):
    html = render_page(page)
    reader = Reader(html)
    scripts = [attrs for tag, attrs in reader.tags if tag == "script"]
    assert scripts
    assert not any("src" in attrs for attrs in scripts)
    policy = next(a["content"] for t, a in reader.tags if t == "meta" and a.get("http-equiv"))
    assert policy == "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
    assert not [h for h in reader.hrefs if not h.startswith("#")]
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", html)
    assert "url(http" not in html
    assert "@import" not in html
    targets = [h[1:] for h in reader.hrefs]
    assert set(targets) <= set(reader.ids)
    assert len(set(reader.ids)) == len(reader.ids), "an id stands twice"


def test_page_is_accessible(page):
    html = render_page(page)
    tags = Reader(html).tags
    assert ("html", {"lang": "en"}) in tags
    assert any(t == "meta" and a.get("name") == "viewport" for t, a in tags)
    assert "prefers-color-scheme: dark" in html
    for tag, attrs in tags:
        if tag == "svg":
            assert attrs.get("aria-label") or attrs.get("aria-hidden") == "true"
        if tag == "th":
            assert attrs.get("scope") in ("col", "row")
        if attrs.get("role") == "region":
            assert attrs["aria-label"]
            assert attrs["tabindex"] == "0"


def test_page_shows_the_plans(page, plans):
    html = render_page(page)
    tables = Reader(html).tables
    overview = tables[0]
    assert overview[0] == ["function", "device", "unfused", "greedy", "solver"]
    assert [row[1] for row in overview[1:]] == ["test", "tpu_v5e"]
    assert overview[1][4] == f"{plans[2].objective_us:.2f} ✓"
    assert overview[2][3] == "", "greedy was not asked for the TPU"
    assert ["f<1>", "1.5"] in tables[1]
    planners = tables[2]
    assert [row[0] for row in planners[1:]] == ["unfused", "greedy", "solver"]
    assert planners[3][6] == "proven optimal (as rewritten)"
    shown = data_of(html)["studies"][0]["plans"][-1]
    assert all(len(column) == len(plans[-1].kernels) for column in shown["kernels"].values())
    assert [tuple(nodes) for nodes in shown["kernels"]["nodes"]] == [k.spec.nodes for k in plans[-1].kernels]
    assert any("A page &lt;of&gt; two &amp; more" in line for line in html.splitlines())
    assert shown["proof"]["status"] == "proven optimal (as rewritten)"
    assert shown["proof"]["bound"] == plans[-1].bound_ps
    assert fuseplan.__version__ in html or "not installed as a package" in html


def test_page_gives_reasons(page, plans):
    data = data_of(render_page(page))
    shown, texts = data["studies"][0]["plans"][-1], data["strings"]
    assert plans[-1].refusals
    assert [texts[r[1]] for r in shown["refusals"]] == [r.reason for r in plans[-1].refusals]
    found = {
        (border.producer, border.consumers): border.reason
        for of_one in borders(plans[-1])
        for border in of_one
    }
    assert found
    assert {(r[0], tuple(r[1])): texts[r[2]] for r in shown["reasons"]} == found


@pytest.mark.slow
def test_page_does_not_show_the_authors_folders(page):
    assert os.path.dirname(__file__) not in render_page(page)


def test_notes_are_escaped(plans):
    noted = replace(plans[-1], notes=("<b>late</b>",))
    html = render_page(Page("p", (Study("f", (noted,)),)))
    assert "&lt;b&gt;late" in html
    assert "<b>late" not in html


def test_the_page_needs_no_matplotlib(page, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert data_of(render_page(page))["studies"]


def test_to_html_adds_the_unfused_plan(plans, tmp_path):
    plans[-1].to_html(tmp_path / "plan.html", title="My function")
    html = (tmp_path / "plan.html").read_text()
    assert "<title>My function · fuseplan</title>" in html
    assert [row[0] for row in Reader(html).tables[0][1:]] == ["unfused", "solver"]
    plans[0].to_html(str(tmp_path / "unfused.html"))
    assert [row[0] for row in Reader((tmp_path / "unfused.html").read_text()).tables[0][1:]] == ["unfused"]


def test_a_page_about_nothing(tmp_path):
    plan = fuseplan.make_plan(lambda x: x, device="test")(SHAPES[0])
    plan.to_html(tmp_path / "nothing.html")
    Reader((tmp_path / "nothing.html").read_text())


# --- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["missing/page.html", "", "a_file/page.html"])
def test_unwritable_places_are_refused_before_the_work(page, tmp_path, path):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write|is a folder"):
        write_page(page, tmp_path / path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a_file"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "page.html"
    target.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OutputError, match="No space left"):
        write_text(target, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert target.read_text() == "old"


def test_a_written_file_has_the_users_permissions(tmp_path):
    target = write_text(tmp_path / "page.html", "µ")
    (tmp_path / "other").write_text("")
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)
    assert target.read_bytes() == "µ".encode()


def test_a_device_can_be_written_to():
    assert write_text(check_writable(os.devnull), "gone")
