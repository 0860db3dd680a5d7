"""The public functions: ``jit`` plans and runs a function, ``make_plan`` returns its plan, ``compare``
compares planners, ``devices`` lists devices."""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax

from costmodel.device import DeviceSpec
from costmodel.model import CostModel
from fuseplan import runtime
from fuseplan.frontend import trace as frontend_trace
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.scans import with_lean_scans
from fuseplan.frontend.trace import (
    Traced,
    closed_jaxpr,
    flatten,
    is_tracing,
    trace,
    tracing,
    tracing_state,
)
from fuseplan.patterns.choice import apply_patterns, plan_patterned
from fuseplan.patterns.pattern import Pattern, flattened
from fuseplan.pipeline import plan_best, plan_function, plan_traced
from fuseplan.plan.constraints import Constraints
from fuseplan.plan.notes import NoteKind, note
from fuseplan.plan.options import ALL_FEATURES, DEFAULT_DEADLINE_S, Features, Options
from fuseplan.public_plan import Plan
from fuseplan.report.comparison import Compared, Timing
from fuseplan.report.frames import compare_frame, devices_frame, joined_frame
from fuseplan.runtime.autoselect import Choices, Measurement
from fuseplan.runtime.background import InBackground
from fuseplan.runtime.bind import fuse
from fuseplan.runtime.compare import (
    compare_patterned,
    compare_plan,
    default_planners,
    require_measurable,
    require_plan,
    time_rows,
)
from fuseplan.runtime.control_flow import bodies
from fuseplan.runtime.derivative import plan_passes
from fuseplan.runtime.known_shapes import KnownShapes, UnseenShapesError
from fuseplan.runtime.min_cut import Halves
from fuseplan.runtime.primitive import PlanOf, Settings, plan_to_run
from fuseplan.runtime.recovering import CallSignatures, RecoveringJit, lower_there
from fuseplan.runtime.screen import (
    as_left_to_xla,
    has_same_loops,
    is_screened,
    may_loop_anywhere,
    runs_as_jax,
    with_chains_in_turn,
)
from fuseplan.runtime.tolerance import check_results
from fuseplan.settings import make_options, resolve_device, with_figures
from fuseplan.shape_families import ShapeFamilies
from fuseplan.support.environment import is_checked, is_disabled
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.support.jax_compat import filter_traceback, hide_frames, is_eager
from fuseplan.targets.compile_only import compiler_for, lower_for
from fuseplan.targets.detect import device_of, local_platform, unmeasured_device

if TYPE_CHECKING:
    import pandas as pd

for _path in (__file__, runtime.__path__[0], frontend_trace.__file__):
    hide_frames(_path)


P = ParamSpec("P")
R = TypeVar("R")


class JitOptions(TypedDict, total=False):
    """The options of ``jit``, and those of ``jax.jit``, for type checkers."""

    device: str | DeviceSpec | jax.Device | None
    planner: str
    deadline_s: float
    strict: bool
    measure: bool
    background: bool
    dynamic_shapes: bool
    constraints: Constraints | None
    peers: Sequence[str]
    cost_model: CostModel | None
    patterns: Any
    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    backend: str | None
    inline: bool
    compiler_options: dict[str, Any] | None


@overload
def jit(f: Callable[P, R], /, **options: Unpack[JitOptions]) -> JitFused[P, R]: ...


@overload
def jit(f: None = None, /, **options: Unpack[JitOptions]) -> Callable[[Callable[P, R]], JitFused[P, R]]: ...


