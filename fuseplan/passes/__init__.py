"""Rewrite a program, before the search, into equivalent programs that may have faster plans.

In: a lowered program and options. Out: programs to plan (``rewriting``). Each rewrite has a file: arrays of
short rows by columns, batch dimensions first, reductions and contractions in steps, rematerialisation of
large values. Open ``rewriting`` first.
"""
