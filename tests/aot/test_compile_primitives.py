"""Every primitive that a rule says a backend can emit is compiled by that backend, by dtype.

Without this, ``lacks`` and ``supports`` in the rules would be claims: a user's program would be the first
to find out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.targets.compile_only import compile_for
from tests.aot import primitives as table
from tests.helpers.mosaic_gpu_cases import exchanged, is_dealt
from tests.helpers.specs import hand_spec, kernel_function, whole_group

pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("aot")]

DEVICES = {"triton": "h200", "mosaic_gpu": "h200", "mosaic_tpu": "tpu_v5e"}
Table = dict[str, Callable[..., Any]]

FLOATS = {
    **table.REDUCTIONS,
    **table.QUANTIFIERS,
    **table.SELECTIONS,
    **table.MOVEMENT,
    **table.FOLDS,
    **table.FLOAT_FOLDS,
    **table.WINDOWS,
    **table.LOOKUPS,
}
WHOLE = {
    **table.REDUCTIONS,
    **table.MOVEMENT,
    **table.FOLDS,
    **table.BITWISE,
    **table.WINDOWS,
    **table.LOOKUPS,
}
INTEGERS = {**table.BINARY, **table.INTEGER}
SCALARS = {**table.BINARY, **table.FLOAT_BINARY}

RUNS = [
    *((f"unary-{d}", table.FLOAT_UNARY, d, 1, table.X) for d in ("float32", "bfloat16", "float16")),
    *((f"binary-{d}", SCALARS, d, 2, table.X) for d in ("float32", "bfloat16", "float16")),
    *((f"axes-{d}", FLOATS, d, 1, table.X) for d in ("float32", "bfloat16", "float16")),
    *((f"axes-{d}", WHOLE, d, 1, table.X) for d in ("int32", "uint32", "int8")),
    *((f"integer-{d}", INTEGERS, d, 2, table.X) for d in ("int32", "uint32", "int16", "uint8")),
    ("boolean", table.BOOLEAN, "bool", 2, table.X),
    ("boolean-axes", table.BOOLEAN_MOVEMENT, "bool", 1, table.X),
    *((f"scalar-unary-{d}", table.FLOAT_UNARY, d, 1, ()) for d in ("float32", "bfloat16")),
    *((f"scalar-binary-{d}", SCALARS, d, 2, ()) for d in ("float32", "bfloat16")),
    *((f"scalar-integer-{d}", INTEGERS, d, 2, ()) for d in ("int32", "uint32")),
    ("scalar-boolean", table.BOOLEAN, "bool", 2, ()),
    *((f"casts-{d}", table.CASTS, d, 1, table.X) for d in table.CAST_DTYPES),
]


def _emittable(functions: Table, backend: str, avals: tuple[Any, ...]) -> Table:
    """Those whose every primitive the rules allow."""
    kept = {}
    for name, f in functions.items():
        if backend == "mosaic_gpu" and not is_dealt(f, avals):
            continue
        nodes = lower(trace(f, *avals)).graph.nodes
        if nodes and all(backend in node.backends for node in nodes):
            kept[name] = f
    return kept


def _on_mosaic(functions: Table, dtype: str) -> bool:
    """Mosaic has no float16, and only converts the narrow integers."""
    return dtype != "float16" and (dtype not in ("int16", "uint8") or functions is table.CASTS)


def _on_mosaic_gpu(functions: Table, dtype: str) -> bool:
    """It computes with 32 bits, and with floats of 16."""
    return dtype not in ("int8", "int16", "uint8", "float8_e4m3fn", "float8_e5m2")


ELEMENTWISE = (table.FLOAT_UNARY, SCALARS, INTEGERS, table.BOOLEAN, table.CASTS)
SCANS = {**table.FOLDS, **table.FLOAT_FOLDS}


def _parts(backend: str, functions: Table, shape: tuple[int, ...]) -> list[tuple[Table, tuple[int, ...]]]:
    """What is compiled together, and at which shape. Each element of a thread takes instructions of its own:
    in Mosaic GPU always, in Triton where it is scanned, which takes longest beside other functions."""
    if backend == "mosaic_gpu" and shape and any(functions is table for table in ELEMENTWISE):
        return [(functions, (4, 128))]  # four elements a thread, as many as are converted at a time
    if backend == "triton":
        scans = {name: f for name, f in functions.items() if name in SCANS}
        others = {name: f for name, f in functions.items() if name not in SCANS}
        return [(others, shape), (scans, (6, 32))]
    return [(functions, shape)]


BOTH = ("float32", "bfloat16", "int32", "bool")
"""Types of which both Pythons compile every primitive, and so both ends of JAX; one compiles the others."""

CASES = [
    pytest.param(
        backend,
        *run[1:],
        id=f"{run[0]}-{backend}",
        marks=[] if run[2] in BOTH else [pytest.mark.one_python],
    )
    for backend in DEVICES
    for run in RUNS
    if {"mosaic_tpu": _on_mosaic, "mosaic_gpu": _on_mosaic_gpu}.get(backend, lambda *_: True)(*run[1:3])
]


@pytest.mark.parametrize(("backend", "functions", "dtype", "arity", "shape"), CASES)
def test_lowers(backend: str, functions: Table, dtype: str, arity: int, shape: tuple[int, ...]) -> None:
    _assert_lowers(backend, functions, dtype, arity, shape)


@pytest.mark.parametrize(("functions", "arity"), [(FLOATS, 1), (SCALARS, 2)], ids=["axes", "binary"])
def test_sixteen_bits_of_a_newer_tpu(functions: Table, arity: int) -> None:
    """Its vector unit has them; a v5e's compiler makes 32 of them."""
    _assert_lowers("mosaic_tpu", functions, "bfloat16", arity, table.X, "tpu_v6e")


