"""Moves by table: every movement primitive x sizes x what stands around it x every backend, in the
interpreters, exactly as NumPy has it.

Elements are small negative integers, and what precedes a move makes its padding a number that no element
is: padding that is taken for an element shows in values, in sums and in maxima alike. A case is run as the
plan that the solver makes, and as one kernel of all its operations where the rules allow one: with the
first and the last of the tilings that would be priced, and for CPU loops with tiles chosen to be ragged.

``python -m tests.helpers.moves`` runs the whole product and says how many cases are kernels (about half an
hour on one core; ``--part 1/4`` runs a quarter); CI runs the part that ``covering`` chooses.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from costmodel.axes import Unifier
from costmodel.devices import get_device
from costmodel.graph import boundary
from costmodel.kernel import KernelSpec
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.trace import trace
from fuseplan.runtime.executor import make_runner
from fuseplan.schedule.legality import refuse_exchange, refuse_nest
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.settings import make_options
from tests.helpers.nests import every_nest, function_of
from tests.helpers.plans import plan_traced
from tests.helpers.quickly import run_quickly

Shape = tuple[int, ...]

DEVICES = {"triton": "h200", "mosaic_gpu": "h200:mosaic_gpu", "mosaic_tpu": "tpu_v5e", "loops": "cpu"}

SIZES: dict[str, tuple[Shape, ...]] = {
    "prime": ((13,), (7, 13), (3, 5, 7)),
    "ragged": ((130,), (12, 10), (6, 8, 7), (30, 30)),
    "one": ((1,), (1, 7), (6, 1), (3, 1, 10)),
    "empty": ((0,), (4, 0), (3, 0, 5)),
    "large": ((3000,), (3, 1000), (300, 130), (2, 70, 100)),
    "even": ((512,), (16, 128), (4, 8, 32), (128, 128)),
}

Function = Callable[[Any, Any], Any]
"""Of ``numpy`` or ``jax.numpy``, and of an array: one array, or several."""


@dataclass(frozen=True, slots=True)
class Move:
    """One way to move elements; ``applies`` says to which shapes. ``reference`` is the same for
    NumPy, which lacks some of ``lax``."""

    f: Function
    applies: Callable[[Shape], bool] = lambda shape: True
    reference: Function | None = None


def _rank(least: int) -> Callable[[Shape], bool]:
    return lambda shape: len(shape) >= least


def _of(rank: int) -> Callable[[Shape], bool]:
    return lambda shape: len(shape) == rank


def _long(shape: Shape) -> bool:
    """The last dimension can be cut in two."""
    return shape[-1] >= 2


def _factor(n: int) -> int:
    """The smallest factor of a number, itself if it is prime."""
    return next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)


def _divides(shape: Shape) -> bool:
    return shape[-1] > 3 and _factor(shape[-1]) < shape[-1]


def _split_shape(shape: Shape, minor: bool) -> Shape:
    p = _factor(shape[-1])
    return (*shape[:-1], *((shape[-1] // p, p) if minor else (p, shape[-1] // p)))


def _regroup_shape(shape: Shape) -> Shape:
    """Two dimensions as nearly equal as can be."""
    size = math.prod(shape)
    first = next(d for d in range(math.isqrt(size), 0, -1) if size % d == 0)
    return (first, size // first)


def _pad(x: Any, config: Sequence[tuple[int, int, int]], value: float) -> Any:
    """``lax.pad`` by NumPy."""
    for d, (low, high, gap) in enumerate(config):
        n = x.shape[d]
        spread = np.full((*x.shape[:d], max(n + (n - 1) * gap, 0), *x.shape[d + 1 :]), value, x.dtype)
        spread[(slice(None),) * d + (slice(None, None, gap + 1),)] = x
        edges = [(0, 0)] * x.ndim
        edges[d] = (max(low, 0), max(high, 0))
        x = np.pad(spread, edges, constant_values=value)
        x = x[(slice(None),) * d + (slice(max(-low, 0), x.shape[d] - max(-high, 0)),)]
    return x


def _padding(*last: tuple[int, int, int], first: bool = False, value: float = -7.0) -> Move:
    def config(x: Any) -> list[tuple[int, int, int]]:
        rest = [(0, 0, 0)] * (x.ndim - 1)
        return [last[0], *rest] if first else [*rest, last[0]]

    def extent(shape: Shape) -> int:
        n, (low, high, gap) = shape[0 if first else -1], last[0]
        return low + high + n + max(n - 1, 0) * gap

    return Move(
        lambda xp, x: lax.pad(x, jnp.asarray(value, x.dtype), config(x)),
        lambda shape: extent(shape) >= 0 and (len(shape) > 1 or not first),
        lambda xp, x: _pad(x, config(x), value),
    )


def _literal_slice(xp: Any, x: Any) -> Any:
    half = tuple(max(n // 2, min(n, 1)) for n in x.shape)
    starts = tuple(n - h for n, h in zip(x.shape, half, strict=True))
    if xp is np:
        return x[tuple(slice(s, s + h) for s, h in zip(starts, half, strict=True))]
    return lax.dynamic_slice(x, starts, half)


def _traced_index(xp: Any, x: Any) -> Any:
    """An integer that is not known while tracing: 1, or 0 of no elements."""
    return (x * 0).sum().astype("int32") + 1


def _traced_slice(xp: Any, x: Any) -> Any:
    size = x.shape[-1] // 2
    if xp is np:
        return x[..., 1 : 1 + size] if 1 + size <= x.shape[-1] else x[..., x.shape[-1] - size :]
    return lax.dynamic_slice_in_dim(x, _traced_index(xp, x), size, axis=-1)


def _update(xp: Any, x: Any) -> Any:
    part = x[..., : x.shape[-1] // 2] * 3
    start = x.shape[-1] - part.shape[-1]
    if xp is np:
        return np.concatenate([x[..., :start], part], -1)
    return lax.dynamic_update_slice_in_dim(x, part, start, axis=-1)


def _traced_update(xp: Any, x: Any) -> Any:
    part = x[..., : x.shape[-1] // 2] * 3
    start = min(1, x.shape[-1] - part.shape[-1])
    if xp is np:
        return np.concatenate([x[..., :start], part, x[..., start + part.shape[-1] :]], -1)
    return lax.dynamic_update_slice_in_dim(x, part, _traced_index(xp, x), axis=-1)


def _one_a_row(xp: Any, x: Any) -> Any:
    index = np.arange(math.prod(x.shape[:-1])).reshape(*x.shape[:-1], 1) % x.shape[-1]
    return xp.take_along_axis(x, xp.asarray(index.astype("int32")), -1)


def _one_a_column(xp: Any, x: Any) -> Any:
    index = np.arange(math.prod(x.shape[1:])).reshape(1, *x.shape[1:]) % x.shape[0]
    return xp.take_along_axis(x, xp.asarray(index.astype("int32")), 0)


def _add_one_a_row(xp: Any, x: Any) -> Any:
    index = np.arange(x.shape[0]) % x.shape[1]
    if xp is np:
        x = x.copy()
        x[np.arange(x.shape[0]), index] += 5
        return x
    return jax.vmap(lambda row, i: row.at[i].add(5))(x, jnp.asarray(index))


def _set_row(xp: Any, x: Any) -> Any:
    if xp is np:
        x = x.copy()
        x[-1] = -3
        return x
    return x.at[-1].set(-3)


def _bits(xp: Any, x: Any) -> Any:
    if xp is np:
        return x
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, "int32"), x.dtype)


def _triangle(xp: Any, x: Any) -> Any:
    rows, columns = (xp.arange(n) for n in x.shape[-2:])
    return xp.where(rows[:, None] >= columns, x, -2)


def _heads(xp: Any, x: Any) -> Any:
    """Heads before rows, as in attention."""
    y = x.reshape(_split_shape(x.shape, minor=False))
    return xp.moveaxis(y, -2, 0)


def _merged_heads(xp: Any, x: Any) -> Any:
    return xp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], x.shape[0] * x.shape[-1])


def _halves(xp: Any, x: Any) -> Any:
    """Rotated by half, as in rotary embeddings."""
    half = x.shape[-1] // 2
    return xp.concatenate([-x[..., half:], x[..., :half]], -1)


def _squeezed(xp: Any, x: Any) -> Any:
    return np.squeeze(x[:, None], 1) if xp is np else lax.squeeze(lax.expand_dims(x, (1,)), (1,))


def _even(shape: Shape) -> bool:
    return shape[-1] % 2 == 0 and shape[-1] > 0


MOVES: dict[str, Move] = {
    "reshape reversed": Move(lambda xp, x: x.reshape(x.shape[::-1]), _rank(2)),
    "reshape nearly square": Move(lambda xp, x: x.reshape(_regroup_shape(x.shape)), lambda s: 0 not in s),
    "reshape square reversed": Move(
        lambda xp, x: x.reshape(_regroup_shape(x.shape)[::-1]), lambda s: 0 not in s
    ),
    "reshape flat": Move(lambda xp, x: x.reshape(-1)),
    "reshape split minor": Move(lambda xp, x: x.reshape(_split_shape(x.shape, True)), _divides),
    "reshape split major": Move(lambda xp, x: x.reshape(_split_shape(x.shape, False)), _divides),
    "reshape merge first": Move(
        lambda xp, x: x.reshape(math.prod(x.shape[:2]), *x.shape[2:]), _rank(3)
    ),
    "reshape merge last": Move(lambda xp, x: x.reshape(*x.shape[:-2], math.prod(x.shape[-2:])), _rank(3)),
    "reshape column": Move(lambda xp, x: x.reshape(*x.shape, 1)),
    "reshape ones": Move(lambda xp, x: x.reshape(1, *x.shape[:-1], 1, x.shape[-1])),
    "transpose": Move(lambda xp, x: xp.transpose(x), _rank(2)),
    "transpose last": Move(lambda xp, x: xp.swapaxes(x, -1, -2), _rank(3)),
    "transpose round": Move(lambda xp, x: xp.moveaxis(x, 0, -1), _rank(3)),
    "transpose first": Move(lambda xp, x: xp.swapaxes(x, 0, 1), _rank(3)),
    "split heads": Move(_heads, _divides),
    "merge heads": Move(_merged_heads, _rank(2)),
    "broadcast first": Move(lambda xp, x: xp.broadcast_to(x, (3, *x.shape))),
    "broadcast last": Move(lambda xp, x: xp.broadcast_to(x[..., None], (*x.shape, 5))),
    "broadcast middle": Move(
        lambda xp, x: xp.broadcast_to(x[:, None], (x.shape[0], 3, *x.shape[1:])), _rank(2)
    ),
    "broadcast one": Move(lambda xp, x: xp.broadcast_to(x[..., :1], x.shape) + x, lambda s: s[-1] > 0),
    "expand_dims": Move(lambda xp, x: xp.expand_dims(x, (0, x.ndim + 1))),
    "squeeze": Move(_squeezed),
    "slice front": Move(lambda xp, x: x[..., : max(x.shape[-1] // 2, 1)]),
    "slice unaligned": Move(lambda xp, x: x[..., 1 : x.shape[-1] - 1], lambda s: s[-1] > 2),
    "slice rows": Move(lambda xp, x: x[1:], _rank(2)),
    "slice nothing": Move(lambda xp, x: x[..., :0]),
    "slice every second": Move(lambda xp, x: x[..., ::2]),
    "slice every second from one": Move(lambda xp, x: x[..., 1::2], _long),
    "slice every third row": Move(lambda xp, x: x[::3], _rank(2)),
    "slice halves": Move(lambda xp, x: x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :], _even),
    "slice neighbours": Move(lambda xp, x: x[..., 1:] - 3 * x[..., :-1], _long),
    "dynamic_slice literal": Move(_literal_slice),
    "dynamic_slice traced": Move(_traced_slice, _long),
    "dynamic_update_slice literal": Move(_update, _long),
    "dynamic_update_slice traced": Move(_traced_update, _long),
    "split even": Move(lambda xp, x: tuple(xp.split(x, 2, -1)), _even),
    "split uneven": Move(lambda xp, x: tuple(xp.split(x, [1, x.shape[-1] // 2], -1)), lambda s: s[-1] > 3),
    "split rows": Move(lambda xp, x: tuple(xp.split(x, [1], 0)), lambda s: len(s) > 1 and s[0] > 1),
    "unstack": Move(lambda xp, x: tuple(x[i] for i in range(x.shape[0])) if xp is np else jnp.unstack(x),
                    lambda s: len(s) > 1 and 0 < s[0] < 9),
    "stack first": Move(lambda xp, x: xp.stack([x, x * 3, x])),
    "stack last": Move(lambda xp, x: xp.stack([x, x * 3], -1)),
    "concatenate rows": Move(lambda xp, x: xp.concatenate([x, x * 3], 0)),
    "concatenate columns": Move(lambda xp, x: xp.concatenate([x, x[..., :1] * 3, x], -1)),
    "concatenate with nothing": Move(lambda xp, x: xp.concatenate([x, x[..., :0], x * 3], -1)),
    "rotate by half": Move(_halves, _even),
    "pad columns": _padding((1, 2, 0)),
    "pad to twice": Move(lambda xp, x: xp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1])])),
    "pad rows": _padding((2, 1, 0), first=True),
    "pad negative": _padding((-1, 0, 0)),
    "pad negative and positive": _padding((-1, 2, 0)),
    "pad nothing": _padding((0, 0, 0)),
    "pad interior": _padding((0, 0, 1)),
    "pad interior and edges": _padding((0, 1, 1)),
    "pad interior of rows": _padding((1, 1, 2), first=True),
    "pad interior and negative": _padding((-1, -1, 2)),
    "rev columns": Move(lambda xp, x: xp.flip(x, -1)),
    "rev rows": Move(lambda xp, x: xp.flip(x, 0), _rank(2)),
    "rev all": Move(lambda xp, x: xp.flip(x)),
    "roll columns": Move(lambda xp, x: xp.roll(x, 1, -1)),
    "roll rows": Move(lambda xp, x: xp.roll(x, -2, 0), _rank(2)),
    "roll flat": Move(lambda xp, x: xp.roll(x, 3), _rank(2)),
    "tile": Move(lambda xp, x: xp.tile(x, (2,) * x.ndim)),
    "tile columns": Move(lambda xp, x: xp.tile(x, (1,) * (x.ndim - 1) + (3,))),
    "repeat": Move(lambda xp, x: xp.repeat(x, 2, -1)),
    "gather one a row": Move(_one_a_row, lambda s: len(s) > 1 and 0 not in s),
    "gather one a column": Move(_one_a_column, lambda s: len(s) > 1 and 0 not in s),
    "gather rows": Move(lambda xp, x: x[np.asarray([0, -1, 0])], lambda s: s[0] > 0),
    "scatter-add one a row": Move(_add_one_a_row, lambda s: len(s) == 2 and 0 not in s),
    "scatter a row": Move(_set_row, lambda s: len(s) > 1 and 0 not in s),
    "diagonal": Move(lambda xp, x: xp.diagonal(x), _of(2)),
    "rot90": Move(lambda xp, x: xp.rot90(x), _rank(2)),
    "triangle": Move(_triangle, _rank(2)),
    "iota": Move(lambda xp, x: x - xp.arange(x.shape[-1]).astype(x.dtype)),
    "bitcast_convert_type": Move(_bits),
    "copy": Move(lambda xp, x: xp.copy(x)),
    "sum with transpose": Move(lambda xp, x: x + 3 * xp.swapaxes(x, -1, -2),
                               lambda s: len(s) > 1 and s[-1] == s[-2]),
}  # fmt: skip

AROUND = ("alone", "between", *(f"sum of dimension {d}" for d in range(4)))
"""What stands around a move: nothing, an elementwise operation on each side, or also a reduction along
one dimension of its result."""


@dataclass(frozen=True, slots=True)
class Case:
    """A move, of an array of some shape, with what stands around it, on one backend."""

    move: str
    shape: Shape
    around: str
    backend: str

    def __str__(self) -> str:
        return f"{self.move} of {list(self.shape)}, {self.around}, {self.backend}"

    def argument(self, dtype: str = "float32") -> np.ndarray:
        rng = np.random.default_rng(list(self.shape))
        return -rng.integers(2, 60, self.shape).astype(dtype)

    def f(self, xp: Any, x: Any) -> list[Any]:
        """The function, of NumPy or JAX."""
        move = MOVES[self.move]
        moves = move.reference if xp is np and move.reference is not None else move.f
        if self.around == "alone":
            return _several(moves(xp, x))
        # The padding of a block, zeros when it is loaded, is -1 then: more than any element.
        results = [y * 2 for y in _several(moves(xp, x - 1))]
        if self.around == "between":
            return results
        d = int(self.around[-1])
        made = []
        for y in results:
            if d < y.ndim:
                made.append(y.sum(d))
                made += [y.max(d)] if y.shape[d] else []
        return made

    def expected(self) -> list[np.ndarray]:
        return [np.asarray(y).astype("float32") for y in self.f(np, self.argument("float64"))]


def _several(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def every_case() -> Iterator[Case]:
    """The whole product."""
    shapes = [shape for several in SIZES.values() for shape in several]
    for (name, move), shape in itertools.product(MOVES.items(), shapes):
        if not move.applies(shape):
            continue
        for around in AROUND:
            case = Case(name, shape, around, "")
            if around == "alone" or case.f(np, case.argument()):
                yield from (Case(name, shape, around, backend) for backend in DEVICES)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case was run: ``planned`` counts the kernels of its plan, ``forced`` those of all its
    operations, each in one tiling; ``refused`` says why there is none of these."""

    planned: int
    forced: int
    refused: str


