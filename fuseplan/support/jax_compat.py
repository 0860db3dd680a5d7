"""Private names of JAX that fuseplan uses, each with its reason.

The tests use every one of them on each supported JAX.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import enum
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import array as _array
from jax._src import config as _config
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import mesh as _mesh
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax.lax import optimization_barrier_p as optimization_barrier_p
from jax._src.sharding_impls import UNSPECIFIED as UNSPECIFIED
from jax._src.sharding_impls import UnspecifiedValue as _UnspecifiedValue
from jax.extend import core as jex_core


def primitives() -> dict[str, Any]:
    """JAX's own primitives by name: of two of one name the public one.

    ``jax.extend.core.primitives`` lacks some that jaxprs hold, such as ``split`` and ``random_wrap``.
    """
    found: dict[str, Any] = {}
    private = [module for name, module in sorted(sys.modules.items()) if name.startswith("jax._src.")]
    for module in (jex_core.primitives, *private):
        for thing in list(vars(module).values()):
            if isinstance(thing, jex_core.Primitive):
                found.setdefault(thing.name, thing)
    return found


@functools.cache
def key_dtypes() -> dict[str, Any]:
    """The dtypes of typed random keys by their text, such as ``key<fry>``.

    JAX has no public way from the text to the dtype.
    """
    kinds = ("threefry2x32", "rbg", "unsafe_rbg")
    shapes = [jax.eval_shape(functools.partial(jax.random.key, 0, impl=kind)) for kind in kinds]
    return {str(shape.dtype): shape.dtype for shape in shapes}


def is_unspecified(value: Any) -> bool:
    """Whether a sharding in the parameters of an inner ``jit`` was not given, so that inlining it loses none.

    ``jax.jit`` records "not given" as a private sentinel.
    """
    return isinstance(value, _UnspecifiedValue)


def empty_mesh(kind: str) -> Any:
    """The ``Mesh`` or ``AbstractMesh`` without devices: a parameter of an inner ``jit``."""
    return _mesh.empty_concrete_mesh if kind == "Mesh" else _mesh.empty_abstract_mesh


def make_eqn(invars: Any, outvars: Any, primitive: Any, params: dict[str, Any]) -> Any:
    """An equation of a jaxpr, without side effects and from nowhere in the user's code."""
    return jex_core.new_jaxpr_eqn(invars, outvars, primitive, params, frozenset())


def make_jaxpr(constvars: Any, invars: Any, outvars: Any, eqns: Any) -> Any:
    """A jaxpr without side effects of its parts.

    ``jax.extend`` has the class, whose arguments are not documented.
    """
    info = _core.DebugInfo("fuseplan", "<fuseplan>", ("",) * len(invars), ("",) * len(outvars))
    return jex_core.Jaxpr(constvars, invars, outvars, eqns, frozenset(), info)


def hide_frames(path: str) -> None:
    """Leave the frames of a file, or of all in a folder, out of tracebacks that JAX filters and out of the
    lines of the user's code that it names.

    JAX has the functions for libraries like this one, under private names.
    """
    _traceback_util.register_exclusion(path)
    _source_info_util.register_exclusion(path)


def filter_traceback(error: BaseException) -> None:
    """Drop hidden frames (``hide_frames``) from an error's traceback, unless ``JAX_TRACEBACK_FILTERING=off``.
    A bare ``raise`` then adds none.

    JAX has this in a decorator that costs a microsecond at each call.
    """
    if _traceback_util._filtering_mode() not in ("off", "tracebackhide") and error.__traceback__ is not None:
        error.__traceback__ = _traceback_util.filter_traceback(error.__traceback__)


def source_line(source_info: Any) -> str:
    """``file:line (function)`` of an equation's ``source_info``.

    ``jax.extend`` shows the traceback but not the rule that skips JAX's own frames.
    """
    return _source_info_util.summarize(source_info)


def inlined_source(inner: Any, outer: Any) -> Any:
    """The ``source_info`` of an equation that is inlined from a call whose own is ``outer``.

    ``jax.extend`` has no way to make one.
    """
    traceback = inner.traceback if source_line(inner) else outer.traceback
    return inner.replace(traceback=traceback, name_stack=outer.name_stack + inner.name_stack)


