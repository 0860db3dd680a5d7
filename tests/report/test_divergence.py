"""Tables that have modelled and measured times say where the two are far apart."""

import math

import pytest

from costmodel.devices import DEVICES
from experiments import gpu_rows
from fuseplan.bench.cpu import Row, summary_lines
from fuseplan.report.comparison import divergence_lines

pytestmark = pytest.mark.one_python


@pytest.mark.parametrize(
    ("modelled", "measured", "shown"),
    [(1.0, 2.0, ""), (2.0, 1.0, ""), (1.0, 2.1, "2.10×"), (2.1, 1.0, "0.48×"), (1.0, 293.4, "293×")],
)
def test_more_than_a_factor_of_two(modelled, measured, shown):
    lines = divergence_lines([("f", modelled, measured)], "cpu")
    assert bool(lines) == bool(shown)
    if shown:
        assert lines[0].endswith(f"factor of 2 apart: f {shown}.")
        assert "The model of a CPU does not know" in lines[1]


def test_what_is_not_known_is_not_compared():
    times = [("a", None, 1.0), ("b", 1.0, None), ("c", math.nan, 1.0), ("d", 1.0, math.nan), ("e", 0.0, 1.0)]
    assert divergence_lines(times, "cpu") == []


def test_of_an_unknown_platform_no_reason_is_made_up():
    assert len(divergence_lines([("f", 1.0, 3.0)], "abacus")) == 1


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_device_has_a_sentence_on_what_its_model_leaves_out(device):
    assert len(divergence_lines([("f", 1.0, 3.0)], device.platform)) == 2


def test_bench_cpu_says_so():
    rows = [Row("f", predicted_ms=1.0, fuseplan_ms=5.0), Row("g", predicted_ms=1.0, fuseplan_ms=1.5)]
    text = " ".join(" ".join(summary_lines(rows)).split())
    assert "apart: f 5.00×. " in text
    assert max(map(len, summary_lines(rows))) <= 80


def test_gpu_bench_says_so():
    row = dict.fromkeys(("missed", "notes"), "") | {"workload": "f", "status": "met"}
    row |= {"modelled_us": "10.0", "ours_us": 25.0}
    machine = dict.fromkeys(("device", "driver", "jax", "torch"), "x")
    assert any("apart: f 2.50×." in line for line in gpu_rows.summary_lines([row], machine, "cupti"))
