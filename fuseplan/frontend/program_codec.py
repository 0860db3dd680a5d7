"""Write a plan's program, the equations of its nodes, as JSON data, and read it again.

Equations are written by primitive name with their parameters: numbers, strings, dtypes, arrays, tuples, JAX's
own records and enumerations, and nested jaxprs without side effects. Anything else (a Python function among
the parameters, an array split over devices, a custom primitive) makes the program unwritable, and only the
plan's graph is written. Reading creates objects of JAX's classes only, never those of another package.
"""

from __future__ import annotations

import base64
import enum
import importlib
import io
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from costmodel.graph import Graph
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import Equation, Literal
from fuseplan.support import jax_compat
from fuseplan.support.errors import InvalidPlanError

MAX_CONSTANT_BYTES = 2**20
"""The most bytes of closed-over arrays in a plan's file. Larger arrays are the user's data."""

Json = Any


class UnwritableError(Exception):
    """The program cannot be written as JSON; the message says why."""


def program_to_data(lowered: Lowered) -> Json:
    """The program without its graph, as JSON data.

    Raises:
        UnwritableError: a parameter, an array or a side effect has no form in JSON.
    """
    size = sum(getattr(const, "nbytes", 0) for const in lowered.consts)
    if size > MAX_CONSTANT_BYTES:
        raise UnwritableError(f"the function closes over {size:,} bytes of arrays")
    return {
        "jax": jax.__version__,
        "avals": [_aval_to(aval) for aval in lowered.avals],
        "equations": [_equation_to(equation) for equation in lowered.equations],
        "outputs": [_operand_to(operand) for operand in lowered.outputs],
        "consts": [_to(np.asarray(const)) for const in lowered.consts],
        "out_tree": _tree_to(lowered.out_tree),
        "without_rule": [list(pair) for pair in lowered.without_rule],
    }


def program_from_data(data: Json, graph: Graph) -> Lowered:
    """The program that ``program_to_data`` wrote, on ``graph``.

    Raises:
        InvalidPlanError: the data is no such program, or one of another version of JAX.
    """
    try:
        avals = tuple(_aval_from(aval) for aval in data["avals"])
        equations = tuple(_equation_from(equation, avals) for equation in data["equations"])
        program = Lowered(
            graph,
            equations,
            avals,
            tuple(_operand_from(operand) for operand in data["outputs"]),
            tuple(_from(const) for const in data["consts"]),
            _tree_from(data["out_tree"]),
            tuple((str(name), int(count)) for name, count in data["without_rule"]),
        )
        _check(program)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        EOFError,
        ImportError,
        AssertionError,
    ) as error:
        written = data.get("jax", "an unknown version") if isinstance(data, Mapping) else "no program"
        raise InvalidPlanError(
            f"plan.program: not a program of JAX {jax.__version__} (written by {written}): "
            f"{type(error).__name__}: {error}"
        ) from None
    return program


def _check(program: Lowered) -> None:
    """Assert that every node matches its equation: primitive, operands, results and shapes."""
    graph = program.graph
    assert len(program.avals) == len(graph.values), "an aval for each value"
    assert len(program.equations) == len(graph.nodes), "an equation for each node"
    for node, equation in zip(graph.nodes, program.equations, strict=True):
        arrays = tuple(v for v in equation.inputs if not isinstance(v, Literal))
        assert arrays == node.inputs, f"n{node.id} reads what its equation reads"
        assert equation.outputs == node.outputs, f"n{node.id} makes what its equation makes"
        assert equation.op == node.op, f"n{node.id} is {node.op}"
    for value, aval in zip(graph.values, program.avals, strict=True):
        assert tuple(getattr(aval, "shape", ())) == value.shape, f"v{value.id} has its aval's shape"


def _aval_to(aval: Any) -> Json:
    if type(aval) is not jax.core.ShapedArray:
        raise UnwritableError(f"a value of type {aval} has no form in a file")
    if not isinstance(aval.dtype, np.dtype) and str(aval.dtype) not in jax_compat.key_dtypes():
        raise UnwritableError(f"a value of type {aval} has no form in a file")
    if jax_compat.varying_axes(aval) or any(axes is not None for axes in aval.sharding.spec):
        raise UnwritableError(f"{aval} is split over devices")
    return [list(aval.shape), str(aval.dtype), bool(aval.weak_type)]


def _aval_from(data: Json) -> Any:
    shape, dtype, weak_type = data
    known = jax_compat.key_dtypes()
    element: Any = known[dtype] if dtype in known else np.dtype(dtype)
    return jax.core.ShapedArray(tuple(map(int, shape)), element, weak_type=bool(weak_type))


def _operand_to(operand: Any) -> Json:
    if isinstance(operand, Literal):
        return {
            "literal": _to(np.asarray(operand.val, getattr(operand.aval, "dtype", None))),
            "aval": _aval_to(operand.aval),
        }
    return operand


