"""Files of rows: what several writers add stays, and every text is read as it was written."""

import multiprocessing
from dataclasses import dataclass

import pytest

from fuseplan.support.errors import InvalidArgumentError
from fuseplan.support.row_file import RowFile


@dataclass(frozen=True)
class Row:
    name: str
    share: float | None = None
    version: str = "1"


def names(path):
    return [row.name for row in RowFile(path, Row).rows]


def test_two_writers_lose_no_row(tmp_path):
    path = tmp_path / "rows.csv"
    a, b = RowFile(path, Row), RowFile(path, Row)
    for file, name in ((a, "a1"), (a, "a2"), (b, "b1"), (a, "a3"), (b, "b2")):
        file.add(Row(name))
    assert names(path) == ["a1", "a2", "b1", "a3", "b2"]
    assert [other.name for other in tmp_path.iterdir()] == ["rows.csv"]


def test_a_writer_drops_old_rows_and_none_that_came_since(tmp_path):
    path = tmp_path / "rows.csv"
    RowFile(path, Row).add(Row("old"))
    a = RowFile(path, Row, lambda row: row.version == "2")
    b = RowFile(path, Row, lambda row: row.version == "3")
    for file, row in ((a, Row("a", None, "2")), (b, Row("b", None, "3")), (a, Row("c", None, "2"))):
        file.add(row)
    assert names(path) == ["a", "b", "c"]


def test_a_file_that_was_deleted_is_whole_again(tmp_path):
    path = tmp_path / "rows.csv"
    file = RowFile(path, Row)
    file.add(Row("a"))
    path.unlink()
    file.add(Row("b"))
    assert names(path) == ["a", "b"]


@pytest.mark.slow
def test_processes_that_write_at_once_lose_no_row(tmp_path):
    path = tmp_path / "rows.csv"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_add, args=(path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(names(path)) == sorted(f"{name}{i}" for name in "abc" for i in range(60))


def _add(path, name):
    for i in range(60):
        RowFile(path, Row).add(Row(f"{name}{i}"))


@pytest.mark.parametrize("text", ["a\rb", "a\r\nb", "a\nb", '"', "a,b", " a", "nul\0", "\u2028"])
def test_every_text_is_read_as_it_was_written(tmp_path, text):
    path = tmp_path / "rows.csv"
    rows = [Row("first"), Row(text, None), Row("last", 0.5)]
    file = RowFile(path, Row)
    for row in rows:
        file.add(row)
    assert RowFile(path, Row).rows == rows


def test_a_text_that_is_no_unicode_costs_no_row(tmp_path):
    path = tmp_path / "rows.csv"
    file = RowFile(path, Row)
    file.add(Row("\udc80"))
    file.add(Row("\udc81"))
    assert names(path) == ["\\udc80", "\\udc81"]


def test_a_file_that_is_no_text_is_left_as_it_is(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\xff\xfe\0")
    with pytest.raises(InvalidArgumentError, match="expected a CSV file in UTF-8"):
        RowFile(path, Row)
    assert path.read_bytes() == b"\xff\xfe\0"


@pytest.mark.parametrize("cut", [1, 2, 5, 7, 9])
@pytest.mark.parametrize("name", ["bb", "b\nb", '"\r'])
def test_a_part_of_a_row_that_another_writer_left_costs_no_other_row(tmp_path, name, cut):
    path = tmp_path / "rows.csv"
    file = RowFile(path, Row)
    file.add(Row("a"))
    RowFile(path, Row).add(Row(name, 0.5))
    path.write_bytes(path.read_bytes()[:-cut])  # as if that writer had died
    before = names(path)
    file.add(Row("c"))
    file.add(Row("d"))
    assert names(path) == [*before, "c", "d"]


def test_a_row_that_was_cut_within_a_character_costs_no_other_row(tmp_path):
    path = tmp_path / "rows.csv"
    file = RowFile(path, Row)
    file.add(Row("a"))
    with path.open("ab") as raw:
        raw.write("µ".encode()[:1])
    assert names(path) == ["a"]
    file.add(Row("b"))
    assert names(path) == ["a", "b"]


def test_a_symbolic_link_stays_one(tmp_path):
    path, target = tmp_path / "rows.csv", tmp_path / "there" / "target.csv"
    target.parent.mkdir()
    path.symlink_to(target)
    file = RowFile(path, Row)
    for name in ("a", "b"):
        file.add(Row(name))
        assert path.is_symlink()
    assert names(target) == names(path) == ["a", "b"]
    assert [other.name for other in target.parent.iterdir()] == ["target.csv"]
