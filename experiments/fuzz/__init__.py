"""Random programs, checked against NumPy in float64: ``python -m experiments.fuzz``."""
