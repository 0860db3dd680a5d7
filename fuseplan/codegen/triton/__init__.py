"""Emit a group as a Pallas Triton kernel (NVIDIA GPUs). Open ``kernel`` first."""
