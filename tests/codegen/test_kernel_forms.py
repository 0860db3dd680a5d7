"""Every primitive that a kernel may hold, in each backend's form of it and each dtype, on ragged
tiles with infinities, zeros of both signs and what is no number among them: against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from costmodel.axes import compose, unify
from fuseplan.frontend.lower import lower
from fuseplan.frontend.ops import rules
from fuseplan.frontend.ops.rule import PALLAS
from fuseplan.frontend.trace import trace
from tests.aot import primitives as table
from tests.helpers.mosaic_gpu_cases import exchanged, is_dealt
from tests.helpers.quickly import run_quickly
from tests.helpers.specs import P, S, Tiled, hand_spec, kernel_function, whole_group

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]

Functions = dict[str, Callable[..., Any]]

BACKENDS = ("triton", "mosaic_gpu", "mosaic_tpu")
FLOATS = {
    "triton": ("float32", "float16"),
    "mosaic_gpu": ("float32", "float16"),
    "mosaic_tpu": ("float32", "bfloat16"),
}
INTEGERS = {
    "triton": ("int32", "uint32", "int8"),
    "mosaic_gpu": ("int32", "uint32"),
    "mosaic_tpu": ("int32", "uint32"),
}
REDUCED = {
    "triton": ("bfloat16", "int32"),
    "mosaic_gpu": ("bfloat16", "uint32"),
    "mosaic_tpu": ("float32", "uint32"),
}

# Units in the last place of the result, where more than this many are off.
ULP = 6
ULPS = {
    # As XLA computes them on a CPU.
    "tan": 10, "cosh": 30, "sinh": 30, "erf_inv": 30, "log1p": 10, "expm1": 10, "pow": 40, "atanh": 10,
    # Products of a row.
    "reduce_prod_minor": 20, "reduce_prod_major": 20, "cumprod": 20, "reduce_prod_all": 200,
    "exp2": 20, "erfc": 80, "logistic": 10,
}  # fmt: skip

AS_XLA = ("nextafter", "pow_integer")
"""What depends on the dtype is compared with ``jax.jit``."""

# Functions, of how many arrays, and of which dtype.
TABLES = (
    *((functions, 1, "float32") for functions in (
        table.FLOAT_UNARY, table.REDUCTIONS, table.QUANTIFIERS, table.FOLDS, table.FLOAT_FOLDS,
        table.MOVEMENT, table.WINDOWS, table.CASTS,
    )),
    *((functions, 2, "float32") for functions in (table.BINARY, table.FLOAT_BINARY)),
    (table.INTEGER, 2, "int32"),
    (table.BITWISE, 1, "int32"),
    (table.BOOLEAN, 2, "bool"),
)  # fmt: skip

# Those of tests/helpers/prologue_cases.py, and names that no public function of JAX emits any more.
ELSEWHERE = {
    "dot_general", "add_any", "eq_to", "le_to", "lt_to", "log2", "stop_gradient",
}  # fmt: skip


def test_every_form_is_here():
    found = set()
    for functions, arity, dtype in TABLES:
        operands = (jax.ShapeDtypeStruct(table.X, dtype),) * arity
        found |= {node.op for f in functions.values() for node in lower(trace(f, *operands)).graph.nodes}
    held = {name for name, rule in rules().items() if rule.block is not None and not rule.lacks >= PALLAS}
    assert held - ELSEWHERE <= found


def numbers(dtype: str, shape: tuple[int, ...], seed: int, special: bool = True) -> Any:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return jnp.asarray(rng.random(shape) < 0.6)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.integer):
        return jnp.asarray(rng.integers(0 if dtype.startswith("u") else -9, 9, shape), dtype)
    x = rng.standard_normal(shape) * np.exp(rng.uniform(-3, 3, shape))
    if special and x.size > 40:
        odd = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -1.5]
        x.reshape(-1)[rng.choice(x.size, len(odd), replace=False)] = odd
    return jnp.asarray(x, dtype)


def kept(functions: Functions, backend: str, avals: tuple[Any, ...], tiled: tuple[Tiled, ...]) -> Functions:
    """Those that compute something, all of which the backend has, in these tiles."""
    chosen = {}
    for name, f in functions.items():
        nodes = lower(trace(f, *avals)).graph.nodes
        has = nodes and all(backend in node.backends for node in nodes)
        if has and (backend != "mosaic_gpu" or is_dealt(f, avals, *tiled)):
            chosen[name] = f
    return chosen


def check(functions: Functions, backend: str, args: tuple[Any, ...], *tiled: Tiled) -> None:
    """One kernel of all that the backend can emit of ``functions``."""
    if backend == "mosaic_gpu":
        functions = {name: exchanged(f, str(args[0].dtype)) for name, f in functions.items()}
        args = tuple(a.astype("int32") if a.dtype == "bool" else a for a in args)
    chosen = kept(functions, backend, args, tiled)
    assert chosen

    def every(*args: Any) -> Any:
        return {name: f(*args) for name, f in chosen.items()}

    lowered = whole_group(every, *args)
    results = run_quickly(
        kernel_function(hand_spec(lowered, backend, *tiled), lowered, interpret=True), *args
    )
    got = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(every, *args)), results)
    # Without LLVM's optimisations XLA makes 0 of what is too large for a float8_e4m3fn (jax 0.10.2).
    plain = (jax.jit(every) if functions is table.CASTS else partial(run_quickly, every))(*args)
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, "float64") if jnp.issubdtype(a.dtype, jnp.floating) else a for a in args]
        exact = jax.tree.map(np.asarray, run_quickly(every, *wide))
    for name in chosen:
        for g, p, e in zip(*map(jax.tree.leaves, (got[name], plain[name], exact[name])), strict=True):
            assert (g.shape, g.dtype) == (p.shape, p.dtype), name
            if not jnp.issubdtype(g.dtype, jnp.floating) or g.dtype.itemsize == 1 or name in AS_XLA:
                kind = "float64" if jnp.issubdtype(g.dtype, jnp.floating) else g.dtype
                np.testing.assert_array_equal(np.asarray(g, kind), np.asarray(p, kind), err_msg=name)
            else:
                close(name, g, np.asarray(e, "float64"))


def close(name: str, got: Any, want: np.ndarray) -> None:
    """Each number is so many units in the last place from that of float64, in the dtype of ``got``."""
    info = jnp.finfo(got.dtype)
    got, want = (np.atleast_1d(np.asarray(x).astype("float64")) for x in (got, want))
    with np.errstate(all="ignore"):
        rounded = want.astype(info.dtype).astype("float64")
        exponent = np.floor(np.log2(np.maximum(np.abs(want), float(info.tiny))))
        off = np.abs(got - want) / (2.0**exponent * float(info.eps))
    # What is below the normal numbers may be zero, what is all but too large infinite.
    at_ends = (np.abs(want) < float(info.tiny)) | (np.abs(want) > 0.99 * float(info.max))
    same = (got == rounded) | (np.isnan(got) & np.isnan(want)) | (at_ends & ~np.isnan(got))
    off[same] = 0
    worst = np.unravel_index(np.argmax(np.nan_to_num(off, nan=np.inf)), off.shape)
    assert off[worst] <= ULPS.get(name, ULP), (
        f"{name}: {got[worst]}, not {want[worst]}: {off[worst]:.1f} units"
    )
    zeros = (want == 0) & (got == 0)
    np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(want[zeros]), err_msg=name)


ELEMENTS = {
    "triton": (Tiled(0, 0, P, 4), Tiled(0, 1, P, 64)),
    "mosaic_gpu": (Tiled(0, 0, P, 4), Tiled(0, 1, P, 128)),
    "mosaic_tpu": (Tiled(0, 0, P, 8), Tiled(0, 1, P, 128)),
}
ROWS = {
    "triton": (Tiled(0, 0, P, 4),),
    "mosaic_gpu": (Tiled(0, 0, P, 4),),
    "mosaic_tpu": (Tiled(0, 0, P, 8),),
}
COLUMNS = {
    "triton": (Tiled(0, 1, P, 64),),
    "mosaic_gpu": (Tiled(0, 1, P, 128),),
    "mosaic_tpu": (Tiled(0, 1, P, 128),),
}


def both(dtypes: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(backend, dtype) for backend in BACKENDS for dtype in dtypes[backend]]


@pytest.mark.parametrize(("backend", "dtype"), both(FLOATS))
def test_functions_of_one(backend, dtype):
    check(table.FLOAT_UNARY, backend, (numbers(dtype, (13, 257), 0),), *ELEMENTS[backend])


@pytest.mark.parametrize(("backend", "dtype"), both(FLOATS))
def test_functions_of_two(backend, dtype):
    x, y = (numbers(dtype, (13, 257), seed) for seed in (1, 2))
    check({**table.BINARY, **table.FLOAT_BINARY}, backend, (x, y), *ELEMENTS[backend])


COMBINING = {**table.REDUCTIONS, **table.QUANTIFIERS, **table.FOLDS}


def along(dim: int, dtype: str) -> Functions:
    """Functions of an array that combine ``dim`` alone."""
    own = table.FLOAT_FOLDS if jnp.issubdtype(jnp.dtype(dtype), jnp.floating) else table.BITWISE
    x = jax.ShapeDtypeStruct((13, 257), dtype)
    return {name: f for name, f in {**COMBINING, **own}.items() if _combined(f, x) == {dim}}


def _combined(f: Callable[..., Any], x: Any) -> set[int]:
    graph = lower(trace(f, x)).graph
    axes = unify(graph, tuple(range(len(graph.nodes))))
    dims = enumerate(compose(graph.nodes[0].input_maps[0], axes.node_axes[0]))
    return {d for d, own in dims if any(axes.reduced[a] or axes.whole[a] for a in own)}


@pytest.mark.parametrize(("backend", "dtype"), both(REDUCED))
@pytest.mark.parametrize("dim", [0, 1], ids=["columns", "rows"])
def test_functions_of_rows_and_columns(backend, dtype, dim):
    # Sums of numbers of one sign and size: others lose their digits in any order.
    # Threads share what is whole evenly, rows of 32 elements and columns of four.
    shared = backend == "mosaic_gpu"
    shape = (13, 256 if shared else 257) if dim else (36 if shared else 37, 130)
    x = abs(numbers(dtype, shape, 3, special=False)) % 2
    tiled = ROWS if dim else COLUMNS
    check(along(dim, dtype), backend, (x,), *tiled[backend])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "uint32"])
def test_streamed_functions_of_rows(backend, dtype):
    """Combined tile by tile, the last of which is ragged."""
    x = abs(numbers(dtype, (16, 300), 4, special=False)) % 2
    once = {n: f for n, f in along(1, dtype).items() if not n.startswith("cum") and not n.endswith("_kept")}
    check(once, backend, (x,), *ROWS[backend], Tiled(0, 1, S, 64 if backend == "triton" else 128))


@pytest.mark.parametrize(("backend", "dtype"), both(REDUCED))
def test_functions_of_the_whole(backend, dtype):
    """What is not one tiling for all, in one block: movement, windows, sums of everything, casts."""
    x = abs(numbers(dtype, table.X, 5, special=False)) % 2
    rest = {name: f for name, f in COMBINING.items() if name.endswith("_all")}
    check({**table.MOVEMENT, **table.WINDOWS, **rest}, backend, (x,))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float32", "int8", "bool"])
def test_casts(backend, dtype):
    x = numbers("float32" if "float" in dtype else dtype, (13, 257), 6)
    x = (x * 100).astype(dtype) if "float" in dtype else x
    if backend == "mosaic_gpu" and x.dtype.itemsize == 1 and dtype != "bool":
        assert not kept(table.CASTS, backend, (x,), ELEMENTS[backend])
        return
    check(table.CASTS, backend, (x,), *ELEMENTS[backend])


@pytest.mark.parametrize(("backend", "dtype"), both(INTEGERS))
def test_functions_of_integers(backend, dtype):
    x, y = (numbers(dtype, (13, 257), seed) for seed in (7, 8))
    # By more bits than there are, and by less than none, hardware shifts as it likes.
    check({**table.BINARY, **table.INTEGER}, backend, (x, abs(y) % 7 + 1), *ELEMENTS[backend])


@pytest.mark.parametrize("backend", BACKENDS)
def test_functions_of_booleans(backend):
    x, y = (numbers("bool", (13, 257), seed) for seed in (9, 10))
    check(table.BOOLEAN, backend, (x, y), *ELEMENTS[backend])
