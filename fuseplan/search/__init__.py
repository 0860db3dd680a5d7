"""The search for the cheapest partition of a graph into kernels, with a proof.

In: a graph and a ``schedule.pricing.Pricing``. Out: a ``grouping.Grouping``: kernels, bound and proof.
``components`` splits the graph, ``space`` and ``candidates`` list the legal groups of one part, ``presolve``
makes it smaller, ``set_partitioning`` solves it (integers in, integers out), ``column_generation`` solves one
that has too many groups to list, ``branching`` one by cases, and ``joint`` puts the parts in order. ``remat``
searches plans that compute a value in several kernels.
Open ``grouping`` first, then ``component``.
"""