def run(case: Case) -> Outcome:
    """Run a case in every way; raises ``AssertionError`` where a result is not exact."""
    x = case.argument()
    traced = trace(lambda x: case.f(jnp, x), x)
    lowered = lower(traced)
    specs, refused = _forced(lowered, case.backend)
    ways = {f"tiles {[axis.tile for axis in spec.axes]}": spec for spec in specs}
    functions: dict[str, Callable[..., Any]] = {
        way: function_of(spec, lowered, interpret=case.backend != "loops") for way, spec in ways.items()
    }
    planned = 0
    if case.backend != "loops":
        options = make_options(get_device(DEVICES[case.backend]), "solver")
        rewritten, plan = plan_traced(traced, options)
        planned = sum(k.spec.backend != "xla" for k in plan.kernels)
        is_forced = rewritten.graph == lowered.graph and all(k.spec in specs for k in plan.kernels)
        if planned and not is_forced:
            functions["as planned"] = make_runner(rewritten, plan, platform="cpu", interpret=True)
            assert len(rewritten.consts) == len(lowered.consts)
    if functions:
        expected = case.expected()
        flat = [*lowered.consts, x]
        results = run_quickly(lambda *flat: [f(*flat) for f in functions.values()], *flat)
        for way, got in zip(functions, results, strict=True):
            _compare(got, expected, f"{case}, {way}")
    return Outcome(planned, len(specs), refused)


