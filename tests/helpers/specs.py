"""Kernel specs with tiles chosen by hand, so that emitters are tested on every shape of
tile and not only on those that a schedule prefers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from costmodel.axes import Conflict, unify
from costmodel.backends import backend_of
from costmodel.graph import boundary
from costmodel.kernel import AxisRole, KernelSpec
from fuseplan.codegen import emit
from fuseplan.codegen.single_pass import live_ins
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule.layout import SpecMaker, group_layout, repeats
from fuseplan.schedule.nests.multipass import passes_of

P, S, R = AxisRole.PARALLEL, AxisRole.STREAMED, AxisRole.RESIDENT


@dataclass(frozen=True, slots=True)
class Tiled:
    """Tile one axis: that of dimension ``dim`` of argument or result ``of``, counted from
    the function's first argument (0, 1, …) or last result (-1, …); ``part`` picks among
    the axes that the dimension merges, major first."""

    of: int
    dim: int
    role: AxisRole
    tile: int
    part: int = 0


def whole_group(f: Callable[..., Any], *args: Any) -> Lowered:
    """``f`` lowered at the shapes of ``args``, to become one kernel."""
    return lower(trace(f, *args))


def hand_spec(lowered: Lowered, backend: str, *tiled: Tiled) -> KernelSpec:
    """All nodes in one kernel: axes named in ``tiled`` as they say, the others resident. A stream
    that one pass over it does not suffice for, or that is written to, is walked in passes."""
    graph = lowered.graph
    nodes = tuple(range(len(graph.nodes)))
    axes = unify(graph, nodes, backend_of(backend).loads_by_index)
    assert not isinstance(axes, Conflict), axes.reason
    layout = group_layout(graph, nodes, axes, boundary(graph, nodes))
    roles = [R] * len(axes.sizes)
    tiles = [_whole(n, backend) for n in axes.sizes]
    for t in tiled:
        value = graph.inputs[t.of] if t.of >= 0 else graph.outputs[t.of]
        access = next(a for a in layout.reads + layout.writes if a.value == value)
        axis = access.axes[t.dim][t.part]
        roles[axis], tiles[axis] = t.role, t.tile
    make_spec = SpecMaker(nodes, axes, layout, tuple(roles), backend)
    if S in roles and layout.contraction is None:
        stream = roles.index(S)
        if any(stream in w.axis_set for w in layout.writes) or stream in repeats(graph, nodes, axes):
            make_spec.passes = passes_of(graph, make_spec(tuple(tiles)))
    return make_spec(tuple(tiles))


def _whole(size: int, backend: str) -> int:
    return 1 << (size - 1).bit_length() if backend == "triton" else size


def kernel_function(spec: KernelSpec, lowered: Lowered, *, interpret: bool) -> Callable[..., Any]:
    """The kernel as a function of the original function's arguments."""
    kernel = emit(spec, lowered, interpret=interpret)
    order = {v: i for i, v in enumerate(lowered.graph.inputs)}
    written = {w.value: i for i, w in enumerate(spec.writes)}
    n_consts = len(lowered.consts)

    def run(*args: Any) -> tuple[Any, ...]:
        arrays = (*lowered.consts, *args)
        assert len(arrays) == len(order), f"{n_consts} constants and {len(args)} arguments"
        results = kernel(*(arrays[order[v]] for v in live_ins(spec)))
        return tuple(results[written[v]] for v in lowered.graph.outputs)

    return run
