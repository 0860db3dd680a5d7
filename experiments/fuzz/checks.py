"""Check fuseplan's kernels, proofs and derivatives of one generated program against the reference in NumPy.

Every kernel that is not XLA's own runs here: tiled loops on the CPU, kernels of GPUs and TPUs in Pallas'
interpreter. Devices are made small, so that arrays of a few hundred elements do not fit on chip and large
intermediates are offered to loops and streams.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

import fuseplan
from costmodel import DeviceSpec, get_device
from experiments.fuzz.operations import OPERATIONS
from experiments.fuzz.program import Program, is_float
from experiments.fuzz.reference import MORE_SAMPLES, Expected, difference, evaluate, expected_results
from fuseplan.extend import SolutionCache, backend_of, register_backend, using_cache

QUICKLY: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Compile with little LLVM optimization, which would take most of the time; XLA's own passes all run."""

_KIB = 1024
_LARGE_BYTES = 512

TINY_CPU = DeviceSpec(
    name="tiny_cpu",
    description="a CPU on which a few hundred bytes are large, for tests",
    platform="cpu",
    backend="xla",
    core_count=2,
    hbm_capacity_bytes=8 * 10**9,
    hbm_bytes_per_s=10**6,
    cache_bytes=2 * _KIB,
    cache_bytes_per_s=10**10,
    onchip_bytes=4 * _KIB,
    register_bytes=0,
    launch_ps=1_000,
    matrix_flops_per_s=(("float32", 10**11), ("float64", 10**11)),
    vector_flops_per_s=10**11,
    transcendental_per_s=10**11,
    private_cache_bytes=_KIB,
    private_cache_bytes_per_s=10**12,
    step_ps=1_000,
    large_bytes=_LARGE_BYTES,
)


def _tiny(name: str, onchip_bytes: int, register_bytes: int) -> DeviceSpec:
    return replace(
        get_device(name),
        name=f"tiny_{name.partition(':')[2] or name}",
        onchip_bytes=onchip_bytes,
        register_bytes=register_bytes,
        cache_bytes=min(get_device(name).cache_bytes, 2 * _KIB),
        large_bytes=_LARGE_BYTES,
    )


_SMALL_PASSES: dict[str, Any] = {"pass_tiles": (4, 8, 32), "max_whole_axis": 16, "one_step_depth": 4}
_SMALL_TILES: dict[str, dict[str, Any]] = {
    "loops": {"pass_tiles": (8, 16)},
    "triton": {"matmul_tiles": (16, 32), "depth_tiles": (16,), **_SMALL_PASSES},
    "mosaic_gpu": {"matmul_tiles": (64, 128), "depth_tiles": (64,), **_SMALL_PASSES},
    "mosaic_tpu": {"matmul_tiles": (8, 16), "depth_tiles": (8, 16), **_SMALL_PASSES},
}


@contextmanager
def small_tiles() -> Iterator[None]:
    """Make tiles a few elements long: small programs then have many tiles."""
    backends = [backend_of(name) for name in _SMALL_TILES]
    for backend in backends:
        register_backend(replace(backend, **_SMALL_TILES[backend.name]))
    try:
        yield
    finally:
        for backend in backends:
            register_backend(backend)


DEVICES: dict[str, tuple[DeviceSpec, ...]] = {
    "cpu": (TINY_CPU,),
    "triton": (get_device("h200"), _tiny("h200", 16 * _KIB, 32 * _KIB)),
    "mosaic_gpu": (get_device("h200:mosaic_gpu"), _tiny("h200:mosaic_gpu", 16 * _KIB, 32 * _KIB)),
    "mosaic_tpu": (get_device("tpu_v5e"), _tiny("tpu_v5e", 48 * _KIB, 0)),
}
"""By backend: the device as it is, where it matters, and a small one."""

GRADIENT_EPSILONS = 2.0**12
"""Rounding errors allowed of a derivative, in units of the type's epsilon and relative to the largest
derivative by that argument, beside what ``jax.jit``'s own has."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One check that did not hold."""

    check: str
    kind: str
    """``wrong``, ``crash``, ``refuted``; ``xla`` where ``jax.jit`` alone is as wrong; ``generator`` where
    the program itself is not one."""
    detail: str


