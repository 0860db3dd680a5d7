"""Tests that compile for a GPU or TPU that is not there need the extra ``aot``."""

from __future__ import annotations

import importlib.util

import pytest

_NEEDED = {"cuda": "jax_plugins.xla_cuda13", "tpu": "libtpu"}


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in _NEEDED.values() if not _installed(name)]
    if not missing:
        return
    skip = pytest.mark.skip(reason=f"needs {' and '.join(missing)}: pip install 'fuseplan[aot]'")
    for item in items:
        if item.get_closest_marker("aot"):
            item.add_marker(skip)