def scope_names(source_info: Any) -> tuple[str, ...]:
    """The ``jax.named_scope``s around an equation, outermost first, without the transformations
    (``jvp``, ``vmap``) that stand between them.

    ``jax.extend`` has no name for an equation's name stack.
    """
    stack = source_info.name_stack.stack
    return tuple(entry.name for entry in stack if isinstance(entry, _source_info_util.Scope))


def is_eager() -> bool:
    """Whether no transformation is under way in this thread, so that what is called is run.

    ``jax.core`` lost the name; to ask costs a third of a microsecond at each call.
    """
    return bool(_core.trace_state_clean())


def array_type() -> type:
    """The type of concrete arrays: ``jax.Array`` is also that of tracers."""
    return _array.ArrayImpl


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Of a ``scan``'s arguments, the number of constants, and of initial carries after them.

    From JAX 0.12 on the trees of its arguments say so, which ``jax.extend`` cannot read.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def default_device() -> Any:
    """The device that operations on NumPy arrays run on.

    ``jax.config.jax_default_device`` is None, a device, or the name of a platform.
    """
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]  # as all of JAX's options
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def trace_context() -> Any:
    """The settings of this thread that change what is traced and compiled, to compare.

    JAX's own caches have them in their keys.
    """
    return _config.trace_context()


def is_jit_disabled() -> bool:
    """Whether functions run operation by operation, under ``jax.disable_jit``.

    JAX's stubs lack the documented option.
    """
    return bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]


def lowered_for(ctx: Any) -> tuple[str, ...]:
    """The platforms (``cpu``, ``gpu``, ``tpu``) of the program that a lowering rule contributes to.

    A lowering rule is given them with its context, which is of a private class.
    """
    return tuple("gpu" if p in ("cuda", "rocm") else p for p in ctx.module_context.platforms)


def eval_jaxpr(jaxpr: jex_core.Jaxpr, consts: Any, *args: Any) -> list[Any]:
    """Evaluate an open jaxpr on values; ``jax.core.eval_jaxpr`` is deprecated."""
    return _core.eval_jaxpr(jaxpr, consts, *args)


def closed(jaxpr: Any) -> jex_core.ClosedJaxpr:
    """A jaxpr without constants as a closed one, whichever of the two it is.

    Primitives keep the one or the other, some from version to version.
    """
    return jaxpr if isinstance(jaxpr, jex_core.ClosedJaxpr) else jex_core.ClosedJaxpr(jaxpr, ())


def is_high(types: Any) -> bool:
    """Whether an abstract value, or a jaxpr, has types or operations that JAX lowers to others before it
    compiles them (``jax_remat3``, ``jax_custom_vjp3``, types that users define).

    ``jax.extend`` has no name for the property.
    """
    return bool(getattr(types, "is_high", False))


def as_compiled(closed: jex_core.ClosedJaxpr) -> tuple[jex_core.Jaxpr, Sequence[Any]]:
    """The jaxpr that ``jax.jit`` compiles of a traced one, and its constants: in low-level types, and
    without what each primitive's own rule calls dead code.

    Such a rule may put another computation in an equation's place: where nobody reads the residuals of
    ``custom_vjp(..., optimize_remat=True)``, the function stands for its forward rule. ``jax.jit`` takes
    both steps in private functions. A jaxpr that has neither is returned as it is.
    """
    if is_high(closed.jaxpr):
        closed = _partial_eval.lower_jaxpr2(closed)  # type: ignore[no-untyped-call]
    jaxpr = closed.jaxpr
    live, _ = _without_dead_code(jaxpr, True)
    is_same = [id(eqn) for eqn in live.eqns] == [id(eqn) for eqn in jaxpr.eqns]
    return jaxpr if is_same else live, closed.consts


def _without_dead_code(jaxpr: jex_core.Jaxpr, keep_arguments: bool) -> tuple[jex_core.Jaxpr, list[bool]]:
    # The body of a shard_map has axes that JAX's own checks would miss here.
    with _config.enable_checks(False):
        return _partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), keep_arguments)


