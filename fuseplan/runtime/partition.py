"""Partition a kernel over the devices of a sharded program, along its own axes.

XLA's partitioner cannot look into a kernel, and it would gather the operands of a loop over tiles onto every
device. So a kernel tells it, as a Shardy sharding rule, which dimension of which operand each of its axes
indexes. The partitioner then splits these axes like those of XLA's own operations, and each device runs the
kernel for its own part (``fuseplan.runtime.split_axes``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from costmodel.kernel import Access, Axis, KernelSpec, block_shape
from fuseplan.codegen.pass_evaluator import NestPart
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import Primitive
from fuseplan.runtime.split_axes import Partial, SplitAxes, first_reads, split_axes
from fuseplan.search.cache import program_digest
from fuseplan.support import jax_compat
from fuseplan.support.errors import FuseplanWarning

T = TypeVar("T")
KernelFunction = Callable[..., tuple[Any, ...]]
Emitted = Callable[..., KernelFunction]

_meshes: ContextVar[tuple[Mesh, ...]] = ContextVar("meshes", default=())
"""The meshes that shardings of the program that is lowered may be on."""

whole_kernel_p = Primitive("whole_kernel")
"""The shapes of a kernel that is partitioned: never lowered, since the parts take its place."""
whole_kernel_p.multiple_results = True
whole_kernel_p.def_abstract_eval(lambda *_, avals: avals)


@contextlib.contextmanager
def traced_for_devices(devices: Sequence[Any]) -> Iterator[None]:
    """A context in which ``partitioned`` kernels are traced to be partitioned over ``devices``."""
    token = _meshes.set(tuple(_possible_meshes(devices)) if devices else ())
    try:
        yield
    finally:
        _meshes.reset(token)


def _possible_meshes(devices: Sequence[Any]) -> Iterator[Mesh]:
    """Meshes whose axes have prime sizes, in each order: every sharding on a mesh of as many devices is also
    a sharding on one of them. The program's own mesh is not known where the program is lowered."""
    factors, rest = [], len(devices)
    for p in range(2, rest + 1):
        while rest % p == 0:
            factors.append(p)
            rest //= p
    for sizes in _orders(Counter(factors)):
        array = np.array(devices, dtype=object).reshape(sizes)
        yield Mesh(array, [f"part{i}" for i in range(len(sizes))])


def _orders(left: Counter[int]) -> Iterator[tuple[int, ...]]:
    """The distinct orders of a multiset."""
    if not left:
        yield ()
    for first in sorted(left):
        yield from ((first, *rest) for rest in _orders(left - Counter([first])))


def on_one_device(one: Callable[..., T], several: Callable[..., T]) -> Callable[..., T]:
    """``one``, or ``several`` in a program that is lowered for several devices."""

    def run(*arrays: Any) -> T:
        return several(*arrays) if _meshes.get() else one(*arrays)

    return run


def partitioned(
    kernel: KernelFunction, spec: KernelSpec, lowered: Lowered, emitted: Emitted
) -> KernelFunction:
    """``kernel``, the function of ``spec``, partitioned over the devices that it is lowered for. ``emitted``
    gives the function of the kernel for one device's part."""
    partition = _Partition(kernel, spec, lowered, emitted)

    def run(*arrays: Any) -> tuple[Any, ...]:
        meshes = _meshes.get()
        return partition.on_devices(meshes, arrays) if meshes else kernel(*arrays)

    return run


_WHOLE = "whole"
"""The beginning of the factors of dimensions that have no axis and are whole on each device."""


