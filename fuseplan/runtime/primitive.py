"""The primitive of fused functions: one equation of a jaxpr, planned when it is compiled.

Transformations come first: under ``jax.vmap`` the batched function is planned, under ``jax.grad`` its forward
and backward passes (``fuseplan.runtime.derivative``).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.scans import with_lean_scans
from fuseplan.frontend.trace import (
    Flat,
    FlatFunction,
    Literal,
    Primitive,
    Traced,
    evaluator,
    is_sharded,
    trace,
    without_shardings,
)
from fuseplan.pipeline import plan_traced
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.options import Options
from fuseplan.planners import has_fixed_kernels
from fuseplan.report.debug import report_left
from fuseplan.runtime.control_flow import Fuse, with_planned_bodies
from fuseplan.runtime.executor import Part, make_runner
from fuseplan.runtime.partition import on_one_device, traced_for_devices
from fuseplan.runtime.screen import (
    as_left_to_xla,
    is_on_cpu,
    is_screened,
    may_gain,
    may_loop_anywhere,
    runs_as_jax,
    with_chains_in_turn,
    with_large_arrays,
)
from fuseplan.search.selectors import of_derivative, require_names
from fuseplan.settings import with_figures
from fuseplan.shape_families import ShapeFamilies
from fuseplan.support import jax_compat
from fuseplan.support.collector import paused_collector
from fuseplan.support.errors import FuseplanError, FuseplanWarning, MemoryLimitError, first_line
from fuseplan.support.memo import memo_scope

fused_p = Primitive("fused")
fused_p.multiple_results = True


PlanOf = Callable[..., FusionPlan]
"""A planning function, such as ``pipeline.plan_traced``."""


class Settings(NamedTuple):
    """The options by which a function is planned, and the platform (``cpu``, ``gpu``, ``tpu``) that runs
    it."""

    options: Options
    platform: str
    derived: bool = False
    """Whether the function is a derivative of the one that the options were given for."""
    plan_of: PlanOf = plan_traced
    families: ShapeFamilies | None = None
    """What is known of the function's programs at other sizes."""


def _as_weak_as(aval: Any, x: Any) -> Any:
    """``x`` with the weak type of ``aval``: results of kernels have no weak types."""
    weak = getattr(aval, "weak_type", False)
    if getattr(jax.typeof(x), "weak_type", False) == weak:
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=aval.dtype, weak_type=weak, sharding=None)


