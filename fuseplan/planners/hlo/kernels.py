"""The kernels of an optimized HLO module: the bytes that each moves, and the graph nodes that it computes.

Every instruction of the entry computation that does work is one kernel: a fusion, a library call, a sort, a
copy, a whole loop. A kernel reads its operands and writes its results once. Of an operand that it slices or
gathers from, it reads at most the elements taken; of an array that it updates in place
(``dynamic-update-slice``, ``scatter``), it writes the updates. Arrays that the compiler placed on chip (VMEM
of a TPU) are counted like arrays in HBM, because no other plan's cost has on-chip arrays. Copies between them
and HBM run in parallel to kernels and are not kernels: their traffic is charged to the kernel that reads the
copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fuseplan.planners.hlo.module import Computation, Instruction, Module, Shape

_FREE = {"add-dependency", "after-all", "bitcast", "constant", "domain", "get-tuple-element", "opt-barrier"}
_FREE |= {"parameter", "partition-id", "replica-id", "tuple"}
"""Instructions that launch nothing."""

_FREE_CALLS = {"AllocateBuffer", "ConcatBitcast"}
"""Custom calls of a TPU that launch nothing: they name parts of VMEM."""

_CALLS = {"async-start", "call"}
"""Instructions that are replaced by those of the computation that they call."""

_EXECUTES = _CALLS | {"conditional", "fusion", "while"}
"""Instructions that run the computations that they call. Others apply a computation to single elements, and
several of them may share it."""

_MOVES = {"bitcast", "bitcast-convert", "broadcast", "concatenate", "convert", "copy", "copy-start"}
_MOVES |= {"get-tuple-element", "pad", "reshape", "reverse", "slice", "transpose", "tuple"}
"""Instructions that only move data. A node is computed by other instructions, if it has any."""

_PRODUCTS = {"convolution", "dot"}
"""Instructions that multiply matrices."""

_SLICES = {"dynamic-slice", "gather", "slice"}
"""Instructions that read only the elements of their first operand that are in their result."""


@dataclass(frozen=True, slots=True)
class HloKernel:
    """One launch of XLA's program."""

    name: str
    computes: frozenset[int]
    """The nodes that it computes, wholly or in part."""
    touches: frozenset[int]
    """The nodes that any of its instructions comes from."""
    read_bytes: int
    write_bytes: int
    on_chip_bytes: int
    """Size of the operands and results that are on chip."""
    after: tuple[int, ...]
    """The kernels whose results it reads, by position."""
    works_on: frozenset[int] = frozenset()
    """The nodes that it computes, without those of which it only renames an array for its other operations,
    and without products of which it only adds up the parts that another kernel computes."""
    is_scalar: bool = False
    """Whether the scalar core of a TPU computes it, as a part of the program that launches kernels."""

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.write_bytes


