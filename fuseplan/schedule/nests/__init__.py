"""Kernels that walk an axis in several passes, or hold several contractions.

In: a graph and a device. Out: the groups that are worth offering to a planner (``offered``, ``regions``), and
the cheapest nest of a group (``cpu``, ``accelerator``). ``multipass`` finds the passes, ``online_rescaling``
what makes a softmax online, ``live_tiles`` the tiles that masks leave. Open ``offered`` first, then
``multipass``.
"""