def _operand_from(data: Json) -> Any:
    if isinstance(data, dict):
        return Literal(_from(data["literal"])[()], _aval_from(data["aval"]))
    return int(data)


def _equation_to(equation: Equation) -> Json:
    if equation.effects or equation.is_set_apart:
        raise UnwritableError(f"{equation} has side effects, or runs elsewhere")
    return {
        "primitive": _primitive_name(equation.primitive),
        "params": {key: _to(value) for key, value in equation.params.items()},
        "inputs": [_operand_to(operand) for operand in equation.inputs],
        "outputs": list(equation.outputs),
        "origin": equation.origin,
    }


def _equation_from(data: Json, avals: tuple[Any, ...]) -> Equation:
    inputs = tuple(_operand_from(operand) for operand in data["inputs"])
    outputs = tuple(map(int, data["outputs"]))
    return Equation(
        _primitives()[data["primitive"]],
        {key: _from(value) for key, value in data["params"].items()},
        inputs,
        outputs,
        tuple(v.aval if isinstance(v, Literal) else avals[v] for v in inputs),
        tuple(avals[v] for v in outputs),
        origin=int(data["origin"]),
    )


def _tree_to(tree: Any) -> Json:
    """A pytree structure as text; None if it has containers of the user: results are then read as a list."""
    try:
        return None if tree is None else base64.b64encode(tree.serialize_using_proto()).decode()
    except ValueError:
        return None


def _tree_from(data: Json) -> Any:
    if data is None:
        return None
    registry = jax.tree_util.default_registry
    return jax.tree_util.PyTreeDef.deserialize_using_proto(registry, base64.b64decode(data))


def _primitive_name(primitive: Any) -> str:
    name = str(primitive.name)
    if _primitives().get(name) is not primitive:
        raise UnwritableError(f"{name!r} is no primitive of JAX")
    return name


_primitives = cache(jax_compat.primitives)


