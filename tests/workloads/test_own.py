"""A user's own functions as workloads, from modules and from files."""

import sys

import jax
import numpy as np
import pytest

from fuseplan.support.errors import InvalidArgumentError, UnknownNameError
from fuseplan.workloads import load_workload

pytestmark = pytest.mark.one_python

SOURCE = '''
"""Programs of a user."""
import jax.numpy as jnp
from math import tau
from fuseplan.workloads import Workload, of_shapes

def good():
    """A row sum.

    More about it."""
    import beside_it  # found when the function runs, too
    return (lambda x: (x * beside_it.FACTOR).sum(-1)), [jnp.ones((8, 16))]

def not_a_pair():
    return 3

def takes(x, y=1):
    return x

class Maker:
    @staticmethod
    def make():
        return jnp.tanh, (jnp.ones(4),)

sized = Workload("sized", "a sum", {"n": 64}, {"n": 5}, of_shapes(jnp.sum, "n"))
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with ``programs.py``, and another as the current one."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "programs.py").write_text(SOURCE)
    (tmp_path / "theirs" / "beside_it.py").write_text("FACTOR = 2.0\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "theirs"
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(module)]:
        del sys.modules[name]


@pytest.mark.parametrize("absolute", [False, True])
def test_a_function_of_a_file(folder, absolute):
    before = list(sys.path)
    workload = load_workload(f"{folder / 'programs.py' if absolute else 'theirs/programs.py'}:good")
    f, args = workload.build()
    assert workload.description == "A row sum"
    np.testing.assert_array_equal(f(*args), np.full(8, 32.0))
    assert sys.path == before


def test_a_function_of_a_module(folder, monkeypatch):
    monkeypatch.chdir(folder)
    f, args = load_workload("programs:good").build()
    np.testing.assert_array_equal(f(*args), np.full(8, 32.0))
    f, args = load_workload("programs:Maker.make").build()
    assert f(*args).shape == (4,)


def test_a_file_is_read_anew(folder):
    load_workload("theirs/programs.py:good")
    (folder / "programs.py").write_text(SOURCE.replace("def good", "def better"))
    assert load_workload("theirs/programs.py:better").build()
    with pytest.raises(UnknownNameError, match=r"there are theirs/programs\.py:better"):
        load_workload("theirs/programs.py:good")


def test_a_workload_of_a_file_has_sizes_and_dtypes(folder):
    workload = load_workload("theirs/programs.py:sized")
    _, (x,) = workload.build("bfloat16", small=True)
    assert x == jax.ShapeDtypeStruct((5,), "bfloat16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("theirs/programs.py:goood", r"there is none; did you mean theirs/programs\.py:good\?"),
        ("theirs/programs.py:qqqq", r"there are theirs/programs\.py:good, theirs/programs\.py:not_a_pair"),
        ("theirs/programs.py:tau", "expected a function 'tau' in module"),
        ("theirs/programs.py", "without a function"),
        ("theirs/program.py:good", r"no file 'theirs/program\.py'; did you mean theirs/programs\.py\?"),
        ("nofolder/x.py:good", r"there is no file 'nofolder/x\.py'"),
        ("nowhere.at_all:f", r"package\.module:function or file\.py:function, but 'nowhere\.at_all' cannot"),
        (".x:f", "it is no name of a module"),
        (":", "cannot be imported: it is no name of a module"),
        ("softmx", "did you mean 'softmax'"),
    ],
)
def test_a_name_of_nothing_says_what_there_is(folder, text, message):
    with pytest.raises(UnknownNameError, match=message):
        load_workload(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("theirs/programs.py:takes", r"takes the arguments x: name a function without arguments"),
        ("theirs/programs.py:not_a_pair", r"not_a_pair\(\) must return \(f, args\).*got 3"),
    ],
)
def test_a_function_of_another_form(folder, text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        load_workload(text).build()


def test_own_functions_decide_on_dtypes(folder):
    with pytest.raises(InvalidArgumentError, match="are for named workloads"):
        load_workload("theirs/programs.py:good").build("bfloat16")


def test_an_error_of_the_file_is_the_users(folder):
    (folder / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_workload("theirs/broken.py:f")
    assert not [name for name in sys.modules if name.endswith("broken")]