def _assert_lowers(
    backend: str, functions: Table, dtype: str, arity: int, shape: tuple[int, ...], device: str = ""
) -> None:
    device = device or DEVICES[backend]
    parts = _parts(backend, functions, shape)
    if backend == "mosaic_gpu":
        parts = [({name: exchanged(f, dtype) for name, f in part.items()}, shape) for part, shape in parts]
        dtype = "int32" if dtype == "bool" else dtype
    n_chosen = 0
    for part, shape in parts:
        avals = (jax.ShapeDtypeStruct(shape, dtype),) * arity
        chosen = _emittable(part, backend, avals)
        n_chosen += len(chosen)
        if chosen:
            _assert_compiles(backend, chosen, avals, device)
    assert n_chosen, f"{backend} kernels compute nothing of it in {dtype}"


def _assert_compiles(backend: str, chosen: Table, avals: tuple[Any, ...], device: str) -> None:
    """All of them as one kernel."""
    lowered = whole_group(lambda *args: tuple(f(*args) for f in chosen.values()), *avals)
    spec = hand_spec(lowered, backend)
    try:
        compile_for(kernel_function(spec, lowered, interpret=False), *avals, device=device)
    except Exception as error:
        culprits = [n for n, f in chosen.items() if not _compiles(f, backend, avals, device)]
        pytest.fail(f"{backend} does not compile {', '.join(culprits) or 'all of them together'}: {error}")


def _compiles(f: Callable[..., Any], backend: str, avals: tuple[Any, ...], device: str) -> bool:
    lowered = whole_group(f, *avals)
    try:
        compile_for(
            kernel_function(hand_spec(lowered, backend), lowered, interpret=False),
            *avals,
            device=device,
        )
    except Exception:
        return False
    return True


# What models are made of: a rule that gives one of these up fails here.
REQUIRED = (
    "neg",
    "abs",
    "sign",
    "floor",
    "ceil",
    "square",
    "exp",
    "log",
    "tanh",
    "sqrt",
    "rsqrt",
    "exp2",
    "log1p",
    "expm1",
    "sin",
    "cos",
    "tan",
    "erf",
    "erfc",
    "erf_inv",
    "logistic",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "asin",
    "acos",
    "atan",
    "cbrt",
    "is_finite",
    "round",
    "round_away",
    "integer_pow",
    "integer_pow_negative",
    "copy",
)


# What no kernel of a backend holds: of a TPU what is apart by one lane of its registers; of Mosaic GPU what
# cuts a block, or deals it to the threads in another way; of both what is loaded by index.
GIVEN_UP: dict[str, set[str]] = {
    "triton": set(),
    "mosaic_tpu": {"slice_strided", "pad_gaps", *table.LOOKUPS},
    "mosaic_gpu": {
        *table.LOOKUPS,
        *table.QUANTIFIERS,
        "select_by_row_of",
        *table.FOLDS,
        *table.FLOAT_FOLDS,
        *table.WINDOWS,
        "tan",
        "erf_inv",
        "asinh",
        "acosh",
        "atanh",
        "asin",
        "acos",
        "atan",
        "rem",
        "atan2",
        "pow",
        "pow_integer",
        "nextafter",
        "transpose",
        "reshape",
    },
}


@pytest.mark.parametrize("backend", list(DEVICES))
def test_required_are_kept(backend: str) -> None:
    for dtype in ("float32", "bfloat16"):
        avals = (jax.ShapeDtypeStruct(table.X, dtype),)
        kept = _emittable(table.FLOAT_UNARY, backend, avals)
        given_up = GIVEN_UP[backend]
        assert set(REQUIRED) - given_up <= set(kept)
        assert set(FLOATS) - given_up == set(_emittable(FLOATS, backend, avals))
        # The next number of 16 bits is not the next of 32.
        given_up = given_up | ({"nextafter"} if dtype == "bfloat16" else set())
        assert set(SCALARS) - given_up == set(_emittable(SCALARS, backend, avals * 2))
