"""The page in a browser: what its scripts draw, what a reader does, and what it costs."""

import json
import re
import shutil
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan.report.page import Page, Study, render_page
from fuseplan.workloads.stress import random_dag

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("there is no Chromium here", allow_module_level=True)
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="Playwright, which drives Chromium, is not installed"
)

WIDE, NARROW = {"width": 1400, "height": 900}, {"width": 420, "height": 860}
# Playwright's event loop makes the tests of a process depend on each other.
pytestmark = [pytest.mark.slow, pytest.mark.one_python, pytest.mark.xdist_group("browser")]


def network(p, x):
    """Two layers in scopes of their own, and a head without one."""
    for i, w in enumerate(p["layers"]):
        with jax.named_scope(f"layer_{i}"):
            with jax.named_scope("norm"):
                y = x - x.mean(-1, keepdims=True)
                y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)
            with jax.named_scope("mlp"):
                x = x + jnp.tanh(y @ w[0]) @ w[1]
    return jax.nn.softmax(x @ p["head"])


def loss(p, x):
    return -jnp.log(network(p, x)[:, 0]).mean()


PARAMS = {
    "layers": [
        [jax.ShapeDtypeStruct((256, 1024), "float32"), jax.ShapeDtypeStruct((1024, 256), "float32")]
        for _ in range(2)
    ],
    "head": jax.ShapeDtypeStruct((256, 1000), "float32"),
}
X = jax.ShapeDtypeStruct((4096, 256), "float32")


@pytest.fixture(scope="module")
def plans():
    return tuple(
        fuseplan.make_plan(jax.grad(loss), device="h200", planner=planner)(PARAMS, X)
        for planner in ("unfused", "greedy", "solver")
    )