@dataclass(eq=False)
class Call:
    """The function of flat arrays that a fused equation computes.

    Some calls have *hints* after their arguments, or further results: residuals, values of the forward pass
    that the backward pass reads. They are determined by the arguments, so the derivative is that of the
    function without them, which ``plain`` evaluates.
    """

    settings: Settings
    out_avals: tuple[Any, ...]
    effects: frozenset[Any]
    evaluate: Callable[..., Sequence[Any]]
    """The function by JAX's own operations, which is batched."""
    reaches: Callable[[Sequence[bool]], list[bool]]
    """For each result, whether it depends on one of the marked arguments."""
    make: Callable[[], FlatFunction]
    """Plans the function and returns it as kernels."""
    n_args: int
    """The number of arguments before the hints."""
    jaxpr: Any
    """The function's jaxpr, in which JAX finds meshes, shardings and high-level types."""
    low: Any
    """The same jaxpr in JAX's low-level types."""
    batches_by_rule: bool = False
    plain: Callable[..., Sequence[Any]] | None = None
    """The function without hints and residuals, by JAX's own operations; None if the call has neither."""
    bare: Call | None = None
    """The call of ``plain``, made on demand by ``base``."""
    n_results: int = 0
    """The number of results before the residuals."""

    def __repr__(self) -> str:
        return f"{len(self.out_avals)} results for {self.settings.options.device.name}"

    @property
    def is_plain(self) -> bool:
        """Whether ``jaxpr`` computes exactly this call."""
        return self.plain is None and not self.jaxpr.constvars and len(self.jaxpr.invars) == self.n_args

    def bind(self, *flat: Any) -> list[Any]:
        """The results on arrays or tracers, as one equation."""
        return fused_p.bind(*flat, call=self, jaxpr=self.jaxpr)

    @property
    def has_side_effects(self) -> bool:
        """Whether it has effects other than named axes of collectives."""
        return not self.effects <= jax_compat.axis_effects(self.effects)

    @functools.cached_property
    def run(self) -> FlatFunction:
        """The function as the kernels of its plan."""
        made, avals = self.make(), self.out_avals
        return lambda *flat: [_as_weak_as(aval, x) for x, aval in zip(made(*flat), avals, strict=True)]

    def base(self, flat: Sequence[Any]) -> Call:
        """The call without hints and residuals, at arguments (or avals) like ``flat``."""
        if self.plain is None:
            return self
        if self.bare is None:
            avals = [x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x) for x in flat]
            self.bare = closed_call(self.plain, avals[: self.n_args], self.settings)
            assert self.bare is not None, "the call of both passes closes over no tracer"
        return self.bare

    @functools.cached_property
    def derivatives(self) -> dict[tuple[int, ...], Any]:
        """A cache of derivatives, by the differentiated arguments (``fuseplan.runtime.derivative``)."""
        return {}

    @functools.cached_property
    def jitted(self) -> Any:
        """``run`` jitted, for use outside ``jax.jit``."""
        return jax.jit(self.run)


def planned(flat: Flat, settings: Settings, only_loops: bool = False) -> FusionPlan:
    """The plan of a program; with ``only_loops``, as ``Options.only_loops``."""
    options = replace(settings.options, only_loops=only_loops)
    if not has_fixed_kernels(options.planner):  # which depend on no figures of the device
        options = with_figures(options)
    if settings.derived and options.constraints is not None:
        there = of_derivative(options.constraints, lower(flat))
        options = replace(options, constraints=there)
    return settings.plan_of(flat, options)


@paused_collector()
@memo_scope()
def plan_to_run(flat: Flat, settings: Settings) -> FusionPlan | None:
    """The plan by which a program runs; None if it runs by JAX's own operations."""
    if not is_screened(settings.options):
        plan = planned(flat, settings)
        return None if runs_as_jax(plan) else plan
    programs = with_large_arrays(flat, settings.options)
    if not programs or not _is_worth_planning(programs, settings):
        report_left()
        return None
    # The proof of a plan changes nothing that runs, nor does a plan of what is left to XLA.
    plan = planned(flat, settings, only_loops=True)
    return None if runs_as_jax(plan) else plan


def _is_worth_planning(programs: Sequence[Lowered], settings: Settings) -> bool:
    """Whether a plan of a program may have a loop, as is known of nearby sizes or by ``may_gain``."""
    options, families = settings.options, settings.families
    if families is None:
        return may_gain(programs, options)
    there = replace(with_figures(options), only_loops=True)
    known = families.may_plan(programs[-1], there)
    if known is None and not may_gain(programs, options):
        families.leave(programs[-1], there)
        known = False
    return known is not False


def can_be_equation(traced: Traced) -> bool:
    """Whether one equation of arrays and tokens can represent the traced function."""
    types = [v.aval for v in (*traced.jaxpr.invars, *traced.jaxpr.outvars)]
    return jax_compat.can_carry(traced.jaxpr.effects) and not any(map(jax_compat.is_high, types))


