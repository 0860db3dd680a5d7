"""Read the ``FUSEPLAN_*`` environment variables and the versions of packages."""

from __future__ import annotations

import os
from pathlib import Path


def debug_level() -> int:
    """``FUSEPLAN_DEBUG``: 1 the plan, 2 refusals too, 3 kernels too, 4 the graph too."""
    text = os.environ.get("FUSEPLAN_DEBUG", "0")
    return int(text) if text.isdigit() else 0


def dump_dir() -> Path | None:
    """``FUSEPLAN_DUMP``: a folder that receives every plan made, as JSON."""
    text = os.environ.get("FUSEPLAN_DUMP", "")
    return Path(text) if text else None


def is_disabled() -> bool:
    """``FUSEPLAN_DISABLE=1``: ``fuseplan.jit`` is ``jax.jit``."""
    return os.environ.get("FUSEPLAN_DISABLE", "") not in ("", "0")


def is_checked() -> bool:
    """``FUSEPLAN_CHECK=1``: every call is compared with JAX's own result."""
    return os.environ.get("FUSEPLAN_CHECK", "") not in ("", "0")


def installed_version(package: str, otherwise: str) -> str:
    """The version of an installed package, or ``otherwise``."""
    # A quarter of what ``fuseplan --help`` would import.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise
