"""What a search refuses before it is priced has no kernel: of the groups that it prices, and of others."""

from __future__ import annotations

import random
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan.schedule.pricing import Price
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits, union_at

pytestmark = pytest.mark.one_python


def shape(*dims: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def energy(x, masses):
    """Arrays of 3 lanes, which a TPU pads to 128; differences that two kernels had better compute each."""
    d = x[:, None] - x[None]
    return 0.5 * masses @ jax.lax.rsqrt(jnp.square(d).sum(-1) + 1e-3) @ masses


def decayed_sums(a, x):
    """Slices of all lengths down to none."""

    def compose(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return jax.lax.associative_scan(compose, (jax.nn.sigmoid(a), x))[1] * 2


def shifted(x):
    """Slices and pads of an array, each with a whole axis."""
    up, left = jnp.pad(x[1:], ((0, 1), (0, 0))), jnp.pad(x[:, 1:], ((0, 0), (0, 1)))
    return jnp.tanh(up - x) * (left - x) + up * left, (up * left).sum(1)


def outer_norms(x, y):
    """Small dimensions beside each other, and one axis twice."""
    gram = jnp.einsum("bik,bjk->bij", x, y)
    norm = jnp.linalg.norm(gram, axis=(1, 2), keepdims=True)
    return gram / (1e-3 + norm), jnp.trace(gram, axis1=1, axis2=2)


def softmaxes(x, w):
    p = jax.nn.softmax(x, 0) + jax.nn.softmax(x, 1)
    return (p @ w).astype(jnp.bfloat16), jnp.square(p - p.mean(1, keepdims=True)).sum(0)


PROGRAMS = {
    "energy_grad": (jax.value_and_grad(energy), (shape(4096, 3), shape(4096))),
    "decayed_sums": (decayed_sums, (shape(37, 512, 16), shape(37, 512, 16))),
    "shifted": (shifted, (shape(2000, 3000),)),
    "outer_norms": (outer_norms, (shape(4000, 6, 40), shape(4000, 6, 40))),
    "softmaxes_grad": (
        jax.grad(lambda x, w: sum(jnp.sum(r.astype(jnp.float32)) for r in softmaxes(x, w))),
        (shape(3000, 5000), shape(5000, 64)),
    ),
}
CASES = [(name, device) for name in PROGRAMS for device in ("h200", "tpu_v5e")]


def searched(monkeypatch: pytest.MonkeyPatch, name: str, device: str) -> list[Space]:
    """The components that planning a program searches, with and without copies."""
    spaces: list[Space] = []
    make = Space.__init__

    def remember(self: Space, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)
        spaces.append(self)

    monkeypatch.setattr(Space, "__init__", remember)
    f, args = PROGRAMS[name]
    fuseplan.jit(f, device=device, deadline_s=10).plan(*args)
    return [space for space in spaces if space.n > 1]


def kernels(space: Space, rng: random.Random) -> Iterator[Mask]:
    """Groups of several positions that obey the rules and have a price: not those that are offered."""
    groups = [mask for mask in space.priced_ps if mask & (mask - 1) and mask not in space.offers]
    groups = [mask for mask in groups if space._clash(mask) is None]
    yield from rng.sample(groups, min(len(groups), 150))


def exchanged(space: Space, known: Mask, possible: Mask) -> Mask:
    """The values that every group between the two exchanges."""
    others = space.everything & ~possible
    written = union_at(known, space.made) & (space.kept | union_at(others, space.read))
    return written | union_at(known, space.read) & union_at(others, space.made)


@pytest.mark.parametrize(("name", "device"), CASES)
def test_no_part_of_a_kernel_is_refused(monkeypatch, name, device):
    rng = random.Random(0)
    asked = 0
    for space in searched(monkeypatch, name, device):
        for mask in kernels(space, rng):
            for keep, join in ((1.0, 0.0), (1.0, 0.5), (0.8, 0.1), (0.5, 0.3)):
                known = sum(1 << i for i in bits(mask) if rng.random() < keep)
                possible = mask | sum(1 << i for i in range(space.n) if rng.random() < join)
                crossing = exchanged(space, known, possible)
                asked += 1
                assert space._misfit(space.question(known, possible, crossing)) is None
                assert space._overflow(known | crossing << space.n) is None
    assert asked


@pytest.mark.parametrize(("name", "device"), CASES)
def test_nothing_around_a_nogood_is_a_kernel(monkeypatch, name, device):
    rng = random.Random(1)
    for space in searched(monkeypatch, name, device):
        n_values = len(space.values)
        cores = [(core, core >> space.n + n_values) for core in space.misfits.cores]
        cores += [(core, 0) for core in space.overflowing.cores]
        for core, barred in cores[:150]:
            known, crossing = core & space.everything, core >> space.n & (1 << n_values) - 1
            for join in (0.0, 0.1, 0.5, 1.0):
                group = known | sum(
                    1 << i for i in range(space.n) if rng.random() < join and not barred >> i & 1
                )
                if group & (group - 1) and not crossing & ~space.crossing(group):
                    refused = space._clash(group) is not None
                    assert refused or not isinstance(space.price(group), Price)
