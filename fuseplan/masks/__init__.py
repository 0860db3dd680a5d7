"""Find the tiles to which a mask, such as a causal one, gives no effect, so that kernels can skip them.

In: the equations of a group. Out: for each tile, bounds of its index arithmetic (``index_ranges``), and the
tiles that contribute nothing (``dead_tiles``), by bounds of all values (``value_ranges``). ``intervals`` is
the arithmetic. Open ``dead_tiles`` first.
"""
