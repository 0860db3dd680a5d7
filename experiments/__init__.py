"""Named workloads, and the studies that compare plans on them.

``fuseplan.workloads`` is the one list that tests, calibration, benchmarks, reports and
the command line share.
"""
