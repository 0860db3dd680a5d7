"""The CPU's rates under XLA: what is measured, what stands in, and the file that keeps it."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel import calibrate as known
from costmodel import timing
from costmodel.timing import Figure
from fuseplan.settings import resolve_device
from fuseplan.targets import calibrate
from fuseplan.targets.detect import local_device

pytestmark = pytest.mark.one_python


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Measured in a moment, on small arrays; kept in a folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "AGREEMENT", 1e9)  # however busy the machine is
    monkeypatch.setattr(known, "CONTENTION", 1e9)
    monkeypatch.setattr(calibrate, "MEMORY_BYTES", (8 << 20, 8 << 20))
    monkeypatch.setattr(calibrate, "MATRIX_EXTENTS", dict.fromkeys(calibrate.MATRIX_EXTENTS, 128))
    return tmp_path


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """A cache folder of its own, and measurements that are counted instead of done."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def measure(limit_s):
        calls.append(limit_s)
        figures = {"vector_flops_per_s": Figure(10**10 + len(calls))}
        return known.measured_cpu(known.described_cpu(), figures, dict.fromkeys(figures, "a test"), "test")

    monkeypatch.setattr(calibrate, "measure", measure)
    return calls


@pytest.mark.slow
def test_this_cpu_is_measured_by_xla(quick):
    cpu = calibrate.measure(60)
    # A difference may be less than the noise of a busy machine: then its figure says so.
    assert set(cpu.assumed) & set(known.FIGURES) <= {"launch_ps", "step_ps", "reduction_row_ps"}
    for figure in known.FIGURES:
        source = cpu.source(figure)
        assert source.startswith("measured: ") == (figure not in cpu.assumed)
        assert (calibrate.MADE_BY in source) == (figure not in cpu.assumed)
    assert 10**8 < cpu.hbm_bytes_per_s <= cpu.cache_bytes_per_s <= cpu.private_cache_bytes_per_s < 10**14
    assert 10**7 < cpu.transcendental_per_s <= cpu.vector_flops_per_s < 10**15
    assert 10**7 < cpu.reduction_per_s < 10**13
    assert cpu.fresh_bytes_per_s > 10**7
    assert {dtype for dtype, _ in cpu.matrix_flops_per_s} == {"float32", "float64", "bfloat16", "float16"}
    assert all(10**7 < rate < 10**15 for _, rate in cpu.matrix_flops_per_s)
    # A dispatch and a turn are neither free nor a millisecond, on however busy a machine.
    assert 10**4 < cpu.launch_ps < 10**9
    assert 0 < cpu.step_ps < 10**9
    assert cpu.private_cache_bytes == known.cache_sizes(known.core_count())[0]


@pytest.mark.slow
def test_what_fails_is_assumed_and_says_why(quick, monkeypatch):
    loop = calibrate.Loop

    def failing(work, turn, state, tiny=1):
        if jax.tree.leaves(state)[0].dtype in (jnp.float64, jnp.bfloat16) or tiny > 1:
            raise RuntimeError("no such kernel on this CPU")
        return loop(work, turn, state, tiny)

    monkeypatch.setattr(calibrate, "Loop", failing)
    cpu, default = calibrate.measure(60), known.described_cpu()
    for figure in ("launch_ps", "step_ps", f"{known.MATRIX}.float64", f"{known.MATRIX}.bfloat16"):
        assert known.figure_of(cpu, figure) == known.figure_of(default, figure)
        assert figure in cpu.assumed
        assert cpu.source(figure).endswith("not measured: RuntimeError: no such kernel on this CPU")
    assert f"{known.MATRIX}.float32" not in cpu.assumed


@pytest.mark.parametrize("attributes", [("_COMPILE_SHARE",), ("Loop", "Touch")])
def test_when_nothing_can_be_measured_everything_is_assumed(quick, monkeypatch, attributes):
    for attribute in attributes:
        monkeypatch.setattr(calibrate, attribute, 0.0)  # no time; and what cannot be called
    cpu, default = calibrate.measure(), known.described_cpu()
    for figure in known.FIGURES:
        assert known.figure_of(cpu, figure) == known.figure_of(default, figure)
        assert cpu.source(figure).startswith(default.source(figure))
        assert figure in cpu.assumed


