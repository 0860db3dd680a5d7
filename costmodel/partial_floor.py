"""Lower bounds on a kernel of which only some members are known (``PartialFloor``), for many at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from costmodel.axes import made_map
from costmodel.device import PS_PER_S
from costmodel.floor import Floor
from costmodel.graph import DimRole, OpKind
from costmodel.parallelism import Parallelism
from costmodel.set_tables import Figures, Sets, UnionTable, sets_of, total

_QUOTIENT = 1 - 1e-12
"""A quotient of figures, times this, is no more than the exact one."""


@dataclass(frozen=True, slots=True)
class Additive:
    """A lower bound on the kernels of many partial groups that grows with each position that joins."""

    known_ps: Figures
    """For each partial group, picoseconds of the launch and of what is known."""
    added_ps: Figures
    """For each partial group and position, picoseconds that the position adds at least if it joins, whichever
    others join with it. Nothing is said of known positions."""


@dataclass(frozen=True, slots=True)
class PartialBounds:
    """Lower bounds in picoseconds on the kernels of many partial groups."""

    floor_ps: Figures
    additive: tuple[Additive, ...]
    """By resource: what passes the memory, what the vector units execute, what passes the shared cache."""


class PartialFloor:
    """Bounds every kernel that holds all of one set of positions, and others of a larger set at most.

    The terms are those of ``Floor.one_kernel``; each counts what is certain of all these kernels. An array is
    read if a known member reads it and no possible member makes it. It is written if a known member makes it,
    and a reader of it cannot join. All known members execute their flops. If both sets are equal, the bound
    is no less than ``Floor.one_kernel``, but for a picosecond or two of rounding.

    On a GPU it also counts idle cores (``Parallelism``). A kernel of t tiles keeps min(t, cores) of them
    busy. A member runs once more for each tile of an axis that it does not have, so it takes at least as long
    as if it alone kept the others idle: cores / min(T, cores) times as long as on all cores, with T tiles
    along its own axes. The same holds of what its tiles load through the shared cache.

    Of copies of an operation one is executed and one result written, as in ``Floor``.

    Args:
        floor: of the whole graph.
        members: the nodes at each position.
    """

    def __init__(self, floor: Floor, members: Sequence[Sequence[int]]) -> None:
        self._floor, self._device = floor, floor.device
        self._position = {m: i for i, nodes in enumerate(members) for m in nodes}
        working = [[m for m in nodes if floor.reads[m] or floor.writes[m]] for nodes in members]
        touched = {v for nodes in working for m in nodes for v in (*floor.reads[m], *floor.made[m])}
        self._column = {v: k for k, v in enumerate(sorted(touched))}
        read, self._made = (
            sets_of([[self._column[v] for m in nodes for v in of[m]] for nodes in working], len(touched))
            for of in (floor.reads, floor.made)
        )
        self._read_by, self._made_by = UnionTable(read), UnionTable(self._made)
        self._read_bytes = self._bytes(floor.read_bytes)
        self._kernel_bytes = self._bytes(floor.kernel_read_bytes)
        written = [(v, i) for i, nodes in enumerate(working) for m in nodes for v in floor.writes[m]]
        written.sort(key=lambda item: floor.name[item[0]])
        self._maker = np.array([i for _, i in written], dtype=np.intp)
        readers = [[self._position.get(r, -1) for r in floor.readers[v]] for v, _ in written]
        self._leaves = np.array([-1 in of for of in readers], dtype=bool)
        """Whether a node outside, or the caller, reads the result."""
        self._readers = UnionTable(sets_of([[i for i in of if i >= 0] for of in readers], len(members)).T)
        names, self._first_copy_written = _runs([floor.name[v] for v, _ in written])
        self._write_bytes = np.array([floor.nbytes[v] for v in names], dtype=np.float64)
        self._tiled_write_bytes = np.array([floor.kernel_bytes[v] for v in names], dtype=np.float64)
        makers_of = [floor.graph.nodes[floor.graph.values[v].producer] for v in names]
        self._own_launch = np.array(
            [floor.has_own_kernel[m.id] and v == m.outputs[0] for v, m in zip(names, makers_of, strict=True)],
            dtype=np.float64,
        )
        """For each array that is written, 1 if another kernel is launched for it than for all others."""
        each = [(i, m) for i, nodes in enumerate(working) for m in nodes]
        each.sort(key=lambda item: floor.origins[item[1]])
        self._worker = np.array([i for i, _ in each], dtype=np.intp)
        operations, self._first_copy = _runs([floor.origins[m] for _, m in each])
        self._work = np.array([floor.work[m] for m in operations], dtype=np.float64)
        self._work = self._work.reshape(len(operations), 3)
        self.executes = np.array([bool(nodes) for nodes in working], dtype=bool)
        """For each position, whether a kernel that holds it executes an operation of it."""
        self._of_arrays = np.array([not floor.of_arrays.isdisjoint(nodes) for nodes in members], dtype=bool)
        self._prepare_added(working, written, each)
        graph, can = floor.graph, floor.device.capabilities
        makers = [(graph.nodes[graph.values[v].producer], v) for v, _ in written]
        maps = [(node.id, made_map(node, v)) for node, v in makers]
        p = Parallelism(graph, self._position, maps, can.least_dot_tile)
        self._parallelism = None
        if floor.is_tiled and not floor.device.sequential_grid:
            self._parallelism = p
            self._own = _Products([p.slots(m, range(len(graph.nodes[m].dims))) for _, m in each])
            loads = sorted(
                (self._column[u], i, tuple(p.slots(m, [d for dims in dim_map for d in dims])))
                for i, m in each
                for v, in_map in zip(graph.nodes[m].inputs, graph.nodes[m].input_maps, strict=True)
                for u in [floor.array_of[v]]
                # What is looked up is loaded as often as the result.
                for dim_map in [graph.nodes[m].output_maps[0] if graph.nodes[m].addresses(in_map) else in_map]
            )
            self._loaded, self._first_load = np.unique([k for k, _, _ in loads], return_index=True)
            self._loader = np.array([i for _, i, _ in loads], dtype=np.intp)
            self._indexed = _Products([slots for _, _, slots in loads])
            self._load_column = np.array([k for k, _, _ in loads], dtype=np.intp)
            # A position that reads an array in two ways is counted once.
            first_load = {(k, i): at for at, (k, i, _) in reversed(list(enumerate(loads)))}
            loads_of: list[list[int]] = [[] for _ in members]
            for (_, i), at in first_load.items():
                loads_of[i].append(at)
            self._loads_of = _Sums(loads_of)
        self._least_steps = []
        """By position of a contraction, the steps along the axis that is contracted."""
        for i, m in each if floor.is_tiled else ():
            node = graph.nodes[m]
            depth = [d for d, role in enumerate(node.roles) if role == DimRole.REDUCED]
            if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE and len(depth) == 1 and p.is_uniform(m, depth[0]):
                most = max(*can.depth_tiles, can.least_dot_tile)
                self._least_steps.append((i, -(-node.dims[depth[0]] // most)))
        self._contractions = [(i, m) for i, nodes in enumerate(working) for m in nodes if m in floor.loads]

    def __call__(self, known: Sets, possible: Sets) -> Figures:
        """Lower bounds in picoseconds: for each row, of every kernel that holds the positions in ``known``,
        and of the others only such as are in ``possible``, which holds ``known``."""
        return self._bounds(known, possible, None, is_additive=False).floor_ps

    def bounds(self, known: Sets, possible: Sets, several: Sets | None = None) -> PartialBounds:
        """The floor, and those of its terms that grow with each position that joins.

        Args:
            known: as for a call.
            possible: as for a call.
            several: the rows of which only kernels that execute two operations or more are bounded; None: all
                kernels of each row are.
        """
        return self._bounds(known, possible, several)

    def _bounds(
        self, known: Sets, possible: Sets, several: Sets | None, is_additive: bool = True
    ) -> PartialBounds:
        device, floor = self._device, self._floor
        read = self._read_by(known) & ~self._made_by(possible)
        written = known[:, self._maker] & (self._leaves | self._readers(~possible))
        executed = _largest_by_run(known[:, self._worker], self._first_copy).sum(axis=1)
        writes = _largest_by_run(written, self._first_copy_written)
        is_several = executed > 1 if several is None else (executed > 1) | several
        waits = is_several & known[:, self._of_arrays].any(axis=1)
        tiled = waits & floor.is_tiled
        moved = np.where(
            tiled,
            total(read, self._kernel_bytes) + total(writes, self._tiled_write_bytes),
            total(read, np.minimum(self._read_bytes, self._kernel_bytes))
            + total(writes, np.minimum(self._write_bytes, self._tiled_write_bytes)),
        )
        idle = self._idle(known, written, waits)
        work = _largest_by_run(known[:, self._worker] * (1.0 if idle is None else idle[0]), self._first_copy)
        matrix_ps, vector, transcendental = total(work, self._work).T
        compute_ps = _time_ps(vector, device.vector_flops_per_s)
        compute_ps = compute_ps + _time_ps(transcendental, device.transcendental_per_s)
        vector_ps = _rate_ps(vector, device.vector_flops_per_s)
        vector_ps = vector_ps + _rate_ps(transcendental, device.transcendental_per_s)
        memory_ps = _time_ps(moved, device.hbm_bytes_per_s)
        if device.sequential_grid:
            wait_ps = waits * self._steps(known) * floor.wait_ps
            compute_ps, vector_ps = compute_ps + wait_ps, vector_ps + wait_ps
        else:
            memory_ps = np.maximum(memory_ps, waits * np.maximum(self._steps(known) // 2, 1) * floor.wait_ps)
        least_bytes = np.where(tiled[:, None], self._kernel_bytes, self._read_bytes)
        loaded = read * least_bytes
        if idle is not None:
            loaded = loaded * self._idlest_loads(idle[1], known)
        loaded = loaded.sum(axis=1)
        loads = np.maximum(self._loads(known, possible, read * least_bytes, is_several), loaded)
        slowest = np.maximum(memory_ps, _time_ps(loads, device.cache_bytes_per_s))
        slowest = np.maximum(np.maximum(slowest, matrix_ps), compute_ps)
        is_kernel = executed > 0 if several is None else (executed > 0) | several
        launch_ps = device.launch_ps * np.maximum(total(writes, self._own_launch), 1)
        floor_ps = np.where(is_kernel, launch_ps + slowest, 0)
        if not is_additive:
            return PartialBounds(floor_ps, ())
        known_ps = [_rate_ps(moved, device.hbm_bytes_per_s), vector_ps]
        if idle is not None:
            known_ps.append(_rate_ps(loaded, device.cache_bytes_per_s))
        added_ps = self._added(known, possible, tiled, idle)
        additive = [
            Additive(np.where(is_kernel, launch_ps + ps, 0), added)
            for ps, added in zip(known_ps, added_ps, strict=True)
        ]
        return PartialBounds(floor_ps, tuple(additive))

    def shares(self, groups: Sets) -> Figures:
        """For each group and position, picoseconds that the position adds by itself to the resource that the
        group's kernel needs longest; 0 for positions outside. A position that makes a result of the group,
        and adds most, has the launch, too: what a kernel writes says how many of its tiles run in parallel.
        """
        inside = self.bounds(groups, groups)
        written = groups[:, self._maker] & (self._leaves | self._readers(~groups))
        tiled = (groups.sum(axis=1) > 1) & self._floor.is_tiled
        added = self._added(np.zeros_like(groups), groups, tiled, self._idle(groups, written, tiled))
        known_ps = np.array([resource.known_ps for resource in inside.additive])
        slowest, every = known_ps.argmax(axis=0), np.arange(len(groups))
        shares: Figures = np.array(list(added))[slowest, every] * groups
        makes = np.zeros_like(groups)
        row, result = np.nonzero(written)
        makes[row, self._maker[result]] = True
        first = (shares + np.where(makes, known_ps[slowest, every][:, None], 0)).argmax(axis=1)
        shares[every, first] += np.maximum(known_ps[slowest, every] - shares.sum(axis=1), 0)
        return shares

    def _added(
        self, known: Sets, possible: Sets, tiled: Sets, idle: tuple[Figures, Figures] | None
    ) -> Iterator[Figures]:
        """``Additive.added_ps`` by resource: of the memory, the vector units, and, where cores may be idle,
        of the shared cache. ``tiled``: the rows of which all kernels have tiles.

        An array that no possible member makes, and no known one reads, is read if a reader joins; each of its
        readers accounts for an equal part. A result is written if it leaves the kernel for certain. An
        operation with copies adds only what it reads, as a known copy may have paid for the rest.
        """
        fresh = ~(self._read_by(known) | self._made_by(possible))
        moved = np.zeros(known.shape)
        nbytes = np.zeros(fresh.shape)
        if len(self._read_arrays):
            joining = (possible & ~known)[:, self._reader]
            readers = np.add.reduceat(joining, self._first_reader, axis=1, dtype=np.float64)
            least = np.where(tiled[:, None], self._kernel_bytes, self._bytes_passed)[:, self._read_arrays]
            nbytes[:, self._read_arrays] = least / np.maximum(readers, 1)
            nbytes *= fresh
            moved += self._reads(nbytes)
        if len(self._maker):
            least = np.where(tiled[:, None], self._own_tiled_write_bytes, self._own_write_bytes)
            moved += self._writes((self._leaves | self._readers(~possible)) * least)
        yield _rate_ps(moved, self._device.hbm_bytes_per_s)
        if idle is None:
            yield np.broadcast_to(self._computes(self._compute_ps[None]), known.shape)
            return
        of_work, of_loads = idle
        yield self._computes(of_work * self._compute_ps)
        loaded = self._loads_of(of_loads * nbytes[:, self._load_column])
        yield _rate_ps(loaded, self._device.cache_bytes_per_s)

    def idles(self, known: Sets, possible: Sets) -> Sets:
        """Whether each position leaves all cores but one idle if it joins: it has no axis along which a
        kernel that surely writes what ``known`` do runs in parallel, and itself surely writes a result."""
        if self._parallelism is None or not len(self._maker):
            return np.zeros_like(known)
        writes = self._leaves | self._readers(~possible)
        extents = self._parallelism.extents(known, known[:, self._maker] & writes)
        has_no_axis = self._computes((self._own(extents) > 1).astype(np.float64)) == 0
        found: Sets = has_no_axis & (self._writes(writes.astype(np.float64)) > 0)
        return found

    def stakes(self, known: Sets) -> Figures:
        """By how many picoseconds the memory time of each kernel depends at most on whether each other
        position joins it: the arrays that are passed between them. A row for each of ``known``."""
        passed = self._reads(self._made_by(known) * self._bytes_passed)
        passed += self._makes(self._read_by(known) * self._bytes_passed)
        return _rate_ps(passed, self._device.hbm_bytes_per_s)

    def _prepare_added(
        self,
        working: Sequence[Sequence[int]],
        written: Sequence[tuple[int, int]],
        each: Sequence[tuple[int, int]],
    ) -> None:
        """Prepare ``_added``; ``written``: the results, each with the position of its maker;
        ``each``: the operations, each with its position."""
        floor = self._floor
        copies = Counter(floor.origins[m] for nodes in working for m in nodes)
        reads = [sorted({self._column[v] for m in nodes for v in floor.reads[m]}) for nodes in working]
        pairs = sorted((column, i) for i, columns in enumerate(reads) for column in columns)
        self._reader = np.array([i for _, i in pairs], dtype=np.intp)
        self._read_arrays, self._first_reader = _runs([column for column, _ in pairs])
        self._reads = _Sums(reads)
        self._makes = _Sums([np.flatnonzero(made).tolist() for made in self._made])
        self._bytes_passed = np.minimum(self._read_bytes, self._kernel_bytes)
        # Of several copies, another may have paid.
        makers = [floor.graph.values[v].producer for v, _ in written]
        names = [
            floor.name[v] if copies[floor.origins[m]] == 1 else None
            for (v, _), m in zip(written, makers, strict=True)
        ]
        tiled = [0 if v is None else floor.kernel_bytes[v] for v in names]
        self._own_tiled_write_bytes = np.array(tiled, dtype=np.float64)
        untiled = [0 if v is None else min(floor.nbytes[v], floor.kernel_bytes[v]) for v in names]
        self._own_write_bytes = np.array(untiled, dtype=np.float64)
        device = self._device
        workers: list[list[int]] = [[] for _ in working]
        for k, (i, _) in enumerate(each):
            workers[i].append(k)
        self._computes = _Sums(workers)
        vector, transcendental = (
            np.array(
                [[floor.work[m][k] * (copies[floor.origins[m]] == 1) for k in (1, 2)] for _, m in each],
                dtype=np.float64,
            )
            .reshape(len(each), 2)
            .T
        )
        self._compute_ps = _rate_ps(vector, device.vector_flops_per_s)
        self._compute_ps += _rate_ps(transcendental, device.transcendental_per_s)
        self._writes = _Sums(
            [[k for k, (_, i) in enumerate(written) if i == of] for of in range(len(working))]
        )

    def _idle(self, known: Sets, written: Sets, tiled: Sets) -> tuple[Figures, Figures] | None:
        """How many times as long as on all cores it takes at least: for each row, to run each operation, and
        for each reader to load each array. None where no core is idle."""
        if self._parallelism is None:
            return None
        cores = self._device.core_count
        extents = self._parallelism.extents(known, written)
        of_work, of_loads = (
            np.where(tiled[:, None], np.maximum(cores * _QUOTIENT / products(extents), 1), 1)
            for products in (self._own, self._indexed)
        )
        return of_work, of_loads

    def _idlest_loads(self, of_loads: Figures, known: Sets) -> Figures:
        """For each row and array, the most of ``of_loads`` of its known readers."""
        found = np.ones((len(known), len(self._column)))
        if len(self._loaded):
            of_loads = np.where(known[:, self._loader], of_loads, 1)
            found[:, self._loaded] = np.maximum.reduceat(of_loads, self._first_load, axis=1)
        return found

    def _steps(self, known: Sets) -> Figures:
        """For each row, how many steps a tile takes at least: those along the axis that is contracted."""
        found = np.ones(len(known))
        for i, steps in self._least_steps:
            found = np.maximum(found, np.where(known[:, i], steps, 1))
        return found

    def _loads(self, known: Sets, possible: Sets, read_bytes: Figures, tiled: Sets) -> Figures:
        """The bytes that pass the shared cache where a contraction of arrays from outside is known;
        ``read_bytes``: those of each array that is read, 0 of the others."""
        floor = self._floor
        loads, certain = np.zeros(len(known)), np.zeros(len(known), dtype=bool)
        beside = read_bytes
        for i, m in self._contractions:
            columns = [self._column[v] for v in floor.reads[m]]
            if self._made[i, columns].any():
                continue
            makers = np.flatnonzero(self._made[:, columns].any(axis=1))
            # What a contraction of arrays from outside reads is among its own loads.
            own = possible[:, i] & ~known[:, makers].any(axis=1)
            if own.any():
                beside = beside.copy() if beside is read_bytes else beside
                beside[:, columns] *= ~own[:, None]
            anchored = known[:, i] & ~possible[:, makers].any(axis=1)
            if not anchored.any():
                continue
            bits = np.zeros(len(known), dtype=np.int64)
            for reader, width in floor.beside[m].items():
                if reader in self._position:
                    bits = np.maximum(bits, width * known[:, self._position[reader]])
            for width in np.unique(bits[anchored]).tolist():
                of = floor.loads[m]
                nbytes = np.where(tiled, of.tiled(width), of.anyhow)
                loads += np.where(anchored & (bits == width), nbytes, 0)
            certain |= anchored
        return np.where(certain, loads + beside.sum(axis=1), 0)

    def _bytes(self, of: Sequence[int]) -> Figures:
        return np.array([of[v] for v in self._column], dtype=np.float64)


_MOST_LOOPED = 4
"""Up to so many columns of a set are added one after the other, for all sets at once."""


class _Sums:
    """The sums of some columns of a table, for each of several sets of columns."""

    def __init__(self, columns: Sequence[Sequence[int]]) -> None:
        width = max(map(len, columns), default=0)
        # Sets are filled up with a column of zeros, which follows the others.
        filled = [[*of, *[-1] * (width - len(of))] for of in columns]
        self._columns = np.array(filled, dtype=np.intp).reshape(len(columns), width)
        self._flat: npt.NDArray[np.intp] | None = None
        if width > _MOST_LOOPED:
            one_each = [[*of] or [-1] for of in columns]
            self._flat = np.array([k for of in one_each for k in of], dtype=np.intp)
            self._first = np.cumsum([0, *map(len, one_each[:-1])])

    def __call__(self, table: Figures) -> Figures:
        """A row for each of ``table``, a column for each set."""
        padded = np.concatenate([table, np.zeros((len(table), 1))], axis=1)
        if self._flat is not None:
            sums: Figures = np.add.reduceat(padded[:, self._flat], self._first, axis=1)
            return sums
        found = np.zeros((len(table), len(self._columns)))
        for columns in self._columns.T:
            found += padded[:, columns]
        return found


class _Products:
    """The products of some columns of a table, for each of several sets of columns."""

    def __init__(self, columns: Sequence[Sequence[int]]) -> None:
        width = max(map(len, columns), default=0)
        # Sets are filled up with a column of ones, which follows the others.
        self._columns = np.array([[*of, *[-1] * (width - len(of))] for of in columns], dtype=np.intp)

    def __call__(self, table: Figures) -> Figures:
        """A row for each of ``table``, a column for each set."""
        padded = np.concatenate([table, np.ones((len(table), 1))], axis=1)
        found = np.ones((len(table), len(self._columns)))
        for columns in self._columns.T:
            found *= padded[:, columns]
        return found


def _runs(keys: Sequence[int]) -> tuple[list[int], npt.NDArray[np.intp]]:
    """The distinct ``keys``, which are ascending, and where each first stands."""
    distinct = sorted(set(keys))
    return distinct, np.searchsorted(np.array(keys, dtype=np.intp), distinct).astype(np.intp)


def _largest_by_run(table: Any, first: npt.NDArray[np.intp]) -> Any:
    """The largest of each run of columns; ``first``: where each run starts."""
    if len(first) == table.shape[1]:
        return table
    return np.maximum.reduceat(table, first, axis=1)


def _rate_ps(amount: Figures, rate: int) -> Figures:
    """Picoseconds of an amount at a rate, no more than the exact ones; not rounded, so that parts add up."""
    return amount * (PS_PER_S / rate * _QUOTIENT) if rate else np.zeros_like(amount)


def _time_ps(amount: Figures, rate: int) -> Figures:
    """As ``costmodel.device.time_ps``; no more than that, and a picosecond less at most."""
    return np.ceil(_rate_ps(amount, rate))