def _compare(got: Sequence[Any], expected: Sequence[np.ndarray], what: str) -> None:
    assert len(got) == len(expected), what
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x), y, err_msg=what, strict=True)


def _forced(lowered: Lowered, backend: str) -> tuple[list[KernelSpec], str]:
    """Kernels of all operations: the first and the last tiling, or why there is none."""
    graph = lowered.graph
    nodes = tuple(range(len(graph.nodes)))
    if not nodes:
        return [], "it has no operations"
    if any(0 in value.shape for value in graph.values):
        return [], "an array is empty"
    if backend == "loops":
        axes_of: Any = Unifier(graph)
        refused = refuse_nest(graph, backend, nodes, axes_of)
        specs = [] if refused else list(every_nest(lowered, nodes, _ragged(axes_of(nodes).sizes)))
    else:
        scheduler = Scheduler(graph, get_device(DEVICES[backend]), lowered)
        edge = boundary(graph, nodes)
        refused = (
            refuse_nest(graph, backend, nodes, scheduler.axes)
            or scheduler.compatible(nodes)
            or refuse_exchange(graph, backend, nodes, edge)
        )
        specs = [] if refused else list(scheduler.schedules(nodes))
    if not specs:
        return [], str(refused or "no tile fits or can be addressed")
    return [specs[0], *specs[-1:]] if len(specs) > 1 else specs, ""


