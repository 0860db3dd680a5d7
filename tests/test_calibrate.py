"""The CPU's rates under XLA: what is measured, what stands in, and the file that keeps it."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel import calibrate as known
from fuseplan import calibrate
from fuseplan.config import resolve_device
from fuseplan.local import local_device

pytestmark = pytest.mark.one_python

RATES = ("hbm_bytes_per_s", "cache_bytes_per_s", "private_cache_bytes_per_s", "vector_flops_per_s",
         "transcendental_per_s", "reduction_per_s", "fresh_bytes_per_s", "launch_ps", "step_ps",
         "matrix_flops_per_s")  # fmt: skip


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Measured in a moment, on small arrays; kept in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(known, "_memory", {})
    monkeypatch.setattr(calibrate, "_SAMPLE_S", 0.1)
    monkeypatch.setattr(calibrate, "_MEMORY_BYTES", (8 << 20, 8 << 20))
    monkeypatch.setattr(calibrate, "_MATRIX", dict.fromkeys(calibrate._MATRIX, 128))
    return tmp_path


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """A cache folder of its own, and measurements that are counted instead of done."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(known, "_memory", {})
    calls = []

    def measure():
        calls.append(1)
        return dataclasses.replace(known.described_cpu(), vector_flops_per_s=10**10 + len(calls))

    monkeypatch.setattr(calibrate, "measure", measure)
    return calls


def test_this_cpu_is_measured_by_xla(quick):
    cpu = calibrate.measure()
    # A busy machine may not get through all of them in time: what is left says so.
    measured = [field for field in RATES if calibrate.MADE_BY in cpu.source(field)]
    assert measured
    assert all(cpu.source(field).startswith("measured: ") for field in measured)
    described = known.described_cpu()
    assert all(cpu.source(field) == described.source(field) for field in RATES if field not in measured)
    assert 10**8 < cpu.hbm_bytes_per_s <= cpu.cache_bytes_per_s <= cpu.private_cache_bytes_per_s < 10**14
    assert 10**7 < cpu.transcendental_per_s < cpu.vector_flops_per_s < 10**15
    assert 10**7 < cpu.reduction_per_s < 10**13
    assert cpu.fresh_bytes_per_s > 10**7
    assert {dtype for dtype, _ in cpu.matrix_flops_per_s} == {"float32", "float64", "bfloat16", "float16"}
    assert all(10**7 < rate < 10**15 for _, rate in cpu.matrix_flops_per_s)
    # A dispatch and a turn are neither free nor a millisecond, on however busy a machine.
    assert 10**4 < cpu.launch_ps < 10**9
    assert 0 < cpu.step_ps < 10**9
    assert cpu.private_cache_bytes == known.cache_sizes(known.core_count())[0]


def test_what_fails_keeps_the_default_and_says_so(quick, monkeypatch):
    loop = calibrate._Loop

    def failing(work, turn, state, tiny=1):
        if jax.tree.leaves(state)[0].dtype in (jnp.float64, jnp.bfloat16) or tiny > 1:
            raise RuntimeError("no such kernel on this CPU")
        return loop(work, turn, state, tiny)

    monkeypatch.setattr(calibrate, "_Loop", failing)
    cpu, default = calibrate.measure(), known.described_cpu()
    assert cpu.launch_ps == default.launch_ps
    assert cpu.source("launch_ps") == default.source("launch_ps")
    assert cpu.matrix_rate("float64") == default.matrix_rate("float64")
    assert cpu.matrix_rate("float32") != default.matrix_rate("float32")
    assert cpu.source("matrix_flops_per_s").endswith("assumed: float64; assumed: bfloat16")


@pytest.mark.parametrize("attributes", [("_COMPILE_S",), ("_Loop", "_Touch")])
def test_when_nothing_can_be_measured_the_defaults_stand(quick, monkeypatch, attributes):
    for attribute in attributes:
        monkeypatch.setattr(calibrate, attribute, 0.0)  # no time; and what cannot be called
    cpu, default = calibrate.measure(), known.described_cpu()
    for field in RATES:
        assert getattr(cpu, field) == getattr(default, field)
        assert cpu.source(field) == default.source(field)


def test_a_loop_that_fails_later_keeps_its_first_time(quick, monkeypatch):
    loop = calibrate._Loop

    class Failing(loop):
        def __init__(self, *program):
            self.sample = super().sample
            super().__init__(*program)
            del self.sample

        def sample(self):
            raise MemoryError

    monkeypatch.setattr(calibrate, "_Loop", Failing)
    assert calibrate.measure().source("vector_flops_per_s").startswith("measured")


def test_a_run_that_another_process_made_long_does_not_fix_the_number_of_turns(monkeypatch):
    loop = calibrate._Loop(0, lambda i, x: x, jnp.zeros(()), 1)
    run, slow = calibrate._Loop._seconds, iter([1.0, 1.0])  # the compilation, and the first run
    monkeypatch.setattr(calibrate._Loop, "_seconds", lambda self: run(self) and next(slow, run(self)))
    disturbed = calibrate._Loop(0, lambda i, x: x, jnp.zeros(()), 1)
    assert disturbed.turn_s < 1.0
    for _ in range(20):
        disturbed.sample()
    assert disturbed.turn_s < 10 * loop.turn_s


