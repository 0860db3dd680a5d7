"""Measure planning time, plan quality, and speed on this CPU, for ``fuseplan bench``.

In: functions and their arguments. Out: rows (dictionaries) and tables of 80 columns. Open ``planning``,
``solver`` or ``cpu``, named as the commands are.
"""
