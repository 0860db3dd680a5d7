"""Independent chains of large arrays run a few at a time: the same bits in a part of the memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from fuseplan.frontend.trace import evaluator, trace
from fuseplan.passes.chains_in_turn import in_turns
from fuseplan.plan.notes import NoteKind
from fuseplan.targets.calibrate import described_cpu

CPU = described_cpu()
BINS = 16


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def histograms(x):
    """Of all pairs of columns."""
    bins = jnp.clip((x * 4 + BINS // 2).astype(jnp.int32), 0, BINS - 1)
    pairs = [(i, j) for i in range(x.shape[1]) for j in range(i)]
    empty = jnp.zeros(BINS * BINS, jnp.int32)
    return jnp.stack([empty.at[bins[:, i] * BINS + bins[:, j]].add(1) for i, j in pairs])


def sorted_sums(x):
    parts = [jnp.cumsum(jnp.sort(jnp.sin(x * k), -1), -1) for k in range(1, 9)]
    return jnp.stack([(z * z).sum(0) for z in parts])


def spectra(x):
    return jnp.stack([abs(jnp.fft.fft(x * w)).sum(0) for w in np.linspace(0.1, 1, 8, dtype=np.float32)])


PROGRAMS = {
    "histograms": (histograms, shaped(100_000, 12)),
    "sorts": (sorted_sums, shaped(1000, 1500)),
    "transforms": (spectra, shaped(500, 4096)),
    "of half precision": (sorted_sums, shaped(2000, 2000, dtype="bfloat16")),
}


def filled(aval):
    return jax.random.normal(jax.random.key(0), aval.shape, aval.dtype)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_bits_in_less_memory(name):
    f, aval = PROGRAMS[name]
    flat = trace(f, aval)
    turned = in_turns(flat, 2)
    assert turned is not flat
    x = filled(aval)
    programs = [
        jax.jit(lambda x, p=p: evaluator(p.equations, p.inputs, p.outputs)(x)) for p in (flat, turned)
    ]
    wanted, got = (jax.tree.leaves(program(x)) for program in programs)
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(wanted[0]))
    before, after = (program.lower(x).compile().memory_analysis().temp_size_in_bytes for program in programs)
    assert after <= 0.4 * before


def test_numbers_that_are_none_keep_their_bits():
    x = filled(shaped(1000, 1500)).at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf).at[2].set(-0.0)
    call = fuseplan.jit(sorted_sums, device=CPU)
    np.testing.assert_array_equal(call(x), jax.jit(sorted_sums)(x))
    assert NoteKind.RUNS_AS_JAX_BUT_CHAINS.value in call.plan(x).notes


def test_no_chain_waits_for_one_that_ends_in_an_empty_array():
    def f(x):
        parts = [jnp.sort(jnp.sin(x * k), -1) for k in range(1, 9)]
        return [z[:0].sum(0) for z in parts], [z.sum() for z in parts]

    x = filled(shaped(1000, 1500))
    in_turns(trace(f, x), 2)
    call = fuseplan.jit(f, device=CPU, strict=True)
    for got, wanted in zip(jax.tree.leaves(call(x)), jax.tree.leaves(jax.jit(f)(x)), strict=True):
        np.testing.assert_array_equal(got, wanted)


def deep(x):
    for k in range(8):
        x = jnp.sort(jnp.sin(x * (k + 1)), -1)
    return x.sum()


def together(x):
    parts = [jnp.sort(jnp.sin(x * k), -1) for k in range(1, 9)]
    return sum(parts).sum(0)


UNCHANGED = {
    "one chain": (deep, shaped(1000, 1500)),
    "arrays that are needed at once": (together, shaped(1000, 1500)),
    "little memory": (sorted_sums, shaped(100, 1500)),
    "as many chains as cores": (lambda x: (jnp.sort(x).sum(), jnp.sort(-x).sum()), shaped(4000, 4000)),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_where_no_order_saves_memory_nothing_changes(name):
    flat = trace(*UNCHANGED[name])
    assert in_turns(flat, 2) is flat
