"""The device table and the measured CPU."""

from __future__ import annotations

import dataclasses
import json

import pytest

from costmodel import (
    DEVICES,
    TEST_DEVICE,
    DeviceSpec,
    UnknownDeviceError,
    backends_of,
    calibrate,
    device_names,
    get_device,
    timing,
)
from costmodel.timing import Figure

FIELDS = ("hbm_bytes_per_s", "cache_bytes", "onchip_bytes", "launch_ps", "matrix_flops_per_s",
          "vector_flops_per_s", "transcendental_per_s", "core_count", "hbm_capacity_bytes")  # fmt: skip
CPU_FIELDS = (*FIELDS, "private_cache_bytes", "private_cache_bytes_per_s", "step_ps")


@pytest.mark.parametrize("device", [d for d in DEVICES.values() if d.name != "test"], ids=lambda d: d.name)
class TestEveryDevice:
    def test_every_number_names_its_source(self, device: DeviceSpec) -> None:
        assert all(len(device.source(field)) > 20 for field in FIELDS)

    def test_rates_are_integers_and_positive(self, device: DeviceSpec) -> None:
        rates = [device.hbm_bytes_per_s, device.vector_flops_per_s, device.transcendental_per_s]
        rates += [rate for _, rate in device.matrix_flops_per_s]
        assert all(type(rate) is int and rate > 0 for rate in rates)

    def test_a_faster_level_is_smaller(self, device: DeviceSpec) -> None:
        assert device.onchip_bytes < device.hbm_capacity_bytes
        if device.cache_bytes:
            assert device.hbm_bytes_per_s < device.cache_bytes_per_s
            assert device.onchip_bytes < device.cache_bytes < device.hbm_capacity_bytes

    def test_narrow_types_are_no_slower_than_wide_ones(self, device: DeviceSpec) -> None:
        rate = device.matrix_rate
        assert rate("float64") <= rate("float32") <= rate("bfloat16") <= rate("float8_e4m3fn")
        assert rate("float16") == rate("bfloat16")
        assert device.transcendental_per_s < device.vector_flops_per_s < rate("bfloat16")

    def test_the_peak_follows_from_cores_and_clock(self, device: DeviceSpec) -> None:
        """A GPU's SFU rate is an eighth of its FP32 lanes (16 of 128, two flops each lane): 1/16,
        or 1/8 on A100 with 64 lanes. A typing error in either column breaks this."""
        ratio = device.vector_flops_per_s / device.transcendental_per_s
        expected = {"a100": 8}.get(device.name, 16 if device.platform == "gpu" else 4)
        assert ratio == pytest.approx(expected, rel=0.1)

    def test_equal_specs_hash_equal(self, device: DeviceSpec) -> None:
        assert hash(device) == hash(dataclasses.replace(device))


def test_a_backend_changes_nothing_else() -> None:
    own, other = get_device("h200"), get_device("h200:mosaic_gpu")
    assert get_device("h200:triton") == own
    assert other == dataclasses.replace(own, name="h200:mosaic_gpu", backend="mosaic_gpu")
    assert backends_of(other) == backends_of(own) == ("triton", "mosaic_gpu")
    assert all(backends_of(d)[0] == d.backend for d in DEVICES.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a100:mosaic_gpu", "unknown backend 'mosaic_gpu' of the device 'a100': expected 'a100:triton'"),
        ("tpu_v5e:triton", "expected 'tpu_v5e:mosaic_tpu'"),
        ("h200:cuda", "expected 'h200:triton' or 'h200:mosaic_gpu'"),
        ("h201:mosaic_gpu", "unknown device 'h201:mosaic_gpu': .*Did you mean 'h200'"),
    ],
)
def test_backends_that_a_device_has_not(name: str, message: str) -> None:
    with pytest.raises(UnknownDeviceError, match=message):
        get_device(name)


def test_ridge_point_of_the_test_device_is_200_flops_a_byte() -> None:
    assert TEST_DEVICE.ridge_point == 200


def test_a_type_without_matrix_units_runs_on_the_vector_units() -> None:
    assert TEST_DEVICE.matrix_rate("int32") == TEST_DEVICE.vector_flops_per_s
    assert get_device("tpu_v5e").matrix_rate("float64") == get_device("tpu_v5e").vector_flops_per_s


def test_a_float8_without_units_of_its_own_runs_as_float16() -> None:
    a100 = get_device("a100")
    assert a100.matrix_rate("float8_e5m2") == a100.matrix_rate("float16")


