"""XLA's optimized program: what it launches and moves, and which operations each of its kernels computes.

In: a lowered program and a device. Out: the kernels of the HLO module that XLA compiles (``compiled``,
``module``, ``kernels``), placed on the graph's nodes (``attribution``). Open ``compiled`` first.
"""
