"""Schedule a group of operations as a kernel: legality, layout, tiles, on-chip footprint, and price.

In: a graph, a device and the nodes of a group. Out: a ``Kernel`` (specification and cost) or a refusal
(``support.errors.Verdict``). ``legality`` decides which operations may share a kernel, ``layout`` the roles
of axes, ``tilings`` the tile sizes that a backend can address, ``footprint`` the on-chip memory; ``nests``
are kernels in several passes, ``pricing`` is the interface to planners. Open ``scheduler`` first.
"""