def test_an_unknown_device_lists_the_known_and_the_closest() -> None:
    with pytest.raises(UnknownDeviceError, match=r"unknown device 'TPU-v5'.*h200.*cpu.*mean 'tpu_v5[ep]'"):
        get_device("TPU-v5")
    assert issubclass(UnknownDeviceError, ValueError)


def test_a_spec_is_its_own_device() -> None:
    mine = dataclasses.replace(TEST_DEVICE, name="mine")
    assert get_device(mine) is mine


def test_names_are_unique_and_all_resolve() -> None:
    names = device_names()
    assert len(set(names)) == len(names)
    assert all(get_device(name).name == name for name in names if name != "cpu")


@pytest.fixture
def fake_cpu(tmp_path, monkeypatch):
    """A cache directory of its own, and a measurement that is counted instead of done."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []

    def measure(limit_s: float) -> DeviceSpec:
        measured.append(limit_s)
        figures = {"vector_flops_per_s": Figure(10**10 + len(measured))}
        return calibrate.measured_cpu(
            calibrate.described_cpu(), figures, dict.fromkeys(figures, "a test"), "test"
        )

    monkeypatch.setattr(calibrate, "measure", measure)
    return measured


class TestCpuCache:
    def test_it_is_measured_once_a_process(self, fake_cpu) -> None:
        assert get_device("cpu") is get_device("cpu")
        assert len(fake_cpu) == 1

    def test_the_next_process_reads_the_file(self, fake_cpu, new_process) -> None:
        first = get_device("cpu")
        new_process()
        assert get_device("cpu") == first
        assert len(fake_cpu) == 1

    def test_it_is_measured_again_when_asked(self, fake_cpu) -> None:
        first = get_device("cpu")
        found = calibrate.recalibrated("numpy", calibrate.measure, 60.0)
        assert fake_cpu == [calibrate.FIRST_USE_S, 60.0]
        assert found.measured == ("vector_flops_per_s",)
        assert get_device("cpu") is found.device
        assert found.device.vector_flops_per_s == first.vector_flops_per_s + 1

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: "{ not json",
            lambda data: "",
            lambda data: json.dumps([1, 2]),
            lambda data: json.dumps({**data, "version": calibrate.VERSION + 1}),
            lambda data: json.dumps({**data, "key": "another CPU x 64"}),
            lambda data: json.dumps({**data, "device": {"name": "cpu"}}),
            lambda data: json.dumps({**data, "device": {**data["device"], "hbm_bytes_per_s": 0}}),
            lambda data: json.dumps({**data, "key": data["key"].replace("numpy", "jax-0.0")}),
            lambda data: json.dumps({**data, "device": {**data["device"], "step_ps": -1}}),
            lambda data: json.dumps({**data, "device": {**data["device"], "launch_ps": 1.5}}),
            lambda data: json.dumps({**data, "device": {**data["device"], "sources": 3}}),
            lambda data: json.dumps({**data, "device": {**data["device"], "sources": []}}),
            lambda data: json.dumps({**data, "device": {**data["device"], "platform": "gpu"}}),
            lambda data: json.dumps({**data, "device": {**data["device"], "hbm_bytes_per_s": float("nan")}}),
            lambda data: json.dumps({**data, "device": [1]}),
            lambda data: json.dumps({**data, "attempts": -1}),
            lambda data: json.dumps({k: v for k, v in data.items() if k != "attempts"}),
            lambda data: json.dumps({**data, "version": 4}),
            lambda data: "[" * 100_000,
            lambda data: json.dumps(measured_impossibly(data)),
        ],
        ids=[
            "text",
            "empty",
            "list",
            "version",
            "other-cpu",
            "fields-missing",
            "zero-rate",
            "other-maker",
            "negative",
            "fraction",
            "wrong-type",
            "no-sources",
            "a-gpu",
            "nan",
            "device-list",
            "negative-attempts",
            "no-attempts",
            "older",
            "deep",
            "impossible",
        ],
    )
    def test_a_damaged_or_foreign_file_is_measured_again(self, fake_cpu, damage, new_process) -> None:
        first = get_device("cpu")
        path = calibrate.cache_path()
        path.write_text(damage(json.loads(path.read_text())))
        new_process()
        assert get_device("cpu").vector_flops_per_s == first.vector_flops_per_s + 1
        assert len(fake_cpu) == 2
        assert json.loads(calibrate.cache_path().read_text())["version"] == calibrate.VERSION

    def test_an_unwritable_directory_costs_nothing_but_time(self, fake_cpu, tmp_path, monkeypatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert get_device("cpu").name == "cpu"

    def test_no_scratch_file_is_left(self, fake_cpu) -> None:
        get_device("cpu")
        assert [p.name for p in calibrate.cache_path().parent.iterdir()] == ["cpu-numpy.json"]

    def test_each_maker_has_a_file_of_its_own(self, fake_cpu) -> None:
        get_device("cpu")
        other = calibrate.cached("other", lambda limit_s: calibrate.described_cpu())
        assert calibrate.cached("other", lambda limit_s: pytest.fail("measured again")) is other
        assert get_device("cpu").name == "cpu"
        assert len(fake_cpu) == 1


def measured_impossibly(data):
    """Figures that are said to be measured, and contradict each other."""
    sources = [
        [k, "measured: long ago" if k.endswith("bytes_per_s") else v] for k, v in data["device"]["sources"]
    ]
    return {**data, "device": {**data["device"], "sources": sources, "hbm_bytes_per_s": 10**15}}


def write_caches(root, *caches) -> None:
    for i, (level, kind, size, cpus) in enumerate(caches):
        folder = root / f"index{i}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", cpus)):
            (folder / name).write_text(f"{text}\n")


class TestMeasurement:
    def test_cache_sizes_are_read_from_sysfs(self, tmp_path) -> None:
        write_caches(tmp_path, (1, "Data", "32K", "0"), (1, "Instruction", "64K", "0"),
                     (2, "Unified", "2048K", "0"), (3, "Unified", "36M", "0-7"))  # fmt: skip
        assert calibrate.cache_sizes(1, tmp_path) == (2 << 20, 36 << 20)
        assert calibrate.cache_sizes(8, tmp_path) == (16 << 20, 36 << 20)

    @pytest.mark.parametrize(("cpus", "l2_caches"), [("0-1", 4), ("0,8", 4), ("0-3,8-9", 2), ("nonsense", 7)])
    def test_a_second_level_cache_is_counted_once_for_all_that_share_it(
        self, tmp_path, cpus, l2_caches
    ) -> None:
        write_caches(tmp_path, (2, "Unified", "1M", cpus))
        assert calibrate.cache_sizes(7, tmp_path) == (l2_caches << 20, 1 << 20)

    def test_without_sysfs_the_defaults_stand_in(self, tmp_path) -> None:
        expected = (3 * calibrate.DEFAULTS["l2_bytes"], calibrate.DEFAULTS["l3_bytes"])
        assert calibrate.cache_sizes(3, tmp_path) == expected

    def test_what_the_system_tells_says_so_and_the_rest_is_assumed(self, monkeypatch) -> None:
        monkeypatch.setattr(calibrate, "core_count", lambda: 1)
        cpu = calibrate.described_cpu()
        assert cpu.core_count == 1
        assert cpu.private_cache_bytes == calibrate.cache_sizes(1)[0]
        assert cpu.vector_flops_per_s == calibrate.DEFAULTS["vector"]
        assert cpu.source("vector_flops_per_s").startswith("assumed")
        assert all(cpu.source(field) != "not stated" for field in CPU_FIELDS)

    def test_a_rate_that_cannot_be_measured_is_assumed_and_says_why(self, monkeypatch) -> None:
        def fail(dtype: type) -> float:
            raise MemoryError("no room")

        monkeypatch.setattr(calibrate, "_matmul", fail)
        cpu = calibrate.measure(limit_s=0.3)
        assert cpu.matrix_rate("float64") == calibrate.DEFAULTS["float64"]
        source = cpu.source("matrix_flops_per_s.float64")
        assert source.startswith("assumed: ")
        assert source.endswith("not measured: MemoryError: no room")
        assert "matrix_flops_per_s.float64" in cpu.assumed

    def test_this_cpu_is_measured_within_physical_reason(self, monkeypatch) -> None:
        monkeypatch.setattr(timing, "AGREEMENT", 1e9)  # however busy the machine is
        monkeypatch.setattr(calibrate, "CONTENTION", 1e9)
        cpu = calibrate.measure(limit_s=60)
        assert {"vector_flops_per_s", "hbm_bytes_per_s", "matrix_flops_per_s.float64"}.isdisjoint(cpu.assumed)
        assert cpu.platform == "cpu"
        assert cpu.backend == "xla"
        assert 10**8 < cpu.hbm_bytes_per_s <= cpu.cache_bytes_per_s <= cpu.private_cache_bytes_per_s < 10**14
        assert 10**8 < cpu.matrix_rate("float32") < 10**15
        assert cpu.transcendental_per_s > 10**7
        assert all(cpu.source(field) != "not stated" for field in CPU_FIELDS)
