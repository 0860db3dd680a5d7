"""``experiments.gpu_bench`` runs to its end without a GPU: its kernels, in the interpreter, are right."""

from __future__ import annotations

import csv

import jax
import pytest

from costmodel.timing import in_turns, rounds
from experiments import gpu_bench, gpu_clock
from experiments.gpu_cases import CASES, MORE, least_bytes
from experiments.gpu_rows import kept_rows, row_line, summary_lines
from fuseplan.bench import TORCH_MAKERS
from fuseplan.workloads import get_workload

pytestmark = pytest.mark.one_python

SOME = ["layernorm_vjp", "layernorm_columns", "linear_gelu", "causal_attention"]


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_from_end_to_end(tmp_path, capsys):
    out = tmp_path / "gpu.csv"
    assert gpu_bench.main(["--out", str(out), "--only", ",".join(SOME)]) == 0
    rows = rows_of(out)
    assert [r["workload"] for r in rows] == SOME
    for row in rows:
        assert (row["status"], row["error"]) == ("tiny", "")
        assert float(row["relative_error"]) < 0.1
        assert min(float(row[k]) for k in ("ours_us", "jax_us", "copy_us", "modelled_us")) > 0
        assert '"triton"' in row["modelled_kernels"]
    assert "never below 0.98" in capsys.readouterr().out
    # A second run has nothing left to do.
    gpu_bench.main(["--out", str(out), "--only", ",".join(SOME), "--budget-s", "0"])
    assert rows_of(out) == rows
    assert list(kept_rows(out, "another device")) == []


def test_the_other_workloads_are_measured_at_their_own_sizes(capsys):
    assert not CASES.keys() & MORE.keys()
    assert {"nbody", "gpt2_block", "gray_scott"} <= MORE.keys()
    assert MORE["nbody"].sizes == get_workload("nbody").sizes
    assert gpu_bench.main(["--only", "lorenz_96", "--no-torch"]) == 0
    assert "lorenz_96" in capsys.readouterr().out
    assert gpu_bench.main(["--more", "--budget-s", "-1"]) == 0
    assert f"{len(CASES) + len(MORE)} workloads are left" in capsys.readouterr().out


def test_a_spent_budget_leaves_the_rest(tmp_path, capsys):
    assert gpu_bench.main(["--budget-s", "-1", "--only", "softmax,swiglu"]) == 0
    assert "2 workloads are left for another run" in capsys.readouterr().out


@pytest.mark.slow
def test_a_failure_or_a_wrong_result_is_a_row_of_its_own(tmp_path, monkeypatch):
    real = gpu_bench.Bench._ours

    def broken(self, f, args, found):
        ours, plan = real(self, f, args, found)
        if len(args) == 2:
            raise RuntimeError("no luck\nat all")
        return lambda *given: ours(*given).at[1, 2].add(2), plan

    monkeypatch.setattr(gpu_bench.Bench, "_ours", broken)
    out = tmp_path / "gpu.csv"
    assert gpu_bench.main(["--out", str(out), "--only", "rmsnorm,softmax"]) == 1
    failed, wrong = rows_of(out)
    assert (failed["status"], failed["error"]) == ("failed", "RuntimeError: no luck\nat all")
    assert wrong["status"] == "wrong"
    assert "of the root mean square" in wrong["error"]
    assert row_line(failed).endswith("failed: RuntimeError: no luck at all")


def test_goals():
    bench = object.__new__(gpu_bench.Bench)
    bench.on_gpu = True
    good = {"faster_than_jax": 2.0, "of_copy": 0.9, "faster_than_library": 0.7}
    assert {bench.verdict(case, good)["status"] for case in CASES.values()} == {"met"}

    def missed(name, **worse):
        return bench.verdict(CASES[name], good | worse)["missed"]

    assert missed("softmax", of_copy=0.89) == "0.89 of 0.9 of a copy's bandwidth"
    assert missed("gated_mlp", of_copy=0.1) == ""
    assert missed("layernorm_vjp", faster_than_jax=1.99) == "1.99 of 2.0 × jax.jit"
    assert missed("gated_mlp", faster_than_jax=0.97) == "0.97 of 0.98 × jax.jit"
    assert missed("causal_attention", faster_than_library=0.69) == "0.69 of 0.7 × cuDNN"
    assert missed("linear_gelu", faster_than_library=0.1) == ""
    row = {"workload": "softmax", "status": "missed", "missed": "a reason", "notes": ""}
    text = "\n".join(summary_lines([row], dict.fromkeys(("device", "driver", "jax", "torch"), "x"), "cupti"))
    assert "met by 0 of 1" in text
    assert "a reason" in text


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_large_and_has_its_like_in_torch(name):
    case = CASES[name]
    f, args = case.build()
    assert set(case.sizes) == set(case.workload.small_sizes)
    shared = jax.eval_shape(f, *args)
    assert least_bytes(f, args) > 100e6, "beyond the L2 cache of an H100"
    assert name in TORCH_MAKERS
    if case.by_library is not None and "cuDNN" not in case.library:
        assert jax.eval_shape(case.by_library, *args).shape == shared.shape
    if case.total_flops:
        assert case.total_flops > 1e11


def test_turns_are_taken():
    calls = []
    clocks = [lambda: calls.append("a") or 1.0, lambda: calls.append("b") or 2.0]
    assert in_turns(clocks, rounds(3)) == [[1.0] * 3, [2.0] * 3]
    assert "".join(calls) == "abbaab"
    assert not gpu_clock.cupti_works(jax.jit(lambda x: -x), (1.0,))