def test_a_measurement_ends_in_its_time(quick, monkeypatch):
    """With a clock of our own: a compilation takes 0.7 s and a sample 0.2, and no two samples agree."""
    now = [0.0]

    class Slow:
        work = 1e9

        def __init__(self, *args, **options):
            now[0] += 0.7
            self.times = iter(2.0**-n for n in range(1000))

        def sample(self):
            now[0] += 0.2
            return next(self.times)

    monkeypatch.setattr(timing, "AGREEMENT", 0.1)
    monkeypatch.setattr(calibrate, "Loop", Slow)
    monkeypatch.setattr(calibrate, "Touch", Slow)
    monkeypatch.setattr(calibrate.time, "monotonic", lambda: now[0])
    cpu = calibrate.measure(limit_s=10.0)
    assert now[0] <= 10.0 + 0.7
    assert set(known.FIGURES) <= set(cpu.assumed)
    assert "no time was left to compile its program" in cpu.source(f"{known.MATRIX}.float16")


def test_a_run_that_another_process_made_long_does_not_fix_the_number_of_turns(monkeypatch):
    loop = calibrate.Loop(0, lambda i, x: x, jnp.zeros(()), 1)
    run, slow = calibrate.Loop._seconds, iter([1.0, 1.0])  # the compilation, and the first run
    monkeypatch.setattr(calibrate.Loop, "_seconds", lambda self: run(self) and next(slow, run(self)))
    disturbed = calibrate.Loop(0, lambda i, x: x, jnp.zeros(()), 1)
    assert disturbed.sample() == 1.0
    best = min(disturbed.sample() for _ in range(20))
    assert best < 10 * min(loop.sample() for _ in range(20))


@pytest.mark.parametrize(("new_s", "rate"), [(0.03, 1e8), (0.02, 1e15), (0.01, 1e15)])
def test_fresh_memory_costs_what_it_takes_longer_than_in_place(new_s, rate):
    """An allocator that keeps what is freed makes no difference, and that costs as good as nothing."""
    figure = calibrate.fresh_rate(timing.Timing((new_s,) * 3), timing.Timing((0.02,) * 3), 10**6)
    assert figure.value == pytest.approx(rate)
    assert not figure.problem
    assert calibrate.fresh_rate(timing.Timing((new_s,)), timing.Timing((0.02,) * 3), 10**6).problem


def test_every_sample_of_fresh_memory_is_freed_before_the_next(monkeypatch):
    made = []
    touch = calibrate.Touch(1 << 20, in_place=False)
    run = touch._run
    monkeypatch.setattr(touch, "_run", lambda x: made.append(run(x)) or made[-1])
    for _ in range(3):
        assert touch.sample() > 0
    assert len(made) == 3
    assert all(x.is_deleted() for x in made)
    assert not touch._x.is_deleted()
    in_place = calibrate.Touch(1 << 20, in_place=True)
    assert in_place.sample() > 0
    assert not in_place._x.is_deleted()
    assert touch.work == in_place.work == 1 << 20


def timings(**changed):
    """Times of the programs that belong to a plausible CPU, some of them changed."""
    names = ("float32", "float64", "bfloat16", "float16", "vector", "exp", "sums", "memory", "shared")
    times = dict.fromkeys((*names, "private", "in place"), 1e-3)
    times |= {"dot": 4e-7, "dots": 4e-7 + 8 * 3e-7, "tile": 5e-7, "fresh": 2e-3, "rows": 2e-3}
    times |= changed
    return {name: timing.Timing((s, s, s)) if isinstance(s, float) else s for name, s in times.items()}


WORKS = {"float32": 1e8, "float64": 5e7, "bfloat16": 1e8, "float16": 1e8, "vector": 1e8, "exp": 1e6,
         "sums": 1e7, "rows": 4e5, "memory": 2e7, "shared": 5e7, "private": 1e8, "fresh": 5e6}  # fmt: skip


def cpu_of(times):
    figures = calibrate.figures_of(times, WORKS)
    return known.measured_cpu(known.described_cpu(), figures, calibrate.HOW_MEASURED, "a test")


