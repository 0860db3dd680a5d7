"""Which parts of the decision are taken: an ablation switches them off one by one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Features:
    """What kernels of GPUs and TPUs may hold beyond the plainest; all of it by default."""

    prologues: bool = True
    """Operands of a contraction are computed inside its kernel, block by block."""
    siblings: bool = True
    """Operations that walk one array share a kernel, though no value passes between them."""


ALL_FEATURES = Features()
"""Nothing switched off."""
