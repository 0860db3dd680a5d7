"""A program as XLA compiles it, for a device that is here or is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from costmodel.device import DeviceSpec
from costmodel.devices import DEVICES
from fuseplan.frontend.evaluate import FlatFunction, evaluator, run_equations
from fuseplan.frontend.lower import Lowered
from fuseplan.planners.hlo.kernels import HloKernel, read_kernels
from fuseplan.planners.hlo.module import SCOPE, read_module
from fuseplan.support import jax_compat
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.targets.compile_only import compile_for, is_installed, targets
from fuseplan.targets.detect import local_device, local_platform


def compiled_kernels(lowered: Lowered, device: DeviceSpec) -> tuple[HloKernel, ...]:
    """What XLA launches for a program, each operation of which it compiles as JAX hands it over.

    Raises:
        InvalidArgumentError: there is no compiler for the device here, or it compiles no such program
            without the device, or the program is a part.
        MissingCompilerError: the extra ``aot`` is not installed.
    """
    if any(jax_compat.varying_axes(a) for e in lowered.equations for a in (*e.in_avals, *e.out_avals)):
        raise InvalidArgumentError(
            "the planner 'xla' compiles whole programs, and this is a shard's part of one (jax.shard_map): "
            "plan the function without its collectives, or take another planner."
        )
    n_consts = len(lowered.consts)
    run = _labelled(lowered)
    avals = [lowered.avals[v] for v in lowered.graph.inputs[n_consts:]]
    # As under jax.jit, what the function closes over is part of the program.
    compiled = _compile(lambda *args: run(*lowered.consts, *args), avals, device)
    (module,) = compiled.runtime_executable().hlo_modules()
    return read_kernels(read_module(module.as_serialized_hlo_module_proto()))


def _labelled(lowered: Lowered) -> FlatFunction:
    """The program on flat arrays, each equation in a scope with the number of its node."""

    def run(*flat: Any) -> list[Any]:
        values: dict[int, Any] = dict(zip(lowered.graph.inputs, flat, strict=True))
        for n, equation in enumerate(lowered.equations):
            with jax.named_scope(f"{SCOPE}{n}"):
                run_equations([equation], values)
        finish = evaluator((), tuple(values), lowered.outputs)
        return finish(*values.values())

    return run


def _compile(f: FlatFunction, avals: Sequence[Any], device: DeviceSpec) -> Any:
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    name = device.name.partition(":")[0]
    if _is_here(device, name):
        with jax.default_device(jax.devices(device.platform)[0]):
            return jax.jit(f).lower(*shapes).compile()
    if name not in targets():
        here = "the CPU" if local_platform() == "cpu" else f"the CPU, {local_device().name}"
        raise InvalidArgumentError(
            f"the planner 'xla' needs XLA's compiler for the device, and here is none for {name!r}: expected "
            f"{here}, or with the extra aot one of {', '.join(targets())}. Plan on the device itself, or "
            "take another planner."
        )
    try:
        return compile_for(f, *shapes, device=name)
    except RuntimeError as error:  # Side effects want a device that is there (test_xla_planner.py).
        raise InvalidArgumentError(
            f"the planner 'xla' compiles the function for {name!r}, which is not here: "
            f"{str(error).rstrip('.')}. Plan on the device itself, or take another planner."
        ) from error


def has_compiler(device: DeviceSpec) -> bool:
    """Whether XLA's compiler for the device is installed; it may still fail to start."""
    name = device.name.partition(":")[0]
    return _is_here(device, name) or (name in targets() and is_installed(name))


def _is_here(device: DeviceSpec, name: str) -> bool:
    """Whether JAX runs on the device; one of the user's own is taken to be of the kind that is here."""
    if device.platform == "cpu":
        return True
    return device.platform == local_platform() and (name not in DEVICES or name == local_device().name)