def jit(
    f: Callable[..., Any] | None = None,
    /,
    *,
    device: str | DeviceSpec | jax.Device | None = None,
    planner: str = "solver",
    deadline_s: float = DEFAULT_DEADLINE_S,
    strict: bool = False,
    measure: bool = False,
    background: bool = False,
    dynamic_shapes: bool = True,
    constraints: Constraints | None = None,
    peers: Sequence[str] = (),
    cost_model: CostModel | None = None,
    patterns: Any = (),
    **jit_options: Any,
) -> Any:
    """``jax.jit`` that plans which operations share a kernel, and emits these kernels.

    Args:
        f: the function; without it, a decorator is returned.
        device: a name of ``fuseplan.devices()``, ``name:backend`` (``"h200:mosaic_gpu"``) for
            another of its backends, or a ``costmodel.DeviceSpec``; None is the device that JAX runs on.
            Kernels for a device that is not present are left to XLA. A ``jax.Device`` is also the
            ``device`` that ``jax.jit`` runs on.
        planner: a name of ``fuseplan.planner_names()``.
        deadline_s: seconds of planning after which the best plan found so far is used; 0 uses that of a
            heuristic.
        strict: raise ``UnsupportedOperationError`` for a primitive without a rule instead of
            leaving it to XLA.
        measure: on the first call at each new set of shapes, time the fused program against
            ``jax.jit(f)`` on these arguments (up to 2 s or one run of each, beside the second compilation),
            and run the faster one from then on. Nothing is timed if both are the same program, as on a CPU
            where no tiled loop can gain. A function with side effects is not timed, and run by ``jax.jit``;
            on tracers the fused function is used.
        background: plan and compile in a thread. Until the fused program is ready (``JitFused.is_ready``),
            calls at new shapes run ``jax.jit``'s. So do calls in a thread that has set options of JAX for
            itself, as ``jax.default_matmul_precision`` does. A process that ends waits for the planning that
            runs, and not for others.
        dynamic_shapes: at sizes within a factor of two of planned ones, take the groups of that plan over
            instead of searching (``fuseplan.shape_families``). False: search at each set of shapes.
            ``JitFused.plan`` says which plan a call has.
        constraints: which operations must or must not share a kernel, and how large a kernel may be. With
            ``measure=True`` they do not bind ``jax.jit``'s program.
        peers: planners whose plans are made beside the solver's: the fastest of them is used. ``["xla"]``
            compiles the program by XLA, for the plan that ``jax.jit`` has.
        cost_model: prices the kernels in place of fuseplan's own model (``fuseplan.CostModel``).
        patterns: ``fuseplan.Pattern``s: their matches are replaced by their replacements, each a kernel of
            its own, before derivatives are taken and before planning. The function itself, as ``jax.jit``
            runs it, stays as it is.
        **jit_options: options of ``jax.jit``, such as ``static_argnums`` and ``donate_argnums``.

    Returns:
        A ``JitFused``, called like ``jax.jit(f)``, with the methods ``plan``, ``trace`` and ``lower``.
        Results have the same pytrees, dtypes, shardings and errors as those of ``jax.jit(f)``: if arrays are
        sharded, each kernel is split over devices along its axes. A kernel that the
        device's compiler refuses is planned again, at most twice, and then left to XLA, with a
        ``CompilerRefusalWarning``.

    Raises:
        FuseplanError: an unknown device or planner, or an invalid deadline.
        ConstraintError: at a call, if a constraint selects no operation or cannot hold.
        MemoryLimitError: at a call, if no plan was found that keeps to ``max_peak_bytes``.
        PatternError: at a call, if a required pattern matches nothing, or a pattern overlaps itself or has a
            replacement with another result.

    Example:
        >>> import jax.numpy as jnp
        >>> softmax = jit(lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True), device="h200")
        >>> softmax(jnp.zeros((2, 4)))[0, 0].item()
        0.25
        >>> softmax.plan(jnp.zeros((2, 4))).status
        'OPTIMAL'
    """
    if f is None:
        return functools.partial(
            jit, device=device, planner=planner, deadline_s=deadline_s, strict=strict, measure=measure,
            background=background, dynamic_shapes=dynamic_shapes, constraints=constraints, peers=peers,
            cost_model=cost_model, patterns=patterns, **jit_options,
        )  # fmt: skip
    if not callable(f):  # jax.jit's message, and the likely reason
        raise InvalidArgumentError(
            f"Expected a callable value, got {f!r} of type {type(f).__name__}. With options only, "
            "fuseplan.jit is a decorator: @fuseplan.jit(device=...)"
        )
    options_for = functools.partial(
        make_options,
        planner=planner,
        deadline_s=deadline_s,
        strict=strict,
        constraints=constraints,
        peers=peers,
        cost_model=cost_model,
        patterns=flattened(patterns),
    )
    if isinstance(device, jax.Device):
        jit_options = {**jit_options, "device": device}
        device = "cpu" if device.platform == "cpu" else device_of(device)
    options_for("test" if device is None else unmeasured_device(device))
    return JitFused(f, device, options_for, jit_options, measure, background, dynamic_shapes)


