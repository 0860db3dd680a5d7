"""Rewrites of a program into equivalent ones that may have faster plans, before the search.

In: a lowered program and options. Out: programs to plan (``rewriting``). One file a rewrite: arrays of short
rows by columns, batch dimensions first, reductions and contractions in steps, large values computed again.
Open ``rewriting`` first.
"""
