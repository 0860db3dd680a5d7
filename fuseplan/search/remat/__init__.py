"""Rematerialisation: search plans in which a value is computed in several kernels.

In: a lowered program, its prices, and a plan in which everything is computed once. Out: the faster plan, and
the program in which the chosen operations stand several times. ``duplicates`` is the graph with a copy of an
operation a reader, ``select`` chooses what may be copied, ``search`` plans that graph, ``materialise`` makes
the program. Open ``search`` first.
"""
