"""From a Python function to a graph that can be priced and to equations that can be evaluated.

In: a function and the shapes of its arguments. Out: a ``Lowered``: a ``costmodel.graph.Graph`` with the
equations behind its nodes. ``trace`` makes a flat list of equations, ``lower`` applies one rule a primitive
(``ops``), and ``rewrite`` builds a changed program from a lowered one. Open ``trace`` first, then ``lower``.
"""
