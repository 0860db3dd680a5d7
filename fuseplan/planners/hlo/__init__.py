"""Read XLA's optimized program: its launches, their traffic, and the operations that each kernel computes.

In: a serialized HLO module. Out: its kernels (``module``, ``kernels``), assigned to the nodes of a graph
(``attribution``). Open ``kernels`` first.
"""
