"""fuseplan: ``jax.jit`` that first decides, by a cost model and a solver with a proof,
which operations share a kernel, and then emits exactly those kernels.

Example:
    >>> import fuseplan, jax, jax.numpy as jnp
    >>> @fuseplan.jit
    ... def f(x):
    ...     return jnp.tanh(x) * 2
    >>> f(jnp.zeros(3)).shape
    (3,)
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from fuseplan.api import JitFused, compare, jit, make_plan
from fuseplan.frontend.ops import register_rule
from fuseplan.plan.constraints import Constraints
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.plan.options import Features
from fuseplan.planners import planner_names, register_planner
from fuseplan.public_plan import Plan
from fuseplan.report.frames import devices_frame
from fuseplan.support.errors import (
    CompilerRefusalWarning,
    ConstraintError,
    FuseplanError,
    FuseplanWarning,
    InvalidArgumentError,
    InvalidPlanError,
    MismatchError,
    UnknownNameError,
    UnsupportedOperationError,
    Verdict,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "CompilerRefusalWarning",
    "ConstraintError",
    "Constraints",
    "Features",
    "FuseplanError",
    "FuseplanWarning",
    "InvalidArgumentError",
    "InvalidPlanError",
    "JitFused",
    "Kernel",
    "MismatchError",
    "Plan",
    "UnknownNameError",
    "UnsupportedOperationError",
    "Verdict",
    "compare",
    "devices",
    "jit",
    "make_plan",
    "planner_names",
    "register_planner",
    "register_rule",
]

try:
    __version__ = version("fuseplan")
except PackageNotFoundError:  # Imported from a checkout that was never installed.
    __version__ = "0+unknown"


def devices() -> pd.DataFrame:
    """A frame of the known devices: memory, bandwidth, rates, and where the numbers come
    from (``frame.attrs["sources"]``). ``cpu`` is measured on the first call."""

    return devices_frame()