def without_unused(closed: jex_core.ClosedJaxpr) -> tuple[jex_core.ClosedJaxpr, list[bool]]:
    """A closed jaxpr without the arguments that neither a result nor a side effect needs, and which it needs.

    ``jax.jit`` drops them in a private function.
    """
    jaxpr = closed.jaxpr
    live, used = _without_dead_code(jaxpr, False)
    return (closed, used) if all(used) else (closed.replace(jaxpr=live), used)


def register_low(
    primitive: jex_core.Primitive, rule: Callable[..., Any], is_high: Callable[..., bool] | None = None
) -> None:
    """Let ``rule``, of an equation's operands and parameters, compute its results where JAX lowers high-level
    types; ``is_high``, of its operands' avals and its parameters, says whether it has such. By default an
    equation has if a jaxpr among its parameters has.

    ``jax.extend`` has no way to register the rule.
    """
    primitive.to_lojax = rule  # type: ignore[method-assign]
    if is_high is not None:
        primitive.is_high = is_high  # type: ignore[method-assign]


def can_carry(effects: Iterable[Any]) -> bool:
    """Whether an equation that stands for a program can have the program's effects.

    It can have those that JAX lowers where the equation stands (prints, callbacks, named axes). It cannot
    have those on references to arrays from outside: JAX turns these into values in the whole program,
    before anything is lowered. ``jax.extend`` has no name for effects.
    """
    inner = _core.InternalMutableArrayEffect
    return all(_effects.lowerable_effects.contains(e) or isinstance(e, inner) for e in effects)


def axis_effects(effects: Any, name: Any = None) -> frozenset[Any]:
    """Those of a jaxpr's effects that only say which named axis a collective is over; with ``name``,
    those that say it is that one.

    ``jax.extend`` has no name for them.
    """
    named = (e for e in effects if isinstance(e, _core.NamedAxisEffect))
    return frozenset(e for e in named if name is None or e.name == name)


def with_leading(aval: Any, size: int, mesh_axis: Any = None) -> Any:
    """What ``jax.vmap`` gives of an array with a batch axis in front.

    ``jax.extend`` has no function on avals.
    """
    return _core.unmapped_aval(size, 0, aval, mesh_axis)


def register_dead_code(primitive: jex_core.Primitive, rule: Callable[[Sequence[bool], Any], Any]) -> None:
    """Let ``rule`` say, from which results of an equation are read, which of its inputs are needed, and
    by which equation (or None) to replace it.

    From JAX 0.11 on, such rules are also told which inputs are live.
    """
    _partial_eval.dce_rules[primitive] = lambda used, *more: rule(used, more[-1])


def varying_axes(aval: Any) -> frozenset[Any]:
    """Along which mesh axes of a ``shard_map`` an array differs from shard to shard.

    ``jax.typeof`` prints them; no public attribute has them on all supported versions.
    """
    manual = getattr(aval, "mat", None)
    return frozenset(manual.varying) if manual is not None else frozenset()


def varying(x: Any, aval: Any) -> Any:
    """``x`` as one that differs between shards where ``aval`` does: primitives, unlike ``jax.lax``'s
    functions, want all of their operands to."""
    missing = varying_axes(aval) - varying_axes(jax.typeof(x))
    if not missing:
        return x
    return jax.lax.pcast(jnp.asarray(x, aval.dtype), tuple(sorted(missing, key=str)), to="varying")


def same_in_all_shards() -> Any:
    """A context in which nothing is tracked of how arrays differ between shards, as under
    ``shard_map(check_vma=False)``, which can only be said of a whole ``shard_map``."""
    return _config._check_vma(False)


