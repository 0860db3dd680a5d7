"""Workloads over pairs of points in KeOps (Charlier et al., JMLR 22, 2021), to time beside the same in JAX.

KeOps evaluates a formula of two sets of points, tile by tile, by C++ code that it compiles. Its interface to
PyTorch is used here: functions of tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fuseplan.bench.torch_programs import SOFTENING

Maker = Callable[[Any], Callable[..., Any]]


def import_keops() -> Any:
    """The class of KeOps's symbolic tensors, or None where KeOps or PyTorch is missing or broken."""
    try:
        return importlib.import_module("pykeops.torch").LazyTensor
    except Exception:
        return None


def _distances(lazy: Any, x: Any, y: Any) -> Any:
    return ((lazy(x[:, None].contiguous()) - lazy(y[None].contiguous())) ** 2).sum(-1)


def _kernel_sum(kernel: Callable[[Any], Any]) -> Maker:
    return lambda lazy: lambda x, y, b: (kernel(_distances(lazy, x, y)) @ b[:, None])[:, 0]


def _nbody(lazy: Any) -> Callable[..., Any]:
    def f(x: Any, masses: Any) -> Any:
        towards = lazy(x[None].contiguous()) - lazy(x[:, None].contiguous())
        cubed = ((towards**2).sum(-1) + SOFTENING) ** 1.5
        return (towards * (lazy(masses[None, :, None].contiguous()) / cubed)).sum(1)

    return f


def _chamfer(lazy: Any) -> Callable[..., Any]:
    def f(x: Any, y: Any) -> Any:
        return sum(_distances(lazy, a, b).min(1).mean() for a, b in ((x, y), (y, x)))

    return f


MAKERS: dict[str, Maker] = {
    "gaussian_gram": _kernel_sum(lambda d: (-d).exp()),
    "gaussian_differences": _kernel_sum(lambda d: (-d).exp()),
    "laplacian": _kernel_sum(lambda d: (-d.sqrt()).exp()),
    "inverse_distance": _kernel_sum(lambda d: (d + SOFTENING).rsqrt()),
    "distance_logsumexp": lambda lazy: lambda x, y: (-_distances(lazy, x, y)).logsumexp(1)[:, 0],
    "nearest_neighbour": lambda lazy: lambda x, y: _distances(lazy, x, y).argmin(1)[:, 0],
    "kmeans_assign": lambda lazy: lambda x, y: _distances(lazy, x, y).argmin(1)[:, 0],
    "nbody": _nbody,
    "chamfer": _chamfer,
}
"""By the names of workloads."""
