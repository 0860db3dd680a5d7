"""``random_bits``: an elementwise operation of the indices of its result, which XLA alone evaluates.

The Threefry generator hashes the index of each element with a key that all elements share (Salmon et al.,
SC'11). XLA fuses the hash into the loop of its readers on GPUs and TPUs (``Backend.loop_generators``); on a
CPU it runs the rounds as a loop over whole arrays. Other generators are kernels of their own everywhere.
"""

from __future__ import annotations

from costmodel.graph import DimRole, Flops, OpKind
from fuseplan.frontend.ops.rule import PALLAS, Rule, Space, out_size, own_dims, whole_space
from fuseplan.frontend.trace import Equation

_THREEFRY = "key<fry>"
"""The dtype of Threefry's keys."""


def random_bits_flops(eqn: Equation) -> Flops:
    """56 integer operations a word of Threefry-2x32: 20 rounds of add, rotate (3 operations) and xor for
    two words, and the key injections (Salmon et al., SC'11)."""
    return Flops(vector=56 * out_size(eqn))


def _per_element(eqn: Equation) -> Space:
    """A dimension for each of the result's; those of the keys come first in it."""
    keys, (out,) = eqn.in_avals[0], eqn.out_avals
    dims, dim_map = own_dims(out.shape)
    return Space(dims, (DimRole.PARALLEL,) * len(dims), (dim_map[: keys.ndim],), (dim_map,))


def _of_threefry(eqn: Equation) -> Rule | None:
    keys = eqn.in_avals[0]
    return _HASHED if str(keys.dtype) == _THREEFRY else None


_HASHED = Rule(OpKind.ELEMENTWISE, _per_element, random_bits_flops, lacks=PALLAS | {"xla", "loops"})

RULES = {
    "random_bits": Rule(OpKind.OPAQUE, whole_space, random_bits_flops, None, PALLAS, special=_of_threefry),
}