def _ragged(sizes: Sequence[int]) -> dict[int, int]:
    """Tiles of axes of these sizes that do not divide them, where any does."""
    return {n: next((t for t in range(n // 2 + 1, 1, -1) if n % t), 1) for n in sizes if n > 1}


def covering() -> Iterator[Case]:
    """A part of the product: each move with each class of sizes, with each backend and with what may stand
    around it in turn."""
    backends, turn = tuple(DEVICES), 0
    for i, (name, move) in enumerate(MOVES.items()):
        for k, shapes in enumerate(SIZES.values()):
            applicable = [shape for shape in shapes if move.applies(shape)]
            if not applicable:
                continue
            turn += 1
            shape = applicable[turn % len(applicable)]
            cases = [Case(name, shape, around, backends[(i + k) % len(backends)]) for around in AROUND]
            cases = [c for c in cases if c.around == "alone" or c.f(np, c.argument())]
            yield cases[(i // len(backends) + turn) % len(cases)]
            if shapes is SIZES["even"] and cases[0].backend != "mosaic_gpu":
                # A warpgroup holds few blocks of other sizes.
                yield Case(name, shape, AROUND[1], "mosaic_gpu")


def is_one_kernel(name: str, backend: str) -> bool:
    """Whether all operations of a move between two others, of some shape, are one kernel."""
    shapes = [shape for several in SIZES.values() for shape in several if 0 not in shape]
    for shape in sorted(shapes, key=lambda shape: (shape not in SIZES["even"], len(shape))):
        if not MOVES[name].applies(shape):
            continue
        case = Case(name, shape, "between", backend)
        lowered = lower(trace(lambda x, case=case: case.f(jnp, x), case.argument()))
        if _forced(lowered, backend)[0]:
            return True
    return False


def main(argv: Sequence[str]) -> int:
    """Run the product, or the part that the words in ``argv`` select."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.helpers.moves", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", default="", help="cases whose text contains this")
    parser.add_argument("--part", default="1/1", help="such as 2/5: the second of five equal parts")
    parser.add_argument("--covering", action="store_true", help="the part that CI runs")
    options = parser.parse_args(argv)
    cases = [c for c in (covering() if options.covering else every_case()) if options.only in str(c)]
    part, parts = map(int, options.part.split("/"))
    cases = cases[part - 1 :: parts]
    start, failures = time.process_time(), []
    kernels: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for i, case in enumerate(cases):
        try:
            outcome = run(case)
        except Exception as error:
            failures.append(case)
            said = [line for line in str(error).splitlines() if line.strip()]
            print(f"FAILED {case}: {type(error).__name__}: {' '.join(said[:4])[:300]}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-4)
            continue
        kernels[f"{case.backend} planned"] += bool(outcome.planned)
        kernels[f"{case.backend} forced"] += bool(outcome.forced)
        kernels[f"{case.backend} cases"] += 1
        if not outcome.forced:
            reasons[
                f"{case.backend}: {outcome.refused.split(':')[0]}: {case.move}: {outcome.refused[:150]}"
            ] += 1
        if i % 500 == 499:
            print(f"{i + 1} of {len(cases)}, {time.process_time() - start:.0f} s", flush=True)
    for reason, count in sorted(reasons.items()):
        print(f"{count:5d} {reason}")
    print(dict(sorted(kernels.items())))
    print(f"{len(cases)} cases, {len(failures)} failures, {time.process_time() - start:.0f} s of CPU")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