def _to(value: Any) -> Json:
    """A parameter as JSON: plain values as they are, others as an object with one key that names their
    kind."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, enum.Enum):
        return {"enum": _class_name(type(value)), "name": value.name}
    if isinstance(value, np.dtype):
        return {"dtype": str(value)}
    if isinstance(value, type) and issubclass(value, np.generic):
        return {"scalar_type": np.dtype(value).name}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"scalar": _to(value.item()), "dtype": str(value.dtype)}
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _array_to(np.asarray(value))
    if isinstance(value, jex_core.ClosedJaxpr):
        return {"closed": _jaxpr_to(value.jaxpr), "consts": [_to(np.asarray(c)) for c in value.consts]}
    if isinstance(value, jex_core.Jaxpr):
        return {"jaxpr": _jaxpr_to(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = {name: _to(getattr(value, name)) for name in value._fields}
        return {"record": _class_name(type(value)), "items": items}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_to(item) for item in value]}
    if type(value) is frozenset:
        return {"frozenset": [_to(item) for item in sorted(value)]}
    if isinstance(value, types.FunctionType):
        return {"function": _function_name(value)}
    if jax_compat.is_unspecified(value):
        return {"unspecified": None}
    if isinstance(value, (jax.sharding.Mesh, jax.sharding.AbstractMesh)) and value.empty:
        return {"empty_mesh": type(value).__name__}
    if is_dataclass(value) and not isinstance(value, type):
        items = {f.name: _to(getattr(value, f.name)) for f in fields(value) if f.init}
        return {"record": _class_name(type(value)), "items": items}
    return _unwritable(value)


def _unwritable(value: Any) -> Json:
    # Without the value's repr, which may hold an address: a plan's file is the same in every process.
    shown = f"{type(value).__name__} {getattr(value, '__qualname__', '')}".rstrip()
    raise UnwritableError(f"a parameter has no form in a file: {shown}")


def _from(data: Json) -> Any:
    """The value that ``_to`` wrote."""
    if not isinstance(data, dict):
        return data
    kind = next(iter(data), "")
    if kind not in _READERS:
        raise ValueError(f"a value of unknown kind {kind!r}")
    return _READERS[kind](data[kind], data)


_READERS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "tuple": lambda items, _: tuple(map(_from, items)),
    "list": lambda items, _: list(map(_from, items)),
    "frozenset": lambda items, _: frozenset(map(_from, items)),
    "float": lambda text, _: float(text),
    "enum": lambda name, data: _class(name, enum.Enum)[data["name"]],
    "dtype": lambda name, _: np.dtype(name),
    "scalar_type": lambda name, _: np.dtype(name).type,
    "scalar": lambda value, data: np.dtype(data["dtype"]).type(_from(value)),
    "array": lambda text, data: _array_from(text, data["dtype"]),
    "closed": lambda jaxpr, data: jex_core.ClosedJaxpr(_jaxpr_from(jaxpr), list(map(_from, data["consts"]))),
    "jaxpr": lambda jaxpr, _: _jaxpr_from(jaxpr),
    "record": lambda name, data: _class(name, object)(**{k: _from(v) for k, v in data["items"].items()}),
    "function": lambda name, _: _function(name),
    "unspecified": lambda *_: jax_compat.UNSPECIFIED,
    "empty_mesh": lambda name, _: jax_compat.empty_mesh(name),
}
"""For each kind of object that ``_to`` writes, the value from the content and the whole object."""


def _array_to(array: Any) -> Json:
    if array.nbytes > MAX_CONSTANT_BYTES or array.dtype.hasobject:
        raise UnwritableError(f"an array of {array.nbytes:,} bytes among the parameters")
    buffer = io.BytesIO()
    # NumPy's file format has no bfloat16: the bytes are stored, and the dtype by name.
    np.save(buffer, array.view(f"V{array.dtype.itemsize}") if array.dtype.kind == "V" else array)
    return {"array": base64.b64encode(buffer.getvalue()).decode(), "dtype": str(array.dtype)}


def _array_from(text: str, dtype: str) -> Any:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False).view(np.dtype(dtype))


def _function_name(function: types.FunctionType) -> str:
    """The qualified name of a function of JAX, such as that of a random number generator."""
    name = f"{function.__module__}:{function.__qualname__}"
    try:
        is_found = _function(name) is function
    except (ValueError, ImportError, AttributeError):
        is_found = False
    return name if is_found else _unwritable(function)


def _function(name: str) -> Any:
    found = _named(name)
    if not isinstance(found, types.FunctionType):
        raise ValueError(f"{name!r} is no function of JAX")
    return found


def _class_name(cls: type) -> str:
    if not cls.__module__.startswith(("jax.", "jaxlib.")):
        raise UnwritableError(f"a parameter of type {cls.__module__}.{cls.__qualname__}, which is not JAX's")
    return f"{cls.__module__}:{cls.__qualname__}"


def _class(name: str, base: type) -> Any:
    found = _named(name)
    is_record = isinstance(found, type) and (issubclass(found, tuple) or is_dataclass(found))
    if not (isinstance(found, type) and issubclass(found, base) and (base is not object or is_record)):
        raise ValueError(f"{name!r} is no record of JAX")
    return found


def _named(name: str) -> Any:
    module, _, path = name.partition(":")
    if not module.startswith(("jax.", "jaxlib.")):
        raise ValueError(f"{name!r} is not of JAX")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _jaxpr_to(jaxpr: Any) -> Json:
    """A jaxpr as data. Variables are numbered in order; unread results have negative numbers."""
    if jaxpr.effects:
        raise UnwritableError("a nested jaxpr has side effects")
    number: dict[Any, int] = {}
    avals: list[Json] = []

    def new(var: Any) -> int:
        if isinstance(var, jex_core.DropVar):
            avals.append(_aval_to(var.aval))
            return -len(avals)
        number[var] = len(avals)
        avals.append(_aval_to(var.aval))
        return number[var]

    def read(atom: Any) -> Json:
        return _operand_to(atom) if isinstance(atom, jex_core.Literal) else number[atom]

    consts, inputs = [new(v) for v in jaxpr.constvars], [new(v) for v in jaxpr.invars]
    equations = []
    for eqn in jaxpr.eqns:
        name = _primitive_name(eqn.primitive)
        params = {key: _to(value) for key, value in eqn.params.items()}
        operands = [read(atom) for atom in eqn.invars]
        equations.append([name, params, operands, [new(v) for v in eqn.outvars]])
    outputs = [read(atom) for atom in jaxpr.outvars]
    return {"avals": avals, "consts": consts, "inputs": inputs, "equations": equations, "outputs": outputs}


def _jaxpr_from(data: Json) -> Any:
    variables: dict[int, Any] = {}

    def new(number: int) -> Any:
        aval = _aval_from(data["avals"][number if number >= 0 else -number - 1])
        variables[number] = jex_core.Var(aval)
        return variables[number] if number >= 0 else jex_core.DropVar(aval)

    def read(operand: Json) -> Any:
        return _operand_from(operand) if isinstance(operand, dict) else variables[operand]

    consts, inputs = [new(v) for v in data["consts"]], [new(v) for v in data["inputs"]]
    equations = []
    for name, params, operands, results in data["equations"]:
        given = [read(operand) for operand in operands]
        values = {key: _from(value) for key, value in params.items()}
        made = [new(v) for v in results]
        equations.append(jax_compat.make_eqn(given, made, _primitives()[name], values))
    return jax_compat.make_jaxpr(consts, inputs, [read(operand) for operand in data["outputs"]], equations)
