"""A backend of your own: a record of what its kernels can hold, and a module that makes them.

This file is both: the module's ``emit`` gets each kernel of a plan, and returns a function of arrays.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

import fuseplan
from fuseplan.extend import Backend, KernelSpec, Lowered, get_device, register_backend
from fuseplan.extend import emit as emit_kernel


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable:
    """Make a kernel. Yours would translate the nodes and the schedule of ``spec`` to its own language; this
    one prints them, and runs the operations by XLA."""
    names = " ".join(lowered.graph.nodes[n].op for n in spec.nodes)
    print(f"kernel of {names}: grid {spec.grid}")
    return emit_kernel(replace(spec, backend="xla"), lowered)


if __name__ == "__main__":
    sys.modules["my_backend"] = sys.modules["__main__"]  # An installed module needs no such line.
    register_backend(Backend("mine", "my_backend", dialect="loops", matmul_tiles=(32, 64), depth_tiles=(32,)))
    device = replace(get_device("test"), name="my_device", platform="cpu", backend="mine")
    f = fuseplan.jit(lambda x: jax.nn.softmax(jnp.tanh(x)), device=device)
    x = jnp.linspace(-1, 1, 64 * 256).reshape(64, 256)
    assert jnp.allclose(f(x), jax.nn.softmax(jnp.tanh(x)), rtol=1e-6)
