"""HLO: what XLA's optimized program launches and moves, and where it was compiled for."""
