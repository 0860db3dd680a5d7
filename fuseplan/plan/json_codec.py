"""Write plans as JSON and read them: field by field, then as a graph.

A dataclass is an object, a tuple is a list, and a member of an enum is its name in lower case. Optional
fields may be missing. An unknown field is an error, so that a misspelled field is not silently its default;
a field that was renamed is also read by its ``former_name``.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from costmodel.backends import backend_names
from costmodel.device_fields import InvalidDeviceError
from costmodel.graph import Graph, GraphError, check_graph
from costmodel.kernel import KernelSpec
from costmodel.model import CostModel, CostModelError, with_cost_model
from fuseplan.frontend.program_codec import UnwritableError, program_from_data, program_to_data
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.support.errors import InvalidPlanError

FORMAT = "fuseplan.plan"
VERSION = 3
"""Of the schema: raised with every change that an older reader would misread."""


def plan_to_json(plan: FusionPlan) -> str:
    """See ``Plan.to_json``."""
    document = {"format": FORMAT, "version": VERSION, "plan": _encode(plan), **_program(plan)}
    if plan.device.cost_model is not None:
        document["cost_model"] = plan.device.cost_model.name
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _program(plan: FusionPlan) -> dict[str, Any]:
    """The plan's program, or the reason why the file cannot hold it."""
    if plan.program is None:
        return {}
    try:
        return {"program": program_to_data(plan.program)}
    except UnwritableError as error:
        return {"no_program": str(error)}


CONTRADICTIONS = (LookupError, ValueError, TypeError, ArithmeticError, AssertionError)
"""Exceptions that the code may raise on a plan that is well-formed and contradicts itself."""


def contradiction(error: Exception) -> str:
    """The message of an ``InvalidPlanError`` on such an exception."""
    return f"the plan contradicts itself: {type(error).__name__}: {error}"


def read_plan(text: str, cost_model: CostModel | None = None) -> FusionPlan:
    """The plan that ``to_json`` wrote, with its fields and graph checked, but not whether it is legal.

    Raises:
        InvalidPlanError: the text is no such plan, or ``cost_model`` has not the name of the one that priced
            it.
    """
    if not isinstance(text, str):
        raise InvalidPlanError(f"expected a plan as JSON text, got {type(text).__name__}")
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidPlanError(f"not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidPlanError(f'expected an object with "format": "{FORMAT}", as Plan.to_json writes it')
    if document.get("version") != VERSION:
        raise InvalidPlanError(
            f"the plan has schema version {document.get('version')!r}, this fuseplan reads {VERSION}: "
            "write it anew with Plan.to_json"
        )
    plan: FusionPlan = _decode(FusionPlan, document.get("plan"), "plan")
    plan = _priced_by(plan, document.get("cost_model"), cost_model)
    _check_ids(plan)
    try:
        check_graph(plan.graph)
    except GraphError as error:
        raise InvalidPlanError(f"plan.graph: {error}") from None
    except CONTRADICTIONS as error:
        raise InvalidPlanError(f"{contradiction(error)}. Write it anew with Plan.to_json") from None
    if "program" in document:
        plan = dataclasses.replace(plan, program=program_from_data(document["program"], plan.graph))
    return plan


def _priced_by(plan: FusionPlan, name: Any, model: CostModel | None) -> FusionPlan:
    """The plan for the device with the cost model that priced it, of which the file has the name."""
    given = None if model is None else model.name
    if name != given:
        priced = "fuseplan's own cost model" if name is None else f"the cost model {_shown(name)}"
        own = "without cost_model" if name is None else "with cost_model=, an object of that name"
        raise InvalidPlanError(
            f"the plan is priced by {priced}, and {'none' if given is None else repr(given)} is given: "
            f"read it by Plan.from_json {own}"
        )
    if model is None:
        return plan
    try:
        return dataclasses.replace(plan, device=with_cost_model(plan.device, model))
    except CostModelError as error:
        raise InvalidPlanError(str(error)) from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _encode(getattr(value, name)) for name in _fields(type(value))}
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


