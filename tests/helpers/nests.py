"""Loop nests with tiles chosen by hand: small and ragged ones, in every loop order, so that the
emitter is tested on more than the schedule would offer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from costmodel.axes import Conflict, unify
from costmodel.graph import boundary
from costmodel.kernel import AxisRole, KernelSpec
from fuseplan.codegen import emit
from fuseplan.codegen.single_pass import live_ins
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.trace import Literal, run_equations, trace
from fuseplan.schedule.layout import SpecMaker, free_axes, group_layout
from fuseplan.schedule.nests.multipass import program_of
from fuseplan.schedule.nests.regions import can_nest, regions
from fuseplan.schedule.tilings import addressing
from tests.helpers.quickly import run_quickly

P, S, R = AxisRole.PARALLEL, AxisRole.STREAMED, AxisRole.RESIDENT
LARGE_BYTES = 512


def groups(lowered: Lowered) -> list[tuple[int, ...]]:
    """All nodes together where they have a nest; else the regions."""
    graph = lowered.graph
    nodes = tuple(range(len(graph.nodes)))
    if all(map(can_nest, graph.nodes)) and not isinstance(unify(graph, nodes), Conflict):
        return [nodes]
    found = regions(graph, LARGE_BYTES)
    return [nodes for nodes in found if not isinstance(unify(graph, nodes), Conflict)]


def every_nest(lowered: Lowered, nodes: tuple[int, ...], tiles: Mapping[int, int]) -> Iterator[KernelSpec]:
    """Every nest of a group that cuts some of the axes whose sizes are among ``tiles``."""
    graph = lowered.graph
    axes = unify(graph, nodes)
    assert not isinstance(axes, Conflict), axes.reason
    layout = group_layout(graph, nodes, axes, boundary(graph, nodes))
    cuttable = [a for a, n in enumerate(axes.sizes) if n in tiles and not axes.whole[a]]
    free = free_axes(layout, axes).intersection(cuttable)
    for k in range(1, len(cuttable) + 1):
        for cut in itertools.combinations(cuttable, k):
            roles = tuple((P if a in free else S) if a in cut else R for a in range(len(axes.sizes)))
            sizes = tuple(tiles[n] if a in cut else n for a, n in enumerate(axes.sizes))
            if not addressing(layout, "loops")(sizes):
                continue
            for stream in [a for a in cut if a not in free] or [None]:
                for keeps in (False, True):
                    spec = SpecMaker(nodes, axes, layout, roles, "loops", stream, keeps)(sizes)
                    program = program_of(graph, spec)
                    if program is not None and (not keeps or any(p.kept for p in program.passes)):
                        yield spec


def describe(spec: KernelSpec, lowered: Lowered) -> str:
    """The loops of a nest, outermost first, and how many passes it has."""
    program = program_of(lowered.graph, spec)
    assert program is not None
    loops = [f"{a.role.name[0]}{a.size}/{a.tile}" for a in spec.axes if a.role != R]
    kept = sum(len(p.kept) for p in program.passes)
    return f"{' '.join(loops)}, {len(program.passes)} passes, {len(spec.nodes)} nodes, {kept} kept"


def function_of(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable[..., list[Any]]:
    """The whole function, with the group as a nest or another kernel, of its constants and flat arguments."""
    kernel, inside = emit(spec, lowered, interpret=interpret), set(spec.nodes)
    graph = lowered.graph

    def run(*arrays: Any) -> list[Any]:
        values: dict[int, Any] = dict(zip(graph.inputs, arrays, strict=True))
        waiting = [n for n in range(len(graph.nodes)) if n not in inside]

        def evaluate() -> None:
            for n in list(waiting):
                if all(v in values for v in graph.nodes[n].inputs):
                    run_equations([lowered.equations[n]], values)
                    waiting.remove(n)

        evaluate()
        results = kernel(*(values[v] for v in live_ins(spec)))
        values.update(zip((w.value for w in spec.writes), results, strict=True))
        evaluate()
        assert not waiting
        return [v.val if isinstance(v, Literal) else values[v] for v in lowered.outputs]

    return run


def specs_of(
    f: Callable[..., Any], args: tuple[Any, ...], tiles: Mapping[int, int]
) -> tuple[Lowered, list[KernelSpec]]:
    lowered = lower(trace(f, *args))
    return lowered, [spec for nodes in groups(lowered) for spec in every_nest(lowered, nodes, tiles)]


def assert_agrees(
    f: Callable[..., Any],
    *args: Any,
    tiles: Mapping[int, int],
    rtol: float = 1e-9,
    atol: float = 1e-11,
    least: int = 1,
) -> tuple[Lowered, list[KernelSpec]]:
    """Every nest of ``f``, of which there are ``least``, gives what ``jax.jit(f)`` gives."""
    lowered, specs = specs_of(f, args, tiles)
    assert len(specs) >= least, f"{len(specs)} nests"
    expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(f)(*args))]
    flat = [*lowered.consts, *jax.tree.leaves(args)]
    for spec in specs:
        got = run_quickly(function_of(spec, lowered), *flat)
        for x, y in zip(got, expected, strict=True):
            assert_close(np.asarray(x), y, rtol, atol, describe(spec, lowered))
    return lowered, specs


def assert_close(x: np.ndarray, y: np.ndarray, rtol: float, atol: float, what: str) -> None:
    """Exactly for integers and booleans; atol is relative to the largest number."""
    assert (x.shape, x.dtype) == (y.shape, y.dtype), what
    if y.dtype.kind not in "f" and str(y.dtype) != "bfloat16":
        np.testing.assert_array_equal(x, y, what)
        return
    x, y = x.astype(np.float64), y.astype(np.float64)
    finite = abs(y[np.isfinite(y)])
    np.testing.assert_allclose(x, y, rtol, atol * max(finite.max(initial=0), 1e-3), err_msg=what)
