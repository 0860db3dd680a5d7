"""The data of a plan: kernels in order with their costs, the proof of its bound, constraints, options, notes.

Nothing here decides, prints or checks: the packages that do take these values as arguments. In
``fusion_plan``, ``FusionPlan`` is the decision and ``Proof`` is the proof of its bound; ``json_codec`` writes
and reads both. Open ``fusion_plan`` first.
"""
