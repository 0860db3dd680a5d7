"""Emit a group as a nest of XLA loops over tiles: the kernels of the CPU. Open ``kernel`` first."""