def test_the_figures_follow_from_the_times():
    cpu = cpu_of(timings())
    assert set(cpu.assumed) == set()
    assert (cpu.hbm_bytes_per_s, cpu.cache_bytes_per_s, cpu.private_cache_bytes_per_s) == (
        2 * 10**10, 5 * 10**10, 10**11)  # fmt: skip
    assert cpu.launch_ps == pytest.approx(300_000, abs=2)
    assert cpu.step_ps == pytest.approx(200_000, abs=2)
    assert cpu.fresh_bytes_per_s == 5 * 10**9
    assert cpu.reduction_row_ps == 2_500  # 1 ms longer for 400,000 rows
    assert cpu.matrix_rate("float64") == 5 * 10**10


@pytest.mark.parametrize(
    ("changed", "assumed"),
    [
        ({"memory": 1e-4}, {"hbm_bytes_per_s", "cache_bytes_per_s"}),  # memory faster than cache
        ({"private": 1e-2}, {"cache_bytes_per_s", "private_cache_bytes_per_s"}),
        ({"exp": 1e-6}, {"transcendental_per_s", "vector_flops_per_s"}),
        ({"dots": 3e-7}, {"launch_ps", "step_ps"}),  # eight dots more take less
        ({"tile": 1e-7}, {"step_ps"}),
        ({"vector": timing.Timing((1e-3, 2e-3, 3e-3))}, {"vector_flops_per_s"}),
        ({"float16": timing.Timing(failure="no kernel")}, {"matrix_flops_per_s.float16"}),
        ({"dot": timing.Timing()}, {"launch_ps", "step_ps"}),
    ],
    ids=["memory", "private", "exp", "negative", "step", "noisy", "failed", "absent"],
)
def test_figures_that_cannot_be_or_do_not_settle_are_assumed(changed, assumed):
    cpu, default = cpu_of(timings(**changed)), known.described_cpu()
    assert set(cpu.assumed) == assumed
    for figure in assumed:
        assert known.figure_of(cpu, figure) == known.figure_of(default, figure)
        assert "; not measured: " in cpu.source(figure)
    assert not known.contradictions(cpu)


@pytest.mark.parametrize("shared", [2.6e-3, 4e-3], ids=["19.2", "12.5"])
def test_a_cache_that_is_a_little_slower_than_memory_is_as_fast(shared):
    """Two cores of a large machine read memory, of 20 GB/s here, as fast as the last cache."""
    cpu = cpu_of(timings(shared=shared))
    assert cpu.cache_bytes_per_s == cpu.hbm_bytes_per_s == 2 * 10**10
    assert cpu.assumed == ()


def test_a_busy_machine_leaves_what_was_measured_on_a_quiet_one(tmp_path, monkeypatch, new_process):
    """What does not settle keeps what the file has; what settles takes its place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quiet = cpu_of(timings())
    steps = [
        (timings(), set(), known.FIGURES),
        ({name: timing.Timing(samples=9, disturbed=9) for name in timings()}, set(), ()),
        (timings(vector=5e-4), set(), None),
        (timings(memory=1e-4), set(), None),  # contradicts its own cache
        # Settled, but faster than the cache that the file has and that did not settle now.
        (timings(memory=1e-4, shared=timing.Timing(), private=timing.Timing()), set(), ()),
    ]
    for times, assumed, measured in steps:
        monkeypatch.setattr(calibrate, "measure", lambda limit_s, times=times: cpu_of(times))
        found = calibrate.recalibrate_cpu(1.0)
        assert set(found.assumed) == assumed
        assert measured is None or found.measured == tuple(measured)
        assert set(found.measured) | set(found.kept) | set(found.assumed) == set(known.FIGURES)
        assert found.device.hbm_bytes_per_s == quiet.hbm_bytes_per_s
        assert not known.contradictions(found.device)
        assert {name for name, _ in found.problems} == {*found.kept, *found.assumed}
        new_process()
        assert calibrate.local_cpu() == found.device
        vector = 2 if times["vector"].seconds == 5e-4 else 1
        assert found.device.vector_flops_per_s == vector * quiet.vector_flops_per_s


def test_what_is_assumed_is_tried_again_by_two_more_processes_and_then_left(
    tmp_path, monkeypatch, new_process
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def measure(limit_s):
        calls.append(limit_s)
        return cpu_of(timings(dots=timing.Timing((1.0, 2.0, 3.0))))

    monkeypatch.setattr(calibrate, "measure", measure)
    for process in range(6):
        new_process()
        assert set(calibrate.local_cpu().assumed) == {"launch_ps", "step_ps"}
        stored = json.loads(calibrate.cache_file().read_text())
        assert stored["assumed"] == ["launch_ps", "step_ps"]
        assert len(calls) == stored["attempts"] == min(process + 1, known.MOST_ATTEMPTS)
    monkeypatch.setattr(calibrate, "measure", lambda limit_s: cpu_of(timings()))
    assert calibrate.recalibrate_cpu().assumed == ()
    new_process()
    assert calibrate.local_cpu().assumed == ()


def test_another_process_that_wrote_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    """This process has begun without a file, on a machine that another one has measured since."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def measure(limit_s):
        known.recalibrated(calibrate.MADE_BY, lambda _: cpu_of(timings()), limit_s)
        return cpu_of({})

    monkeypatch.setattr(calibrate, "measure", measure)
    assert calibrate.local_cpu().assumed == ()
    assert json.loads(calibrate.cache_file().read_text())["assumed"] == []


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch, failing):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "measure", lambda limit_s: cpu_of(timings()))
    calibrate.local_cpu()
    before = calibrate.cache_file().read_bytes()

    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(known.os, failing, fail)
    monkeypatch.setattr(calibrate, "measure", lambda limit_s: cpu_of(timings(vector=5e-4)))
    assert not calibrate.recalibrate_cpu().is_stored
    assert calibrate.cache_file().read_bytes() == before
    assert [path.name for path in calibrate.cache_file().parent.iterdir()] == [calibrate.cache_file().name]


