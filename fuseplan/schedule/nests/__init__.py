"""Nests: kernels that loop over an axis several times, or that contain several contractions.

In: a graph and a device. Out: the groups worth offering to a planner (``regions`` finds them, ``offered``
prices them), and the fastest nest of a group (``cpu``, ``accelerator``). ``multipass`` splits a group into
passes, ``online_rescaling`` makes a softmax online, ``live_tiles`` skips masked tiles. Open ``offered``
first, then ``multipass``.
"""
