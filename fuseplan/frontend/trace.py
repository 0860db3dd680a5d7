"""Trace a jittable function to one flat list of equations, and evaluate equations by JAX's own operations.

Nested ``jit``, ``custom_jvp``, ``custom_vjp``, ``checkpoint`` and ``closed_call`` are inlined, and dead
equations are dropped. Values are numbered, so that one inner jaxpr can be inlined many times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from fuseplan.support import jax_compat

Literal = jex_core.Literal
Primitive = jex_core.Primitive
Operand = int | jex_core.Literal
FlatFunction = Callable[..., list[Any]]

# The parameter of each inlined primitive that holds the jaxpr that it evaluates.
INLINED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "fused": "jaxpr",  # an inner fused function (``fuseplan.runtime.primitive``)
}

PATTERN = "pattern"
"""The primitive of what a library kernel computes in the place of a matched part of a program
(``fuseplan.patterns``)."""

_PATTERN_CALL = f"{PATTERN}:"
"""Begins the name of a ``jit`` that holds the derivative of such a kernel, or the kernel of a batch."""


def pattern_call(name: str) -> str:
    """The name of a ``jit`` that is not inlined, for the pattern ``name``."""
    return _PATTERN_CALL + name


def _pattern_of(primitive: str, params: Mapping[str, Any]) -> str:
    """The name of the pattern that an equation stands for; empty if it stands for none."""
    if primitive == PATTERN:
        return str(params["name"])
    name = str(params.get("name", "")) if primitive == "jit" else ""
    return name.removeprefix(_PATTERN_CALL) if name.startswith(_PATTERN_CALL) else ""


@dataclass(frozen=True, slots=True)
class Equation:
    """One equation: operands and results are value numbers, or literals."""

    primitive: jex_core.Primitive
    params: dict[str, Any]
    inputs: tuple[Operand, ...]
    outputs: tuple[int, ...]
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]
    effects: bool = False
    frames: tuple[Any, ...] = ()
    """JAX's ``source_info`` of the equation, then of each call that it was inlined from, innermost first."""
    context: Any = None
    """JAX's ``JaxprEqnContext``: the settings in force where the equation was traced."""
    scope: tuple[str, ...] = ()
    """The ``jax.named_scope``s around the equation, outermost first."""
    origin: int = -1
    """The id of the node that the equation was first lowered to, kept by rewrites. -1 before lowering."""

    @property
    def op(self) -> str:
        """The name of the operation in plans: that of its primitive, or of its pattern."""
        return _pattern_of(self.primitive.name, self.params) or str(self.primitive.name)

    @property
    def source(self) -> str:
        """``file:line (function)`` in the user's code; for an equation inside a library function, the line
        of the call. Reading a traceback is slow, so it is read on demand."""
        return next(filter(None, map(jax_compat.source_line, self.frames)), "")

    @property
    def is_set_apart(self) -> bool:
        """Whether the equation must be left to XLA by itself: it runs elsewhere (``compute_on``), carries
        metadata to XLA, or works on arrays that are split over the explicit axes of a mesh."""
        context = self.context
        if getattr(context, "compute_type", None) or getattr(context, "xla_metadata", None):
            return True
        return any(map(_is_split, self.in_avals)) or any(map(_is_split, self.out_avals))

    def __str__(self) -> str:
        ins = ", ".join(a.str_short() for a in self.in_avals)
        outs = ", ".join(a.str_short() for a in self.out_avals)
        return f"{outs} = {self.primitive.name} {ins}"


def _changes_only_type(eqn: Any) -> bool:
    """Whether an equation only says how its operand lies on a mesh, and leaves that open."""
    if eqn.primitive.name == "reshard":
        return not any(_is_split(v.aval) for v in (*eqn.invars, *eqn.outvars))
    return bool(eqn.primitive.name == "pvary")