@dataclass(slots=True)
class Report:
    """What came of the checks of one program."""

    failures: list[Failure] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def check_program(
    program: Program, backends: Sequence[str], gradient: bool, small: bool = True, solver: bool = True
) -> Report:
    """Run and compare the program on ``backends``.

    Args:
        program: what ``generate`` made.
        backends: some of ``DEVICES``.
        gradient: check its derivatives, too.
        small: with small tiles on small devices, else on those that there are.
        solver: plan by the solver, else by best-first.
    """
    report = Report()
    tiling = small_tiles() if small else nullcontext()
    with jax.enable_x64(program.x64), using_cache(SolutionCache()), np.errstate(all="ignore"), tiling:
        _Checks(program, report, "solver" if solver else "best_first").run(backends, gradient, small)
    return report


class _Checks:
    def __init__(self, program: Program, report: Report, planner: str) -> None:
        self.program, self.report, self.planner = program, report, planner
        self.f, self.arguments = program.function(), program.arguments()

    def run(self, backends: Sequence[str], gradient: bool, small: bool) -> None:
        program, counts = self.program, self.report.counts
        counts.update({f"op {s.op}": 1 for s in program.steps})
        counts.update(
            {f"type {program.dtype_of(v)}": 1 for v in range(len(program.inputs) + len(program.steps))}
        )
        try:
            jax.eval_shape(self.f, *self.arguments)
        except Exception as error:
            self._fail("the program", "generator", _said(error))
            return
        expected = expected_results(program)
        counts["elements"] += sum(e.value.size for e in expected)
        counts["elements undetermined"] += sum(int((~e.determined).sum()) for e in expected)
        counts["results with NaN or infinity"] += any(
            not np.isfinite(e.value).all() for e in expected if is_float(e.dtype)
        )
        counts["empty arrays"] += any(e.value.size == 0 for e in expected)
        derivative = _Derivative.of(program, self.f) if gradient else None
        counts["gradients"] += derivative is not None
        for backend in backends:
            device = DEVICES[backend][-1 if small else 0]
            if backend == "cpu":
                fused = fuseplan.jit(self.f, device=device, planner=self.planner)
                self._compare("fuseplan.jit", partial(run_quickly, fused, *self.arguments), expected)
                if derivative is not None:
                    self._derivatives("jax.vjp of fuseplan.jit", derivative, derivative.pulled_back(fused))
            self._planned(backend, device, self.f, self.arguments, expected)
            if derivative is not None:
                self._planned_derivative(backend, device, derivative)

    def _planned(
        self, backend: str, device: DeviceSpec, f: Any, arguments: list[Any], expected: list[Expected]
    ) -> None:
        run = self._plan(f"plan for {device.name}", backend, device, f, arguments)
        if run is not None:
            self._compare(f"kernels of {device.name}", partial(run_quickly, run, *arguments), expected)

    def _planned_derivative(self, backend: str, device: DeviceSpec, derivative: _Derivative) -> None:
        pulled_back, arguments = derivative.pulled_back(self.f), derivative.arguments
        name = f"derivative for {device.name}"
        run = self._plan(name, backend, device, pulled_back, arguments)
        if run is not None:
            self._derivatives(name, derivative, run)

    def _plan(
        self, name: str, backend: str, device: DeviceSpec, f: Any, arguments: list[Any]
    ) -> Callable[..., Any] | None:
        """The plan's kernels as a function; None where it failed, or where all is left to XLA, as ``jax.jit``
        has it."""
        counts = self.report.counts
        try:
            plan = fuseplan.make_plan(f, device=device, planner=self.planner)(*arguments)
        except Exception as error:
            self._fail(name, "crash", _said(error))
            return None
        self._verify(name, plan)
        backends = Counter(k.spec.backend for k in plan.kernels)
        own = backends.total() - backends["xla"]
        counts[f"{backend}: plans by {self.planner}"] += 1
        counts[f"{backend}: kernels of ours"] += own
        counts[f"{backend}: programs with kernels of ours"] += own > 0
        counts[f"{backend}: kernels in passes"] += sum(len(k.spec.passes) > 1 for k in plan.kernels)
        counts[f"{backend}: kernels of several tiles"] += sum(
            any(a.n_tiles > 1 for a in k.spec.axes) for k in plan.kernels
        )
        counts[f"{backend}: kernels with ragged tiles"] += sum(
            any(a.ragged for a in k.spec.axes) for k in plan.kernels
        )
        counts[f"{backend}: kernels with skipped tiles"] += sum(
            bool(k.spec.tiles_visited) for k in plan.kernels
        )
        return partial(plan.run, interpret=True) if own else None

    def _verify(self, name: str, plan: fuseplan.Plan) -> None:
        try:
            verification = plan.verify()
        except Exception as error:
            self._fail(f"verify the {name}", "crash", _said(error))
            return
        self.report.counts[f"plans {verification.status}"] += 1
        if verification.status == "refuted":
            self._fail(f"verify the {name}", "refuted", verification.reason)

    def _compare(self, check: str, run: Callable[[], Any], expected: list[Expected]) -> None:
        try:
            got = run()
        except Exception as error:
            self._fail(check, "crash", _said(error))
            return
        if not self._differences(got, expected):
            return
        more = expected_results(self.program, MORE_SAMPLES)
        said = self._differences(got, more)
        if not said:
            self.report.counts["differences that more samples explain"] += 1
            return
        for options in (QUICKLY, {}):
            plain = jax.jit(self.f, compiler_options=options)(*self.arguments)
            if self._differences(plain, more):
                self._fail(check, "xla", "; ".join(said))
                return
        self._fail(check, "wrong", "; ".join(said))

    def _differences(self, got: Sequence[Any], expected: list[Expected]) -> list[str]:
        pairs = enumerate(zip(got, expected, strict=True))
        return [f"result {k}: {d}" for k, (g, e) in pairs if (d := difference(g, e))]

    def _derivatives(self, check: str, derivative: _Derivative, pulled_back: Callable[..., Any]) -> None:
        try:
            got = run_quickly(pulled_back, *derivative.arguments)
        except Exception as error:
            self._fail(check, "crash", _said(error))
            return
        self.report.counts["derivatives compared"] += 1
        said = derivative.differences(got)
        if said:
            self._fail(check, "wrong", "; ".join(said))

    def _fail(self, check: str, kind: str, detail: str) -> None:
        self.report.failures.append(Failure(check, kind, detail))