@pytest.fixture(scope="module")
def html(plans):
    return render_page(Page("A network", (Study("network", plans),)))


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Open a page; after the test it must have asked for nothing and reported no error."""
    problems, contexts = [], []

    def opened(html, viewport=WIDE, **options):
        path = tmp_path / f"page-{len(contexts)}.html"
        path.write_text(html, encoding="utf-8")
        contexts.append(browser.new_context(viewport=viewport, **options))
        tab = contexts[-1].new_page()
        tab.set_default_timeout(10_000)
        tab.on(
            "console",
            lambda message: problems.append(message.text) if message.type in ("error", "warning") else None,
        )
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on(
            "request", lambda request: problems.append(request.url) if request.url != path.as_uri() else None
        )
        tab.goto(path.as_uri())
        tab.wait_for_selector("#panes .box, #panes .empty", state="attached")
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


def data_of(html):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1]
    )


def boxes(tab, kind=".box", pane=0):
    return tab.locator(".pane").nth(pane).locator(kind)


def show_second(tab, planner):
    tab.select_option("#beside", label=planner)


def overlaps(a, b, slack=1.0):
    return (
        a["x"] + slack < b["x"] + b["width"]
        and b["x"] + slack < a["x"] + a["width"]
        and a["y"] + slack < b["y"] + b["height"]
        and b["y"] + slack < a["y"] + a["height"]
    )


RECTS = """all => all.map(element => {
    const {x, y, width, height} = element.getBoundingClientRect();
    return {x, y, width, height};
})"""


# --- what is drawn ---------------------------------------------------------------------------------


def test_every_kernel_is_a_row_a_dot_and_a_bar(visit, html, plans):
    tab = visit(html)
    plan = plans[-1]
    table = tab.get_by_role("table", name="Kernels")
    assert table.get_attribute("aria-rowcount") == str(len(plan.kernels) + 1)
    assert tab.locator("#kernels tr[data-k]").count() == len(plan.kernels)
    names = tab.locator("#kernels tbody th").all_inner_texts()
    frame = plan.to_frame()
    assert names == list(frame.name)
    dots = [k for k in plan.kernels if k.cost.flops.total and k.cost.hbm_bytes]
    assert tab.locator(".dot.full").count() == len(dots)
    assert tab.locator("#time .bar").count() >= len([k for k in plan.kernels if k.cost.time_ps > 10**5])
    total = sum(
        float(text.replace(",", ""))
        for text in tab.locator("#kernels tr[data-k] td:nth-child(6)").all_inner_texts()
    )
    assert total == pytest.approx(plan.objective_us, abs=0.01 * len(plan.kernels))


def test_frames_are_scopes_and_their_kernels_are_inside(visit, html):
    tab = visit(html)
    labels = " ".join(
        boxes(tab, ".box.frame").evaluate_all("all => all.map(e => e.getAttribute('aria-label'))")
    )
    assert "layer_0" in labels
    assert "layer_1" in labels


def test_boxes_do_not_overlap_and_labels_lie_over_none(visit, html):
    tab = visit(html)
    leaves = boxes(tab, ".box:not(.open) > .body").evaluate_all(RECTS)
    assert len(leaves) > 4
    for i, a in enumerate(leaves):
        assert not any(overlaps(a, b) for b in leaves[:i])
    labels = boxes(tab, ".edge-labels text").evaluate_all(RECTS)
    assert labels
    for label in labels:
        assert not any(overlaps(label, leaf) for leaf in leaves)


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["1400", "420"])
def test_labels_of_the_roofline_lie_over_no_dot(visit, html, viewport):
    tab = visit(html, viewport)
    dots = tab.locator(".dot").evaluate_all(RECTS)
    labels = tab.locator(".roofline text").evaluate_all(RECTS)
    assert len(labels) > 4
    for i, label in enumerate(labels):
        assert not any(overlaps(label, dot) for dot in dots)
        assert not any(overlaps(label, other) for other in labels[:i])


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["1400", "420"])
def test_the_page_is_no_wider_than_the_window(visit, html, viewport):
    tab = visit(html, viewport)
    assert tab.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_the_scheme_follows_the_reader(visit, html):
    colours = {}
    for scheme in ("light", "dark"):
        tab = visit(html, color_scheme=scheme)
        colours[scheme] = tab.evaluate(
            """() => [getComputedStyle(document.body).backgroundColor,
                      getComputedStyle(document.querySelector('.box:not(.open) .body')).fill,
                      getComputedStyle(document.querySelector('.box .first')).fill]"""
        )
    brightness = {
        scheme: [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in of_one]
        for scheme, of_one in colours.items()
    }
    assert brightness["light"][0] > 600 > 200 > brightness["dark"][0]
    assert brightness["light"][1] > 600 > 200 > brightness["dark"][1]
    assert brightness["light"][2] < 200 < 500 < brightness["dark"][2]


def test_arrows_carry_the_bytes_that_kernels_pass(visit, plans):
    x = jax.ShapeDtypeStruct((1000, 1000), "float32")
    plan = fuseplan.make_plan(lambda x: jnp.exp(x).sum(0), device="h200", planner="unfused")(x)
    tab = visit(render_page(Page("two", (Study("two", (plan,)),))))
    assert boxes(tab, ".edge-labels text").all_text_contents() == ["4.0 MB"]
    assert boxes(tab, ".box.kernel").count() == 2


# --- one selection in all views ---------------------------------------------------------------------


def selected(tab):
    """The kernel that each view shows as selected."""
    return {
        "graph": boxes(tab, ".box.selected").first.get_attribute("aria-label"),
        "table": tab.locator("#kernels tr.selected").first.get_attribute("data-k"),
        "details": tab.locator("#details h3").inner_text(),
        "dots": tab.locator(".dot.selected").count(),
        "bars": tab.locator(".bar.selected").count(),
    }


def drawn_kernel(plan):
    return max(
        (k for k, kernel in enumerate(plan.kernels) if kernel.cost.flops.total and kernel.cost.hbm_bytes),
        key=lambda k: plan.kernels[k].cost.time_ps,
    )


@pytest.mark.parametrize("view", ["table", "roofline", "strip", "graph"])
def test_a_click_selects_in_every_view(visit, html, plans, view):
    tab = visit(html)
    k = drawn_kernel(plans[-1])
    if view == "table":
        tab.locator(f'#kernels tr[data-k="{k}"]').click()
    elif view == "roofline":
        dot = tab.locator(".dot.full").last  # none lies over it
        k = int(re.search(r"kernel (\d+),", dot.get_attribute("aria-label"))[1])
        dot.click()
    elif view == "strip":
        tab.locator(f'.bar[aria-label^="solver, kernel {k},"]').click(force=True)
    else:
        search(tab, str(k))
        tab.locator("#details h3").click()
        boxes(tab, f'.box.kernel[aria-label^="kernel {k},"]').click()
    found = selected(tab)
    assert found["graph"].startswith(f"kernel {k},")
    assert found["table"] == str(k)
    assert found["details"].startswith(f"{k} ")
    assert (found["dots"], found["bars"]) == (1, 1)


def search(tab, query):
    tab.fill("#search", query)
    tab.press("#search", "Enter")


def test_search_finds_an_equation_and_shows_it(visit, html, plans):
    tab = visit(html)
    graph = plans[-1].graph
    n = next(node.id for node in graph.nodes if node.op == "tanh")
    tab.fill("#search", f"n{n}")
    assert f"n{n} tanh" in tab.locator("#found li").first.inner_text()
    tab.press("#search", "Enter")
    box = boxes(tab, ".box.op.selected")
    assert box.get_attribute("aria-label").startswith(f"operation n{n}, tanh")
    assert f"n{n} tanh" in tab.locator("#details .operation").inner_text()
    inside, frame = box.bounding_box(), tab.locator("svg.graph").first.bounding_box()
    assert frame["y"] <= inside["y"] <= frame["y"] + frame["height"] - inside["height"]
    assert frame["x"] <= inside["x"] <= frame["x"] + frame["width"] - inside["width"]


@pytest.mark.parametrize(
    "query", ["tanh", "layer_1 tanh", "test_page_browser.py tanh", "TANH f32[4096,1024]"]
)
def test_search_by_name_scope_source_and_type(visit, html, query):
    tab = visit(html)
    tab.fill("#search", query)
    assert all("tanh" in text for text in tab.locator("#found li[data-i]").all_inner_texts())
    tab.locator("#found li[data-i]").filter(has_text=re.compile(r"^n\d+ ")).last.click()
    assert "tanh" in tab.locator("#details .operation").inner_text()


def test_search_without_a_result_says_so(visit, html):
    tab = visit(html)
    tab.fill("#search", "no such thing")
    assert tab.locator("#found").inner_text() == "nothing found in this plan"
    tab.press("#search", "Enter")
    tab.press("#search", "Escape")
    assert tab.locator("#found").is_hidden()


def test_the_table_sorts_by_a_column(visit, html):
    tab = visit(html)
    column = tab.locator("#kernels th", has_text="µs")
    column.locator("button").click()
    assert column.get_attribute("aria-sort") == "descending"
    times = [
        float(t.replace(",", ""))
        for t in tab.locator("#kernels tr[data-k] td:nth-child(6)").all_inner_texts()
    ]
    assert times == sorted(times, reverse=True)
    column.locator("button").click()
    assert column.get_attribute("aria-sort") == "ascending"


def test_a_tooltip_tells_a_dot(visit, html, plans):
    tab = visit(html)
    k = drawn_kernel(plans[-1])
    tab.locator(f'.dot.full[aria-label*="kernel {k},"]').hover(force=True)
    assert "flop/s at" in tab.locator(".tip").inner_text()


# --- frames and the keyboard -------------------------------------------------------------------------


def test_a_frame_opens_and_closes(visit, html):
    tab = visit(html)
    frame = boxes(tab, '.box.frame[aria-label^="layer_0"]').first
    before = boxes(tab).count()
    was_open = frame.get_attribute("aria-expanded") == "true"
    frame.locator("> .toggle").click()
    frame = boxes(tab, '.box.frame[aria-label^="layer_0"]').first
    assert (frame.get_attribute("aria-expanded") == "true") != was_open
    assert (boxes(tab).count() > before) != was_open
    frame.locator("> .toggle").click()
    assert boxes(tab).count() == before


def test_a_kernel_opens_to_its_operations(visit, html, plans):
    tab = visit(html)
    k, kernel = max(enumerate(plans[-1].kernels), key=lambda pair: len(pair[1].spec.nodes))
    search(tab, str(k))
    boxes(tab, ".box.kernel.selected").dblclick(position={"x": 20, "y": 20})
    shown = boxes(tab, ".box.op").count()
    assert shown == len(kernel.spec.nodes)


def test_collapse_closes_all(visit, html):
    tab = visit(html)
    boxes(tab, "button", 0).get_by_text("Collapse").click()
    assert boxes(tab, ".box.open").count() == 0
    assert boxes(tab).count() > 0


def test_the_keyboard_reaches_boxes_opens_and_closes_them(visit, html):
    tab = visit(html)
    boxes(tab, "button", 0).get_by_text("Collapse").click()
    tab.keyboard.press("Tab")
    focused = "document.activeElement.getAttribute('aria-label')"
    first = tab.evaluate(focused)
    assert tab.evaluate("document.activeElement.outerHTML.slice(0, 80)").startswith('<g transform="'), "a box"
    assert tab.evaluate("document.activeElement.classList.contains('box')")
    outline = tab.evaluate("getComputedStyle(document.activeElement.querySelector('.body')).strokeWidth")
    assert outline == "4px"
    tab.keyboard.press("ArrowDown")
    second = tab.evaluate(focused)
    assert second != first
    tab.keyboard.press("ArrowUp")
    assert tab.evaluate(focused) == first
    frame = boxes(tab, '.box.frame[aria-expanded="false"]').first
    frame.focus()
    label = frame.get_attribute("aria-label")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    assert tab.locator("#details h3").inner_text() in label
    tab.keyboard.press("Escape")
    assert tab.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"
    assert tab.evaluate(focused) == label
    tab.keyboard.press("Escape")
    assert "Select a box" in tab.locator("#details").inner_text()


def test_the_keyboard_moves_through_the_table_and_the_charts(visit, html):
    tab = visit(html)
    tab.locator("#kernels tr[data-k]").first.focus()
    tab.keyboard.press("ArrowDown")
    assert tab.locator("#kernels tr.selected").get_attribute("data-k") == "1"
    for part in (".dot", ".bar"):
        assert tab.locator(f'{part}[tabindex="0"]').count() == 1, "one tab stop"
        tab.locator(f'{part}[tabindex="0"]').focus()
        tab.keyboard.press("ArrowRight")
        tab.keyboard.press("Enter")
        assert tab.evaluate(f"document.activeElement.matches('{part}.selected')")


def test_slash_goes_to_the_search_field(visit, html):
    tab = visit(html)
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "search"


# --- details -----------------------------------------------------------------------------------------


def test_details_tell_schedule_cost_neighbours_and_the_best_other_cut(visit, html, plans):
    tab = visit(html)
    plan = plans[-1]
    k = drawn_kernel(plan)
    search(tab, str(k))
    text = tab.locator("#details").inner_text()
    row = plan.to_frame().iloc[k]
    for wanted in (row.grid, row.tile, row.backend, row.makes, row.source.rpartition("/")[2]):
        assert str(wanted) in text
    for n in plan.kernels[k].spec.nodes:
        assert f"n{n}\n" in text or f"n{n}\t" in text
    for part, ps in plan.kernels[k].cost.parts_ps.items():
        assert re.search(rf"{part} {ps / 1e6:,.2f}", text.replace(",", "")) or ps >= 1e8
    assert "The best other cut" in text or "No other cut is possible" in text
    assert tab.locator("#details .reasons li").count() > 0


def test_the_best_other_cut_is_what_explain_prices(html, plans):
    plan = plans[-1]
    data = data_of(html)["studies"][0]["plans"][-1]
    assert data["cuts"]
    for k, n, extra_ps, extra_bytes, count in data["cuts"][:3]:
        first = plan.kernels[k].spec.nodes[0]
        why = plan.explain(first, n)
        assert (why.extra_ps, why.extra_hbm_bytes, len(why.forced)) == (extra_ps, extra_bytes, count)
        others = [plan.explain(first, m).extra_ps for m in plan.kernels[k].spec.nodes[1:]]
        assert extra_ps == min(ps for ps in others if ps is not None)


def test_long_plans_say_that_reasons_were_left_out(visit):
    x = jax.ShapeDtypeStruct((64,), "float32")
    f = lambda x: random_dag(x, x, 200, 1)  # noqa: E731
    plan = fuseplan.make_plan(f, device="h200", planner="unfused")(x)
    assert len(plan.kernels) > 150
    tab = visit(render_page(Page("long", (Study("long", (plan,)),))))
    search(tab, "3")
    assert "were left out of this page" in tab.locator("#details").inner_text()


def test_the_proof_is_told(visit, html, plans):
    tab = visit(html)
    text = tab.locator("#proof").inner_text()
    assert "solver: proven optimal" in text
    assert f"{plans[-1].bound_us:,.3f} µs: no plan in the solver planner's space is faster" in text
    tab.select_option("#plan", label="unfused")
    assert "none: the unfused planner proves nothing" in tab.locator("#proof").inner_text()


def test_refusals_are_listed(visit, html, plans):
    tab = visit(html)
    text = tab.locator("#refused").inner_text()
    assert plans[-1].refusals
    for refusal in plans[-1].refusals:
        assert refusal.reason in text


def test_memory_over_the_schedule_has_the_plan_s_peak(visit, html, plans):
    tab = visit(html)
    plan = plans[-1]
    live = tab.evaluate("Math.max(...loadPlan(DOC.studies[0], DOC.studies[0].plans.length - 1).live)")
    assert live == plan.peak_bytes > 0
    assert "at the peak" in tab.locator("#time").inner_text()


# --- two plans ---------------------------------------------------------------------------------------


def operations(plan):
    origin = [
        equation.origin if equation.origin >= 0 else n for n, equation in enumerate(plan.program.equations)
    ]
    return [frozenset(origin[n] for n in kernel.spec.nodes) for kernel in plan.kernels]


def test_kernels_that_differ_from_the_second_plan_are_marked(visit, html, plans):
    tab = visit(html)
    for beside in (0, 1):
        show_second(tab, plans[beside].planner)
        known = set(operations(plans[beside]))
        differing = {k for k, cut in enumerate(operations(plans[-1])) if cut not in known}
        marked = tab.locator("#kernels tr[data-k]:has(td.mark)")
        assert {int(k) for k in marked.evaluate_all("all => all.map(e => e.dataset.k)")} == differing
        head = tab.locator("#differences").inner_text()
        assert (f"{len(differing)} of the {len(plans[-1].kernels)} kernels" in head) == bool(differing)
        for k in sorted(differing)[:2]:
            search(tab, str(k))
            assert "differs" in boxes(tab, ".box.kernel.selected").get_attribute("class")


def test_two_graphs_stand_side_by_side(visit, html, plans):
    tab = visit(html)
    show_second(tab, "unfused")
    tab.get_by_role("button", name="Two graphs").click()
    assert "unfused" in tab.locator(".pane-title").nth(1).inner_text()
    first, second = (tab.locator(".pane").nth(i).bounding_box() for i in (0, 1))
    assert first["y"] == second["y"]
    assert first["x"] + first["width"] <= second["x"]
    k = drawn_kernel(plans[-1])
    tab.locator(f'#kernels tr[data-k="{k}"]').click()
    assert boxes(tab, ".box.also", 1).count() >= 1
    tab.select_option("#beside", label="no other plan")
    assert tab.locator(".pane").nth(1).is_hidden()


def test_only_the_kernels_that_differ_can_be_listed(visit, html, plans):
    tab = visit(html)
    show_second(tab, "unfused")
    tab.locator("#kernels .filter input").check()
    known = set(operations(plans[0]))
    assert tab.locator("#kernels tr[data-k]").count() == sum(
        cut not in known for cut in operations(plans[-1])
    )


def test_each_program_of_a_page_has_its_views(visit, plans):
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    other = fuseplan.make_plan(jax.nn.softmax, device="tpu_v5e")(x)
    tab = visit(render_page(Page("both", (Study("network", plans), Study("softmax", (other,))))))
    assert tab.locator(".study:visible").count() == 1
    tab.get_by_role("link", name="softmax").click()
    tab.wait_for_function("document.querySelector('.pane-title').textContent.includes('1 kernel')")
    assert tab.locator("#study-1").is_visible()
    assert "tpu_v5e" in tab.locator("#study option:checked").inner_text()
    assert boxes(tab, ".box.op").count() > 0, "a kernel that is alone is open"


# --- odd pages ---------------------------------------------------------------------------------------


NASTY = "</script><b>bold</b><!--<script>"


def test_markup_in_names_is_text(visit, plans):
    def f(x):
        with jax.named_scope("a<b>c"):
            return jnp.exp(x).sum(0) + 1

    plan = fuseplan.make_plan(f, device="test", planner="unfused")(jax.ShapeDtypeStruct((64, 64), "float32"))
    nodes = tuple(replace(node, source=f"{NASTY}.py:3 (f{NASTY})", scope=NASTY) for node in plan.graph.nodes)
    plan = replace(plan, graph=replace(plan.graph, nodes=nodes), planner=NASTY, notes=(NASTY,), program=None)
    html = render_page(Page(NASTY, (Study(NASTY, (plan, plan)),)))
    assert "<b>bold" not in html
    tab = visit(html)
    assert tab.locator('b:text-is("bold")').count() == 0
    search(tab, "n0")
    # The place of a source is shown without folders: up to the last slash.
    assert "script>" in tab.locator("#details").inner_text()
    assert NASTY in tab.locator("h1").inner_text()


def test_a_plan_without_kernels(visit):
    plan = fuseplan.make_plan(lambda x: x, device="test")(X)
    tab = visit(render_page(Page("nothing", (Study("nothing", (plan,)),))))
    assert "no kernels" in tab.locator("#details").inner_text()
    assert "This plan has no kernels" in tab.locator("svg.graph").first.text_content()
    tab.fill("#search", "exp")
    assert "nothing found" in tab.locator("#found").inner_text()


def test_a_plan_of_a_file(visit, plans, tmp_path):
    plan = fuseplan.Plan.from_json(plans[-1].to_json())
    plan.to_html(tmp_path / "plan.html")
    tab = visit((tmp_path / "plan.html").read_text())
    assert tab.locator("#kernels tr[data-k]").count() == len(plan.kernels)
    search(tab, "tanh")
    assert "tanh" in tab.locator("#details .operation").inner_text()


@pytest.fixture(scope="module")
def large():
    """A page about 10,000 equations that are as many kernels."""
    x = jax.ShapeDtypeStruct((1024,), "float32")
    plan = fuseplan.make_plan(lambda x, y: random_dag(x, y, 12_000, 0), device="h200", planner="unfused")(
        x, x
    )
    assert len(plan.kernels) >= 10_000
    return plan, render_page(Page("large", (Study("large", (plan,)),)))


def test_ten_thousand_equations_are_usable_in_three_seconds(visit, large):
    plan, html = large
    assert len(html.encode()) < 3e6
    start = time.perf_counter()
    tab = visit(html)
    tab.locator("#kernels tr[data-k]").first.wait_for()
    tab.locator(".dot").first.wait_for(state="attached")
    assert time.perf_counter() - start < 3
    assert boxes(tab).count() <= 100
    n = len(plan.graph.nodes) // 2
    start = time.perf_counter()
    search(tab, f"n{n}")
    assert boxes(tab, ".box.op.selected").get_attribute("aria-label").startswith(f"operation n{n},")
    assert time.perf_counter() - start < 3
    assert boxes(tab).count() <= 300