def _is_split(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    if sharding is None:
        return False
    spec = sharding.spec
    return bool(spec.unreduced or spec.reduced) or any(axes is not None for axes in spec.partitions)


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat program: equations over numbered values.

    ``inputs`` are the value numbers of the constants followed by those of the arguments. ``outputs`` are
    value numbers or literals.
    """

    equations: tuple[Equation, ...]
    avals: tuple[Any, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    consts: tuple[Any, ...]
    out_tree: Any


def is_sharded(flat: Flat) -> bool:
    """Whether an array of the program has an explicit sharding along some dimension."""
    return any(map(_is_split, flat.avals))


def without_shardings(flat: Flat) -> Flat | None:
    """The program without the explicit shardings of its arrays, for XLA to choose; None if it has none, or an
    operation that depends on them."""
    if not is_sharded(flat):
        return None
    equations = []
    for eqn in flat.equations:
        if eqn.effects or eqn.primitive.name in _ON_MESHES or _has_split_body(eqn.params):
            return None
        avals = [tuple(map(_unsharded, own)) for own in (eqn.in_avals, eqn.out_avals)]
        params = {name: None if name in _SHARDING_PARAMS else value for name, value in eqn.params.items()}
        context = None if eqn.context is None else jax_compat.InSurroundingMesh(eqn.context)
        new = replace(eqn, params=params, in_avals=avals[0], out_avals=avals[1], context=context)
        equations.append(new)
    return Flat(
        tuple(equations),
        tuple(map(_unsharded, flat.avals)),
        flat.inputs,
        flat.outputs,
        flat.consts,
        flat.out_tree,
    )


_SHARDING_PARAMS = ("out_sharding", "sharding")
"""The parameters of JAX's operations that only say how their results are sharded."""

_ON_MESHES = ("reshard", "sharding_constraint", "mesh_cast", "layout_constraint")


def _unsharded(aval: Any) -> Any:
    return (
        jax.core.ShapedArray(aval.shape, aval.dtype, aval.weak_type) if hasattr(aval, "weak_type") else aval
    )


def _has_split_body(params: Mapping[str, Any]) -> bool:
    """Whether an operation has a body of its own, such as a loop's, in which arrays are split."""

    def is_body(x: Any) -> bool:
        return isinstance(x, (jex_core.Jaxpr, jex_core.ClosedJaxpr))

    for body in filter(is_body, jax.tree.leaves(dict(params), is_leaf=is_body)):
        jaxpr = body.jaxpr if isinstance(body, jex_core.ClosedJaxpr) else body
        made = (v for eqn in jaxpr.eqns for v in eqn.outvars)
        if any(_is_split(v.aval) for v in (*jaxpr.invars, *jaxpr.constvars, *made)):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Traced(Flat):
    """A function traced at given shapes: flat equations for compilation, a jaxpr for transformations."""

    jaxpr: jex_core.Jaxpr
    """The traced jaxpr, with custom derivatives, ``checkpoint``, batching rules and high-level types."""
    low: jex_core.Jaxpr
    """The jaxpr of the flat equations: ``jaxpr`` in JAX's low-level types, without dead code."""
    constants: tuple[int, ...]
    """For each constant of ``jaxpr``, its index among the function's constants."""
    low_constants: tuple[int, ...]
    """For each constant of ``low``, its index among the function's constants."""

    def evaluate(self, *flat: Any) -> list[Any]:
        """Evaluate ``jaxpr`` on the constants followed by the arguments. Fused functions are differentiated
        and batched by it, since it has every custom rule."""
        return self._evaluate(self.jaxpr, self.constants, flat)

    def evaluate_low(self, *flat: Any) -> list[Any]:
        """Evaluate ``low``, which cannot be differentiated or batched."""
        return self._evaluate(self.low, self.low_constants, flat)

    def _evaluate(self, jaxpr: jex_core.Jaxpr, constants: Sequence[int], flat: Sequence[Any]) -> list[Any]:
        n_consts = len(self.inputs) - len(jaxpr.invars)
        return jax_compat.eval_jaxpr(jaxpr, [flat[i] for i in constants], *flat[n_consts:])

    def reaches(self, marks: Sequence[bool]) -> list[bool]:
        """For each result of ``evaluate``, whether it depends on a marked constant or argument.

        ``equations`` may have fewer dependencies: dead-code rules can replace an equation by one with fewer
        arguments.
        """
        flat = _Flattener()
        arguments = [flat.new(v.aval) for v in self.jaxpr.invars]
        stand_ins = [object() for _ in self.jaxpr.constvars]
        outputs = flat.run(self.jaxpr, tuple(stand_ins), arguments)
        inputs = [flat.constants[id(value)][0] for value in stand_ins]
        marked = [marks[place] for place in self.constants]
        n_consts = len(marks) - len(arguments)
        return depends_on(flat.equations, [*inputs, *arguments], outputs, [*marked, *marks[n_consts:]])

    @property
    def batches_by_rule(self) -> bool:
        """Whether a batching rule was inlined that the equations do not show: the user's own
        (``custom_vmap``), or that of a high-level type."""
        return jax_compat.is_high(self.jaxpr) or _calls(self.jaxpr, "custom_vmap_call")


class _State(threading.local):
    depth = 0
    """How many functions this thread is tracing, one inside another."""


tracing_state = _State()


def is_tracing() -> bool:
    """Whether this thread is tracing a function to plan it. A nested ``fuseplan.jit`` is then traced as its
    plain function, so that the outer plan covers it."""
    return tracing_state.depth > 0


@contextmanager
def tracing() -> Iterator[None]:
    """A context in which ``is_tracing()`` is true."""
    tracing_state.depth += 1
    try:
        yield
    finally:
        tracing_state.depth -= 1


def trace(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Traced:
    """Trace ``f`` at the shapes and dtypes of ``args``, arrays or ``ShapeDtypeStruct``\\ s.

    Errors that ``f`` raises while it is traced pass through unchanged.

    Example:
        >>> import jax.numpy as jnp
        >>> from fuseplan.frontend.trace import trace
        >>> [str(e.primitive) for e in trace(lambda x: jnp.tanh(x) * 2, jnp.ones(3)).equations]
        ['tanh', 'mul']
    """
    closed, out_tree = closed_jaxpr(f, args, kwargs)
    return flatten(closed, out_tree)


def trace_used(
    f: Callable[..., Any],
    args: Any,
    kwargs: Any,
    static_argnums: Sequence[int],
    rewrite: Callable[[jex_core.ClosedJaxpr], jex_core.ClosedJaxpr] | None = None,
) -> tuple[Traced, list[bool]]:
    """As ``trace``, as a function of those arrays among the arguments that ``f`` uses; and which these are of
    all, in the order of ``jax.tree.leaves((args, kwargs))``. The arguments at ``static_argnums`` are given to
    ``f`` as they are. ``rewrite`` replaces what was traced."""
    closed, out_tree = closed_jaxpr(f, args, kwargs, static_argnums)
    closed = closed if rewrite is None else rewrite(closed)
    closed, used = jax_compat.without_unused(closed)
    return flatten(closed, out_tree), used


def closed_jaxpr(
    f: Callable[..., Any], args: Any, kwargs: Any, static_argnums: Sequence[int] = ()
) -> tuple[jex_core.ClosedJaxpr, Any]:
    """The closed jaxpr of ``f`` at these arguments, and the tree of its results."""
    traced = jax.make_jaxpr(f, static_argnums, return_shape=True)
    with tracing():
        closed, out_shape = traced(*args, **kwargs)
    return closed, jax.tree.structure(out_shape)


def flatten(closed: jex_core.ClosedJaxpr, out_tree: Any = None) -> Traced:
    """Inline the nested calls of a closed jaxpr, and drop dead equations."""
    flat = _Flattener()
    low, consts = jax_compat.as_compiled(closed)
    arguments = [flat.new(v.aval) for v in low.invars]
    outputs = flat.run(low, tuple(consts), arguments)
    for value, var in zip(closed.consts, closed.jaxpr.constvars, strict=True):
        flat.constant(value, var.aval)
    equations = live(flat.equations, outputs)
    constants = flat.constants.values()
    place = {key: i for i, key in enumerate(flat.constants)}
    return Traced(
        equations,
        tuple(flat.avals),
        (*(number for number, _ in constants), *arguments),
        tuple(outputs),
        tuple(value for _, value in constants),
        out_tree,
        closed.jaxpr,
        low,
        tuple([place[id(value)] for value in closed.consts]),
        tuple([place[id(value)] for value in consts]),
    )


def _calls(jaxpr: jex_core.Jaxpr, name: str) -> bool:
    """Whether ``jaxpr``, or one inlined in it, has an equation of that name."""
    for eqn in jaxpr.eqns:
        inner = inlinable(eqn)
        if eqn.primitive.name == name or (inner is not None and _calls(inner[0], name)):
            return True
    return False


def depends_on(
    equations: Iterable[Equation], inputs: Sequence[int], outputs: Sequence[Operand], marks: Sequence[bool]
) -> list[bool]:
    """For each output, whether it depends on one of the marked inputs."""
    marked = {v for v, mark in zip(inputs, marks, strict=True) if mark}
    for eqn in equations:
        if any(not isinstance(v, Literal) and v in marked for v in eqn.inputs):
            marked.update(eqn.outputs)
    return [not isinstance(v, Literal) and v in marked for v in outputs]


class _Flattener:
    def __init__(self) -> None:
        self.avals: list[Any] = []
        self.equations: list[Equation] = []
        self.constants: dict[int, tuple[int, Any]] = {}

    def new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, value: Any, aval: Any) -> int:
        # Keyed by identity: an inner jaxpr that is inlined twice shares its constants.
        if id(value) not in self.constants:
            self.constants[id(value)] = (self.new(aval), value)
        return self.constants[id(value)][0]

    def run(
        self,
        jaxpr: jex_core.Jaxpr,
        consts: tuple[Any, ...],
        inputs: Sequence[Operand],
        callers: tuple[Any, ...] = (),
        within: tuple[str, ...] = (),
    ) -> list[Operand]:
        env: dict[Any, Operand] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = self.constant(value, var.aval)
        for eqn in jaxpr.eqns:
            operands = [v if isinstance(v, Literal) else env[v] for v in eqn.invars]
            if _changes_only_type(eqn):
                env[eqn.outvars[0]] = operands[0]
                continue
            inner = inlinable(eqn)
            frames = (eqn.source_info, *callers)
            scope = within + jax_compat.scope_names(eqn.source_info)
            if inner is None:
                in_avals, out_avals = (tuple([v.aval for v in own]) for own in (eqn.invars, eqn.outvars))
                results: list[Any] = [self.new(aval) for aval in out_avals]
                self.equations.append(
                    Equation(
                        eqn.primitive, eqn.params, tuple(operands), tuple(results), in_avals, out_avals,
                        bool(eqn.effects), frames, eqn.ctx, scope,
                    )
                )  # fmt: skip
            else:
                if eqn.params.get("differentiated"):
                    operands = self._barrier(operands, eqn.params["prevent_cse"], frames, scope)
                body, body_consts = inner
                results = self.run(body, body_consts, operands, frames, scope)
            env.update(zip(eqn.outvars, results, strict=True))
        return [v if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    def _barrier(
        self,
        operands: list[Operand],
        prevent_cse: bool | tuple[bool, ...],
        frames: tuple[Any, ...],
        scope: tuple[str, ...],
    ) -> list[Operand]:
        """Put an optimization barrier around the operands of a ``checkpoint``'s recomputation, as JAX does.

        Without it XLA merges the recomputation with the original values and keeps their memory.
        ``prevent_cse`` says for which operands.
        """
        chosen = prevent_cse if isinstance(prevent_cse, tuple) else (prevent_cse,) * len(operands)
        arrays = [(i, v) for i, v in enumerate(operands) if chosen[i] and not isinstance(v, Literal)]
        if not arrays:
            return operands
        results = [self.new(self.avals[v]) for _, v in arrays]
        avals = tuple(self.avals[v] for _, v in arrays)
        numbers = tuple(v for _, v in arrays)
        barrier = Equation(jax_compat.optimization_barrier_p, {}, numbers, tuple(results), avals, avals)
        self.equations.append(replace(barrier, frames=frames, scope=scope))
        shielded = list(operands)
        for (i, _), number in zip(arrays, results, strict=True):
            shielded[i] = number
        return shielded


def inlinable(eqn: Any) -> tuple[jex_core.Jaxpr, tuple[Any, ...]] | None:
    """The body of a call that is inlined, and its constants; None for any other equation."""
    key = INLINED.get(eqn.primitive.name)
    if key is None or key not in eqn.params:
        return None
    for name in ("in_shardings", "out_shardings"):
        if name in eqn.params and not all(map(jax_compat.is_unspecified, eqn.params[name])):
            return None
    body = eqn.params[key]
    if eqn.primitive.name == "fused" and not eqn.params["call"].is_plain:
        return None
    if _pattern_of(eqn.primitive.name, eqn.params):
        return None
    if isinstance(body, jex_core.ClosedJaxpr):
        return body.jaxpr, tuple(body.consts)
    return body, ()


def live(equations: Sequence[Equation], outputs: Sequence[Operand]) -> tuple[Equation, ...]:
    """The equations that an output or a side effect needs."""
    needed = {v for v in outputs if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(equations):
        if eqn.effects or not needed.isdisjoint(eqn.outputs):
            needed.update(v for v in eqn.inputs if not isinstance(v, Literal))
            kept.append(eqn)
    return tuple(reversed(kept))


def evaluator(
    equations: Iterable[Equation], inputs: Sequence[int], outputs: Sequence[Operand]
) -> FlatFunction:
    """A function by JAX's own operations."""

    def run(*flat: Any) -> list[Any]:
        values: dict[int, Any] = dict(zip(inputs, flat, strict=True))
        run_equations(equations, values)
        return [literal_array(o) if isinstance(o, Literal) else values[o] for o in outputs]

    return run


def literal_array(literal: Literal) -> Any:
    """The value of a literal as an array of its dtype, weakly typed where the literal is."""
    aval: Any = literal.aval
    if getattr(aval, "weak_type", False):
        return jnp.asarray(np.asarray(literal.val).item())
    return jnp.asarray(literal.val, dtype=aval.dtype)


def run_equations(equations: Iterable[Equation], values: dict[int, Any]) -> None:
    """Evaluate equations in order, adding their results to ``values``."""
    for equation in equations:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in equation.inputs]
        with nullcontext() if equation.context is None else equation.context.manager:
            values.update(zip(equation.outputs, evaluate(equation, operands), strict=True))


def evaluate(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluate one equation, whatever its primitive, on arrays or tracers."""
    primitive = equation.primitive
    if any(map(jax_compat.varying_axes, equation.in_avals)):
        operands = [jax_compat.varying(x, aval) for x, aval in zip(operands, equation.in_avals, strict=True)]
    # Calls of functions (custom_jvp_call …) are bound to the function, not to its jaxpr.
    results = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
    return results if primitive.multiple_results else [results]
