"""Studies and benchmarks of fuseplan on the programs of ``fuseplan.workloads``; not part of the wheel."""