@dataclass(frozen=True)
class _Partition:
    """A kernel, and how it is partitioned."""

    kernel: KernelFunction
    spec: KernelSpec
    lowered: Lowered
    emitted: Emitted

    @functools.cached_property
    def _split(self) -> SplitAxes:
        return split_axes(self.spec, self.lowered)

    @functools.cached_property
    def _reads(self) -> tuple[Access, ...]:
        return tuple(first_reads(self.spec).values())

    def on_devices(self, meshes: Sequence[Mesh], arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The results of the kernel, as one operation that XLA's partitioner splits."""
        from jax.experimental.custom_partitioning import custom_partitioning

        whole = [self.lowered.avals[w.value] for w in self.spec.writes]
        avals = tuple(jax.core.ShapedArray(aval.shape, aval.dtype) for aval in whole)
        on_devices = custom_partitioning(lambda *arrays: whole_kernel_p.bind(*arrays, avals=avals))
        on_devices.def_partition(
            functools.partial(self._partition, meshes), sharding_rule=self._rule, decode_shardings=False
        )
        # JAX's keys for compiled programs on disk have the rule and the operands, but not the kernel.
        return tuple(on_devices(np.uint32(self._fingerprint(arrays)), *arrays))

    def _fingerprint(self, arrays: Sequence[Any]) -> int:
        """A hash of the kernel, and of what its parts follow from."""
        traced = jax.make_jaxpr(self.kernel)(*map(jax.typeof, arrays))
        text = repr((program_digest(), self.spec, str(traced)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])

    @functools.cached_property
    def _rule(self) -> Any:
        """The kernel's axes as factors of a Shardy sharding rule."""
        from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule

        units = itertools.count()

        def mapping(access: Access) -> Any:
            """A factor for each axis of a dimension, or one of its own for a dimension of size one, or in
            which indices choose places. An axis that an array has twice, on a diagonal, is another factor the
            second time."""
            times: Counter[int] = Counter()
            shape = self.lowered.avals[access.value].shape

            def factor(a: int) -> str:
                times[a] += 1
                return f"axis{a}" if times[a] == 1 else f"axis{a}_{times[a]}"

            dims = [
                list(map(factor, own)) or [f"{'unit' if n == 1 else _WHOLE}{next(units)}"]
                for own, n in zip(access.axes, shape, strict=True)
            ]
            return ArrayMapping(*(names[0] if len(names) == 1 else CompoundFactor(*names) for names in dims))

        operands, results = tuple(map(mapping, self._reads)), tuple(map(mapping, self.spec.writes))
        dims = [dim for array in (*operands, *results) for dim in array]
        alone = {dim for dim in dims if isinstance(dim, str)}
        # In order of appearance, as the rule's lists of factors have to be.
        factors = list(dict.fromkeys(f for dim in dims for f in ((dim,) if isinstance(dim, str) else dim)))
        axis_of = {f: int(f[4:].partition("_")[0]) for f in factors if f.startswith("axis")}
        sizes: dict[str, Any] = {f: self.spec.axes[axis_of[f]].size for f in factors if f not in alone}
        return SdyShardingRule(
            (ArrayMapping(), *operands),
            results,
            need_replication_factors=tuple(
                f for f in factors if f.startswith(_WHOLE) or axis_of.get(f) in self._split.whole
            ),
            **sizes,
        )

    def _partition(
        self, meshes: Sequence[Mesh], _: Any, operands: Sequence[Any], results: Sequence[Any]
    ) -> tuple[Mesh, Callable[..., Any], list[NamedSharding], tuple[NamedSharding, ...]]:
        """As ``custom_partitioning`` asks: the mesh, the function of one device, and the shardings of its
        results and operands, for those that the partitioner suggests."""
        arrays = [*zip(self.spec.writes, results, strict=True), *zip(self._reads, operands[1:], strict=True)]
        mesh, names = self._names(meshes, [(access, array.sharding) for access, array in arrays])
        try:
            run = self._of_device(mesh, names)
        except Exception as error:  # each device computes all of the kernel instead
            warnings.warn(
                f"a kernel could not be split over devices, so each computes all of it: "
                f"{type(error).__name__}: {error}",
                FuseplanWarning,
                stacklevel=2,
            )
            names = [()] * len(names)
            run = self._of_device(mesh, names)

        def sharding(access: Access) -> NamedSharding:
            dims = [names[own[0]] or None if own else None for own in access.axes]
            return NamedSharding(mesh, PartitionSpec(*dims))

        of_operands = (NamedSharding(mesh, PartitionSpec()), *map(sharding, self._reads))
        return mesh, run, list(map(sharding, self.spec.writes)), of_operands

    def _of_device(self, mesh: Mesh, names: Sequence[tuple[str, ...]]) -> Callable[..., Any]:
        """The kernel of each device, if each axis is split over the mesh's axes of these names."""
        spec, lowered = self._local([math.prod(mesh.shape[n] for n in own) for own in names])
        split = self._split

        def combine(part: Partial, x: Any) -> Any:
            over = tuple(n for a in sorted(part.axes) for n in names[a])
            return part.collective(x, over) if over else x

        def run(_: Any, *arrays: Any) -> list[Any]:
            options = {}
            if spec.capabilities.loop_nest:
                sizes = [axis.size for axis in spec.axes]
                origin = [lax.axis_index(own) * n if own else 0 for own, n in zip(names, sizes, strict=True)]
                inside = {i: functools.partial(combine, part) for i, part in split.inside.items()}
                options["part"] = NestPart(self.spec, tuple(origin), inside)
            parts = dict(zip(spec.writes, self.emitted(spec, lowered, **options)(*arrays), strict=True))
            return [
                combine(split.results[w.value], x) if w.value in split.results else x
                for w, x in parts.items()
            ]

        # Traced here, where ``_partition`` can still choose other parts.
        number = jax.core.ShapedArray((), np.uint32)
        avals = [number, *(lowered.avals[read.value] for read in self._reads)]
        return jax_compat.traced_on(mesh, run, avals)

    def _names(
        self, meshes: Sequence[Mesh], arrays: Sequence[tuple[Access, Any]]
    ) -> tuple[Mesh, list[tuple[str, ...]]]:
        """The mesh that all shardings are on, and for each axis of the kernel the mesh axes that split it."""
        names: list[tuple[str, ...]] = [()] * len(self.spec.axes)
        taken: set[str] = set()
        for mesh in meshes:
            specs = [jax_compat.partition_spec(sharding, mesh) for _, sharding in arrays]
            if None not in specs:
                break
        else:
            return meshes[0], names
        for (access, _), spec in zip(arrays, specs, strict=True):
            for own, wanted in zip(access.axes, spec or (), strict=False):
                if not own or own[0] in self._split.whole or names[own[0]] or not taken.isdisjoint(wanted):
                    continue
                parts = math.prod(mesh.shape[n] for n in wanted)
                if self.spec.axes[own[0]].size % (parts * self._split.units[own[0]]) == 0:
                    names[own[0]] = wanted
                    taken.update(wanted)
        return mesh, names

    def _local(self, parts: Sequence[int]) -> tuple[KernelSpec, Lowered]:
        """The kernel of one device, if axis ``a`` is split into ``parts[a]`` equal parts."""
        is_padded = self.spec.capabilities.power_of_two_tiles
        axes = tuple(_part_of(axis, n, is_padded) for axis, n in zip(self.spec.axes, parts, strict=True))
        sizes = tuple(replace(axis, tile=axis.size) for axis in axes)
        avals = list(self.lowered.avals)
        for access in (*self.spec.reads, *self.spec.writes):
            whole = avals[access.value]
            own = zip(access.axes, block_shape(sizes, access.axes), whole.shape, strict=True)
            shape = tuple(n if axes else whole_n for axes, n, whole_n in own)
            avals[access.value] = jax.core.ShapedArray(shape, whole.dtype)
        return replace(self.spec, axes=axes), replace(self.lowered, avals=tuple(avals))


def _part_of(axis: Axis, parts: int, is_padded: bool) -> Axis:
    """A part of an axis; ``is_padded`` says whether a tile may be longer than the part."""
    size = axis.size // parts
    return replace(axis, size=size, tile=axis.tile if is_padded else min(axis.tile, size))