class JitFused(Generic[P, R]):
    """A function that is planned, fused and compiled at each new set of shapes. Type checkers see the
    parameters and the result of the function."""

    def __init__(
        self,
        f: Callable[P, R],
        device: str | DeviceSpec | None,
        options_for: functools.partial[Options],
        jit_options: dict[str, Any],
        measure: bool = False,
        background: bool = False,
        dynamic_shapes: bool = False,
    ) -> None:
        # __getattr__ finds f's attributes. Copied, they would hide equally named ones of this class.
        functools.update_wrapper(self, f, updated=())
        self._f = f
        self._device, self._options_for = device, options_for
        # This CPU is measured only where prices matter (``with_figures``): it takes seconds, and in most
        # functions no price matters. A function, so that no cycle keeps this object alive.
        self._options = functools.cache(lambda: options_for(unmeasured_device(device)))
        self._jit_options = jit_options
        self._known = KnownShapes() if measure or background else None
        """Ends a direct call at new shapes; None if the first call at some shapes is like later ones."""
        self._reference = jax.jit(f if self._known is None else self._known.watched(f), **jit_options)
        self._families = ShapeFamilies() if dynamic_shapes else None
        self._emitted = functools.partial(_emitted, f, self._options, self._families, self._known)
        calls = CallSignatures(f, jit_options)
        plan_of = plan_traced if self._families is None else self._families.plan
        self._jitted = RecoveringJit(self._name, self._emitted, self._reference, calls, jit_options, plan_of)
        self._choices: Choices | None = None
        if measure:
            self._choices = Choices(
                self._name,
                f,
                self._jitted,
                self._reference,
                jit_options,
                functools.partial(_is_left_to_jax, self._options),
            )
        self._background: InBackground | None = None
        if background:
            fused = self._choices or self._jitted
            self._background = InBackground(self._name, fused, self._jitted, self._reference, calls)
        self._direct: Callable[..., Any] | None = None
        """The jitted function that later calls run, where they need no checks and no recovery: at known
        shapes only, if there are ``_known`` ones."""
        self._may_be_direct = True

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        direct = self._direct
        try:
            if direct is not None and not tracing_state.depth:  # is_tracing() without the cost of a call
                if self._known is None:
                    return direct(*args, **kwargs)
                if is_eager():  # Under a transformation, a call is recorded and not run.
                    try:
                        return self._known.call(direct, args, kwargs)
                    except UnseenShapesError:
                        pass
            if is_disabled() or is_tracing():
                return self._reference(*args, **kwargs)
            expected = self._expected(args, kwargs) if is_checked() else None
            result = (self._background or self._choices or self._jitted)(*args, **kwargs)
            if expected is not None:
                check_results(self._name, result, expected[0])
            elif self._may_be_direct and not is_checked() and local_platform() == "cpu":
                self._direct = self._settled()
            return result
        except Exception as error:
            filter_traceback(error)
            raise

    def _settled(self) -> Callable[..., Any] | None:
        """The jitted function that calls at all known shapes run, if there is one."""
        if self._background is not None:
            is_settled = self._choices is None and self._background.is_settled
            return self._jitted.fused if is_settled else None
        if self._choices is not None:
            return {"fused": self._jitted.fused, "plain": self._reference}.get(self._choices.settled or "")
        return self._jitted.fused

    def _call_indirectly(self) -> None:
        """Look up the shapes of every later call: ``jax.jit`` may now know shapes that were never called."""
        if self._known is not None:
            self._direct, self._may_be_direct = None, False

    def _expected(self, args: Any, kwargs: Any) -> tuple[Any] | None:
        """The result of ``jax.jit(f)``, computed before the arguments may be donated; None on tracers and for
        functions with side effects."""
        # Under a transformation a result may be a tracer though no argument is one.
        if not is_eager() or any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            return None
        if self._reference.trace(*args, **kwargs).jaxpr.effects:
            return None
        return (self._undonating(*args, **kwargs),)

    @functools.cached_property
    def _undonating(self) -> Any:
        """``jax.jit(f)`` without donation of arguments."""
        kept = {k: v for k, v in self._jit_options.items() if not k.startswith("donate_")}
        return jax.jit(self._f, **kept)

    @property
    def _name(self) -> str:
        return getattr(self._f, "__name__", type(self._f).__name__)

    def __getattr__(self, name: str) -> Any:
        # Attributes of the function, and what else a function that jax.jit returns has.
        if name.startswith("__") or name == "_jitted":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._jitted.fused, name)

    def __repr__(self) -> str:
        planner = self._options_for.keywords["planner"]
        measure = ", measure=True" if self._choices else ""
        measure += ", background=True" if self._background else ""
        return f"fuseplan.jit({self._name}, device={self._device!r}, planner={planner!r}{measure})"

    def __reduce__(self) -> Any:
        # For deep copies and for picklers that write functions: what is compiled is not copied.
        how = (self._jit_options, self._choices is not None, self._background is not None)
        return JitFused, (self._f, self._device, self._options_for, *how, self._families is not None)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind a decorated method to its instance, as ``jax.jit`` does."""
        return self if instance is None else types.MethodType(self, instance)

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments: arrays or ``ShapeDtypeStruct``s. On a CPU, a note tells if a call
        runs the program of ``jax.jit``."""
        started = time.perf_counter()
        self._call_indirectly()
        with tracing():
            traced = self._reference.trace(*args, **kwargs)
        trace_s = time.perf_counter() - started
        plan_of = self._jitted.plan_of(args, kwargs)
        options = with_figures(self._options())
        applied = apply_patterns(traced.jaxpr, options, self._name)
        as_traced, options = _flat(traced, applied.closed), replace(options, patterns=())
        flat = with_lean_scans(as_traced)
        plan = Plan.of(plan_of(flat, options, trace_s))
        plan = replace(plan, notes=(*plan.notes, *applied.notes)) if applied.notes else plan
        called = None
        if not is_screened(options):
            if not runs_as_jax(plan):
                return plan
        else:
            own = replace(self._options(), patterns=())
            settings = Settings(own, "cpu", plan_of=plan_of, families=self._families)
            called = plan_to_run(flat, settings)
        if called is not None:
            if has_same_loops(plan, called):
                return plan
            kind = NoteKind.OTHER_LOOPS
        elif not runs_as_jax(plan):
            kind = NoteKind.LEFT_BY_HEURISTIC
        elif any(may_loop_anywhere(body, self._options()) for body in bodies(flat.equations)):
            kind = NoteKind.RUNS_AS_JAX_BUT_BODIES
        elif as_left_to_xla(flat, options) is not flat:
            kind = NoteKind.RUNS_AS_JAX_BUT_ROWS
        elif with_chains_in_turn(flat, options) is not flat:
            kind = NoteKind.RUNS_AS_JAX_BUT_CHAINS
        else:
            kind = NoteKind.RUNS_AS_JAX if flat is as_traced else NoteKind.RUNS_AS_JAX_BUT_SCANS
        return replace(plan, notes=(*plan.notes, str(note(kind))))

    def plan_vjp(self, /, *args: Any, **kwargs: Any) -> Halves | None:
        """The plan of ``jax.grad`` of this function: both passes, with respect to all arguments that have a
        derivative, and the values kept between them; None if JAX has no reverse mode for the function. On a
        CPU, the gradient itself plans only what may have tiled loops, in less work."""
        self._call_indirectly()
        with tracing():
            traced = self._reference.trace(*args, **kwargs)
        options = self._options()
        applied = apply_patterns(traced.jaxpr, options, self._name)
        return plan_passes(_flat(traced, applied.closed), replace(options, patterns=()))

    def measured(self, /, *args: Any, **kwargs: Any) -> Measurement | None:
        """The measurement of ``measure=True`` for arguments of these shapes; None if there is none."""
        return self._choices.measured(args, kwargs) if self._choices else None

    def is_ready(self, /, *args: Any, **kwargs: Any) -> bool:
        """With ``background=True``, whether calls at these shapes run the fused program, after a first one;
        else true."""
        return self._background is None or self._background.is_ready(args, kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """Trace the fused function, as ``jax.jit(f).trace``, to a ``jax.stages.Traced``."""
        self._call_indirectly()
        return self._jitted.trace(*args, **kwargs)

    def lower(self, /, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        """Lower the fused function, as ``jax.jit(f).lower``, to a ``jax.stages.Lowered``.

        With ``device``, a name or a ``DeviceSpec``, it is planned and lowered for that device, which need not
        be present (extra ``aot``). A kernel that the compiler refuses is planned again, and in the end left
        to XLA, with a ``CompilerRefusalWarning``.
        """
        self._call_indirectly()
        if device is None:
            return self._jitted.lower(*args, **kwargs)
        if not isinstance(device, str | DeviceSpec):  # an argument of the function
            return self._jitted.lower(*args, device=device, **kwargs)
        other = JitFused(self._f, device, self._options_for, self._jit_options)
        name = device if isinstance(device, str) else device.name
        return lower_there(
            self._name,
            other._emitted,
            self._reference,
            other._options().device.platform,
            lambda jitted: lower_for(jitted, args, kwargs, name),
            compiler_for(name),
            self._jit_options,
        )

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The shapes and dtypes of the results, as ``jax.jit(f).eval_shape``."""
        self._call_indirectly()
        return self._jitted.fused.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Delete compiled programs, as ``jax.jit(f).clear_cache()``, and measurements."""
        self._direct, self._may_be_direct = None, True
        if self._background:
            self._background.clear()
        if self._choices:
            self._choices.clear()
        if self._families:
            self._families.clear()
        self._jitted.clear_cache()
        self._reference.clear_cache()  # type: ignore[attr-defined]  # public, missing from JAX's stub


def _flat(traced: Any, closed: Any) -> Traced:
    """What ``jax.jit`` has traced, as ``fuseplan.frontend.trace`` has it; ``closed`` is its jaxpr."""
    return flatten(closed, jax.tree.structure(traced.out_info))


def _emitted(
    f: Callable[..., Any],
    options: Callable[[], Options],
    families: ShapeFamilies | None,
    known: KnownShapes | None,
    platform: str | None,
    plan_of: PlanOf,
) -> Callable[..., Any]:
    """``f``, whose kernels for a platform (None: the one of this process) are planned by ``plan_of``."""

    @functools.wraps(f)
    def fused(*args: Any, **kwargs: Any) -> Any:
        return fuse(f, args, kwargs, options(), platform or local_platform(), plan_of, families)

    return fused if known is None else known.watched(fused)


def _is_left_to_jax(options: Callable[[], Options], closed: Any) -> bool:
    """Whether calls of a traced function run ``jax.jit``'s program without planning."""
    if options().patterns:
        return False
    flat = flatten(closed)
    return with_lean_scans(flat) is flat and not may_loop_anywhere(flat, options())


def _require_no_patterns(patterns: Sequence[Pattern]) -> None:
    if patterns:
        raise InvalidArgumentError(
            "patterns are looked for in functions: pass the function instead of its lowered program"
        )


def _require_function(caller: str, f: Any, remedy: str = "") -> None:
    if not callable(f):
        raise InvalidArgumentError(f"{caller} expects a function, got {type(f).__name__}{remedy}")


def make_plan(
    f: Callable[..., Any] | Lowered,
    *,
    device: str | DeviceSpec | None = None,
    planner: str = "solver",
    deadline_s: float = DEFAULT_DEADLINE_S,
    strict: bool = False,
    constraints: Constraints | None = None,
    features: Features = ALL_FEATURES,
    peers: Sequence[str] = (),
    cost_model: CostModel | None = None,
    patterns: Any = (),
) -> Callable[..., Plan]:
    """A function that returns the plan of ``f``, as ``jax.make_jaxpr`` returns its jaxpr.

    ``f`` may also be a program that ``fuseplan.extend.lower`` has made, to plan it several times; the
    function then takes no arguments. ``features`` switches parts of the planner off, for ablations.

    ``peers`` are planners whose plans are made, too: the fastest plan is used, so that it is no slower than
    any of them. ``["xla"]`` compiles the program by XLA, for the plan that ``jax.jit`` has; for a device that
    is not present that needs the extra ``aot``.

    ``cost_model`` prices the kernels in place of fuseplan's own model (``fuseplan.CostModel``); the plan is
    proven, and checked, by its prices.
    ``patterns`` are ``fuseplan.Pattern``s, whose matches are kernels of their own in the plan.

    Raises:
        FuseplanError: an unknown device or planner, or another invalid option.
        ConstraintError, MemoryLimitError, PatternError: at a call, as for ``fuseplan.jit``.
        UnsupportedOperationError: at a call, with ``strict=True``, a primitive without a rule.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((4096, 1024), "float32")
        >>> plan = make_plan(jax.nn.softmax, device="h200")(x)
        >>> len(plan.kernels), plan.status
        (1, 'OPTIMAL')
    """
    if not isinstance(f, Lowered):
        _require_function("fuseplan.make_plan", f)
    elif strict:
        raise InvalidArgumentError("strict is an option of fuseplan.extend.lower, which made this program")
    every = flattened(patterns)
    options = make_options(
        device, planner, deadline_s, strict, constraints, features, peers, cost_model, every
    )
    if isinstance(f, Lowered):
        _require_no_patterns(every)
        program = f
        return lambda: Plan.of(plan_best(program, options))
    name = getattr(f, "__name__", type(f).__name__)

    @functools.wraps(f)
    def planned(*args: Any, **kwargs: Any) -> Plan:
        if not every:
            return Plan.of(plan_function(f, args, kwargs, options))
        started = time.perf_counter()
        closed, out_tree = closed_jaxpr(f, args, kwargs)
        return Plan.of(plan_patterned(closed, out_tree, options, name, time.perf_counter() - started))

    return planned


def compare(
    f: Callable[..., Any] | Lowered,
    *,
    device: str | DeviceSpec | Sequence[str | DeviceSpec] | None = None,
    planners: Sequence[str] | None = None,
    deadline_s: float = DEFAULT_DEADLINE_S,
    constraints: Constraints | None = None,
    features: Features = ALL_FEATURES,
    measure: bool = False,
    cost_model: CostModel | None = None,
    patterns: Any = (),
) -> Callable[..., pd.DataFrame]:
    """A function that plans ``f`` by each planner and returns a frame with a row for each.

    By default these are all planners, and XLA's own plan (``xla``) if its compiler for the device is
    installed. Columns: ``planner, kernels, time_us, unrewritten_us, hbm_bytes, peak_bytes, recomputed_flops,
    status, bound_us, gap, planning_s, ratio, baseline, notes, assumed``:

    - ``unrewritten_us``: the time of the planner's plan of the program as traced, with
      ``Features(rewrites=False)``. All planners are given the same rewrites: ``unrewritten_us / time_us`` is
      the gain from rewriting, and greedy's ``time_us`` over the solver's is the gain from solving.
    - ``gap``: ``time_us / bound_us - 1``; 0.0 when proven.
    - ``ratio``: ``time_us`` over that of the ``baseline``: ``xla`` if it has a plan, else ``unfused``,
      else the first planner.
    - ``status``, ``notes``: ``NONE`` and the reason if there is no plan, as where a planner fails.
    - ``assumed``: the figures of the device that are neither measured nor published.

    ``fuseplan.COLUMNS["compare"]`` has the dtype and unit of each. With a list of devices, the frame has the
    rows of each in turn, with a column ``device`` in front; ratios are to the baseline on the same device.

    ``f`` may also be a program that ``fuseplan.extend.lower`` has made; the function then takes no arguments.
    ``cost_model``: as for ``make_plan``.

    With ``measure=True`` each program is also run here, in turns with that of ``jax.jit``, and its results
    are checked against those. This adds the columns ``measured_us, measured_ratio, temp_bytes, temp_ratio``
    (ratios to ``jax.jit`` in the same run; NaN where nothing was measured). XLA fuses operations that a plan
    leaves to it in its own way: on a CPU, all plans without tiled loops run the program of ``jax.jit``.

    ``patterns``, as in ``make_plan``, are replaced for every planner.

    Raises:
        InvalidArgumentError: there are no planners or devices, or ``measure=True`` is given for another
            device than this one or without arrays.
        UnknownNameError: a planner or device is unknown.
        ConstraintError: a constraint selects nothing, or cannot hold.
        MemoryLimitError, ExtensionError: no planner has a plan for any of the devices. It is the first
            planner's error.
        MismatchError: the results of a measured program differ from those of ``jax.jit``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((4096, 1024), "float32")
        >>> frame = compare(jax.nn.softmax, device="h200", planners=("unfused", "xla_priority", "solver"))(x)
        >>> frame.kernels.tolist()
        [9, 3, 1]
        >>> frame = compare(jax.nn.softmax, device=["h200", "tpu_v5e"], planners=["solver"])(x)
        >>> frame[["device", "kernels"]].values.tolist()
        [['h200', 1], ['tpu_v5e', 1]]
    """
    if not isinstance(f, Lowered):
        _require_function("fuseplan.compare", f)
    elif measure:
        raise InvalidArgumentError("measure=True runs the function: pass it instead of its lowered program")
    chosen = [planners] if isinstance(planners, str) else planners
    if chosen is not None and not chosen:
        raise InvalidArgumentError("planners expects one or more names, got none; leave it out for all")
    several = isinstance(device, (list, tuple))
    given: list[Any] = list(device) if isinstance(device, (list, tuple)) else [device]
    if not given:
        raise InvalidArgumentError("device expects one or more devices, got none; leave it out for this one")
    every = flattened(patterns)
    options = [
        [
            make_options(
                of_device,
                name,
                deadline_s,
                False,
                constraints,
                features,
                cost_model=cost_model,
                patterns=every,
            )
            for name in (default_planners(of_device) if chosen is None else chosen)
        ]
        for of_device in map(resolve_device, given)
    ]

    def frame_of(
        planned: Callable[[list[Options]], Sequence[Compared]],
        time: Callable[..., Sequence[Timing] | None],
    ) -> pd.DataFrame:
        rows_of = [planned(of_device) for of_device in options]
        require_plan([row for rows in rows_of for row in rows])
        frames = []
        for of_device, rows in zip(options, rows_of, strict=True):
            name = of_device[0].device.name if several else None
            frames.append(compare_frame(rows, time(of_device, rows), name))
        return frames[0] if len(frames) == 1 else joined_frame(frames)

    def plans_of(lowered: Lowered) -> Callable[[list[Options]], Sequence[Compared]]:
        return lambda of_device: [compare_plan(lowered, option) for option in of_device]

    if isinstance(f, Lowered):
        _require_no_patterns(every)
        program = f
        return lambda: frame_of(plans_of(program), lambda *_: None)

    @functools.wraps(f)
    def compared(*args: Any, **kwargs: Any) -> pd.DataFrame:
        if measure:
            require_measurable([option for of_device in options for option in of_device], args, kwargs)
        if every:
            planned: Any = functools.partial(compare_patterned, f, args, kwargs)
        else:
            planned = plans_of(lower(trace(f, *args, **kwargs)))
        return frame_of(
            planned, lambda options, rows: [*time_rows(f, args, kwargs, options, rows)] if measure else None
        )

    return compared


def devices() -> pd.DataFrame:
    """A frame of the known devices: memory, bandwidth and rates, with the source of each figure in
    ``frame.attrs["sources"]``. The first call measures ``cpu``."""
    return devices_frame()
