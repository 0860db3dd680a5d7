"""Trace a Python function and lower it to a graph that can be priced and equations that can be evaluated.

In: a function and the shapes of its arguments. Out: a ``Lowered``: a ``costmodel.graph.Graph`` with one
equation for each node. ``trace`` makes a flat list of equations, ``lower`` applies the rule of each primitive
(``ops``), and ``rewrite`` builds a changed program from a lowered one. Open ``trace`` first, then ``lower``.
"""
