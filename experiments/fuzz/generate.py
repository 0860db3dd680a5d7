"""Generate random programs: which operations, of which values, of which shapes.

Each decision is one call of ``pick``, which chooses one of several options: ``random.Random.choice``, or
Hypothesis, which can then shrink the program.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from experiments.fuzz import operations as ops
from experiments.fuzz.program import FLOATS, INTEGERS, SIGNED, Input, Program, Step, is_float
from experiments.fuzz.reference import evaluate

T = TypeVar("T")
Pick = Callable[[Sequence[Any]], Any]

MAX_SIZE = 1500
"""Elements of the largest value; interpreters take time for each."""

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 24, 30, 33, 40, 64, 128, 128, 130)


def random_program(seed: int, index: int) -> Program:
    """The program of that number."""
    return generate(random.Random(f"{seed} {index}").choice)


def generate(pick: Pick) -> Program:
    """A program of a few to some twenty steps."""
    maker = _Maker(pick)
    if pick((False, False, True)):  # large intermediates, which loops and streams are for
        pick((_attention, _pairs))(maker)
    for _ in range(pick(range(2, 10))):
        pick(_KINDS)(maker)
    return maker.finished()


class _Maker:
    """A program in the making, evaluated as it grows, so that shapes are known."""

    def __init__(self, pick: Pick) -> None:
        self.pick = pick
        self.x64 = pick((False, False, False, False, True))
        self.float = pick(("float32",) * 7 + ("bfloat16", "float16") + ("float64",) * self.x64 * 9)
        self.sizes = tuple(pick(SIZES) for _ in range(3))
        if pick((False,) * 30 + (True,)):
            self.sizes = (0, *self.sizes[1:])
        self.kind = pick(("normal",) * 6 + ("special", "infinite", "positive"))
        self.pool: list[Input] = []
        self.steps: list[tuple[str, tuple[tuple[bool, int], ...], tuple[Any, ...], str]] = []
        self.arrays: dict[tuple[bool, int], Any] = {}
        self.order: list[tuple[bool, int]] = []
        for _ in range(pick((1, 1, 2))):
            self.new_input(self.shape())

    # Values are (is a step, number among inputs or steps) until the program is finished.

    def shape(self, dims: Sequence[int] = (1, 2, 2, 2, 3)) -> tuple[int, ...]:
        shape = tuple(self.pick((*self.sizes, *self.sizes, 1)) for _ in range(self.pick(dims)))
        while math.prod(shape) > MAX_SIZE // 2:
            shape = shape[1:]
        return shape

    def new_input(self, shape: tuple[int, ...], dtype: str | None = None) -> tuple[bool, int]:
        dtype = dtype or self.float
        kinds = {"bool": ("rare", "often", "even")}.get(dtype, ("small", "small", "large"))
        kind = self.kind if is_float(dtype) else self.pick(kinds)
        constant = self.pick((False,) * 7 + (True,))
        made = Input(dtype, shape, kind, len(self.pool) + self.pick(range(100)) * 10, constant)
        self.pool.append(made)
        value = (False, len(self.pool) - 1)
        x = made.array()
        self.arrays[value] = x.astype(np.float64) if is_float(dtype) else x
        self.order.append(value)
        return value

    def dtype(self, value: tuple[bool, int]) -> str:
        return self.steps[value[1]][3] if value[0] else self.pool[value[1]].dtype

    def add(self, op: str, *args: tuple[bool, int], params: tuple[Any, ...] = (), dtype: str = "") -> Any:
        """The new value, or None if it would be too large."""
        dtype = dtype or self.dtype(args[0])
        step = Step(op, tuple(range(len(args))), params, dtype)
        inputs = tuple(Input(self.dtype(a), (), "", 0) for a in args)
        made = evaluate(Program(inputs, (step,), ()), [self.arrays[a] for a in args])[-1]
        if made.size > MAX_SIZE or made.ndim > 4:
            return None
        self.steps.append((op, args, params, dtype))
        value = (True, len(self.steps) - 1)
        self.arrays[value] = made
        self.order.append(value)
        return value

    def values(self, keep: Callable[[str], bool], least_dims: int = 0, empty: bool = True) -> list[Any]:
        """Values of such types, the later the more often."""
        found = [
            v
            for v in self.order
            if keep(self.dtype(v))
            and self.arrays[v].ndim >= least_dims
            and (empty or self.arrays[v].size)
            and not (v[0] and self.steps[v[1]][0] == "scalar")
        ]
        return found + found[-3:] * 2

    def some(self, keep: Callable[[str], bool], least_dims: int = 0, empty: bool = True) -> Any:
        found = self.values(keep, least_dims, empty)
        return self.pick(found) if found else None

    def any_float(self, least_dims: int = 0, empty: bool = True) -> tuple[bool, int]:
        found = self.some(is_float, least_dims, empty)
        if found is None:
            shape = tuple(max(n, 1) for n in self.shape((least_dims or 1,)))
            found = self.new_input((*(1,) * (least_dims - len(shape)), *shape))
        return found  # type: ignore[no-any-return]

    def an_integer(self) -> tuple[bool, int]:
        found = self.some(lambda t: t in INTEGERS, empty=False)
        if found is None or self.pick((False, False, True)):
            types = [t for t in INTEGERS if self.x64 or "64" not in t]
            shape = tuple(max(n, 1) for n in self.shape((1, 1, 2)))
            found = self.new_input(shape, self.pick(("int32", "int32", *types)))
        return found  # type: ignore[no-any-return]

    def a_flag(self, shape: tuple[int, ...]) -> tuple[bool, int]:
        """A boolean that broadcasts to the shape."""
        found = [v for v in self.values(lambda t: t == "bool") if _broadcasts(self.arrays[v].shape, shape)]
        if found and self.pick((True, False)):
            return self.pick(found)  # type: ignore[no-any-return]
        return self.new_input(self.part_of(shape), "bool")

    def part_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to this one."""
        kept = tuple(n if self.pick((True, True, True, False)) else 1 for n in shape)
        return kept[self.pick((0, 0, 0, 1)) :] if kept else kept

    def matching(self, value: tuple[bool, int]) -> tuple[bool, int]:
        """Another value of the same type that broadcasts with it."""
        shape, dtype = self.arrays[value].shape, self.dtype(value)
        found = [
            v
            for v in self.values(lambda t: t == dtype)
            if _broadcasts(self.arrays[v].shape, shape) or _broadcasts(shape, self.arrays[v].shape)
        ]
        if len(self.pool) < 6 and self.pick((True, False, False, False)):
            return self.new_input(self.part_of(shape), dtype)
        return self.pick(found)  # type: ignore[no-any-return]

    def axis(self, value: tuple[bool, int]) -> int:
        return self.pick(range(self.arrays[value].ndim))  # type: ignore[no-any-return]

    def finished(self) -> Program:
        read = {a for _, args, _, _ in self.steps for a in args}
        unread = [v for v in self.order if v not in read and v[0]]
        results = unread[-5:] or [self.order[-1]]
        for _ in range(self.pick((0, 0, 1, 2))):
            results.append(self.pick(self.order))
        n = len(self.pool)
        number = {(False, k): k for k in range(n)} | {(True, k): n + k for k in range(len(self.steps))}
        steps = tuple(Step(op, tuple(number[a] for a in args), p, t) for op, args, p, t in self.steps)
        program = Program(tuple(self.pool), steps, tuple(number[v] for v in results), self.x64)
        program = without_dead(program)
        if not program.arguments():
            inputs = (replace(program.inputs[0], constant=False), *program.inputs[1:])
            program = replace(program, inputs=inputs)
        return program