@cache
def _fields(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """The fields that are written: those that are not derived from others, and are data."""
    left_out = ("program", "cost_model")
    return {f.name: f for f in dataclasses.fields(cls) if f.init and f.name not in left_out}


@cache
def _former_names(cls: type) -> dict[str, str]:
    """From the former names of fields, in older files, to their names."""
    fields = _fields(cls).items()
    return {field.metadata["former_name"]: name for name, field in fields if "former_name" in field.metadata}


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {name: hints[name] for name in _fields(cls)}


def _decode(hint: Any, value: Any, where: str) -> Any:
    """``value`` as ``hint`` says: a class of this project, a tuple, or a plain type."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (hint,) = (h for h in get_args(hint) if h is not type(None))
        return _decode(hint, value, where)
    if origin is tuple:
        return _decode_tuple(get_args(hint), value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _decode_object(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        members = {member.name.lower(): member for member in hint}
        if not isinstance(value, str) or value not in members:
            raise InvalidPlanError(f"{where}: expected one of {', '.join(members)}, got {_shown(value)}")
        return members[value]
    if hint is float and type(value) is int:
        value = _float(value, where)
    if type(value) is not hint:
        raise InvalidPlanError(f"{where}: expected {_NAMES[hint]}, got {_shown(value)}")
    if hint is float and not math.isfinite(value):
        raise InvalidPlanError(f"{where}: expected a finite number, got {_shown(value)}")
    return value


_NAMES = {int: "an integer", str: "a string", bool: "true or false", float: "a number"}


def _float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise InvalidPlanError(f"{where}: expected a finite number, got {_shown(value)}") from None


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except ValueError:  # an integer of too many digits to print
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:59] + "…"


def _decode_tuple(hints: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise InvalidPlanError(f"{where}: expected a list, got {_shown(value)}")
    if len(hints) == 2 and hints[1] is Ellipsis:
        return tuple(_decode(hints[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(hints):
        raise InvalidPlanError(f"{where}: expected a list of {len(hints)}, got {_shown(value)}")
    pairs = enumerate(zip(hints, value, strict=True))
    return tuple(_decode(hint, item, f"{where}[{i}]") for i, (hint, item) in pairs)


def _decode_object(cls: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise InvalidPlanError(f"{where}: expected an object ({cls.__name__}), got {_shown(value)}")
    former_names = _former_names(cls)
    value = {former_names.get(name, name): item for name, item in value.items()}
    hints = _hints(cls)
    if unknown := sorted(value.keys() - hints.keys()):
        raise InvalidPlanError(
            f"{where}: {cls.__name__} has no field {unknown[0]!r}; its fields are {', '.join(hints)}"
        )
    known = {}
    for name, field in _fields(cls).items():
        if name in value:
            known[name] = _decode(hints[name], value[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InvalidPlanError(f"{where}: the field {name!r} of {cls.__name__} is missing")
    try:
        return cls(**known)
    except InvalidDeviceError as error:
        raise InvalidPlanError(f"{where}.{error.field}: {error.problem}") from None


def _check_ids(plan: FusionPlan) -> None:
    """Raise ``InvalidPlanError`` if a number refers to a value, node, dimension or axis that is not there."""
    graph = plan.graph
    n_values, n_nodes = len(graph.values), len(graph.nodes)
    for i, value in enumerate(graph.values):
        _check_range(f"plan.graph.values[{i}].producer", (value.producer,), n_nodes, "nodes", low=-1)
        _check_range(f"plan.graph.values[{i}].shape", value.shape, None, "")
    for name in ("inputs", "outputs"):
        _check_range(f"plan.graph.{name}", getattr(graph, name), n_values, "values")
    for i, node in enumerate(graph.nodes):
        where = f"plan.graph.nodes[{i}]"
        for name in ("inputs", "outputs"):
            _check_range(f"{where}.{name}", getattr(node, name), n_values, "values")
        _check_range(f"{where}.dims", node.dims, None, "")
        for name in ("input_maps", "output_maps"):
            for dim_map in getattr(node, name):
                for dims in dim_map:
                    _check_range(f"{where}.{name}", dims, len(node.dims), "dimensions")
        flops = node.flops
        _check_range(f"{where}.flops", (flops.matrix, flops.vector, flops.transcendental), None, "")
    if len(graph.consumers) != n_values:
        raise InvalidPlanError(
            f"plan.graph.consumers: expected one entry for each of {n_values} values, "
            f"got {len(graph.consumers)}"
        )
    for k, kernel in enumerate(plan.kernels):
        _check_spec(f"plan.kernels[{k}].spec", kernel.spec, graph)
    for i, verdict in enumerate(plan.refusals):
        _check_range(f"plan.refusals[{i}].nodes", verdict.nodes, n_nodes, "nodes")
    if plan.constraints is not None:
        for i, apart in enumerate(plan.constraints.apart):
            nodes = (*apart.a, *(apart.b or ()))
            _check_range(f"plan.constraints.apart[{i}]", nodes, n_nodes, "nodes")
        for i, together in enumerate(plan.constraints.together):
            _check_range(f"plan.constraints.together[{i}].nodes", together.nodes, n_nodes, "nodes")


def _check_spec(where: str, spec: KernelSpec, graph: Graph) -> None:
    _check_range(f"{where}.nodes", spec.nodes, len(graph.nodes), "nodes")
    if spec.backend not in backend_names():
        known = ", ".join(backend_names())
        raise InvalidPlanError(f"{where}.backend: expected one of {known}, got {_shown(spec.backend)}")
    for i, axis in enumerate(spec.axes):
        _check_range(f"{where}.axes[{i}].size", (axis.size,), None, "")
        _check_range(f"{where}.axes[{i}].tile", (axis.tile,), None, "", low=1)
    for axes in spec.node_axes:
        for own in axes:
            _check_range(f"{where}.node_axes", own, len(spec.axes), "axes")
    if (spec.keeps and not spec.capabilities.loop_nest) or (spec.tiles_visited and not spec.passes):
        raise InvalidPlanError(
            f"{where}: only a loop nest skips tiles or keeps products, and this is {_shown(spec.backend)}"
        )
    may_pass = spec.capabilities.loop_nest or (spec.capabilities.emits_kernels and spec.streamed is not None)
    if spec.passes and not may_pass:
        raise InvalidPlanError(f"{where}.passes: expected none of a kernel that streams no axis")
    if spec.capabilities.loop_nest and not spec.axes:
        raise InvalidPlanError(f"{where}.axes: expected the axes of a loop nest, got none")
    for i, nodes in enumerate(spec.passes):
        _check_range(f"{where}.passes[{i}]", nodes, len(spec.nodes), "positions in its nodes")
    _check_range(f"{where}.tiles_visited", spec.tiles_visited, None, "", low=1)
    if (made := spec.compiled) is not None:
        _check_range(f"{where}.compiled", (made.launches, made.read_bytes, made.write_bytes), None, "")
    for name in ("reads", "writes"):
        for i, access in enumerate(getattr(spec, name)):
            at = f"{where}.{name}[{i}]"
            _check_range(f"{at}.value", (access.value,), len(graph.values), "values")
            rank = len(graph.values[access.value].shape)
            if len(access.axes) != rank:
                raise InvalidPlanError(
                    f"{at}.axes: v{access.value} has {rank} dimensions, got {len(access.axes)}"
                )
            for dims in access.axes:
                _check_range(f"{at}.axes", dims, len(spec.axes), "axes")


def _check_range(where: str, numbers: tuple[int, ...], count: int | None, what: str, low: int = 0) -> None:
    for number in numbers:
        if number < low or (count is not None and number >= count):
            expected = f"at least {low}" if count is None else f"one of {count} {what}"
            raise InvalidPlanError(f"{where}: expected {expected}, got {number}")
