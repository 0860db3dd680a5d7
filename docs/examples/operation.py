"""An operation of your own: a primitive that fuseplan fuses once it has a rule."""

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

import fuseplan
from fuseplan.extend import elementwise, register_rule

# A primitive of JAX, as a library would define it: x / (1 + |x|).
softsign_p = Primitive("softsign")
softsign_p.def_abstract_eval(lambda x: x)


@softsign_p.def_impl
def _softsign(x):
    return x / (1 + jnp.abs(x))


mlir.register_lowering(softsign_p, mlir.lower_fun(_softsign, multiple_results=False))


def softsign(x):
    """The function that users call."""
    return softsign_p.bind(x)


def f(x):
    """A function with the primitive between others."""
    return softsign(x * 2.0).sum(-1)


if __name__ == "__main__":
    x = jnp.linspace(-3, 3, 8 * 512).reshape(8, 512)
    before = fuseplan.make_plan(f, device="h200")(x)

    # Three vector operations an element; a kernel evaluates a block of it in plain JAX.
    register_rule(softsign_p, elementwise(vector=3, block=lambda tile, eqn, args: [_softsign(*args)]))
    after = fuseplan.make_plan(f, device="h200")(x)
    print(f"{len(before.kernels)} kernels without the rule, {len(after.kernels)} with it")
    assert jnp.allclose(after.run(x, interpret=True), f(x), rtol=1e-6)
