"""Names of emitted kernels, as profilers and compiler dumps show them."""

from __future__ import annotations

from costmodel.kernel import KernelSpec
from fuseplan.lower import Lowered


def kernel_name(spec: KernelSpec, lowered: Lowered) -> str:
    """The first and last operation of a kernel and how many it has.

    Example: ``fuseplan_sub_to_div_5`` for a softmax.
    """
    ops = [lowered.graph.nodes[n].op for n in spec.nodes]
    return f"fuseplan_{ops[0]}_to_{ops[-1]}_{len(ops)}".replace("-", "_")
