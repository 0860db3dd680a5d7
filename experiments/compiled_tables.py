"""Summaries of the rows of ``experiments.compiled``: for each device, and for each workload on a TPU."""

from __future__ import annotations

from datetime import UTC, datetime

import pandas as pd

from fuseplan.bench import machine_columns

CYCLES_HEAD = """\
# Cycles of the planned kernels, and of XLA's own for the same operations, by libtpu's static profile:
# no TPU has run them. "time" counts the larger of cycles and of bytes at the device's bandwidth (XLA's
# bytes as XLA counts them). Kernels that are not estimated, ours or XLA's, are left out of both sums.
"""


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each device and dtype: the number of kernels, the shares that compile and spill, and the
    median and the worst ratio of our time to XLA's, by cycles and bytes."""
    rows = []
    for (device, dtype), part in frame.groupby(["device", "dtype"], sort=False):
        ratio = (part["cycles_us"] / part["xla_cycles_us"]).dropna()
        rows.append(
            {
                "device": device,
                "dtype": dtype,
                "kernels": len(part),
                "compiled": f"{part['compiled'].mean():.1%}",
                "spilling": int((part["spill_bytes"].fillna(0) > 0).sum()),
                "serialized": int(part["serialized"].eq(True).sum()),
                "median time/XLA": round(float(ratio.median()), 2) if len(ratio) else None,
                "worst": round(float(ratio.max()), 2) if len(ratio) else None,
            }
        )
    return pd.DataFrame(rows)


def cycles_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each workload, device and dtype, summed over all kernels of the plan: the number of kernels
    with both estimates, and the ratios of our cycles and time to XLA's."""
    rows = []
    for at, part in frame.groupby(["workload", "device", "dtype"], sort=False):
        both = part["cycles"].notna() & part["xla_cycles"].notna()
        known = part[both]

        def total(column: str, of: pd.DataFrame = known) -> float:
            return float((of[column] * of["count"]).sum())

        cycles, xla_cycles = total("cycles"), total("xla_cycles")
        us, xla_us = total("cycles_us"), total("xla_cycles_us")
        rows.append(
            {
                **dict(zip(("workload", "device", "dtype"), at, strict=True)),
                "kernels": int(part["count"].sum()),
                "estimated": int(known["count"].sum()),
                "cycles": int(cycles),
                "xla_cycles": int(xla_cycles),
                "ratio": round(cycles / xla_cycles, 3) if xla_cycles else None,
                "us": round(us, 2),
                "xla_us": round(xla_us, 2),
                "time_ratio": round(us / xla_us, 3) if xla_us else None,
            }
        )
    return pd.DataFrame(rows)


def cycles_csv(frame: pd.DataFrame, command: str) -> str:
    """``cycles_table`` as CSV, with the command, the versions and the date in comments."""
    versions = ", ".join(sorted(set(frame["versions"]) - {""}))
    versions = f"fuseplan {machine_columns()['fuseplan']}; {versions}"
    head = f"{CYCLES_HEAD}# {command}\n# {versions}, {datetime.now(UTC):%Y-%m-%d}\n"
    return head + cycles_table(frame).to_csv(index=False, lineterminator="\n")
