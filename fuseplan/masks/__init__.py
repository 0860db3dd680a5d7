"""Ranges of values and of indices: which tiles of a kernel a mask leaves without work.

In: equations of a group. Out: for each tile, what its index arithmetic can be (``index_ranges``), and the
tiles that contribute nothing (``dead_tiles``). ``intervals`` and ``interval_operations`` are the arithmetic.
Open ``dead_tiles`` first.
"""