def call_of(traced: Traced, settings: Settings) -> Call:
    """The call of a traced function. Its arguments are the function's constants and arguments."""
    shared = replace(traced, consts=())  # JAX's tracers may be among them

    # JAX caches the transformations of a jitted function. It is inlined, since XLA simplifies a called
    # function before it sees which operands of the call are constants.
    @functools.partial(jax.jit, inline=True)
    def evaluate(*flat: Any) -> Any:
        return shared.evaluate(*flat)

    return Call(
        settings,
        tuple(v.aval for v in traced.jaxpr.outvars),
        frozenset(traced.jaxpr.effects),
        evaluate,
        shared.reaches,
        maker_of(shared, settings, shared.evaluate_low),
        len(traced.inputs),
        traced.jaxpr,
        traced.low,
        traced.batches_by_rule,
    )


def maker_of(flat: Flat, settings: Settings, evaluate: FlatFunction) -> Callable[[], FlatFunction]:
    """A function that plans the program and returns it as kernels; as ``evaluate``, JAX's own operations, if
    no kernel gains, or with a warning if planning fails."""

    def make() -> FlatFunction:
        try:
            return _within_limit(made(), flat, settings)
        except FuseplanError:
            raise  # for the user
        except Exception as error:
            if settings.options.strict:
                raise
            warn_of_failure("planned", error)
            return evaluate

    def made() -> FlatFunction:
        lean = with_lean_scans(flat)
        unsharded = without_shardings(lean)
        program = lean if unsharded is None else unsharded
        plan = plan_to_run(program, settings)
        if plan is not None:
            run = runner_of(plan, settings)
            return _or_evaluated(run if unsharded is None else in_auto_axes(run, flat), evaluate, settings)
        left = as_left_to_xla(lean, settings.options)
        turned = with_chains_in_turn(left, settings.options)
        run = evaluated(left)
        return run if turned is left else on_one_device(evaluated(turned), run)

    def evaluated(program: Flat) -> FlatFunction:
        equations = with_planned_bodies(program.equations, _fuse_body(settings))
        if equations is flat.equations:
            return evaluate
        return evaluator(equations, program.inputs, program.outputs)

    return make


def _within_limit(run: FlatFunction, flat: Flat, settings: Settings) -> FlatFunction:
    """``run``, if it keeps to the limit of memory. On a CPU, XLA regroups what a plan leaves to it and gives
    it memory, so that the compiled program's own count decides.

    Raises:
        MemoryLimitError: its temporaries need more.
    """
    constraints = settings.options.constraints
    limit = None if constraints is None else constraints.max_peak_bytes
    if limit is None or settings.platform != "cpu" or not is_on_cpu(settings.options.device):
        return run
    types = [flat.avals[v] for v in flat.inputs]
    if is_sharded(flat) or not all(hasattr(aval, "dtype") for aval in types):
        return run  # Each device has a part of the program, and tokens have no memory.
    arrays = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types]
    memory = jax.jit(run).lower(*arrays).compile().memory_analysis()
    if memory is not None and memory.temp_size_in_bytes > limit:
        raise MemoryLimitError(limit, memory.temp_size_in_bytes, 0)
    return run


def in_auto_axes(run: FlatFunction, flat: Flat) -> FlatFunction:
    """``run``, a function of arrays whose shardings XLA chooses, as one of arrays with the explicit shardings
    of ``flat``."""
    avals = [jax.typeof(o.val) if isinstance(o, Literal) else flat.avals[o] for o in flat.outputs]
    shardings = [aval.sharding for aval in avals]
    return lambda *arrays: list(
        jax.sharding.auto_axes(lambda *a: list(run(*a)), out_sharding=shardings)(*arrays)
    )


def _or_evaluated(run: FlatFunction, evaluate: FlatFunction, settings: Settings) -> FlatFunction:
    """``run``; with a warning ``evaluate`` where its loops cannot be emitted. Kernels that a compiler refuses
    are planned anew (``fuseplan.runtime.recovering``)."""
    if settings.options.strict or settings.platform != "cpu":
        return run

    def emitted(*flat: Any) -> list[Any]:
        try:
            return run(*flat)
        except FuseplanError:
            raise
        except Exception as error:
            warn_of_failure("emitted", error)
            return evaluate(*flat)

    return emitted


