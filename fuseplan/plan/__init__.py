"""The data of a decision: kernels in order with their costs, the proof of a bound, constraints and options.

Nothing here decides, prints or checks: those packages take these values as arguments. ``plan.Plan`` is the
decision, ``certificate.Proof`` is what its bound rests on, ``json_codec`` writes and reads both. Open
``plan`` first.
"""
