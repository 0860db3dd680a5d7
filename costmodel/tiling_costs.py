"""Price many tilings of one kernel at once (``tiling_costs``).

The model is that of ``costmodel.roofline.estimate`` and ``costmodel.traffic``: a row of an array here is what
one spec is there, and both give the same integers. Tiles and footprints are 64-bit integers. Products with
picoseconds exceed 64 bits, so these arrays hold Python's integers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from costmodel.axes import NodeAxes
from costmodel.device import DeviceSpec, time_ps
from costmodel.graph import Graph
from costmodel.kernel import Access, AxisRole, KernelSpec, looked_up, pass_count, reading_passes
from costmodel.memory import SUBLANES, array_bytes_if
from costmodel.onchip import MOST_TILES_PER_CORE, KernelFootprint
from costmodel.roofline import Work

Counts = npt.NDArray[np.int64]
Integers: TypeAlias = Any
"""Arrays of Python's integers, of which NumPy's types know nothing."""


@dataclass(frozen=True, slots=True)
class TilingCosts:
    """The costs of the tilings that fit on chip; an element of each array belongs to one tiling."""

    rows: list[int]
    """The rows of the tilings, ascending."""
    time_ps: list[int]
    hbm_bytes: list[int]
    onchip_bytes: list[int]


def tiling_costs(
    graph: Graph,
    spec: KernelSpec,
    device: DeviceSpec,
    tiles: Counts,
    need: KernelFootprint,
    work: Work,
) -> TilingCosts:
    """What ``estimate`` says of ``spec`` with each row of ``tiles``, a tile for each of its axes, that fits.

    ``spec`` is a tiled kernel of a GPU or TPU, but no nest that leaves out tiles; ``need`` is its footprint
    and ``work`` its work. Neither depends on its own tiles.
    """
    onchip, registers = need.of_tilings(tiles)
    fits = onchip <= device.onchip_bytes
    if device.register_bytes:
        fits &= registers <= device.register_bytes // 2
    rows = np.flatnonzero(fits)
    if not len(rows):
        return TilingCosts([], [], [], [])
    tiles, onchip, registers = tiles[rows], onchip[rows], registers[rows]
    kernel = _Tilings(graph, spec, device, tiles)
    return TilingCosts(
        rows.tolist(),
        kernel.times_ps(_resident(device, onchip, registers), work).tolist(),
        kernel.hbm_bytes.tolist(),
        onchip.tolist(),
    )


def _resident(device: DeviceSpec, onchip: Counts, registers: Counts) -> Integers:
    """As ``concurrent_tiles``: tiles that share one core at a time."""
    limit = np.full(len(onchip), MOST_TILES_PER_CORE, dtype=np.int64)
    for capacity, occupied in ((device.onchip_bytes, onchip), (device.register_bytes, registers)):
        if capacity:
            held = np.where(occupied > 0, capacity // np.maximum(occupied, 1), limit)
            limit = np.minimum(limit, held)
    return np.maximum(limit, 1).astype(object)


class _Tilings:
    """The traffic and the time of a kernel with each of many tilings."""

    def __init__(self, graph: Graph, spec: KernelSpec, device: DeviceSpec, tiles: Counts) -> None:
        self._spec, self._device, self._graph = spec, device, graph
        self._tiles = tiles
        self._roles = [axis.role for axis in spec.axes]
        self._sizes = [axis.size for axis in spec.axes]
        self._n_tiles = (-(-np.array(self._sizes, dtype=np.int64) // tiles)).astype(object)
        self._ones = np.ones(len(tiles), dtype=object)
        self.hbm_bytes, self._loaded_bytes = self._moved()

    def times_ps(self, resident: Integers, work: Work) -> Integers:
        """The time of each tiling, with ``resident`` tiles at once on a core."""
        spec, device = self._spec, self._device
        vector, transcendental, matrix_ps = self._executed(work)
        memory_ps = time_ps(self.hbm_bytes, device.hbm_bytes_per_s)
        cache_ps = time_ps(self._loaded_bytes, device.cache_bytes_per_s)
        vector_ps = time_ps(vector, device.vector_flops_per_s) + 0 * self._ones
        transcendental_ps = time_ps(transcendental, device.transcendental_per_s)
        tiles = self._product(a for a, role in enumerate(self._roles) if role == AxisRole.PARALLEL)
        steps = self._ones if spec.streamed is None else self._n_tiles[:, spec.streamed]
        cores = device.core_count
        waves = -(-tiles // cores)
        matrix_ps, vector_ps, transcendental_ps = (
            -(-ps * waves * cores // tiles) for ps in (matrix_ps, vector_ps, transcendental_ps)
        )
        busy = np.minimum(tiles, cores)
        cache_ps = -(-cache_ps * cores // busy)
        step_ps = latency_ps = 0 * self._ones
        if device.sequential_grid:
            memory_ps = -(-memory_ps * cores // busy)
            step_ps = waves * steps * pass_count(spec) * device.grid_step_ps
        else:
            rounds = pass_count(spec) * -(-tiles // (cores * resident))
            latency_ps = rounds * np.maximum(steps // 2, 1) * device.hbm_latency_ps
        slowest = memory_ps
        for part in (latency_ps, cache_ps, matrix_ps, vector_ps + transcendental_ps + step_ps):
            slowest = np.maximum(slowest, part)
        return device.launch_ps + slowest

    def _product(self, axes: Iterable[int]) -> Integers:
        """The number of tiles of ``axes`` together."""
        found = self._ones
        for a in axes:
            found = found * self._n_tiles[:, a]
        return found

    def _moved(self) -> tuple[Integers, Integers]:
        """Bytes of HBM, and bytes that all tiles load (``costmodel.traffic.bytes_moved``)."""
        spec, device = self._spec, self._device
        written = {access.value: self._array_bytes(access) for access in spec.writes}
        hbm = sum(written.values(), 0 * self._ones)
        loaded = 0 * self._ones
        fetched: dict[int, Integers] = {}
        passes_of = reading_passes(self._graph, spec) if spec.passes else {}
        results_of = looked_up(self._graph, spec)
        for access in spec.reads:
            nbytes = self._array_bytes(access)
            if access in results_of:
                results = [(result, self._array_bytes(result)) for result in results_of[access]]
                touched = np.minimum(nbytes, sum(size for _, size in results))
                times = 0 * self._ones
                for result, size in results:
                    n_passes = len(passes_of.get(access, ())) or 1
                    loads, fetches = self._read_counts(result, touched, n_passes)
                    loaded = loaded + np.minimum(nbytes, size) * loads
                    times = np.maximum(times, fetches)
                again = fetched.get(access.value, np.zeros(len(times), dtype=bool))
                hbm = hbm + np.where(again, 0, touched * times)
                continue
            loads, fetches = self._read_counts(access, nbytes, len(passes_of.get(access, ())) or 1)
            loaded = loaded + nbytes * loads
            in_cache = nbytes <= device.cache_bytes
            again = in_cache & fetched.get(access.value, np.zeros(len(in_cache), dtype=bool))
            hbm = hbm + np.where(again, 0, nbytes * fetches)
            fetched[access.value] = in_cache | again
        return hbm, loaded

    def _array_bytes(self, access: Access) -> Integers:
        """The bytes of an array, padded as a TPU has it with each tiling."""
        value = self._graph.values[access.value]
        if not self._device.sequential_grid:
            return value.nbytes * self._ones
        if len(access.axes) < 2:
            return array_bytes_if(value, lifted=False) * self._ones
        rows = self._tiles[:, list(access.axes[-2])].prod(axis=1)
        extent = prod([self._sizes[a] for a in access.axes[-2]])
        lifted = (rows % SUBLANES != 0) & (rows != extent)
        both = [array_bytes_if(value, lifted=which) for which in (False, True)]
        return np.array(both, dtype=object)[lifted.astype(np.int64)]

    def _read_counts(self, access: Access, nbytes: Integers, n_passes: int) -> tuple[Integers, Integers]:
        """As ``costmodel.traffic.read_counts``."""
        device, spec = self._device, self._spec
        indexed = access.axis_set
        if device.sequential_grid:
            loads = pending = self._ones
            for i, role in enumerate(self._roles):
                if role.is_whole:
                    continue
                n = self._n_tiles[:, i]
                if i in indexed:
                    again = n_passes if role == AxisRole.STREAMED else 1
                    loads = np.where(n > 1, loads * pending * again, loads)
                    pending = np.where(n > 1, 1, pending)
                else:
                    pending = pending * n
            return loads, loads
        streamed = spec.streamed
        loads = fetches = self._ones * (n_passes if streamed in indexed else 1)
        is_inner = any(self._roles[a] == AxisRole.INNER for a in indexed)
        if streamed is not None and streamed not in indexed and is_inner:
            loads = loads * n_passes * self._n_tiles[:, streamed]
        concurrent = device.core_count * self._ones
        for i in reversed(range(len(self._roles))):
            if self._roles[i] != AxisRole.PARALLEL:
                continue
            n = self._n_tiles[:, i]
            together = np.maximum(np.minimum(n, concurrent), 1)
            if i not in indexed:
                loads = loads * n
                fetches = fetches * -(-n // together)
            concurrent = np.maximum(concurrent // together, 1)
        return loads, np.where(nbytes <= device.cache_bytes, 1, fetches)

    def _executed(self, work: Work) -> tuple[Integers, Integers, Integers]:
        """Vector and transcendental operations, and the matrix units' time."""
        spec, device = self._spec, self._device
        vector = transcendental = matrix_ps = 0 * self._ones
        for own, rerun, flops in work.terms:
            times, per = self._repeats(own)
            if rerun and device.sequential_grid:
                times = times * self._n_tiles[:, spec.streamed or 0] * pass_count(spec)
            vector = vector + -(-flops.vector * times // per)
            transcendental = transcendental + -(-flops.transcendental * times // per)
        for own, product, dtype in work.products:
            times, per = self._repeats(own)
            done = -(-product * times // per)
            matrix_ps = matrix_ps + time_ps(done, device.matrix_rate(dtype))
        return vector, transcendental, matrix_ps

    def _repeats(self, own: NodeAxes) -> tuple[Integers, int]:
        """As ``costmodel.roofline.repeat_factor``, with one denominator."""
        carried = {a for axes in own for a in axes}
        times, per = self._ones, 1
        for a, (size, role) in enumerate(zip(self._sizes, self._roles, strict=True)):
            if a in carried:
                times = times * (self._n_tiles[:, a] * self._tiles[:, a])
                per *= size
            elif role == AxisRole.PARALLEL:
                times = times * self._n_tiles[:, a]
        return times, per