def warn_of_failure(what: str, error: Exception) -> None:
    """Warn that ``jax.jit``'s program runs after a failure of fuseplan's own."""
    warnings.warn(
        f"a function could not be {what}, so jax.jit's program is used. The error, which strict=True raises: "
        f"{type(error).__name__}: {first_line(error)}",
        FuseplanWarning,
        stacklevel=2,
    )


def runner_of(plan: FusionPlan, settings: Settings, part: Part | None = None) -> FlatFunction:
    """The function that runs a plan's kernels, or a part of them, on the platform of ``settings``."""
    lowered = plan.lowered
    if plan.device.platform == settings.platform:
        equations = with_planned_bodies(lowered.equations, _fuse_body(settings))
        lowered = replace(lowered, equations=equations)
    return make_runner(lowered, plan, platform=settings.platform, part=part)


def _fuse_body(settings: Settings) -> Fuse:
    """The function that plans the bodies of loops and branches, by themselves and without constraints."""
    # Constraints refer to operations outside of bodies.
    own = settings._replace(options=replace(settings.options, constraints=None, strict=False))
    return lambda traced: call_of(traced, own).bind if may_loop_anywhere(traced, own.options) else None


def closed_call(f: Callable[..., Any], avals: Sequence[Any], settings: Settings) -> Call | None:
    """The call of ``f`` at these shapes; None if ``f`` closes over a tracer of JAX, which cannot be part of
    an equation."""
    traced = trace(f, *avals)
    return None if holds_tracer(traced) else bound(call_of(traced, settings), traced.consts)


def holds_tracer(traced: Traced) -> bool:
    """Whether the function closes over a tracer of JAX."""
    return any(isinstance(value, jax.core.Tracer) for value in traced.consts)


def bound(call: Call, consts: tuple[Any, ...]) -> Call:
    """The call whose first arguments are ``consts``."""
    if not consts:
        return call
    unmarked = [False] * len(consts)
    return replace(
        call,
        evaluate=functools.partial(call.evaluate, *consts),
        reaches=lambda marks: call.reaches([*unmarked, *marks]),
        make=lambda: functools.partial(call.run, *consts),
        n_args=call.n_args - len(consts),
    )


@fused_p.def_impl
def _evaluated(*flat: Any, call: Call, jaxpr: Any) -> Any:
    return call.jitted(*flat)


@fused_p.def_effectful_abstract_eval
def _shapes(*_: Any, call: Call, jaxpr: Any) -> Any:
    return list(call.out_avals), set(call.effects)


jax_compat.register_low(fused_p, lambda *flat, call, jaxpr: fused_p.bind(*flat, call=call, jaxpr=call.low))


def _lowered(ctx: Any, *operands: Any, call: Call, jaxpr: Any) -> Any:
    devices = jax_compat.partitioned_devices(ctx)
    is_elsewhere = jax_compat.lowered_for(ctx) != (call.settings.platform,)
    if devices is None or is_elsewhere:  # kernels would be whole on each device, or are of another platform
        return mlir.lower_fun(call.evaluate, multiple_results=True)(ctx, *operands)
    inner = jax_compat.with_devices(ctx, devices) if devices else ctx
    with traced_for_devices(devices):  # none: within a ``shard_map``, say, of a program that has some
        results = mlir.lower_fun(call.run, multiple_results=True)(inner, *operands)
    if inner is not ctx and inner.tokens_out is not None:  # of ordered side effects
        ctx.set_tokens_out(inner.tokens_out)
    return results


# Lowered inline: shard_map cannot be compiled in a function of its own.
mlir.register_lowering(fused_p, _lowered, cacheable=False)


