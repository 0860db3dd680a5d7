"""Horizontal fusion: small kernels that no more than a scalar ties together become one on one core.

In: a plan's groups. Out: the groups with packs. ``rules`` says what a pack may be and the least that it
costs, ``pack`` finds the packs by shortest paths. Open ``rules`` first.
"""
