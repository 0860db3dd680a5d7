"""fuseplan: a ``jax.jit`` that plans which operations share a kernel, by a cost model and a solver with a
proof, and emits these kernels.

Names are imported on first use, as the planner takes a third of a second to import.

Example:
    >>> import fuseplan, jax, jax.numpy as jnp
    >>> @fuseplan.jit
    ... def f(x):
    ...     return jnp.tanh(x) * 2
    >>> f(jnp.zeros(3)).shape
    (3,)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodel.device import DeviceSpec
    from costmodel.model import CostModel
    from fuseplan.api import JitFused, compare, devices, jit, make_plan
    from fuseplan.frontend.ops import register_rule
    from fuseplan.patterns import Pattern, match
    from fuseplan.plan.constraints import Constraints
    from fuseplan.plan.fusion_plan import Kernel
    from fuseplan.plan.options import Features
    from fuseplan.planners import planner_names, register_planner
    from fuseplan.public_plan import Plan
    from fuseplan.report.columns import COLUMNS
    from fuseplan.report.figures import study_figure
    from fuseplan.report.frames import read_frame
    from fuseplan.studies import study
    from fuseplan.support.errors import (
        CompilerRefusalWarning,
        ConstraintError,
        ExtensionError,
        FuseplanError,
        FuseplanWarning,
        InvalidArgumentError,
        InvalidPlanError,
        MemoryLimitError,
        MismatchError,
        PatternError,
        UnknownNameError,
        UnsupportedOperationError,
        Verdict,
    )

__all__ = [
    "COLUMNS",
    "CompilerRefusalWarning",
    "ConstraintError",
    "Constraints",
    "CostModel",
    "DeviceSpec",
    "ExtensionError",
    "Features",
    "FuseplanError",
    "FuseplanWarning",
    "InvalidArgumentError",
    "InvalidPlanError",
    "JitFused",
    "Kernel",
    "MemoryLimitError",
    "MismatchError",
    "Pattern",
    "PatternError",
    "Plan",
    "UnknownNameError",
    "UnsupportedOperationError",
    "Verdict",
    "compare",
    "devices",
    "jit",
    "make_plan",
    "match",
    "planner_names",
    "read_frame",
    "register_planner",
    "register_rule",
    "study",
    "study_figure",
]

_MODULE_OF = dict.fromkeys(__all__, "fuseplan.support.errors") | {
    **dict.fromkeys(("JitFused", "compare", "devices", "jit", "make_plan"), "fuseplan.api"),
    **dict.fromkeys(("Pattern", "match"), "fuseplan.patterns"),
    **dict.fromkeys(("planner_names", "register_planner"), "fuseplan.planners"),
    "COLUMNS": "fuseplan.report.columns",
    "Constraints": "fuseplan.plan.constraints",
    "CostModel": "costmodel.model",
    "DeviceSpec": "costmodel.device",
    "Features": "fuseplan.plan.options",
    "Kernel": "fuseplan.plan.fusion_plan",
    "Plan": "fuseplan.public_plan",
    "read_frame": "fuseplan.report.frames",
    "register_rule": "fuseplan.frontend.ops",
    "study": "fuseplan.studies",
    "study_figure": "fuseplan.report.figures",
}


def __getattr__(name: str) -> Any:
    if name == "patterns":
        return import_module("fuseplan.patterns")
    if name == "__version__":
        environment = import_module("fuseplan.support.environment")
        # Imported from a checkout that was never installed, it has no version.
        return environment.installed_version("fuseplan", "0+unknown")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fuseplan' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
