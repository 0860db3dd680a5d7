"""Memory of a plan: live ranges, the order of kernels, buffer offsets, and plans under a limit.

In: a graph and kernels. Out: the order of least peak (``order``), offsets in one arena (``allocation``), or
the fastest plan within ``max_peak_bytes`` (``limit``, ``rematerialise``). Open ``liveness`` first, then
``order``.
"""
