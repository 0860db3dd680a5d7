"""Small tools without any knowledge of fusion, for every other package.

Errors and refusals (``errors``), sets of small integers (``bitset``), orders and cycles of directed graphs
(``digraph``), counted work and seconds by stage (``work``), files written whole or not at all
(``atomic_file``), text with units (``format``), environment variables and versions (``environment``), and
the one adapter to JAX's private names (``jax_compat``). Open ``errors`` first.
"""
