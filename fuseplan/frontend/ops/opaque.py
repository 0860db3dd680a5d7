"""Primitives that always stay kernels of their own: control flow, collectives, FFTs, random keys.

XLA compiles them. Their rules only count flops, for primitives with a body those of the body.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jax.extend import core as jex_core

from costmodel.graph import Flops, OpKind
from fuseplan.frontend.ops.random_bits import random_bits_flops
from fuseplan.frontend.ops.rule import PALLAS, Rule, in_size, no_flops, out_size, rule_of, whole_space
from fuseplan.frontend.trace import PATTERN, Equation, flatten
from fuseplan.support import jax_compat


def body_flops(jaxpr: Any) -> Flops:
    """The flops of a jaxpr, open or closed, that an equation has for a parameter."""
    return sum((rule_of(eqn).flops(eqn) for eqn in flatten(jax_compat.closed(jaxpr)).equations), Flops())


def _scan_flops(eqn: Equation) -> Flops:
    return body_flops(eqn.params["jaxpr"]).times(eqn.params["length"])


def _while_flops(eqn: Equation) -> Flops:
    """The flops of one trip: the trip count is unknown when the plan is made."""
    return body_flops(eqn.params["body_jaxpr"]) + body_flops(eqn.params["cond_jaxpr"])


def _cond_flops(eqn: Equation) -> Flops:
    """The flops of the most expensive branch, an upper bound."""
    return max((body_flops(b) for b in eqn.params["branches"]), key=lambda f: f.total)


def _call_flops(eqn: Equation) -> Flops:
    jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return body_flops(jaxpr) if jaxpr is not None else Flops()


def _fused_flops(eqn: Equation) -> Flops:
    """The flops of the traced function; where the equation is one pass of a derivative, of both passes."""
    jaxpr = eqn.params["jaxpr"]
    return body_flops(jex_core.ClosedJaxpr(jaxpr, [None] * len(jaxpr.constvars)))


def _pattern_flops(eqn: Equation) -> Flops:
    """The flops of what the kernel computes in the place of."""
    flops: Flops = eqn.params["flops"]
    return flops


def _fft_flops(eqn: Equation) -> Flops:
    """``5 n log2 n`` for each transform of ``n`` (C. Van Loan, Computational Frameworks for the FFT)."""
    n = math.prod(eqn.params["fft_lengths"])
    return Flops(vector=round(5 * max(in_size(eqn), out_size(eqn)) * math.log2(max(n, 2))))


def _flops_per_element(eqn: Equation) -> Flops:
    """One operation an element, for a reduction over devices."""
    return Flops(vector=in_size(eqn))


_FLOPS: dict[Callable[[Equation], Flops], tuple[str, ...]] = {
    _scan_flops: ("scan",),
    _while_flops: ("while",),
    _cond_flops: ("cond",),
    _fused_flops: ("fused",),
    _fft_flops: ("fft",),
    _pattern_flops: (PATTERN,),
    _flops_per_element: ("psum", "psum_invariant", "pmax", "pmin", "reduce_scatter"),
    _call_flops: ("jit", "shard_map", "closed_call", "custom_lin"),
    random_bits_flops: ("rng_bit_generator",),
    no_flops: (
        *("optimization_barrier", "await_cotangents", "fused_tangents", "axis_index", "pvary"),
        *("all_gather", "all_gather_invariant", "all_to_all", "ppermute"),
        *("random_seed", "random_wrap", "random_unwrap", "random_fold_in", "random_split"),
    ),
}

RULES: dict[str, Rule] = {
    name: Rule(OpKind.OPAQUE, whole_space, flops, None, PALLAS)
    for flops, names in _FLOPS.items()
    for name in names
}