@pytest.mark.parametrize(("new_s", "seconds"), [(0.04, 0.03), (0.01, 1e-9), (0.005, 1e-9)])
def test_fresh_memory_costs_what_it_takes_longer_than_in_place(monkeypatch, new_s, seconds):
    """An allocator that keeps what is freed makes no difference, and that costs as good as nothing."""
    times = iter([(9.0, 9.0), (0.06, 0.02), (new_s, 0.05), (0.07, 0.01)])
    monkeypatch.setattr(calibrate._Touch, "_times", lambda self: next(times))
    touch = calibrate._Touch(1 << 20)
    assert touch.sample() == new_s + 0.05
    touch.sample()
    assert touch.turn_s == pytest.approx(seconds)
    assert touch.work == 1 << 20


def test_every_sample_of_fresh_memory_is_freed_before_the_next(monkeypatch):
    made = []
    touch = calibrate._Touch(1 << 20)
    run = touch._new
    monkeypatch.setattr(touch, "_new", lambda x: made.append(run(x)) or made[-1])
    for _ in range(3):
        touch.sample()
    assert len(made) == 3
    assert all(x.is_deleted() for x in made)
    assert not touch._x.is_deleted()


def test_a_noisy_level_is_no_slower_than_the_next(quick, monkeypatch):
    sampled = calibrate._sampled

    def noisy(programs):
        loops = sampled(programs)
        for name, factor in (("shared", 1000), ("dots", 0.001), ("tile", 0.0)):
            loops[name].turn_s *= factor
        return loops

    monkeypatch.setattr(calibrate, "_sampled", noisy)
    cpu, default = calibrate.measure(), known.described_cpu()
    assert cpu.cache_bytes_per_s == cpu.hbm_bytes_per_s <= cpu.private_cache_bytes_per_s
    # Differences that noise made negative are no measurements.
    assert (cpu.launch_ps, cpu.step_ps) == (default.launch_ps, default.step_ps)
    assert cpu.source("step_ps") == default.source("step_ps")


def test_one_core_without_sysfs_is_measured_too(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(known, "core_count", lambda: 1)
    monkeypatch.setattr(known, "cache_sizes", lambda cores: (cores * 4096, 4096))
    cpu = calibrate.measure()
    assert cpu.core_count == 1
    assert cpu.private_cache_bytes == 4096
    assert cpu.source("private_cache_bytes_per_s").startswith("measured")


def test_the_caller_s_trace_and_settings_do_not_matter(quick):
    """Planning happens while JAX traces, under whatever the user has set."""

    @jax.jit
    def traced(x):
        with jax.enable_x64(False), jax.disable_jit():
            cpu = calibrate.measure()
        assert cpu.source("vector_flops_per_s").startswith("measured")
        return x + 1

    assert traced(1.0) == 2.0


class TestCache:
    def test_it_is_measured_once_a_process_and_read_by_the_next(self, counted):
        first = calibrate.local_cpu()
        assert calibrate.local_cpu() is first
        known._memory.clear()
        assert calibrate.local_cpu() == first
        assert len(counted) == 1
        assert calibrate.local_cpu(refresh=True) != first

    def test_every_way_to_name_it_gives_the_same(self, counted):
        cpu = calibrate.local_cpu()
        assert resolve_device("cpu") is resolve_device(None) is local_device() is cpu
        assert fuseplan.jit(jnp.sin).plan(jnp.ones(3)).device is cpu

    def test_the_file_and_its_key_name_the_version_of_jax(self, counted, monkeypatch):
        calibrate.local_cpu()
        path = calibrate.cache_file()
        assert path.name == f"cpu-jax-{jax.__version__}.json"
        assert json.loads(path.read_text())["key"].endswith(f", jax-{jax.__version__}")
        monkeypatch.setattr(calibrate, "MADE_BY", "jax-99.0")
        path.rename(calibrate.cache_file())  # as if it had been another JAX's
        assert calibrate.local_cpu().vector_flops_per_s == 10**10 + 2
        assert len(counted) == 2

    def test_numpy_s_file_is_not_xla_s(self, counted, monkeypatch):
        monkeypatch.setattr(known, "measure", known.described_cpu)
        numpy_cpu = known.cached_cpu()
        assert calibrate.local_cpu() != numpy_cpu
        assert known.cached_cpu() is numpy_cpu
        known.cache_path().rename(calibrate.cache_file())
        known._memory.clear()
        assert calibrate.local_cpu() != numpy_cpu
        assert len(counted) == 2

    def test_a_damaged_file_is_measured_again(self, counted):
        calibrate.local_cpu()
        calibrate.cache_file().write_bytes(b"\xff{")
        known._memory.clear()
        assert calibrate.local_cpu().vector_flops_per_s == 10**10 + 2

    def test_an_unwritable_directory_costs_nothing_but_time(self, counted, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert calibrate.local_cpu() is calibrate.local_cpu()
        assert len(counted) == 1

    def test_without_a_cpu_backend_the_rates_are_numpy_s(self, counted, monkeypatch):
        def absent(platform):
            raise RuntimeError(f"Unknown backend {platform}")

        monkeypatch.setattr(jax, "devices", absent)
        monkeypatch.setattr(known, "measure", known.described_cpu)
        assert calibrate.local_cpu() == known.described_cpu()
        assert calibrate.cache_file() == known.cache_path()
        assert counted == []

    def test_a_terminal_is_told_once_and_a_pipe_never(self, counted, capsys, monkeypatch):
        calibrate.local_cpu()
        assert capsys.readouterr() == ("", "")
        known._memory.clear()
        calibrate.cache_file().unlink()
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        for _ in range(2):
            calibrate.local_cpu()
        out, err = capsys.readouterr()
        assert out == ""
        assert err == "fuseplan: measuring this CPU, once; `fuseplan calibrate` does it anew\n"
