"""Describe the machine that a benchmark runs on, and the memory that this process has used."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from costmodel.calibrate import capacity_bytes, core_count, cpu_model
from fuseplan.support.environment import installed_version


def machine_columns() -> dict[str, Any]:
    """The CPU, its memory, the versions and the time (UTC), as columns of a row."""
    return {
        "cpu": cpu_model(),
        "cores": core_count(),
        "memory_bytes": capacity_bytes(),
        "fuseplan": installed_version("fuseplan", "unknown"),
        "jax": installed_version("jax", "unknown"),
        "jaxlib": installed_version("jaxlib", "unknown"),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def reset_peak_rss() -> None:
    """Let ``peak_rss_bytes`` count from now on, where the system can do that (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak since the start of the process is an upper bound


def peak_rss_bytes() -> int | None:
    """The most memory that this process has held at once; None where the system does not say."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
