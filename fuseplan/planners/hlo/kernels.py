"""The kernels of an optimized HLO module: what is launched, what that moves, what it comes from.

Every instruction of the entry computation that does work is a kernel: a fusion, a library's call, a sort, a
copy, a loop as one. It reads its operands and writes its results once, but of what it only slices or
gathers from, no more than it takes, and of what it updates in place (``dynamic-update-slice``,
``scatter``) the updates. Arrays that the compiler placed on chip (VMEM of a TPU) count as all others do: the
cost model knows nothing of the like for any plan. Copies between them and HBM run beside the kernels, and
are none: whoever reads the copy is charged with it.
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

_SAME = {"async-start", "call"}
"""Instructions that stand for those of the computation that they call."""

_HOLDS = _SAME | {"conditional", "fusion", "while"}
"""Instructions that run what they call. What others apply element by element may be shared by several."""

_MOVES = {"bitcast", "bitcast-convert", "broadcast", "concatenate", "convert", "copy", "copy-start"}
_MOVES |= {"get-tuple-element", "pad", "reshape", "reverse", "slice", "transpose", "tuple"}
"""Instructions that arrange data: where others come from an equation, too, those compute it."""

_TAKES = {"dynamic-slice", "gather", "slice"}


@dataclass(frozen=True, slots=True)
class HloKernel:
    """Something that XLA launches."""

    name: str
    computes: frozenset[int]
    """The nodes that it computes, or parts of them."""
    touches: frozenset[int]
    """The nodes that anything in it comes from."""
    read_bytes: int
    write_bytes: int
    on_chip_bytes: int
    """Of operands and results that lie on chip."""
    after: tuple[int, ...]
    """Kernels whose results it reads, by position."""

    @property
    def moved_bytes(self) -> int:
        """What it moves in all."""
        return self.read_bytes + self.write_bytes


def read_kernels(module: Module) -> tuple[HloKernel, ...]:
    """The kernels of the entry computation, in the order in which they run."""
    reader = _Reader(module)
    reader.walk(module.computations[module.entry], [])
    # A node that some kernel computes is not computed where its data are only arranged.
    return tuple(replace(k, computes=k.computes | (k.touches - reader.strong)) for k in reader.kernels)


class _Reader:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.kernels: list[HloKernel] = []
        self.strong: set[int] = set()
        """Nodes that some kernel computes by more than arranging data."""

    def walk(
        self, computation: Computation, given: Sequence[frozenset[int]], is_beside: bool = False
    ) -> frozenset[int]:
        """Add the kernels of a computation, whose parameters come from the kernels ``given``, and which may
        run beside others; the kernels that its result comes from."""
        made: dict[int, frozenset[int]] = {}
        for one in computation.instructions.values():
            sources = [made[operand] for operand in one.operands]
            every = frozenset[int]().union(*sources)
            if one.opcode == "parameter":
                made[one.id] = given[one.index] if given else frozenset()
            elif one.opcode in _SAME:
                made[one.id] = self.walk(
                    self.module.computations[one.called[0]], sources, one.opcode == "async-start"
                )
            elif _is_free(one) or (one.opcode in _MOVES and self._is_beside(computation, one, is_beside)):
                made[one.id] = every
            else:
                made[one.id] = frozenset({len(self.kernels)})
                self.kernels.append(self._kernel(computation, one, tuple(sorted(every))))
        return made.get(computation.root, frozenset())

    def _is_beside(self, computation: Computation, one: Instruction, may_be: bool) -> bool:
        """Whether it is a copy onto the chip, or off it, that runs beside kernels."""
        if not may_be and one.opcode != "copy-start":
            return False
        # What a copy starts from is among its results.
        return any(shape.on_chip_bytes for shape in (one.shape, *_shapes(computation, one)))

    def _kernel(self, computation: Computation, one: Instruction, after: tuple[int, ...]) -> HloKernel:
        inside = list(self._inside(one)) or [one]
        computes = _nodes(i for i in inside if i.opcode not in _MOVES)
        self.strong |= computes
        # Its results are where it copies to, where it copies from, and what to wait for.
        result = one.shape.parts[0] if one.opcode == "copy-start" else one.shape
        return HloKernel(
            one.name,
            computes,
            _nodes([one, *inside]),
            sum(self._read(computation, one, operand) for operand in dict.fromkeys(one.operands)),
            min(result.nbytes, self._written(computation, one)),
            sum(shape.on_chip_bytes for shape in (*_shapes(computation, one), result)),
            after,
        )

    def _inside(self, one: Instruction) -> Iterator[Instruction]:
        """All instructions of what an instruction runs, but those that stand for no work."""
        for called in one.called if one.opcode in _HOLDS else ():
            for inner in self.module.computations[called].instructions.values():
                if inner.opcode not in ("constant", "parameter"):
                    yield inner
                    yield from self._inside(inner)

    def _read(self, computation: Computation, one: Instruction, operand: int) -> int:
        """Bytes that ``one`` reads of an operand."""
        whole = computation.instructions[operand].shape.nbytes
        return min(whole, self._parts(computation, one, operand, whole))

    def _parts(self, computation: Computation, one: Instruction, operand: int, whole: int) -> int:
        """Bytes that ``one`` takes of an operand that has ``whole``, of each place where it stands."""
        places = [i for i, o in enumerate(one.operands) if o == operand]
        return sum(self._part(computation, one, place, whole) for place in places)

    def _part(self, computation: Computation, one: Instruction, place: int, whole: int) -> int:
        if one.opcode in _TAKES and place == 0:
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
        """Bytes that a fusion reads of what it is ``given``."""
        if given.id == body.root:
            return whole
        parts = 0
        for user in body.users.get(given.id, ()):
            is_name = user.opcode == "bitcast"
            parts += self._used(body, user, whole) if is_name else self._parts(body, user, given.id, whole)
        return min(whole, parts)

    def _written(self, computation: Computation, one: Instruction) -> int:
        """Bytes that ``one`` writes: of what it is given and updates, the updates."""
        if one.opcode in ("dynamic-update-slice", "scatter") and self._is_given(computation, one.operands[0]):
            return sum(computation.instructions[u].shape.array_bytes for u in _updates(one))
        if one.opcode == "fusion":
            body = self.module.computations[one.called[0]]
            return self._written(body, body.instructions[body.root])
        if one.opcode == "tuple":
            return sum(self._written(computation, computation.instructions[o]) for o in one.operands)
        if one.opcode == "bitcast":
            return self._written(computation, computation.instructions[one.operands[0]])
        if one.opcode == "custom-call" and one.shape.parts:  # Workspace is nobody's result.
            taken = {u.index for u in computation.users.get(one.id, ()) if u.opcode == "get-tuple-element"}
            return sum(one.shape.parts[k].nbytes for k in taken) if taken else one.shape.nbytes
        return one.shape.nbytes

    def _is_given(self, computation: Computation, i: int) -> bool:
        one = computation.instructions[i]
        if one.opcode == "bitcast":
            return self._is_given(computation, one.operands[0])
        return one.opcode == "parameter" or computation is self.module.computations[self.module.entry]


def _is_free(one: Instruction) -> bool:
    waits = one.opcode.endswith(("-done", "-update"))
    return waits or one.opcode in _FREE or one.target in _FREE_CALLS


def _shapes(computation: Computation, one: Instruction) -> list[Shape]:
    """Of the operands, each once."""
    return [computation.instructions[operand].shape for operand in dict.fromkeys(one.operands)]


def _nodes(instructions: Iterable[Instruction]) -> frozenset[int]:
    return frozenset(n for one in instructions for n in one.nodes)


def _updates(one: Instruction) -> tuple[int, ...]:
    """The operands that a ``dynamic-update-slice`` or a ``scatter`` puts in place."""
    if one.opcode == "dynamic-update-slice":
        return one.operands[1:2]
    return one.operands[len(one.operands) // 2 + 1 :]
