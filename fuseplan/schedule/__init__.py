"""From a group of operations to the cheapest kernel that computes it, or to the reason why it has none.

In: a graph, a device and the nodes of a group. Out: a ``Kernel`` (specification and cost) or a refusal
(``support.errors.Verdict``). ``legality`` holds the rules, ``layout`` the roles of axes, ``tilings`` the tile
sizes that a backend can address, ``footprint`` what must fit on chip, ``nests`` the kernels that walk an axis
in several passes, ``pricing`` the interface through which planners ask. Open ``scheduler`` first.
"""