class _Derivative:
    """Derivatives of a program's results, weighted by random cotangents, by its arguments.

    The reference is ``jax.vjp`` of the program in float64, unfused but by XLA; it is taken for true only
    where, along random directions, it agrees with finite differences of the evaluation in NumPy, which
    shares nothing with JAX.
    """

    def __init__(self, program: Program, f: Callable[..., Any], reference: list[np.ndarray]) -> None:
        self.program, self.f, self.reference = program, f, reference
        self.arguments = _arguments_of(program)

    @classmethod
    def of(cls, program: Program, f: Callable[..., Any]) -> _Derivative | None:
        """None where the program has no derivative, or none that NumPy confirms."""
        if not program.differentiable or not any(is_float(program.dtype_of(r)) for r in program.results):
            return None
        if not all(OPERATIONS[s.op].smooth for s in program.steps):
            return None
        wide = program.in_float64()
        # The same numbers, rounded to the working types first.
        arguments = [np.asarray(x) for x in _arguments_of(program)]
        floats = [x.astype(np.float64) if x.dtype.kind not in "iub" else x for x in arguments]
        with jax.enable_x64(True):
            pulled_back = _pulled_back(wide, wide.function())
            reference = [np.asarray(x) for x in run_quickly(pulled_back, *floats)]
        if not all(np.isfinite(x).all() for x in reference):
            return None
        return cls(program, f, reference) if _confirmed(program, floats, reference) else None

    def pulled_back(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """The derivative of ``f``, a function of its arguments and the cotangents."""
        return _pulled_back(self.program, f)

    def differences(self, got: Sequence[Any]) -> list[str]:
        """Where ``got`` is further off than rounding explains."""
        plain: list[Any] | None = None
        said = []
        # A cotangent of a narrow result is narrow, whatever the argument is.
        types = [self.program.dtype_of(v) for v in range(len(self.program.inputs) + len(self.program.steps))]
        eps = max(float(jax.numpy.finfo(d).eps) for d in types if is_float(d))
        for k, (x, want) in enumerate(zip(got, self.reference, strict=True)):
            x = np.asarray(x)
            scale = max(float(abs(want).max(initial=0.0)), 1e-3)
            off = abs(x.astype(np.float64) - want)
            if not (off > GRADIENT_EPSILONS * min(eps, 2.0**-17) * scale).any() and np.isfinite(off).all():
                continue
            if plain is None:
                plain = [
                    np.asarray(y, np.float64) for y in run_quickly(self.pulled_back(self.f), *self.arguments)
                ]
            # Where jax.jit errs as much, the program is ill-conditioned.
            theirs = abs(plain[k] - want)
            allowed = GRADIENT_EPSILONS * min(eps, 2.0**-17) * scale + 16 * theirs.max(initial=0.0)
            wrong = ~(off <= allowed) & np.isfinite(theirs)
            if wrong.any() and np.isfinite(theirs).all():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                said.append(
                    f"derivative by argument {self.program.differentiable[k]}: {int(wrong.sum())} of "
                    f"{wrong.size} elements are wrong, first at {list(at)}: expected {want[at]!r}, "
                    f"got {x[at]!r}"
                )
        return said


def _float_results(program: Program) -> list[int]:
    """The places of the results that a cotangent belongs to."""
    return [k for k, r in enumerate(program.results) if is_float(program.dtype_of(r))]


def _arguments_of(program: Program) -> list[Any]:
    """The program's arguments, then a cotangent for each result of floats."""
    expected = evaluate(program, [i.array() for i in program.inputs])
    rng = np.random.default_rng(0)
    cotangents = []
    for k in _float_results(program):
        v = program.results[k]
        x = rng.standard_normal(np.shape(expected[v]))
        cotangents.append(np.asarray(x).astype(jax.numpy.dtype(program.dtype_of(v))))
    return [*program.arguments(), *cotangents]


def _pulled_back(program: Program, f: Callable[..., Any]) -> Callable[..., Any]:
    which, floats = program.differentiable, _float_results(program)
    n = len(program.arguments())

    def pulled_back(*arrays: Any) -> Any:
        arguments, cotangents = list(arrays[:n]), arrays[n:]

        def of_floats(*chosen: Any) -> Any:
            for k, x in zip(which, chosen, strict=True):
                arguments[k] = x
            results = f(*arguments)
            return [results[k] for k in floats]

        return jax.vjp(of_floats, *(arrays[k] for k in which))[1](list(cotangents))

    return pulled_back


def _confirmed(program: Program, arguments: list[np.ndarray], reference: list[np.ndarray]) -> bool:
    """Whether finite differences of the NumPy evaluation agree along three random directions."""
    n = len(program.arguments())
    cotangents = arguments[n:]
    places = [k for k, i in enumerate(program.inputs) if not i.constant]
    inputs = [i.array() for i in program.inputs]
    inputs = [
        x.astype(np.float64) if is_float(i.dtype) else x for x, i in zip(inputs, program.inputs, strict=True)
    ]
    wide = program.in_float64()
    rng = np.random.default_rng(1)

    def along(direction: list[np.ndarray], h: float) -> float:
        moved = list(inputs)
        for k, d in zip(program.differentiable, direction, strict=True):
            moved[places[k]] = inputs[places[k]] + h * d
        values = evaluate(wide, moved)
        results = [values[program.results[k]] for k in _float_results(program)]
        return float(sum((c * y).sum() for c, y in zip(cotangents, results, strict=True)))

    for _ in range(3):
        direction = [rng.standard_normal(x.shape) for x in reference]
        wanted = sum((g * d).sum() for g, d in zip(reference, direction, strict=True))
        size = sum(float(np.sqrt((g * g).sum())) for g in reference)
        h = 1e-6
        near = (along(direction, h) - along(direction, -h)) / (2 * h)
        if not abs(near - wanted) <= 1e-4 * (size + abs(wanted)) + 1e-6:
            return False
    return True


def run_quickly(f: Callable[..., Any], *arguments: Any) -> Any:
    """What ``jax.jit(f)`` gives, compiled without LLVM's optimisations."""
    return jax.jit(f, compiler_options=QUICKLY)(*arguments)


def _said(error: Exception) -> str:
    """The error and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/fuseplan/" in f.filename or "/costmodel/" in f.filename] or frames
    last = own[-1]
    first = str(error).strip().splitlines()[:3]
    return (
        f"{type(error).__name__}: {' '.join(first)[:400]} ({last.filename.rpartition('/')[2]}:{last.lineno})"
    )
