"""Run a ``fuseplan.jit`` function: plan once for each set of shapes, emit, compile, run and differentiate.

In: a function and its arguments. Out: its results, by JAX's own conventions. ``bind`` makes a fused function
one JAX primitive (``primitive``), ``executor`` runs a plan's kernels in order, ``recovering`` and ``replan``
recover when a compiler refuses a kernel, ``derivative`` plans the backward pass, ``autoselect`` measures
against ``jax.jit``. Open ``bind`` first.
"""
