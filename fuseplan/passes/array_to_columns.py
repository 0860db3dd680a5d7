"""Split large arrays of short rows into columns: array of structures to structure of arrays.

The differences ``x[:, None] - y[None]`` of points in three dimensions have rows of three elements, over which
XLA's loops are slow: a Gaussian kernel sum over 20,000 x 20,000 points took 1.1 s with rows, and 0.14 s with
columns (two cores, jax 0.10). With columns the innermost loop runs along a long dimension, and a sum over a
row adds up three columns.

The rewritten program computes the same results, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from costmodel.graph import OpKind
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.ops import rule_of
from fuseplan.frontend.rewrite import EquationRewriter
from fuseplan.frontend.trace import Equation, Flat, Literal, Operand, Primitive
from fuseplan.support.memo import memoised

_MAX_ROW = 16
"""Elements of a short row in loops over tiles: of 32 bits, they fill one vector register of 64 bytes at
most."""

_MAX_ROW_OF_XLA = 8
"""And in what is left to XLA:CPU, which writes more than some tens of terms of a sum to memory (found with
jax 0.10 and 0.12: distances of 4,000 x 4,000 points in 8 dimensions and their sums took a quarter of the time
of rows, in 16 dimensions three times as long)."""

_LEAST_BYTES_OF_XLA = 1 << 20
"""And there the least size of an array, whose rows take a tenth of a millisecond."""

_COMBINES: dict[str, Primitive] = {
    "reduce_sum": lax.add_p,
    "reduce_max": lax.max_p,
    "reduce_min": lax.min_p,
    "reduce_prod": lax.mul_p,
}


@memoised
def by_columns(
    lowered: Lowered, min_bytes: int, max_row: int = _MAX_ROW, lookups: bool = False
) -> Lowered | None:
    """Compute arrays of at least ``min_bytes`` column by column, if their rows have at most ``max_row``
    elements; None where ``lowered`` has none.

    With ``lookups``, rows that a gather takes from a table or a scatter adds to one are columns, too. A CPU
    takes a row at once; kernels of GPUs and TPUs compute what follows by columns.

    Example:
        >>> import jax
        >>> from fuseplan.frontend.trace import trace
        >>> points = jax.ShapeDtypeStruct((2000, 3), "float32")
        >>> f = lambda x, y: ((x[:, None] - y[None]) ** 2).sum(-1)
        >>> new = by_columns(lower(trace(f, points, points)), 1 << 20)
        >>> sorted({str(a.shape) for a in new.avals if a.size > 6000})
        ['(2000, 2000)']
    """
    split = _split(lowered, min_bytes, max_row, lookups)
    return _Rewriter(lowered, split).run() if split else None


def with_columns(flat: Flat) -> Flat:
    """The program with its large arrays of short rows as columns; the same object if it has none. XLA:CPU
    takes as long for a row of two elements as for a row of eight.

    Example:
        >>> import jax
        >>> from fuseplan.frontend.trace import trace
        >>> points = jax.ShapeDtypeStruct((2000, 3), "float32")
        >>> flat = trace(lambda x, y: ((x[:, None] - y[None]) ** 2).sum(-1), points, points)
        >>> any(eqn.primitive.name == "reduce_sum" for eqn in with_columns(flat).equations)
        False
    """
    rows = (a for eqn in flat.equations for a in eqn.out_avals if hasattr(a, "dtype"))
    if not any(_bytes(a) >= _LEAST_BYTES_OF_XLA and _has_short_rows(a, _MAX_ROW_OF_XLA) for a in rows):
        return flat
    new = by_columns(lower(flat), _LEAST_BYTES_OF_XLA, _MAX_ROW_OF_XLA)
    if new is None:
        return flat
    return Flat(new.equations, new.avals, new.graph.inputs, new.outputs, new.consts, new.out_tree)


def _split(lowered: Lowered, min_bytes: int, max_row: int, lookups: bool) -> frozenset[int]:
    """The values to split into columns: all large ones of short rows that can be."""
    avals = lowered.avals

    def large(v: Operand) -> bool:
        return not isinstance(v, Literal) and _bytes(avals[v]) >= min_bytes

    makers = {v: eqn for eqn in lowered.equations for v in eqn.outputs}
    split = {
        v
        for v, eqn in makers.items()
        if large(v) and _has_short_rows(avals[v], max_row) and (_by_column(eqn) or _parts(eqn, makers)[0])
    }
    if not lookups:
        split -= {v for v in split if makers[v].primitive.name == "gather"}
    split.difference_update(o for o in lowered.outputs if not isinstance(o, Literal))
    readers: dict[int, list[Equation]] = {v: [] for v in split}
    for eqn in lowered.equations:
        for v in eqn.inputs:
            if not isinstance(v, Literal) and v in readers:
                readers[v].append(eqn)

    def fits(v: int) -> bool:
        cut = [u for u in _rows_of(makers[v]) if not isinstance(u, Literal)]
        whole = any(large(u) and u not in split and _last(avals[u]) > 1 for u in cut)
        return not whole and all(takes_columns(eqn, v) for eqn in readers[v])

    def takes_columns(eqn: Equation, v: int) -> bool:
        if eqn.primitive.name == "gather" and v in eqn.inputs[1:]:
            return False  # as its indices
        if _by_column(eqn):
            return split.issuperset(eqn.outputs)
        if _taken_column(eqn) is not None:
            return True
        return _reduces(eqn, max_row) or (lookups and _scatters(eqn, v, max_row))

    while unfit := [v for v in split if not fits(v)]:
        split.difference_update(unfit)
    return frozenset(split)


def _bytes(aval: Any) -> int:
    """The bytes of its elements as 32-bit words: a mask counts as much as the array that it masks."""
    return 4 * int(getattr(aval, "size", 0))


def _last(aval: Any) -> int:
    return int(aval.shape[-1]) if aval.ndim else 1


def _has_short_rows(aval: Any, max_row: int) -> bool:
    # Partial sums of 16 bits would be rounded once too often.
    kind = getattr(aval.dtype, "kind", "")  # keys of random numbers have none
    exact = kind == "b" or (kind in ("i", "u", "f") and aval.dtype.itemsize >= 4)
    return exact and aval.ndim > 1 and 1 < aval.shape[-1] <= max_row


def _by_column(eqn: Equation) -> bool:
    """Whether column k of each result depends on column k alone of the operands that have rows
    (``_rows_of``)."""
    if eqn.effects or eqn.is_set_apart:
        return False
    if eqn.primitive.name == "gather":
        return _moves_rows(eqn)
    if eqn.primitive.name == "broadcast_in_dim":
        return True
    # Random bits depend on the place of an element in the whole array.
    return "shape" not in eqn.params and rule_of(eqn).kind == OpKind.ELEMENTWISE


def _parts(eqn: Equation, makers: Mapping[int, Equation]) -> tuple[Sequence[Operand], int | None]:
    """The arrays that an equation joins as the columns of its result, as ``jnp.stack`` and ``jnp.cross`` do:
    the operands of a stack or a concatenation along the last dimension, or along one that a transpose makes
    the last; none of other equations. The second result is the dimension along which each has one element,
    None if they have no such dimension."""
    joined, dim = eqn, eqn.out_avals[0].ndim - 1
    if eqn.primitive.name == "transpose" and not isinstance(eqn.inputs[0], Literal):
        joined, dim = makers.get(eqn.inputs[0], eqn), eqn.params["permutation"][-1]
    if joined.is_set_apart:
        return (), None
    if joined.primitive.name == "stack" and joined.params["axis"] == dim:
        return joined.inputs, None
    if joined.primitive.name != "concatenate" or joined.params["dimension"] != dim:
        return (), None
    return (joined.inputs if all(aval.shape[dim] == 1 for aval in joined.in_avals) else ()), dim


def _taken_column(eqn: Equation) -> int | None:
    """The column that a slice takes of whole rows; None of any other equation."""
    if eqn.primitive.name != "slice" or eqn.params["strides"] is not None:
        return None
    starts, limits, shape = eqn.params["start_indices"], eqn.params["limit_indices"], eqn.in_avals[0].shape
    is_column = not any(starts[:-1]) and limits[:-1] == shape[:-1] and limits[-1] == starts[-1] + 1
    return int(starts[-1]) if is_column else None


def _rows_of(eqn: Equation) -> Sequence[Operand]:
    """The operands that have the rows of its results."""
    if eqn.primitive.name == "gather":
        return eqn.inputs[:1]
    return eqn.inputs if _by_column(eqn) and _keeps_rows(eqn) else ()


def _moves_rows(eqn: Equation) -> bool:
    """Whether a gather reads, or a scatter writes, whole rows of its table at each index."""
    numbers, table = eqn.params["dimension_numbers"], eqn.in_avals[0]
    if eqn.primitive.name == "gather":
        rows, windows, collapsed = eqn.out_avals[0], numbers.offset_dims, numbers.collapsed_slice_dims
        indexed = numbers.start_index_map
    else:
        rows, windows, collapsed = eqn.in_avals[2], numbers.update_window_dims, numbers.inserted_window_dims
        indexed = numbers.scatter_dims_to_operand_dims
    if table.ndim < 2 or not windows or windows[-1] != rows.ndim - 1:
        return False
    is_window = table.ndim - 1 not in (*collapsed, *indexed, *numbers.operand_batching_dims)
    return is_window and rows.shape[-1] == table.shape[-1]


def _keeps_rows(eqn: Equation) -> bool:
    """Whether the operands have rows, too: each column of the results reads one column of them."""
    if eqn.primitive.name != "broadcast_in_dim":
        return True
    return len(eqn.params["shape"]) - 1 in eqn.params["broadcast_dimensions"]


def _reduces(eqn: Equation, max_row: int) -> bool:
    """Whether it reduces rows, or reduces columns to a much smaller result."""
    if eqn.primitive.name not in _COMBINES or eqn.effects or eqn.is_set_apart:
        return False
    (operand,), (result,) = eqn.in_avals, eqn.out_avals
    return operand.ndim - 1 in eqn.params["axes"] or result.size * max_row < operand.size


def _scatters(eqn: Equation, v: int, max_row: int) -> bool:
    """Whether it adds the rows of ``v`` to those of a much smaller table."""
    if eqn.primitive.name != "scatter-add" or eqn.effects or eqn.is_set_apart or eqn.inputs[2] != v:
        return False
    is_small = eqn.out_avals[0].size * max_row < eqn.in_avals[2].size
    return is_small and v not in eqn.inputs[:2] and _moves_rows(eqn)


class _Rewriter(EquationRewriter):
    """Writes the equations again, with columns in the place of the values that are split."""

    def __init__(self, old: Lowered, split: frozenset[int]) -> None:
        super().__init__(old)
        self.split = split
        self.broadcasts: dict[Operand, Equation] = {
            v: eqn
            for eqn in old.equations
            if eqn.primitive.name == "broadcast_in_dim" and _by_column(eqn) and _keeps_rows(eqn)
            for v in eqn.outputs
        }
        """For each value that repeats the rows of an array, the equation that makes it."""
        self.columns: dict[tuple[int, int], Operand] = {}
        self.makers = {v: eqn for eqn in old.equations for v in eqn.outputs}

    def run(self) -> Lowered:
        for eqn in self.old.equations:
            if self.split.isdisjoint(v for v in (*eqn.inputs, *eqn.outputs) if not isinstance(v, Literal)):
                self.equations.append(eqn)
            elif _by_column(eqn):
                self._split_up(eqn)
            elif not self.split.isdisjoint(eqn.outputs):
                self._split_joined(eqn)
            elif _taken_column(eqn) is not None:
                self._take_column(eqn)
            elif eqn.primitive.name == "scatter-add":
                self._scatter(eqn)
            else:
                self._reduce(eqn)
        return self.lowered()

    def _split_up(self, eqn: Equation) -> None:
        """Write an equation whose results are split, once for each column."""
        for k in range(_last(eqn.out_avals[0])):
            inputs, params = self._of_column(eqn, k)
            avals = [_without_last(aval) for aval in eqn.out_avals]
            columns = self.add(eqn, eqn.primitive, params, inputs, avals)
            self.columns.update(((v, k), column) for v, column in zip(eqn.outputs, columns, strict=True))

    def _split_joined(self, eqn: Equation) -> None:
        """Take the columns of an equation's result from the arrays that it joins."""
        (result,) = eqn.outputs
        permutation = eqn.params.get("permutation", range(eqn.out_avals[0].ndim))
        dim = permutation[-1]
        order = tuple([d - (d > dim) for d in permutation[:-1]])
        parts, unit = _parts(eqn, self.makers)
        for k, part in enumerate(parts):
            column: Operand = part
            if unit is not None:
                aval: Any = part.aval if isinstance(part, Literal) else self.avals[part]
                flat = aval.update(shape=(*aval.shape[:unit], *aval.shape[unit + 1 :]))
                (column,) = self.add(eqn, lax.squeeze_p, {"dimensions": (unit,)}, [part], [flat])
            if order != tuple(range(len(order))):
                turned = _without_last(eqn.out_avals[0])
                (column,) = self.add(eqn, lax.transpose_p, {"permutation": order}, [column], [turned])
            self.columns[result, k] = column

    def _take_column(self, eqn: Equation) -> None:
        """Write a slice of one column of a split value."""
        (out,), k = eqn.out_avals, _taken_column(eqn)
        assert k is not None
        wide = {"shape": out.shape, "broadcast_dimensions": tuple(range(out.ndim - 1)), "sharding": None}
        column = self._column(eqn, eqn.inputs[0], k)
        self.add(eqn, lax.broadcast_in_dim_p, wide, [column], [out], eqn.outputs)

    def _of_column(self, eqn: Equation, k: int) -> tuple[Sequence[Operand], dict[str, Any]]:
        if eqn.primitive.name == "gather":
            table, indices = eqn.inputs
            numbers = eqn.params["dimension_numbers"]
            new = {
                "dimension_numbers": numbers._replace(offset_dims=numbers.offset_dims[:-1]),
                "slice_sizes": eqn.params["slice_sizes"][:-1],
            }
            return [self._column(eqn, table, k), indices], {**eqn.params, **new}
        if eqn.primitive.name != "broadcast_in_dim":
            return [self._column(eqn, v, k) for v in eqn.inputs], eqn.params
        shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
        (operand,) = eqn.inputs
        if _keeps_rows(eqn):
            operand, dims = self._column(eqn, operand, k), dims[:-1]
        return [operand], {**eqn.params, "shape": shape[:-1], "broadcast_dimensions": dims}

    def _column(self, eqn: Equation, operand: Operand, k: int) -> Operand:
        """Column ``k`` of an operand; all of a scalar. A row of one element is in every column."""
        if isinstance(operand, Literal) or not self.avals[operand].ndim:
            return operand
        aval = self.avals[operand]
        k = min(k, _last(aval) - 1)
        if (operand, k) not in self.columns:
            self.columns[operand, k] = self._new_column(eqn, operand, aval, k)
        return self.columns[operand, k]

    def _new_column(self, eqn: Equation, operand: int, aval: Any, k: int) -> Operand:
        """Write the equations that take column ``k`` of an operand, an array of type ``aval``."""
        maker = self.broadcasts.get(operand)
        if maker is not None and _last(maker.in_avals[0]) == _last(aval):
            # The column is taken before the broadcast, and so once for all broadcasts of the array.
            inputs, params = self._of_column(maker, k)
            (column,) = self.add(eqn, maker.primitive, params, inputs, [_without_last(aval)])
            return column
        part = operand
        if _last(aval) > 1:
            starts, limits = (0,) * (aval.ndim - 1) + (k,), (*aval.shape[:-1], k + 1)
            params = {"start_indices": starts, "limit_indices": limits, "strides": None}
            sliced = aval.update(shape=(*aval.shape[:-1], 1))
            (part,) = self.add(eqn, lax.slice_p, params, [operand], [sliced])
        params = {"dimensions": (aval.ndim - 1,)}
        (column,) = self.add(eqn, lax.squeeze_p, params, [part], [_without_last(aval)])
        return column

    def _reduce(self, eqn: Equation) -> None:
        """Write an equation that reduces split values."""
        aval = eqn.in_avals[0]
        last = aval.ndim - 1
        axes = tuple(a for a in eqn.params["axes"] if a != last)
        columns = [self._column(eqn, eqn.inputs[0], k) for k in range(_last(aval))]
        if last in eqn.params["axes"]:
            total = columns[0]
            for i, column in enumerate(columns[1:], 2):
                place = eqn.outputs if not axes and i == len(columns) else None
                (total,) = self.add(
                    eqn, _COMBINES[eqn.primitive.name], {}, [total, column], [_without_last(aval)], place
                )
            if axes:
                params = {**eqn.params, "axes": axes}
                self.add(eqn, eqn.primitive, params, [total], eqn.out_avals, eqn.outputs)
            return
        results = [
            self.add(eqn, eqn.primitive, eqn.params, [column], [_without_last(eqn.out_avals[0])])[0]
            for column in columns
        ]
        self._join(eqn, results)

    def _scatter(self, eqn: Equation) -> None:
        """Write an equation that adds split rows to a table, once for each column of the table."""
        (table, indices, updates), out = eqn.inputs, eqn.out_avals[0]
        numbers = eqn.params["dimension_numbers"]
        windows = numbers._replace(update_window_dims=numbers.update_window_dims[:-1])
        params = {**eqn.params, "dimension_numbers": windows}
        results: list[Operand] = []
        for k in range(_last(out)):
            inputs = [self._column(eqn, table, k), indices, self._column(eqn, updates, k)]
            results += self.add(eqn, eqn.primitive, params, inputs, [_without_last(out)])
        self._join(eqn, results)

    def _join(self, eqn: Equation, columns: Sequence[Operand]) -> None:
        """Write the result of ``eqn``, which has these columns."""
        out = eqn.out_avals[0]
        shape, dims = (*out.shape[:-1], 1), tuple(range(out.ndim - 1))
        wide = {"shape": shape, "broadcast_dimensions": dims, "sharding": None}
        parts: list[Operand] = []
        for column in columns:
            parts += self.add(eqn, lax.broadcast_in_dim_p, wide, [column], [out.update(shape=shape)])
        self.add(eqn, lax.concatenate_p, {"dimension": out.ndim - 1}, parts, [out], eqn.outputs)


def _without_last(aval: Any) -> Any:
    return aval.update(shape=aval.shape[:-1])
