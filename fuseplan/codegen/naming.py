"""Names of emitted kernels, as profilers and compiler dumps show them."""

from __future__ import annotations

import re

from costmodel.kernel import KernelSpec
from fuseplan.frontend.lower import Lowered
from fuseplan.plan import kernel_names as names


def kernel_name(spec: KernelSpec, lowered: Lowered) -> str:
    """The name that tables give the kernel, in letters and digits, and how many operations it has.

    Example: ``fuseplan_softmax_5``.
    """
    name = re.sub(r"\W+", "_", names.kernel_name(lowered.graph, spec.nodes), flags=re.ASCII).strip("_")
    return f"fuseplan_{name}_{len(spec.nodes)}"
