"""The tools of a study, and the measurements of ``fuseplan bench``: planning time, plan quality, and speed on
this CPU.

In: functions and their arguments. Out: rows (dictionaries) and tables of 80 columns. Open ``planning``,
``solver`` or ``cpu``, named as the commands are.

The tools:

- time: ``in_turns`` samples programs side by side, until there are enough ``rounds``;
- check: ``in_float64`` evaluates a program, and ``largest_difference`` compares results;
- compare: ``with_ratios`` adds the times over a baseline's to a study's frame; ``divergence_lines`` lists the
  measured times that ``are_apart`` from the modelled ones, by more than ``DIVERGENCE_FACTOR``, and
  ``price_lines`` how well all are priced;
- beside: ``TORCH_MAKERS`` has workloads in PyTorch, for ``import_torch`` and ``to_torch``;
- compile: ``count_compiled_kernels`` compares a plan with what XLA compiles of it;
- show: ``progress``, ``print_table``, ``columns``, and ``bytes_text``, ``factor_text`` and ``time_text``;
- keep: ``machine_columns`` and ``csv_of`` for rows, ``RowFile`` for rows that are written one by one,
  ``parsed_row`` and ``results_lines`` to read them, and ``check_writable`` and ``write_text``, which replaces
  a file in one step.

Example:
    >>> print(csv_of([{"workload": "softmax", "time": time_text(1234.5)}]), end="")
    workload,time
    softmax,"1,234"
"""

from __future__ import annotations

from costmodel.timing import in_turns, rounds
from fuseplan.bench.compiled_plans import count_compiled_kernels
from fuseplan.bench.cpu import price_lines
from fuseplan.bench.float64 import in_float64
from fuseplan.bench.machine import machine_columns
from fuseplan.bench.planning import csv_of
from fuseplan.bench.torch_programs import MAKERS as TORCH_MAKERS
from fuseplan.bench.torch_programs import import_torch, to_torch
from fuseplan.console import print_table, progress
from fuseplan.report.comparison import DIVERGENCE_FACTOR, are_apart, divergence_lines
from fuseplan.report.figures import with_ratios
from fuseplan.runtime.tolerance import largest_difference
from fuseplan.support.atomic_file import check_writable, write_text
from fuseplan.support.format import bytes_text, columns, factor_text, time_text
from fuseplan.support.row_file import RowFile, parsed_row, results_lines

__all__ = [
    "DIVERGENCE_FACTOR",
    "TORCH_MAKERS",
    "RowFile",
    "are_apart",
    "bytes_text",
    "check_writable",
    "columns",
    "count_compiled_kernels",
    "csv_of",
    "divergence_lines",
    "factor_text",
    "import_torch",
    "in_float64",
    "in_turns",
    "largest_difference",
    "machine_columns",
    "parsed_row",
    "price_lines",
    "print_table",
    "progress",
    "results_lines",
    "rounds",
    "time_text",
    "to_torch",
    "with_ratios",
    "write_text",
]