def without_dead(program: Program) -> Program:
    """The program without steps and inputs that no result depends on; it keeps at least one input."""
    n = len(program.inputs)
    needed = set(program.results)
    for k in range(len(program.steps) - 1, -1, -1):
        if n + k in needed:
            needed.update(program.steps[k].args)
    if not any(k < n for k in needed):
        needed.add(0)
    number = {v: k for k, v in enumerate(sorted(needed))}
    steps = tuple(
        replace(s, args=tuple(number[a] for a in s.args))
        for k, s in enumerate(program.steps, n)
        if k in needed
    )
    inputs = tuple(i for k, i in enumerate(program.inputs) if k in needed)
    return replace(program, inputs=inputs, steps=steps, results=tuple(number[r] for r in program.results))


def _broadcasts(part: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if len(part) > len(shape):
        return False
    return all(a in (1, b) for a, b in zip(part[::-1], shape[::-1], strict=False))


# --- kinds of steps ----------------------------------------------------------------------------------


def _unary(m: _Maker) -> None:
    m.add(m.pick(("gelu", *sorted(ops.UNARY | ops.UNARY_EXACT))), m.any_float())


def _binary(m: _Maker) -> None:
    x = m.any_float()
    args = [x, m.matching(x)]
    if m.pick((False, True)):
        args.reverse()
    m.add(m.pick(("add", "sub", "mul", *sorted(ops.BINARY | ops.BINARY_EXACT))), *args)


def _integers(m: _Maker) -> None:
    x = m.an_integer()
    for _ in range(m.pick((1, 2))):
        if m.pick((True, False)):
            x = m.add(m.pick(sorted(ops.INTEGER_UNARY)), x) or x
        else:
            x = m.add(m.pick(sorted(ops.INTEGER_BINARY)), x, m.matching(x)) or x


def _booleans(m: _Maker) -> None:
    x = m.some(lambda t: t == "bool")
    if x is None or m.pick((True, False)):
        y = m.some(lambda t: t != "bool")
        name = m.pick(("positive", "isfinite", *sorted(ops.COMPARE)))
        if name == "isfinite" and not is_float(m.dtype(y)):
            name = "positive"
        m.add(name, *((y, m.matching(y)) if name in ops.COMPARE else (y,)), dtype="bool")
    elif m.pick((True, False)):
        m.add("bool_not", x)
    else:
        m.add(m.pick(sorted(ops.BOOLEAN_BINARY)), x, m.matching(x))


def _where(m: _Maker) -> None:
    x = m.any_float()
    m.add("where", m.a_flag(m.arrays[x].shape), x, m.matching(x), dtype=m.dtype(x))


def _cast(m: _Maker) -> None:
    x = m.some(lambda t: True)
    old = m.dtype(x)
    floats = [t for t in FLOATS if m.x64 or t != "float64"]
    integers = [t for t in INTEGERS if m.x64 or "64" not in t]
    kind = m.pick(("float", "float", "integer"))
    if kind == "float":
        m.add("cast", x, dtype=m.pick([m.float, m.float, *floats]))
    elif is_float(old):
        new = m.pick(integers)
        m.add("float_to_int", x, params=(-100 if new in SIGNED else 0,), dtype=new)
    else:
        m.add("cast", x, dtype=m.pick(integers))


def _constant(m: _Maker) -> None:
    kind = m.pick(("full", "iota", "eye", "scalar"))
    if kind == "full":
        m.add("full", params=(m.shape(), m.pick((0.0, 0.5, 2.0))), dtype=m.float)
    elif kind == "iota":
        m.add("iota", params=(m.pick(m.sizes),), dtype=m.pick((m.float, "int32")))
    elif kind == "eye":
        m.add("eye", params=(m.pick(m.sizes), m.pick(m.sizes)), dtype=m.float)
    else:
        m.add("scalar", params=(m.pick((0.5, 3.0)),), dtype="float64" if m.x64 else "float32")


def _move(m: _Maker) -> None:
    x = m.some(lambda t: True, 1) or m.any_float(1)
    shape = m.arrays[x].shape
    names = ["transpose", "reshape", "reshape", "reshape", "expand", "broadcast", "flip", "roll", "slice"]
    names += ["slice", "pad", "concatenate", "stack", "tile", "repeat", "transpose"]
    name, d = m.pick(names), m.axis(x)
    if name == "transpose":
        order = list(range(len(shape)))
        m.add(name, x, params=(tuple(order.pop(m.pick(range(len(order)))) for _ in shape),))
    elif name == "reshape":
        m.add(name, x, params=(_reshaped(m, shape),))
    elif name == "expand":
        m.add(name, x, params=(m.pick(range(len(shape) + 1)),))
    elif name == "broadcast":
        m.add(name, x, params=((m.pick(m.sizes), *shape),))
    elif name == "flip":
        m.add(name, x, params=(d,))
    elif name == "roll":
        m.add(name, x, params=(m.pick((1, 2, -1)), d))
    elif name == "slice":
        parts = [(0, n, 1) for n in shape]
        start = m.pick(range(min(shape[d], 4) + 1))
        parts[d] = (start, m.pick(range(start, shape[d] + 1)), m.pick((1, 1, 2, 3)))
        m.add(name, x, params=(tuple(parts), *(tuple(p[k] for p in parts) for k in range(3))))
    elif name == "pad":
        config = [(0, 0, 0)] * len(shape)
        # Negative edges cut; an array cannot be cut below nothing.
        low = m.pick((0, 1, 2, -1)) if shape[d] else 1
        config[d] = (low, m.pick((0, 3, -1)) if shape[d] > 1 else 0, m.pick((0, 0, 1)))
        fill = 0.5 if is_float(m.dtype(x)) else 0
        m.add(name, x, params=(fill, tuple(config)))
    elif name in ("concatenate", "stack"):
        same = [
            v
            for v in m.values(lambda t: t == m.dtype(x))
            if _but(m.arrays[v].shape, d if name == "concatenate" else -1)
            == _but(shape, d if name == "concatenate" else -1)
        ]
        m.add(name, x, m.pick(same), params=(d,))
    elif name == "tile":
        m.add(name, x, params=(tuple(m.pick((1, 2)) for _ in shape),))
    else:
        m.add(name, x, params=(m.pick((2, 3)), d))


def _but(shape: tuple[int, ...], d: int) -> tuple[Any, ...]:
    return (len(shape), *(n for k, n in enumerate(shape) if k != d))


def _reshaped(m: _Maker, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Flat, two dimensions merged, one split, or the size factored anew."""
    kind, n = m.pick(("flat", "merged", "split", "factored", "reversed")), math.prod(shape)
    if n == 0 or kind == "reversed":
        return shape[::-1]
    if kind == "merged" and len(shape) > 1:
        d = m.pick(range(len(shape) - 1))
        return (*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :])
    if kind == "split" and len(shape) < 4:
        d = m.pick(range(len(shape)))
        part = m.pick(_divisors(shape[d]))
        return (*shape[:d], part, shape[d] // part, *shape[d + 1 :])
    if kind == "factored":
        first = m.pick(_divisors(n))
        second = m.pick(_divisors(n // first))
        return (first, second, n // first // second) if m.pick((True, False)) else (first, n // first)
    return (n,)


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _pick_by_index(m: _Maker) -> None:
    x = m.any_float(1, empty=False)
    d = m.axis(x)
    n = m.arrays[x].shape[d]
    name = m.pick(
        ("take", "take_at", "along_axis", "dynamic_slice", "dynamic_update", "added_at", "argsort", "sort")
    )
    if name == "take":
        m.add(name, x, params=(tuple(m.pick(range(n)) for _ in range(m.pick((1, 3, 7)))), d))
    elif name == "take_at":
        m.add(name, x, m.an_integer(), params=(n - 1, d))
    elif name in ("along_axis", "sort"):
        m.add(name, x, params=(d,))
    elif name == "added_at":
        m.add(name, x, m.an_integer())
    elif name == "argsort":
        m.add(name, x, params=(d,), dtype="int32")
    else:
        m.add(name, x, m.an_integer(), params=(m.pick(range(1, n + 1)), d))


def _mask(m: _Maker) -> None:
    x = m.any_float(2)
    fill = m.pick((0.0, -1e4, -math.inf))
    m.add("triangle", x, params=(m.pick((1, 1, 2, 0)), m.pick((0, 0, -3, 4)), fill))


def _reduction(m: _Maker) -> None:
    x = m.some(lambda t: t != "bool", 1, empty=m.pick((False, True))) or m.any_float(1, empty=False)
    shape, keep = m.arrays[x].shape, m.pick((True, True, False))
    axes = tuple(d for d in range(len(shape)) if m.pick((True, False))) or (m.axis(x),)
    names = ["sum", "sum", "reduce_max", "reduce_min", "prod"]
    floats = ["mean", "var", "logsumexp", "sum", "cumsum", "cummax", "argmax", "argmin"]
    if 0 in shape:
        names = ["sum", "prod"]
    elif is_float(m.dtype(x)):
        names += floats
    name = m.pick(names)
    if name in ("cumsum", "cummax"):
        if m.dtype(x) not in ("bfloat16", "float16"):  # running sums in 16 bits have few digits
            m.add(name, x, params=(m.axis(x),))
    elif name in ("argmax", "argmin"):
        m.add(name, x, params=(m.axis(x), keep), dtype="int32")
    else:
        m.add(name, x, params=(axes, keep))


def _quantifier(m: _Maker) -> None:
    x = m.some(lambda t: t == "bool", 1)
    if x is not None:
        m.add(m.pick(("reduce_any", "reduce_all")), x, params=((m.axis(x),), m.pick((True, False))))


def _contraction(m: _Maker) -> None:
    x = m.any_float(1) if m.pick((True,) * 7 + (False,)) else m.an_integer()
    dims, dtype = m.arrays[x].shape, m.dtype(x)
    if len(dims) > 3 or not dims:
        return
    letters = "abc"[: len(dims)]
    summed = m.pick(letters)
    shared = "".join(c for c in letters if c != summed and m.pick((False, False, True)))
    other = m.pick([*(v for v in m.values(lambda t: t == dtype, 2)), None])
    of = dict(zip(letters, dims, strict=True))
    right = list(shared + summed + m.pick(("d", "d", "")))
    right = [right.pop(m.pick(range(len(right)))) for _ in range(len(right))]
    of["d"] = m.pick(m.sizes)
    if other is not None and len(m.arrays[other].shape) == len(right):
        shape = m.arrays[other].shape
        fits = all(of[c] == n for c, n in zip(right, shape, strict=True) if c != "d")
        of["d"] = dict(zip(right, shape, strict=True)).get("d", of["d"])
        y = other if fits else m.new_input(tuple(of[c] for c in right), dtype)
    else:
        y = m.new_input(tuple(of[c] for c in right), dtype)
    result = [c for c in (*letters, "d") if c != summed and (c in letters or "d" in right)]
    result = [result.pop(m.pick(range(len(result)))) for _ in range(len(result))]
    spec = f"{letters},{''.join(right)}->{''.join(result)}"
    wider = dtype
    if dtype in ("bfloat16", "float16"):
        wider = m.pick((dtype, "float32"))
    elif dtype in ("int8", "int16"):
        wider = m.pick((dtype, "int32"))
    m.add("einsum", x, y, params=(spec, wider), dtype=wider)


def _normalisation(m: _Maker) -> None:
    x = m.any_float(1, empty=False)
    names = ["softmax", "log_softmax", "softmax_where", "guarded_softmax", "layernorm", "rmsnorm"]
    name, d = m.pick(names), m.pick((m.arrays[x].ndim - 1, m.axis(x)))
    if name == "softmax_where":
        m.add(name, x, m.a_flag(m.arrays[x].shape), params=(d,), dtype=m.dtype(x))
    else:
        m.add(name, x, params=(d,))


def _attention(m: _Maker) -> None:
    rows, columns, width = (max(m.pick(m.sizes), 1) for _ in range(3))
    heads = m.pick(((), (), (2,), (3,)))
    if rows * columns * math.prod(heads) > MAX_SIZE:
        return
    h = "h" if heads else ""
    q, k = m.new_input((*heads, rows, width)), m.new_input((*heads, columns, width))
    s = m.add("einsum", q, k, params=(f"{h}qd,{h}kd->{h}qk", m.float))
    if s is None:
        return
    s = m.add("halved", s) if m.pick((True, False)) else s
    mask = m.pick(("none", "triangle", "flags", "rows"))
    if mask == "triangle":
        s = m.add("triangle", s, params=(1, m.pick((0, 0, -2)), m.pick((-1e4, -math.inf))))
    elif mask in ("flags", "rows"):
        flags = m.new_input((rows, columns) if mask == "flags" else (rows, 1), "bool")
        fill = m.add("full", params=((), m.pick((-1e4, -math.inf))), dtype=m.float)
        s = m.add("where", flags, s, fill, dtype=m.float)
    p = m.add(m.pick(("softmax", "softmax", "guarded_softmax", "log_softmax")), s, params=(len(heads) + 1,))
    v = m.new_input((*heads, columns, m.pick((width, 1, 7))))
    m.add("einsum", p, v, params=(f"{h}qk,{h}kd->{h}qd", m.float))


def _pairs(m: _Maker) -> None:
    """All pairs of two vectors or lists of vectors, and a reduction of what is computed of them."""
    rows, columns = (max(m.pick(m.sizes), 2) for _ in range(2))
    width = m.pick(((), (), (2,), (3,)))
    if rows * columns * math.prod(width) > MAX_SIZE:
        return
    pair = m.add(
        m.pick(("sub", "mul", "add", "max")),
        m.new_input((rows, 1, *width)),
        m.new_input((1, columns, *width)),
    )
    if width:
        pair = m.add("sum", m.add(m.pick(("square", "abs")), pair), params=((2,), False))
    for _ in range(m.pick((1, 2, 3))):
        pair = m.add(m.pick(("tanh", "exp", "sin", "neg", "halved", "relu", "square")), pair)
    if m.pick((False, True)):
        pair = m.add("triangle", pair, params=(1, m.pick((0, -1)), m.pick((0.0, -1e4, -math.inf))))
    for axes in m.pick((((1,),), ((0,),), ((0, 1),), ((1,), (0,)))):
        m.add(m.pick(("sum", "reduce_max", "mean", "logsumexp", "var")), pair, params=(axes, False))
    if m.pick((False, True)):
        pair = m.add(m.pick(("softmax", "rmsnorm", "guarded_softmax")), pair, params=(1,))
    if m.pick((False, True)):
        weights = m.new_input((columns, m.pick((1, 3, 7))))
        m.add("einsum", pair, weights, params=("ab,bd->ad", m.float))


def _control(m: _Maker) -> None:
    x = m.any_float(1, empty=False)
    name = m.pick(("cond", "scan", "scan", "fori", "while", "map", "vmap", "checkpoint", "nested_jit"))
    body = m.pick(sorted(ops.BODIES))
    if name == "cond":
        flags = m.a_flag(m.arrays[x].shape)
        m.add(name, flags, x, params=(body, m.pick(sorted(ops.BODIES))), dtype=m.dtype(x))
    elif name == "scan":
        m.add(name, x, params=(m.pick(sorted(ops.SCANS)), m.pick((0, 1))))
    elif name in ("fori", "while"):
        m.add(name, x, params=(body, m.pick((0, 1, 3))))
    else:
        m.add(name, x, params=(body,))


_KINDS: tuple[Callable[[_Maker], None], ...] = (
    *(_unary,) * 6,
    *(_binary,) * 6,
    *(_move,) * 7,
    *(_reduction,) * 5,
    *(_contraction,) * 2,
    *(_normalisation,) * 2,
    *(_pick_by_index,) * 2,
    *(_mask,) * 1,
    *(_attention,) * 3,
    *(_pairs,) * 3,
    *(_control,) * 1,
    *(_integers,) * 2,
    *(_booleans,) * 1,
    *(_quantifier,) * 1,
    *(_where,) * 1,
    *(_cast,) * 2,
    *(_constant,) * 1,
)