def partitioned_devices(ctx: Any) -> Sequence[Any] | None:
    """The devices over which XLA's partitioner splits the program of a lowering context: empty if it splits
    none, and None if it cannot ask this process how to split a kernel, or in a ``shard_map`` over some of the
    mesh's axes splits over the others.

    Where they are not known yet, any of the same number stand for them: shardings number devices by their
    place. Programs that are exported have to run without this process.
    """
    module = ctx.module_context
    context = module.axis_context
    if isinstance(context, _sharding_impls.SPMDAxisContext):  # within ``jax.shard_map``
        left = set(context.mesh.axis_names) - context.manual_axes
        return None if any(context.mesh.shape[name] > 1 for name in left) else ()
    is_split = isinstance(context, _sharding_impls.ShardingContext) and context.num_devices > 1
    if not is_split:
        return ()
    by_shardy = jax.config._read("jax_use_shardy_partitioner")
    # The partitioner asks in a thread of its own, where ``with jax.enable_x64(...)`` does not hold.
    is_alike = jax.config._read("jax_enable_x64") == _config.enable_x64.get_global()
    if not by_shardy or not is_alike or module.lowering_parameters.for_export:
        return None
    devices = context.device_assignment or _devices_of(module.platforms[0])
    return devices[: context.num_devices] if len(devices) >= context.num_devices else None


def _devices_of(platform: str) -> Sequence[Any]:
    try:
        return jax.devices(platform)
    except RuntimeError:  # a program for devices that are not present
        return jax.devices()


def with_devices(ctx: Any, devices: Sequence[Any]) -> Any:
    """A lowering context in which the devices of the program are known, as ``custom_partitioning`` needs."""
    context = dataclasses.replace(
        ctx.module_context.axis_context, device_assignment=tuple(devices), abstract_mesh=None
    )
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=context))


def traced_on(mesh: jax.sharding.Mesh, f: Callable[..., Any], avals: Sequence[Any]) -> Callable[..., Any]:
    """``f``, a function of one device's arrays with collectives over the axes of ``mesh``, traced at once.

    ``jax.shard_map`` gives a function of whole arrays.
    """
    no_mesh = jax.sharding.AbstractMesh((), ())  # rather than the one of ``jax.set_mesh``
    with jax.sharding.use_abstract_mesh(no_mesh):
        traced = jex_core.jaxpr_as_fun(jax.make_jaxpr(f, axis_env=list(mesh.shape.items()))(*avals))

    def run(*arrays: Any) -> Any:
        with jax.sharding.use_abstract_mesh(no_mesh):
            return traced(*arrays)

    return run


@functools.lru_cache(maxsize=64)
class InSurroundingMesh:
    """The context of an equation, but for its mesh: that is the one in which the equation is evaluated."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.compute_type = context.compute_type
        self.xla_metadata = context.xla_metadata

    @property
    def manager(self) -> Any:
        """As that of an equation's context in a jaxpr."""
        return self._entered()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        mesh = jax.sharding.get_abstract_mesh()
        with self._context.manager, jax.sharding.use_abstract_mesh(mesh):
            yield


def partition_spec(sharding: Any, mesh: jax.sharding.Mesh) -> tuple[tuple[str, ...], ...] | None:
    """For each of the leading dimensions of an array, the axes of ``mesh`` that XLA's ``sharding`` splits it
    over; None if it is no sharding on this mesh.

    JAX's function is private.
    """
    try:
        (spec,) = _sharding_impls.parse_flatten_op_sharding(sharding._hlo_sharding, mesh)
    except (AssertionError, KeyError, NotImplementedError, ValueError):
        return None
    return tuple(() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in spec)


def load_gmem(ref: Any, layout: Any) -> Any:
    """A block of an array in global memory, dealt to the threads of a Mosaic GPU kernel.

    JAX 0.10 wants an index beside the reference.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    index = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def store_gmem(ref: Any, block: Any) -> None:
    """Write a block to global memory, straight from the registers of a Mosaic GPU kernel.

    JAX 0.10 does so with a plain assignment, which is refused since as slow.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref, block, optimized=False)
    else:
        ref[...] = block


def interpret_gpu(*, detect_races: bool) -> Any:
    """The settings under which a Mosaic GPU kernel is interpreted on any device.

    JAX 0.10 has them under a private name.
    """
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=detect_races)


@dataclasses.dataclass(frozen=True, slots=True)
class PallasKernel:
    """A Pallas kernel in a jaxpr, as text."""

    name: str
    grid: str
    """As ``(64, 8)``, or ``(program: 64)`` if its dimensions have names."""
    blocks: tuple[str, ...]
    """For each array, in order: its shape, the block, and the map from the grid to blocks. Empty for a kernel
    that gets whole arrays and cuts its blocks itself."""
    options: str
    """Of the compiler."""
    body: str
    """The jaxpr of the kernel."""