def read_kernels(module: Module) -> tuple[HloKernel, ...]:
    """The kernels of the entry computation, in the order in which they run."""
    reader = _Reader(module)
    reader.walk(module.computations[module.entry], [])
    # A kernel that only moves a node's data computes the node only if no other kernel does.
    return tuple(
        replace(
            kernel,
            computes=kernel.computes | (kernel.touches - reader.strong),
            works_on=_works_on(kernel, parts, reader.parts),
        )
        for kernel, parts in zip(reader.kernels, reader.parts, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """The nodes of one kernel, by what its instructions do for them. A node may occur several times."""

    multiplied: frozenset[int]
    """Nodes with a product of matrices."""
    reduced: frozenset[int]
    """Nodes with a reduction."""
    computed: frozenset[int]
    """Nodes with another instruction that does more than move data."""
    moved: frozenset[int]
    """Nodes with an instruction that moves data, and does not only rename an array."""


def _works_on(kernel: HloKernel, own: _Parts, every: Sequence[_Parts]) -> frozenset[int]:
    """``HloKernel.works_on`` of a kernel with the parts ``own``."""
    multiplied, reduced, computed = (
        frozenset[int]().union(*(getattr(parts, name) for parts in every))
        for name in ("multiplied", "reduced", "computed")
    )
    strong = own.multiplied | own.reduced | own.computed
    # Sums of a product's parts have its name: XLA divides a product along its contracted dimension.
    strong = (strong - (multiplied - own.multiplied - own.computed)) or strong
    weak = own.moved if strong else kernel.touches
    return strong | (weak - multiplied - reduced - computed)


class _Reader:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.kernels: list[HloKernel] = []
        self.strong: set[int] = set()
        """Nodes that some kernel computes by more than moving data."""
        self.parts: list[_Parts] = []
        """The parts of each of ``kernels``."""

    def walk(
        self, computation: Computation, given: Sequence[frozenset[int]], is_async: bool = False
    ) -> frozenset[int]:
        """Add the kernels of a computation; the kernels that its result comes from.

        ``given`` has, for each parameter, the kernels that it comes from; ``is_async`` is whether the
        computation may run in parallel to others.
        """
        made: dict[int, frozenset[int]] = {}
        for one in computation.instructions.values():
            sources = [made[operand] for operand in one.operands]
            every = frozenset[int]().union(*sources)
            if one.opcode == "parameter":
                made[one.id] = given[one.index] if given else frozenset()
            elif one.opcode in _CALLS:
                made[one.id] = self.walk(
                    self.module.computations[one.called[0]], sources, one.opcode == "async-start"
                )
            elif _is_free(one) or (one.opcode in _MOVES and self._is_async_copy(computation, one, is_async)):
                made[one.id] = every
            else:
                made[one.id] = frozenset({len(self.kernels)})
                self.kernels.append(self._kernel(computation, one, tuple(sorted(every))))
        return made.get(computation.root, frozenset())

    def _is_async_copy(self, computation: Computation, one: Instruction, is_async: bool) -> bool:
        """Whether it is a copy onto the chip, or off it, that runs in parallel to kernels."""
        if not is_async and one.opcode != "copy-start":
            return False
        # The results of a copy-start include its source.
        return any(shape.on_chip_bytes for shape in (one.shape, *_shapes(computation, one)))

    def _kernel(self, computation: Computation, one: Instruction, after: tuple[int, ...]) -> HloKernel:
        every = list(self._inside(one)) or [(computation, one)]
        inside = [i for _, i in every]
        computes = _nodes(i for i in inside if i.opcode not in _MOVES)
        self.strong |= computes
        self.parts.append(_parts(every))
        # The results of a copy-start are the destination, the source and a token.
        result = one.shape.parts[0] if one.opcode == "copy-start" else one.shape
        return HloKernel(
            one.name,
            computes,
            _nodes([one, *inside]),
            sum(
                self._read(computation, one, operand, computation.instructions[operand].shape.nbytes)
                for operand in dict.fromkeys(one.operands)
            ),
            min(result.nbytes, self._written(computation, one)),
            sum(shape.on_chip_bytes for shape in (*_shapes(computation, one), result)),
            after,
            is_scalar=one.shape.in_scalar_memory and one.opcode not in _EXECUTES,
        )

    def _inside(self, one: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """All instructions of the computations that an instruction runs, without constants and parameters,
        each with its computation."""
        for called in one.called if one.opcode in _EXECUTES else ():
            computation = self.module.computations[called]
            for inner in computation.instructions.values():
                if inner.opcode not in ("constant", "parameter"):
                    yield computation, inner
                    yield from self._inside(inner)

    def _read(self, computation: Computation, one: Instruction, operand: int, whole: int) -> int:
        """Bytes that ``one`` reads of an operand of ``whole`` bytes, at all its positions."""
        places = [i for i, o in enumerate(one.operands) if o == operand]
        return min(whole, sum(self._part(computation, one, place, whole) for place in places))

    def _part(self, computation: Computation, one: Instruction, place: int, whole: int) -> int:
        if one.opcode in _SLICES and place == 0:
            return one.shape.array_bytes
        if one.opcode == "dynamic-update-slice" and place == 0:
            return 0
        if one.opcode == "scatter" and place < len(one.operands) // 2:
            return computation.instructions[_updates(one)[place]].shape.array_bytes
        if one.opcode == "fusion":
            body = self.module.computations[one.called[0]]
            parameter = body.parameter(place)
            return 0 if parameter is None else self._used(body, parameter, whole)
        return whole

    def _used(self, body: Computation, given: Instruction, whole: int) -> int:
        """Bytes that a fusion reads of its parameter ``given``."""
        if given.id == body.root:
            return whole
        parts = 0
        for user in body.users.get(given.id, ()):
            is_name = user.opcode == "bitcast"
            parts += self._used(body, user, whole) if is_name else self._read(body, user, given.id, whole)
        return min(whole, parts)

    def _written(self, computation: Computation, one: Instruction) -> int:
        """Bytes that ``one`` writes; of an operand that it updates in place, those of the updates."""
        if one.opcode in ("dynamic-update-slice", "scatter") and self._is_given(computation, one.operands[0]):
            return sum(computation.instructions[u].shape.array_bytes for u in _updates(one))
        if one.opcode == "fusion":
            body = self.module.computations[one.called[0]]
            return self._written(body, body.instructions[body.root])
        if one.opcode == "tuple":
            return sum(self._written(computation, computation.instructions[o]) for o in one.operands)
        if one.opcode == "bitcast":
            return self._written(computation, computation.instructions[one.operands[0]])
        if one.opcode == "custom-call" and one.shape.parts:  # Workspace has no reader.
            taken = {u.index for u in computation.users.get(one.id, ()) if u.opcode == "get-tuple-element"}
            return sum(one.shape.parts[k].nbytes for k in taken) if taken else one.shape.nbytes
        return one.shape.nbytes

    def _is_given(self, computation: Computation, i: int) -> bool:
        one = computation.instructions[i]
        if one.opcode == "bitcast":
            return self._is_given(computation, one.operands[0])
        return one.opcode == "parameter" or computation is self.module.computations[self.module.entry]


def _parts(inside: Sequence[tuple[Computation, Instruction]]) -> _Parts:
    """The parts of a kernel of these instructions, each with its computation."""
    found: dict[str, list[Instruction]] = {name: [] for name in _Parts.__slots__}
    for computation, one in inside:
        if one.opcode in _EXECUTES and len(inside) > 1:
            continue  # What it runs is inside, too.
        if one.opcode in _PRODUCTS:
            found["multiplied"].append(one)
        elif _is_reshape(computation, one):
            found["moved"].append(one)
        elif one.opcode == "reduce":
            found["reduced"].append(one)
        elif one.opcode not in _MOVES:
            found["computed"].append(one)
        elif one.opcode not in _FREE:
            found["moved"].append(one)
    return _Parts(**{name: _nodes(some) for name, some in found.items()})


def _is_reshape(computation: Computation, one: Instruction) -> bool:
    """Whether a reduction combines no elements: XLA drops dimensions of size one by it."""
    if one.opcode != "reduce" or one.shape.parts:
        return False
    return computation.instructions[one.operands[0]].shape.array_bytes == one.shape.array_bytes


def _is_free(one: Instruction) -> bool:
    waits = one.opcode.endswith(("-done", "-update"))
    return waits or one.opcode in _FREE or one.target in _FREE_CALLS


def _shapes(computation: Computation, one: Instruction) -> list[Shape]:
    """Shapes of the operands, each operand once."""
    return [computation.instructions[operand].shape for operand in dict.fromkeys(one.operands)]


def _nodes(instructions: Iterable[Instruction]) -> frozenset[int]:
    return frozenset(n for one in instructions for n in one.nodes)


def _updates(one: Instruction) -> tuple[int, ...]:
    """The operands of a ``dynamic-update-slice`` or a ``scatter`` that are the updates."""
    if one.opcode == "dynamic-update-slice":
        return one.operands[1:2]
    return one.operands[len(one.operands) // 2 + 1 :]
