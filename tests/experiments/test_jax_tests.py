"""The table of JAX's own tests: a row for each file of tests and version of JAX, of its last run."""

from __future__ import annotations

import csv

from experiments import jax_tests
from experiments.readme import TABLES


def test_rows_of_a_file_are_replaced_when_it_is_run_again(tmp_path, monkeypatch):
    results = {
        ("api_test", "jax"): {"A::one": True, "A::two": True, "A::three": False},
        ("api_test", "fuseplan"): {"A::one": True, "A::two": False, "A::three": False},
        ("nn_test", "jax"): {"N::one": True},
        ("nn_test", "fuseplan"): {"N::one": True},
    }
    monkeypatch.setattr(jax_tests, "run", lambda folder, file, side: results[file, side])
    path = tmp_path / "jax_tests.csv"
    assert jax_tests.main([str(tmp_path), "api_test", "nn_test", "--out", str(path)]) == 1
    results["api_test", "fuseplan"] = results["api_test", "jax"]
    assert jax_tests.main([str(tmp_path), "api_test", "--out", str(path)]) == 0
    rows = {row["file"]: row for row in csv.DictReader(path.read_text().splitlines())}
    assert {file: (row["tests"], row["fail_with_jax"], row["fail_alone"]) for file, row in rows.items()} == {
        "nn_test": ("1", "0", "0"),
        "api_test": ("3", "1", "0"),
    }
    text = TABLES["jax_tests"].text(tmp_path)
    assert "| `api_test` | 3 | 1 | 0 |" in text
    assert "| all | 4 | 1 | 0 |" in text
