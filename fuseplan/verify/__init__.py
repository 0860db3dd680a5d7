"""Check a plan, and the proof of its bound, without the code that made them.

In: a plan. Out: ``plan`` and ``kernel`` check every plan before it is used, and raise ``InvalidPlanError``;
``report`` also compares the graph with the program, recomputes the bound from the proof, and returns a
``Verification``. Nothing here imports the solver or the enumeration of candidate groups. Open ``plan`` first,
then ``report``.
"""
