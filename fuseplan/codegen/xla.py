"""Emit a group for XLA: its equations on whole arrays, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from costmodel.kernel import KernelSpec
from fuseplan.codegen.single_pass import live_ins
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import evaluator


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The group as a function that XLA compiles; see ``fuseplan.codegen.emit``."""
    equations = [lowered.equations[n] for n in spec.nodes]
    group = evaluator(equations, live_ins(spec), [w.value for w in spec.writes])
    return lambda *arrays: tuple(group(*arrays))
