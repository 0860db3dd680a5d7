"""What ``fuseplan.jit`` does at a call: plan once a set of shapes, emit, compile, run, and differentiate.

In: a function and its arguments. Out: its results, by JAX's own conventions. ``bind`` makes a fused function
one JAX primitive (``primitive``), ``executor`` runs a plan's kernels in order, ``guarded`` and ``replan`` go
on when a compiler refuses a kernel, ``derivative`` plans the pass back, ``autoselect`` measures against
``jax.jit``. Open ``bind`` first.
"""
