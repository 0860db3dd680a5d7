"""Price kernels by a cost model of the user's own: ``CostModel``, and the device that carries one.

``with_cost_model`` makes of a device one whose kernels ``costmodel.roofline.estimate`` and
``costmodel.floor.floor_of`` price by the model. So a plan, its proof and their check all use the same prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from costmodel.kernel import Cost, KernelSpec


class CostModelError(ValueError):
    """A cost model failed, or gave an answer that it may not give. The message names the model and the
    operations of the kernel."""


@runtime_checkable
class CostModel(Protocol):
    """Prices the kernels of a device, in place of fuseplan's own roofline model.

    Any object with these members is a cost model; a subclass need only define ``cost``. It must be hashable,
    and give equal answers to equal questions. Kernels of equal structure on other arrays have equal prices,
    so ``cost`` and ``floor_ps`` may use kinds, shapes, dtypes and schedules, and must not depend on the ids
    of nodes or values. A kernel that only renames arrays is free, and the model is not asked for its price.

    Example:
        >>> from dataclasses import replace
        >>> class TwiceHbm(CostModel):
        ...     '''As fuseplan's model, with bytes of HBM at twice their time.'''
        ...     at_least_estimated = True
        ...     def cost(self, graph, kernel, device, estimated):
        ...         return replace(estimated, memory_ps=2 * estimated.memory_ps)
        >>> TwiceHbm().name
        'TwiceHbm'
    """

    at_least_estimated: bool = False
    """Whether no kernel takes less than by fuseplan's own model, whose lower bounds then hold: the search is
    shorter, and larger programs are proven."""

    @property
    def name(self) -> str:
        """The name in plans and messages: that of the class by default."""
        return type(self).__name__

    def cost(self, graph: Graph, kernel: KernelSpec, device: DeviceSpec, estimated: Cost) -> Cost:
        """The time of one run of ``kernel``, in parts.

        Args:
            graph: the operations and values of the program.
            kernel: the group of operations, and how it is scheduled: its nodes, axes with tiles, and the
                arrays that it reads and writes.
            device: the figures of the device.
            estimated: the cost by fuseplan's own model.

        Returns:
            A ``Cost`` whose parts ``*_ps`` are whole picoseconds of at least 0; ``Cost.time_ps`` is the time,
            at most ``2**50`` (19 minutes). Its bytes, flops and ``in_turns`` are taken from ``estimated``.
        """
        raise NotImplementedError

    def floor_ps(self, graph: Graph, nodes: Sequence[int], device: DeviceSpec, estimated_ps: int) -> int:
        """A lower bound, in picoseconds, on the time of ``nodes`` however they are divided into kernels.

        0 always holds. A tighter bound makes the search shorter, and proves larger programs. The default is
        ``estimated_ps`` if ``at_least_estimated``, and otherwise 0.

        Args:
            graph: the operations and values of the program. Copies of one operation (``Graph.origins``) may
                be computed once.
            nodes: the operations, ascending.
            device: the figures of the device.
            estimated_ps: fuseplan's own bound on the same nodes. In some calls it is a bound on ``nodes`` as
                one kernel; then the result need only hold for that kernel.
        """
        return estimated_ps if self.at_least_estimated else 0


@dataclass(frozen=True, slots=True)
class ModelledDevice(DeviceSpec):
    """A device whose kernels are priced by ``cost_model``."""

    cost_model: CostModel | None = None  # type: ignore[misc]  # of the class in a device without one

    def __post_init__(self) -> None:
        plain_device(self)  # checks the fields


@lru_cache(maxsize=64)
def plain_device(device: DeviceSpec) -> DeviceSpec:
    """The device without its cost model."""
    if device.cost_model is None and type(device) is DeviceSpec:
        return device
    return DeviceSpec(**{field.name: getattr(device, field.name) for field in fields(DeviceSpec)})


def with_cost_model(device: DeviceSpec, model: CostModel | None) -> DeviceSpec:
    """The device with kernels priced by ``model``; by fuseplan's own model if it is None.

    Raises:
        CostModelError: ``model`` lacks a member of ``CostModel``, cannot be hashed, or raises an exception
            when its name or hash is asked for.
    """
    if model is None:
        return plain_device(device)
    try:
        is_model = (
            not isinstance(model, type) and isinstance(model, CostModel) and isinstance(model.name, str)
        )
    except Exception as error:
        raise CostModelError(
            f"expected a cost model whose name is a text, but that of a {type(model).__name__} raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if not is_model:
        raise CostModelError(
            "expected a cost model, an object with name, cost, floor_ps and at_least_estimated (see "
            f"fuseplan.CostModel), got {model!r}"
        )
    try:
        hash(model)
    except TypeError:
        raise CostModelError(
            f"the cost model {model.name!r} cannot be hashed, and plans are remembered by it: write "
            "@dataclass(frozen=True)"
        ) from None
    except Exception as error:
        raise CostModelError(
            f"the hash of the cost model {model.name!r} raised {type(error).__name__}: {error}"
        ) from error
    own = {field.name: getattr(device, field.name) for field in fields(DeviceSpec)}
    return ModelledDevice(**own, cost_model=model)


_LONGEST_PS = 2**50
"""The longest time that a model may give to a kernel, some 19 minutes: 64 bits hold the sum of 2**12 of them,
with one to spare. It is the same for every program, as copies of operations make a program larger."""


_PARTS = tuple(field.name for field in fields(Cost) if field.name.endswith("_ps"))
_FACTS = tuple(field.name for field in fields(Cost) if field.name not in _PARTS)
_parts_of, _facts_of = attrgetter(*_PARTS), attrgetter(*_FACTS)


def modelled_cost(graph: Graph, kernel: KernelSpec, device: DeviceSpec, estimated: Cost) -> Cost:
    """The cost of a kernel by the model of a ``ModelledDevice``.

    Raises:
        CostModelError: the model raised an exception, or returned no ``Cost`` of whole picoseconds, or less
            than it promises, or more than ``_LONGEST_PS``.
    """
    model = device.cost_model
    assert model is not None
    found = _answer(model, "cost", graph, kernel.nodes, kernel, plain_device(device), estimated)
    if not isinstance(found, Cost):
        raise CostModelError(f"{_asked(model, 'cost', graph, kernel.nodes)} should be a Cost, got {found!r}")
    parts = dict(zip(_PARTS, _parts_of(found), strict=True))
    for part, figure in parts.items():
        if not _is_whole(figure):
            raise _no_whole(f"{part} of {_asked(model, 'cost', graph, kernel.nodes)}", figure)
    if found.time_ps > (most := max(_LONGEST_PS, estimated.time_ps)):
        raise CostModelError(
            f"{_asked(model, 'cost', graph, kernel.nodes)} is {found.time_ps:,} ps, above the longest time "
            f"of a kernel, {most:,} ps (64 bits hold the sum of the times of all kernels considered): "
            "is it in picoseconds?"
        )
    if model.at_least_estimated and found.time_ps < estimated.time_ps:
        raise CostModelError(
            f"{_asked(model, 'cost', graph, kernel.nodes)} is {found.time_ps:,} ps, less than the "
            f"{estimated.time_ps:,} ps of fuseplan's model, though at_least_estimated is true: set it to "
            "False"
        )
    facts = dict(zip(_FACTS, _facts_of(estimated), strict=True))
    return Cost(**parts, **facts)


def has_partial_bounds(device: DeviceSpec) -> bool:
    """Whether ``costmodel.partial_floor`` holds for the prices of a device."""
    return device.cost_model is None or bool(device.cost_model.at_least_estimated)


def modelled_floor_ps(graph: Graph, nodes: Sequence[int], device: DeviceSpec, estimated_ps: int) -> int:
    """The lower bound of some nodes by the model of a ``ModelledDevice``.

    Raises:
        CostModelError: the model raised an exception, or returned no whole picoseconds, or too many.
    """
    model = device.cost_model
    assert model is not None
    found = _answer(model, "floor_ps", graph, nodes, nodes, plain_device(device), estimated_ps)
    if not _is_whole(found):
        raise _no_whole(_asked(model, "floor_ps", graph, nodes), found)
    if found > (most := max(_LONGEST_PS * max(1, len(nodes)), estimated_ps)):
        raise CostModelError(
            f"{_asked(model, 'floor_ps', graph, nodes)} is {found:,} ps, above the longest time of "
            f"{len(nodes):,} kernels, {most:,} ps: is it in picoseconds?"
        )
    return int(found)


def _is_whole(figure: object) -> bool:
    return type(figure) is int and figure >= 0


def _no_whole(what: str, figure: object) -> CostModelError:
    return CostModelError(f"{what} should be whole picoseconds, at least 0 (round by int()), got {figure!r}")


def _answer(model: CostModel, method: str, graph: Graph, nodes: Sequence[int], *arguments: Any) -> Any:
    """Call a method of a model about ``nodes``, and name both where it raises an exception."""
    try:
        return getattr(model, method)(graph, *arguments)
    except Exception as error:
        raise CostModelError(
            f"{_asked(model, method, graph, nodes)} raised {type(error).__name__}: {error}"
        ) from error


def _asked(model: CostModel, method: str, graph: Graph, nodes: Sequence[int]) -> str:
    return f"{method} of the cost model {model.name!r} for {operations_text(graph, nodes)}"


def operations_text(graph: Graph, nodes: Sequence[int]) -> str:
    """The operations of a group in a message: ``n3 exp, n4 reduce_sum``.

    Example:
        >>> from costmodel.graph import make_graph
        >>> operations_text(make_graph((), (), (), ()), ())
        'no operation'
    """
    named = [f"n{n} {graph.nodes[n].op}" for n in nodes[:6]]
    more = [f"{len(nodes) - 6} more"] if len(nodes) > 6 else []
    return ", ".join([*named, *more]) or "no operation"
