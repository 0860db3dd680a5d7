"""The demo, on the small sizes: what it plans, runs, prints and writes."""

import json
import re
from dataclasses import replace

import pytest

from fuseplan import demo
from fuseplan.console import Steps
from fuseplan.report.page import Study
from fuseplan.runtime import compare as comparison
from fuseplan.workloads import get_workload
from fuseplan.workloads.workload import make_args

pytestmark = [pytest.mark.one_python, pytest.mark.slow, pytest.mark.xdist_group("demo")]


PLANNED = {device: [p for p in demo.PLANNERS if p != "xla" or device == "cpu"] for device in demo.DEVICES}
"""As where XLA's compiler is installed for the CPU alone: the others take a lock, and long."""


class Counted(Steps):
    def __init__(self):
        super().__init__()
        self.expected, self.finished = 0, 0

    def total(self, count):
        self.expected = count

    def done(self):
        self.finished += 1


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    page = tmp_path_factory.mktemp("demo") / "demo.html"
    programs = []
    for name in ("gpt2_block", "gpt2_block_grad"):
        f, args = get_workload(name).build(small=True)
        programs.append(demo.Program(name, f, args, make_args(args)))
    steps = Counted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "has_compiler", lambda device: device.platform == "cpu")
        result = demo.run_demo(programs, page, 20.0, steps)  # time for a proof
    assert steps.finished == steps.expected == 2 * (sum(map(len, PLANNED.values())) + 1) + 1
    return result


def test_plans_of_every_device_and_planner(result):
    found = [(p.name, p.device.name, row.planner) for p in result.planned for row in p.compared]
    assert found == [
        (name, device, planner)
        for name in ("gpt2_block", "gpt2_block_grad")
        for device in demo.DEVICES
        for planner in PLANNED[device]
    ]
    for planned in result.planned:
        times = {plan.planner: plan.objective_ps for plan in planned.plans}
        assert times["solver"] <= min(times.values())
        assert times["solver"] < times["unfused"]


def test_both_functions_ran_and_agree(result):
    assert [run.name for run in result.runs] == ["gpt2_block", "gpt2_block_grad"]
    for run in result.runs:
        assert run.pairs >= 5
        assert run.fuseplan_ms > 0 < run.jax_ms
        assert 0 <= run.relative_difference < 1e-4
        assert run.fuseplan_temp_bytes > 0 < run.jax_temp_bytes


def test_what_is_printed_fits_80_columns(result, capsys):
    first, *others = result.planned
    last = first.compared[-1]
    kernels = tuple(replace(k, cost=replace(k.cost, launch_ps=10**11)) for k in last.plan.kernels)
    slow = replace(last.plan, kernels=kernels, status="FEASIBLE", bound_ps=10**9)
    wide = (Study.of(first.name, [*first.compared[:-1], replace(last, plan=slow)]), *others)
    demo.print_demo(replace(result, planned=wide))
    lines = capsys.readouterr().out.splitlines()
    assert f"{100 * len(kernels):,}" in "\n".join(lines)  # times the bound, and more
    assert lines.pop() == str(result.page)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "assumed of tpu_v5e, not measured or published: launch_ps" in text
    assert "gpt2_block_grad" in text
    assert "left to XLA" in text
    assert re.search(r"h200, solver: at most [\d,]+ times the bound of 1,000 µs", text), text
    assert "h200: speed-up over unfused. Rewriting gains greedy" in text
    assert "cpu: speed-up over xla." in text
    assert "Measured over modelled time" in text
    assert "For example, kernel" in text


def test_tiled_loops_are_told_apart_from_xla(result, capsys):
    demo.print_demo(replace(result, tiled_loops=3))
    assert "3 kernels are tiled loops" in capsys.readouterr().out
    demo.print_demo(replace(result, tiled_loops=0))
    assert "every group is left to XLA in this version" in capsys.readouterr().out


def test_json_has_the_same_numbers(result):
    document = json.loads(json.dumps(result.as_dict()))
    assert len(document["plans"]) == sum(len(p.plans) for p in result.planned)
    assert document["plans"][2]["time_us"] == result.planned[0].plans[2].objective_us
    baselines = {(plan["device"], plan["baseline"]) for plan in document["plans"]}
    assert baselines == {("h200", "unfused"), ("tpu_v5e", "unfused"), ("cpu", "xla")}
    assert document["runs"][0]["jax_ms"] == result.runs[0].jax_ms


def test_the_page_has_a_section_for_each_device(result):
    html = result.page.read_text()
    for planned in result.planned:
        assert f"{planned.name} on {planned.device.name}</h2>" in html
    assert "Measured on this CPU" in html
