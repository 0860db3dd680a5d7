"""Tiled loops for the CPU: which groups they suit, and how a group becomes a loop nest."""
