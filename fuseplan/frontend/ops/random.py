"""Random bits: pure functions of their key, left to XLA as they are."""

from __future__ import annotations

from costmodel.graph import Flops, OpKind
from fuseplan.frontend.ops.rule import PALLAS, Rule, no_flops, out_size, whole_space

# Threefry-2x32: 20 rounds of add, rotate (3 operations) and xor, for two words of output,
# plus key injections (Salmon et al., SC'11): about 56 integer operations a word.
_THREEFRY_OPERATIONS_A_WORD = 56

_BITS = Rule(
    OpKind.OPAQUE,
    whole_space,
    lambda eqn: Flops(vector=_THREEFRY_OPERATIONS_A_WORD * out_size(eqn)),
    None,
    PALLAS,
)
_KEY = Rule(OpKind.OPAQUE, whole_space, no_flops, None, PALLAS)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("random_bits", "rng_bit_generator"), _BITS),
    **dict.fromkeys(("random_seed", "random_wrap", "random_unwrap", "random_fold_in", "random_split"), _KEY),
}
