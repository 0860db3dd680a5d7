"""Emit a group as a Pallas Mosaic GPU kernel (NVIDIA Hopper and newer). Open ``kernel`` first."""
