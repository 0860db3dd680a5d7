"""Check a plan, and the proof of its bound, without the code that made them.

In: a plan. Out: nothing or an ``InvalidPlanError`` (``plan``, ``kernel``, ``buffers``: every plan is checked
before it is used), or a ``Verification`` (``report``: the bound anew from the certificate). Nothing here
imports the solver or what lists the groups for it. Open ``plan`` first, then ``report``.
"""