@pytest.mark.slow
def test_one_core_without_sysfs_is_measured_too(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(known, "core_count", lambda: 1)
    monkeypatch.setattr(known, "cache_sizes", lambda cores: (cores * 4096, 4096))
    cpu = calibrate.measure(60)
    assert cpu.core_count == 1
    assert cpu.private_cache_bytes == 4096
    assert cpu.source("private_cache_bytes_per_s").startswith("measured")


@pytest.mark.slow
def test_the_caller_s_trace_and_settings_do_not_matter(quick):
    """Planning happens while JAX traces, under whatever the user has set."""

    @jax.jit
    def traced(x):
        with jax.enable_x64(False), jax.disable_jit():
            cpu = calibrate.measure(60)
        assert cpu.source("vector_flops_per_s").startswith("measured")
        return x + 1

    assert traced(1.0) == 2.0


class TestCache:
    def test_it_is_measured_once_a_process_and_read_by_the_next(self, counted, new_process):
        first = calibrate.local_cpu()
        assert calibrate.local_cpu() is first
        new_process()
        assert calibrate.local_cpu() == first
        assert len(counted) == 1
        assert calibrate.recalibrate_cpu().device != first
        assert counted == [known.FIRST_USE_S, known.ASKED_FOR_S]

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

    def test_numpy_s_file_is_not_xla_s(self, counted, monkeypatch, new_process):
        monkeypatch.setattr(known, "measure", lambda limit_s: known.described_cpu())
        numpy_cpu = known.cached_cpu()
        assert calibrate.local_cpu() != numpy_cpu
        assert known.cached_cpu() is numpy_cpu
        known.cache_path().rename(calibrate.cache_file())
        new_process()
        assert calibrate.local_cpu() != numpy_cpu
        assert len(counted) == 2

    def test_a_damaged_file_is_measured_again(self, counted, new_process):
        calibrate.local_cpu()
        calibrate.cache_file().write_bytes(b"\xff{")
        new_process()
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
        monkeypatch.setattr(known, "measure", lambda limit_s: known.described_cpu())
        assert calibrate.recalibrate_cpu().device == known.described_cpu()
        assert calibrate.local_cpu() == known.described_cpu()
        assert calibrate.cache_file() == known.cache_path()
        assert counted == []

    def test_a_terminal_is_told_once_and_a_pipe_never(self, counted, capsys, monkeypatch, new_process):
        calibrate.local_cpu()
        assert capsys.readouterr() == ("", "")
        new_process()
        calibrate.cache_file().unlink()
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        for _ in range(2):
            calibrate.local_cpu()
        out, err = capsys.readouterr()
        assert out == ""
        assert err == "fuseplan: measuring this CPU, once; `fuseplan calibrate` does it anew\n"