def pallas_kernels(closed: Any) -> list[PallasKernel]:
    """The Pallas kernels that a jaxpr calls, in order, also inside of other calls.

    Pallas has no public names for its primitives and for the form of its grid.
    """
    found = []
    for eqn in closed.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "pallas_call":
            found.append(_pallas_kernel(params))
        elif name == "mpmd_map":
            found += [
                _mesh_kernel(params, mesh, jaxpr)
                for mesh, jaxpr in zip(params["meshes"], params["jaxprs"], strict=True)
            ]
        else:
            inner = [value for param in params.values() for value in _sequence(param)]
            found += [k for value in inner if hasattr(value, "eqns") for k in pallas_kernels(value)]
    return found


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _pallas_kernel(params: dict[str, Any]) -> PallasKernel:
    mapping = params["grid_mapping"]
    blocks = []
    for block in mapping.block_mappings:
        whole = block.has_trivial_window()
        index_map = "" if whole else f", {' '.join(str(block.index_map_jaxpr).split())}"
        shape = "" if whole else f", block {_block_shape(block.block_shape)}"
        blocks.append(f"{block.origin}: {block.array_aval.str_short(short_dtypes=True)}{shape}{index_map}")
    if all(block.has_trivial_window() for block in mapping.block_mappings):
        blocks = []
    names = mapping.grid_names or (None,) * len(mapping.grid)
    name = params.get("name") or getattr(params["jaxpr"].debug_info, "func_name", "kernel")
    return PallasKernel(
        str(name),
        _grid_text(names, mapping.grid),
        tuple(blocks),
        _options_text(params.get("compiler_params")),
        str(params["jaxpr"]),
    )


def _mesh_kernel(params: dict[str, Any], mesh: Any, jaxpr: Any) -> PallasKernel:
    names = [*mesh.grid_names, *([mesh.thread_name] if mesh.thread_name else [])]
    sizes = [*mesh.grid, *([mesh.num_threads] if mesh.thread_name else [])]
    options = _options_text(params.get("compiler_params"))
    return PallasKernel(
        str(params.get("name") or "kernel"), _grid_text(names, sizes), (), options, str(jaxpr)
    )


def _block_shape(shape: Iterable[Any]) -> str:
    """The extents of a block; ``None`` for a dimension of which the kernel sees one index."""
    sizes = [getattr(size, "block_size", None if not isinstance(size, int) else size) for size in shape]
    return f"({', '.join(map(str, sizes))})"


def _grid_text(names: Iterable[Any], sizes: Iterable[Any]) -> str:
    parts = [str(n) if name is None else f"{name}: {n}" for name, n in zip(names, sizes, strict=True)]
    return f"({', '.join(parts)})"


def _options_text(options: Any) -> str:
    """The options that differ from their defaults."""
    if not dataclasses.is_dataclass(options) or isinstance(options, type):
        return "" if options is None else str(options)
    changed = [
        (field.name, getattr(options, field.name))
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default
    ]
    return ", ".join(f"{name}={_option_text(value)}" for name, value in changed)


def _option_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_option_text, value))})"
    return str(value.value) if isinstance(value, enum.Enum) else str(value)


def mosaic_modules(hlo: str) -> tuple[str, ...]:
    """The Mosaic kernels in XLA's optimized program for a TPU, as MLIR.

    A program holds them as bytecode of a versioned dialect, which only private modules of JAX read.
    """
    from jax._src.interpreters import mlir as _mlir
    from jax._src.lib import tpu as _tpu
    from jax.extend.mlir import ir, passmanager

    texts = []
    for body in re.findall(r'"body"\s*:\s*"([A-Za-z0-9+/=]+)"', hlo):
        context = _mlir.make_ir_context()
        _tpu.register_dialect(context)
        with context, ir.Location.unknown():
            context.allow_unregistered_dialects = True
            module = ir.Module.parse(base64.b64decode(body))
            stages = passmanager.PassManager.parse("builtin.module(mosaic-serde{serialize=false})")
            stages.run(module.operation)
            texts.append(str(module))
    return tuple(texts)
