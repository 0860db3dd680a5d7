"""What a plan holds in memory: liveness, the order of kernels, buffers, and plans under a limit.

In: a graph and kernels. Out: the order with the least peak (``order``), offsets in one arena
(``allocation``), or the fastest plan within ``max_peak_bytes`` (``limit``, ``rematerialise``). Open
``liveness`` first, then ``order``.
"""
