"""The columns of frames: those that are documented, with their dtypes, and the same after a file."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from fuseplan import COLUMNS, Plan
from fuseplan.report.columns import columns_of
from fuseplan.report.comparison import Compared, Timing
from fuseplan.report.frames import compare_frame, operations_frame, read_frame, typed_frame
from fuseplan.studies import study
from fuseplan.support.errors import InvalidArgumentError

X = jax.ShapeDtypeStruct((512, 256), "float32")
W = jax.ShapeDtypeStruct((256, 128), "bfloat16")


def f(x, w):
    with jax.named_scope("block/norm"):
        y = jnp.tanh(x - x.mean(-1, keepdims=True))
    return (y.astype(w.dtype) @ w).astype(x.dtype), y.max()


@pytest.fixture(scope="module")
def plan():
    return fuseplan.make_plan(f, device="h200")(X, W)


@pytest.fixture(scope="module")
def frames(plan):
    measured = [Timing(1e-5, 0.5, 1024, None), Timing()]
    rows = [
        Compared("solver", plan, plan.objective_ps),
        Compared("xla", None, reason='no compiler, "none"\n'),
    ]
    return {
        "kernels": plan.to_frame(),
        "operations": plan.ops_frame(),
        "compare": fuseplan.compare(f, device=["h200", "tpu_v5e"], planners=["greedy", "solver"])(X, W),
        "measured": compare_frame(rows, measured),
        "study": study(["softmax", ("broken", lambda x: x.nothing, [X])], ["h200"], ["greedy"]),
    }


TABLE_OF = {"measured": "compare"}
NAMES = ["kernels", "operations", "compare", "measured", "study"]


def dtypes_of(frame):
    """The dtypes by column, where pandas before 3 has ``object`` for text."""
    return {name: str(dtype).replace("object", "str") for name, dtype in frame.dtypes.items()}


@pytest.mark.parametrize("name", NAMES)
def test_frames_have_the_documented_columns_and_dtypes(frames, name):
    frame = frames[name]
    columns = [c for c in COLUMNS[TABLE_OF.get(name, name)] if not c.is_optional or c.name in frame]
    assert list(frame.columns) == [c.name for c in columns]
    assert dtypes_of(frame) == {c.name: c.dtype for c in columns}
    assert frame.attrs["units"] == {c.name: c.unit for c in columns if c.unit}


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_frame_has_the_same_columns_and_dtypes(frames, name):
    columns = columns_of(frames[name].columns)
    assert dtypes_of(typed_frame([], columns)) == dtypes_of(frames[name])


DOCUMENTED = {
    "kernels": Plan.to_frame,
    "operations": Plan.ops_frame,
    "compare": fuseplan.compare,
    "study": fuseplan.study,
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstrings_name_every_column_in_order(name):
    text = " ".join(re.findall(r"``([^`]+)``", DOCUMENTED[name].__doc__))
    words = re.findall(r"\w+", text)
    places = [words.index(c.name) for c in COLUMNS[name] if not c.is_optional]
    assert places == sorted(places)


def test_every_column_is_explained_and_has_the_unit_that_its_name_says():
    units = {"us": "µs", "s": "s", "bytes": "B", "flops": "flop"}
    for columns in COLUMNS.values():
        assert len({c.name for c in columns}) == len(columns)
        for column in columns:
            assert column.meaning
            assert column.dtype in ("int64", "Int64", "float64", "str")
            assert column.unit == units.get(column.name.rpartition("_")[2], column.unit), column.name


def same(a, b):
    assert list(a.columns) == list(b.columns)
    assert dtypes_of(a) == dtypes_of(b)
    assert a.attrs == b.attrs
    for name in a.columns:
        assert a[name].isna().tolist() == b[name].isna().tolist()
        assert a[name].dropna().tolist() == b[name].dropna().tolist()


@pytest.mark.parametrize("name", NAMES)
def test_frames_come_back_from_csv_as_they_were(frames, name, tmp_path):
    frames[name].to_csv(tmp_path / "frame.csv", index=False)
    same(read_frame(tmp_path / "frame.csv"), frames[name])


@pytest.mark.parametrize("name", NAMES)
def test_frames_come_back_from_parquet_as_they_were(frames, name, tmp_path):
    pytest.importorskip("pyarrow")
    frames[name].to_parquet(tmp_path / "frame.parquet")
    same(read_frame(tmp_path / "frame.parquet"), frames[name])


def test_large_integers_and_missing_ones_are_exact(tmp_path):
    columns = [c for c in COLUMNS["compare"] if not c.is_optional]
    row = {c.name: "" if c.dtype == "str" else None for c in columns}
    big = 2**62 + 1  # no float64 has it
    frame = typed_frame([row | {"hbm_bytes": big, "gap": float("inf"), "notes": "NA"}, row], columns)
    assert frame.hbm_bytes[0] == big
    frame.to_csv(tmp_path / "frame.csv", index=False)
    same(read_frame(tmp_path / "frame.csv"), frame)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("other.csv", "a,b\n1,2\n", "expected the columns of a frame of fuseplan"),
        ("cell.csv", None, "is no number"),
        ("missing.csv", "", "cannot read a frame from"),
        ("missing.parquet", "", "cannot read a frame from"),
    ],
)
def test_other_files_are_refused(plan, tmp_path, name, text, message):
    path = tmp_path / name
    if text is None:
        plan.to_frame().to_csv(path, index=False)
        lines = path.read_text().splitlines()
        path.write_text("\n".join([lines[0], "x" + lines[1]]))
    elif text:
        path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        fuseplan.read_frame(path)


def test_an_empty_cell_where_a_number_has_to_be_names_the_column(plan, tmp_path):
    path = tmp_path / "cell.csv"
    frame = plan.to_frame().astype({"n_ops": "object"})
    frame["n_ops"] = ""
    frame.to_csv(path, index=False)
    with pytest.raises(InvalidArgumentError, match=r"is no number.*of the column 'n_ops' is empty"):
        fuseplan.read_frame(path)


@pytest.mark.parametrize("cells", ["text", None, "1" * 30])
def test_other_cells_in_a_parquet_file_name_the_column(plan, tmp_path, cells):
    pytest.importorskip("pyarrow")
    path = tmp_path / "cell.parquet"
    plan.to_frame().assign(n_ops=cells).to_parquet(path)
    with pytest.raises(InvalidArgumentError, match=r"column 'n_ops' of .*cell\.parquet should be int64"):
        fuseplan.read_frame(path)


def test_what_is_no_path_of_a_frame():
    with pytest.raises(InvalidArgumentError, match="expected the path of a file with a frame, got 5"):
        fuseplan.read_frame(5)


# --- operations ------------------------------------------------------------------------------


def test_a_row_an_operation_with_its_kernel(plan):
    frame, graph = plan.ops_frame(), plan.graph
    assert frame.operation.tolist() == list(range(len(graph.nodes)))
    assert frame.primitive.tolist() == [node.op for node in graph.nodes]
    for row in frame.itertuples():
        assert row.operation in plan.kernels[row.kernel].spec.nodes
    assert set(frame[frame.primitive == "tanh"].scope) == {"block/norm"}
    product = frame[frame.primitive == "dot_general"].iloc[0]
    assert product["shape"] == "[512,128]"
    assert product["dtype"] == "bfloat16"
    assert product["flops"] == 2 * 512 * 256 * 128
    # Each array once: two bytes an element.
    assert product["read_bytes"] == 2 * (512 * 256 + 256 * 128)
    assert product["write_bytes"] == 2 * 512 * 128


def test_every_kernel_has_one_main_operation_and_its_roles_follow_the_graph(plan):
    frame = plan.ops_frame()
    assert (frame[frame.role == "main"].groupby("kernel").size() == 1).all()
    assert frame[frame.role == "main"].kernel.nunique() == len(plan.kernels)
    whole = fuseplan.make_plan(jax.nn.softmax, device="h200")(X).ops_frame()
    of = dict(zip(whole.primitive, whole.role, strict=True))
    assert (of["exp"], of["reduce_sum"], of["div"]) == ("prologue", "main", "epilogue")


def test_rematerialised_operations_say_so():
    def shared(x):
        y = jnp.exp(x)
        return y.sum(0), jnp.cumsum(y, 1), y.sum(1)

    found = operations_frame(
        fuseplan.make_plan(shared, device="h200")(jax.ShapeDtypeStruct((8192, 8192), "f4"))
    )
    again = found[found.copies > 1]
    assert not again.empty, "the plan computes exp more than once"
    assert (again.copy_of <= again.operation).all()
    assert again.groupby("copy_of").size().tolist() == again.groupby("copy_of").copies.first().tolist()
    alone = found[found.copies == 1]
    assert (alone.copy_of == alone.operation).all()


# --- compare ---------------------------------------------------------------------------------


def test_several_devices_have_a_column_in_front(frames):
    frame = frames["compare"]
    assert frame[["device", "planner"]].to_numpy().tolist() == [
        [d, p] for d in ("h200", "tpu_v5e") for p in ("greedy", "solver")
    ]
    one = fuseplan.compare(f, device="tpu_v5e", planners=["greedy", "solver"])(X, W)
    assert "device" not in one
    assert one.time_us.tolist() == frame[frame.device == "tpu_v5e"].time_us.tolist()
    assert np.allclose(frame.groupby("device").ratio.first(), 1.0), "the baseline is that of the device"


def test_wrong_devices_cost_nothing():
    with pytest.raises(InvalidArgumentError, match="one or more devices, got none"):
        fuseplan.compare(f, device=[])
    with pytest.raises(ValueError, match="h300"):
        fuseplan.compare(f, device=["h200", "h300"])