def _batching_rule(axis: Any, flat: Any, dims: Any, *, call: Call, jaxpr: Any) -> tuple[Any, list[Any]]:
    """The results of a call with a new axis at ``dims`` of its arguments, and the axis's dimension in
    each."""
    over_axis = bool(jax_compat.axis_effects(call.effects, axis.name))
    if all(dim is None for dim in dims) and not over_axis:
        return call.bind(*flat), [None] * len(call.out_avals)
    if not call.settings.derived:
        require_names(call.settings.options.constraints)
    marks = call.reaches([dim is not None for dim in dims])
    out_dims = [0 if mark or over_axis else None for mark in marks]
    f = with_axis(call.evaluate, axis, dims, out_dims)
    avals = [jax.typeof(x) for x in flat]
    new = closed_call(f, avals, call.settings)
    if new is None:
        return f(*flat), out_dims
    if call.plain is not None:
        n = call.n_args
        plain = with_axis(call.plain, axis, dims[:n], out_dims[: call.n_results])
        new = replace(new, plain=plain, n_args=n, n_results=call.n_results)
    return new.bind(*flat), out_dims


def with_axis(
    f: Callable[..., Sequence[Any]], axis: Any, dims: Sequence[int | None], out_dims: Sequence[int | None]
) -> Callable[..., Any]:
    """``jax.vmap`` of a flat function over JAX's ``axis``."""

    def tupled(*flat: Any) -> tuple[Any, ...]:
        return tuple(f(*flat))

    named = {"axis_name": axis.name, "axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
    if any(dim is not None for dim in dims):
        return jax.vmap(tupled, tuple(dims), tuple(out_dims), **named)
    # A collective over unbatched arguments: jax.vmap needs an argument that has the axis.
    vmapped = jax.vmap(lambda _, *flat: tupled(*flat), (0, *dims), tuple(out_dims), **named)
    return lambda *flat: vmapped(jnp.zeros(axis.size), *flat)


def _transposed(cotangents: Any, *flat: Any, call: Call, jaxpr: Any) -> Any:
    """The cotangents of the operands that the call is linear in (``jax.linear_transpose``)."""
    linear = [i for i, x in enumerate(flat) if ad.is_undefined_primal(x)]
    moved = [j for j, ct in enumerate(cotangents) if not isinstance(ct, ad.Zero)]
    avals = [flat[i].aval for i in linear]
    known = [x for x in flat if not ad.is_undefined_primal(x)]

    def back(*arrays: Any) -> Any:
        def f(*some: Any) -> list[Any]:
            rest, ours = iter(arrays), iter(some)
            filled = [next(ours) if ad.is_undefined_primal(x) else next(rest) for x in flat]
            outs = call.evaluate(*filled)
            return [outs[j] for j in moved]

        return list(jax.linear_transpose(f, *avals)(list(arrays[len(known) :])))

    arrays = [*known, *(cotangents[j] for j in moved)]
    new = closed_call(back, [jax.typeof(x) for x in arrays], call.settings._replace(derived=True))
    results = iter(back(*arrays) if new is None else new.bind(*arrays))
    return [next(results) if ad.is_undefined_primal(x) else None for x in flat]


ad.primitive_transposes[fused_p] = _transposed


batching.fancy_primitive_batchers[fused_p] = _batching_rule


def _without_kept(used: Sequence[bool], eqn: Any) -> Any:
    """The dead-code rule: drop residuals that are not read (under ``jax.checkpoint`` and in forward mode)."""
    call, n_inputs = eqn.params["call"], len(eqn.invars)
    if not any(used) and not call.has_side_effects:
        return [False] * n_inputs, None
    n, m = call.n_args, call.n_results
    if call.plain is not None and m < len(used) and not any(used[m:]):
        bare = call.base([v.aval for v in eqn.invars])
        params = {"call": bare, "jaxpr": bare.jaxpr}
        eqn = eqn.replace(invars=eqn.invars[:n], outvars=eqn.outvars[:m], params=params)
        return [i < n for i in range(n_inputs)], eqn
    return [True] * n_inputs, eqn


jax_compat.register_dead_code(fused_p, _without_kept)
