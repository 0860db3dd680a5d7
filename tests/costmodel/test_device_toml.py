"""A device in a TOML file: read, written, and every mistake named with its field and its range."""

from __future__ import annotations

import dataclasses

import pytest
from typer.testing import CliRunner

import fuseplan
from costmodel import DEVICES, TEST_DEVICE, DeviceSpec, InvalidDeviceError
from costmodel.calibrate import described_cpu
from fuseplan.cli import app
from fuseplan.settings import read_device
from fuseplan.support.errors import InvalidArgumentError

MINE = dataclasses.replace(TEST_DEVICE, name="mine")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE.to_toml(), encoding="utf-8")
    return path


def edited(file, **lines):
    """The file with other lines for some fields; None leaves a line out."""
    kept = []
    for line in file.read_text().splitlines():
        name = line.partition(" =")[0]
        if name in lines:
            line = lines.pop(name)
        if line is not None:
            kept.append(line)
    file.write_text("\n".join([*lines.values(), *kept]), encoding="utf-8")
    return file


@pytest.mark.parametrize("device", [*DEVICES.values(), described_cpu()], ids=lambda d: d.name)
def test_every_known_device_is_read_as_it_was_written(device, tmp_path):
    path = tmp_path / "device.toml"
    path.write_text(device.to_toml(), encoding="utf-8")
    assert DeviceSpec.from_toml(path) == device


def test_texts_of_any_kind_are_kept(tmp_path):
    odd = dataclasses.replace(
        MINE, description='"quoted" \\ é\t\x7f ✓', sources=(("launch_ps", "line\nbreak"), ("a.b c", "x"))
    )
    path = tmp_path / "odd.toml"
    path.write_text(odd.to_toml(), encoding="utf-8")
    assert DeviceSpec.from_toml(path) == odd


def test_whole_fractions_are_integers(file):
    edited(file, hbm_bytes_per_s="hbm_bytes_per_s = 3.35e12")
    assert DeviceSpec.from_toml(file).hbm_bytes_per_s == 3_350 * 10**9


RATE = "hbm_bytes_per_s"
TABLE = "[matrix_flops_per_s]  # flops per second"


@pytest.mark.parametrize(
    ("lines", "field", "message"),
    [
        ({RATE: None}, RATE, "the field is missing: expected an integer from 1,000,000"),
        ({RATE: f"{RATE} = -1"}, RATE, "from 1,000,000 to 10,000,000,000,000,000 bytes per second, got -1"),
        ({RATE: f"{RATE} = 4.8"}, RATE, "got 4.8"),
        ({RATE: f"{RATE} = 1e17"}, RATE, "got 100000000000000000"),
        ({"core_count": "core_count = 0"}, "core_count", "an integer from 1 to 10,000,000 cores, got 0"),
        ({"onchip_bytes": 'onchip_bytes = "lots"'}, "onchip_bytes", "got 'lots'"),
        ({"launch_ps": "launch_ps = nan"}, "launch_ps", "got nan"),
        ({"platform": 'platform = "npu"'}, "platform", "expected one of 'gpu', 'tpu', 'cpu'"),
        ({"backend": 'backend = "cuda"'}, "backend", "'triton'"),
        ({"x": "core_cuont = 3"}, "core_cuont", "did you mean 'core_count'"),
        ({"x": "warp_size = 32"}, "warp_size", "the fields are name, description"),
        ({TABLE: "[matrix_flops]"}, "matrix_flops", "did you mean 'matrix_flops_per_s'"),
        ({"name": 'name = ""'}, "name", "a text that is not empty"),
        ({"name": "name = "}, "", "expected TOML"),
    ],
)
def test_a_mistake_names_file_field_and_range(file, lines, field, message):
    edited(file, **lines)
    with pytest.raises(InvalidDeviceError) as caught:
        DeviceSpec.from_toml(file)
    assert caught.value.field == field
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{file}: {field}")


def test_a_rate_of_one_dtype_is_named(file):
    text = file.read_text().replace("float32 = ", "float32 = -")
    file.write_text(text)
    with pytest.raises(InvalidDeviceError, match=r"matrix_flops_per_s\['float32'\]"):
        DeviceSpec.from_toml(file)


def test_a_known_name_needs_the_known_figures(file, tmp_path):
    known = tmp_path / "h200.toml"
    known.write_text(DEVICES["h200"].to_toml())
    assert read_device(known) == DEVICES["h200"]
    edited(known, core_count="core_count = 3")
    with pytest.raises(InvalidArgumentError, match=r"'h200' is a known device.*another name"):
        read_device(known)
    with pytest.raises(InvalidArgumentError, match=r"cannot read the device file .*No such file"):
        read_device(tmp_path / "none.toml")


# --- on the command line ----------------------------------------------------------------------


def run(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_every_command_takes_a_device_file(file, tmp_path):
    options = ("--device-file", file)
    out = tmp_path / "plan.json"
    assert "solver plan for mine" in run("plan", "softmax", *options, "--small", "--out", out).stdout
    assert fuseplan.Plan.from_json(out.read_text()).device == MINE
    assert run("verify", out).stdout.startswith("verified")
    assert run("explain", "softmax", "0,1", *options, "--small").stdout.startswith("n0")
    text = run("compare", "softmax", *options, "--device", "test", "--planners", "greedy", "--small").stdout
    assert "softmax on test" in text
    assert "softmax on mine" in text
    page = tmp_path / "page.html"
    run("report", "softmax", *options, "--planners", "greedy", "--small", "--out", page)
    assert "softmax on mine" in page.read_text()
    assert json_of("bench", "plan", "--workloads", "softmax", *options, "--small", "--no-xla", "--json")


def json_of(*args):
    import json

    return json.loads(run(*args).stdout)


def test_mistakes_are_one_line(file):
    both = run("plan", "softmax", "--device", "test", "--device-file", file, code=2).stderr
    assert "expected one of the two" in both
    edited(file, core_count="core_count = -4")
    wrong = run("plan", "softmax", "--device-file", file, code=2)
    assert len(wrong.stderr.splitlines()) == 1
    assert "core_count: expected an integer from 1" in wrong.stderr
    assert "No such file" in run("compare", "softmax", "--device-file", "none.toml", code=2).stderr


def test_a_known_device_is_printed_to_start_from():
    assert run("devices", "--toml", "h200").stdout == DEVICES["h200"].to_toml()
    assert "Did you mean 'h200'" in run("devices", "--toml", "h20", code=2).stderr
