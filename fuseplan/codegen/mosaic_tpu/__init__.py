"""Emit a group as a Pallas Mosaic kernel (Google TPUs). Open ``kernel`` first."""
