"""Control flow, transforms, collectives and other steps that stay whole: priced by what runs inside."""

from __future__ import annotations

import math
from typing import Any

from jax.extend import core as jex_core

from costmodel.graph import Flops, OpKind
from fuseplan.frontend.ops.registry import rule_of
from fuseplan.frontend.ops.rule import PALLAS, Rule, in_size, no_flops, out_size, whole_space
from fuseplan.frontend.trace import Equation, flatten


def _inside(jaxpr: Any) -> Flops:
    closed = jaxpr if isinstance(jaxpr, jex_core.ClosedJaxpr) else jex_core.ClosedJaxpr(jaxpr, ())
    total = Flops()
    for eqn in flatten(closed).equations:
        total += rule_of(eqn).flops(eqn)
    return total


def _scan_flops(eqn: Equation) -> Flops:
    return _inside(eqn.params["jaxpr"]).times(eqn.params["length"])


def _while_flops(eqn: Equation) -> Flops:
    """How often it runs is not known when it is planned: one trip is counted."""
    return _inside(eqn.params["body_jaxpr"]) + _inside(eqn.params["cond_jaxpr"])


def _cond_flops(eqn: Equation) -> Flops:
    """The dearest branch: a bound, since only one of them runs."""
    return max((_inside(b) for b in eqn.params["branches"]), key=lambda f: f.total)


def _call_flops(eqn: Equation) -> Flops:
    jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return _inside(jaxpr) if jaxpr is not None else Flops()


def _fused_flops(eqn: Equation) -> Flops:
    """Of what it was traced from: both passes, where it is one of them, so a bound."""
    jaxpr = eqn.params["jaxpr"]
    return _inside(jex_core.ClosedJaxpr(jaxpr, [None] * len(jaxpr.constvars)))


def _fft_flops(eqn: Equation) -> Flops:
    """``5 n log2 n`` of each transform of ``n`` (C. Van Loan, Computational Frameworks for the FFT)."""
    n = math.prod(eqn.params["fft_lengths"])
    return Flops(vector=round(5 * max(in_size(eqn), out_size(eqn)) * math.log2(max(n, 2))))


def _each_flops(eqn: Equation) -> Flops:
    """One operation an element, as a sum over devices has for each of them."""
    return Flops(vector=in_size(eqn))


def _opaque(flops: Any) -> Rule:
    return Rule(OpKind.OPAQUE, whole_space, flops, None, PALLAS)


RULES: dict[str, Rule] = {
    "scan": _opaque(_scan_flops),
    "while": _opaque(_while_flops),
    "cond": _opaque(_cond_flops),
    "optimization_barrier": _opaque(no_flops),
    "await_cotangents": _opaque(no_flops),
    "fused": _opaque(_fused_flops),
    "fused_tangents": _opaque(no_flops),
    "fft": _opaque(_fft_flops),
    **dict.fromkeys(
        ("psum", "psum2", "psum_invariant", "pmax", "pmin", "reduce_scatter"), _opaque(_each_flops)
    ),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_to_all", "ppermute"), _opaque(no_flops)),
    **dict.fromkeys(("axis_index", "pvary"), _opaque(no_flops)),
    **dict.fromkeys(("pjit", "jit", "shard_map", "closed_call", "custom_lin"), _opaque(_call_flops)),
}
