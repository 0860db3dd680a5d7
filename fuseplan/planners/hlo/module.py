"""An optimized HLO module: computations, their instructions, and the bytes of arrays.

Field numbers are those of ``xla/service/hlo.proto`` and ``xla/xla_data.proto``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fuseplan.planners.hlo.wire import Message, fields, integer, integers, messages, text

# Bits of an element, by PrimitiveType; tuples, tokens and opaque values have none of their own.
_BITS = {1: 8, 2: 8, 3: 16, 4: 32, 5: 64, 6: 8, 7: 16, 8: 32, 9: 64, 10: 16, 11: 32, 12: 64, 15: 64, 16: 16}
_BITS |= {18: 128, 19: 8, 20: 8, 21: 4, 22: 4, 23: 8, 24: 8, 25: 8, 26: 2, 27: 2, 28: 8, 29: 8, 30: 1}
_BITS |= {31: 1, 32: 4, 33: 8}

_ON_CHIP = 1
"""The memory space of a layout that is VMEM on a TPU (printed as ``S(1)``)."""

SCOPE = "fuseplan.node."
"""What the name stack of each equation begins with, before the number of its node."""

_NODE = re.compile(re.escape(SCOPE) + r"(\d+)")


@dataclass(frozen=True, slots=True)
class Shape:
    """An array, or a tuple of shapes."""

    array_bytes: int
    """Of the array; 0 of a tuple."""
    on_chip: bool = False
    parts: tuple[Shape, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(p.nbytes for p in self.parts) + self.array_bytes

    @property
    def on_chip_bytes(self) -> int:
        """Of all arrays that lie on chip."""
        return sum(p.on_chip_bytes for p in self.parts) + (self.array_bytes if self.on_chip else 0)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; operands are ids of the same computation."""

    id: int
    name: str
    opcode: str
    shape: Shape
    nodes: frozenset[int]
    """The nodes whose equations it comes from."""
    operands: tuple[int, ...]
    called: tuple[int, ...]
    """The computations that it calls."""
    index: int
    """Of a parameter or an element of a tuple."""
    target: str
    """Of a custom call."""


@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions in an order that can run, that of the schedule where there is one."""

    instructions: dict[int, Instruction]
    root: int
    users: dict[int, list[Instruction]] = field(default_factory=dict)

    def parameter(self, index: int) -> Instruction | None:
        """The parameter of that number, if it is used."""
        every = self.instructions.values()
        return next((i for i in every if i.opcode == "parameter" and i.index == index), None)


@dataclass(frozen=True, slots=True)
class Module:
    """Computations by id."""

    computations: dict[int, Computation]
    entry: int


def read_module(serialized: bytes) -> Module:
    """The module in a serialized ``HloModuleProto``."""
    module = fields(serialized)
    order = {
        integer(entry, 1): list(integers(sequence, 1))
        for schedule in messages(module, 7)
        for entry in messages(schedule, 1)
        for sequence in messages(entry, 2)
    }
    computations = {}
    for message in messages(module, 3):
        known = {i.id: i for i in map(_instruction, messages(message, 2))}
        own = integer(message, 5)
        sequence = order.get(own, [])
        # The schedule leaves out nothing that is launched, but may leave out constants.
        ranked = [i for i in known if i not in set(sequence)] + sequence
        computation = Computation({i: known[i] for i in ranked}, integer(message, 6))
        for instruction in known.values():
            for operand in dict.fromkeys(instruction.operands):
                computation.users.setdefault(operand, []).append(instruction)
        computations[own] = computation
    return Module(computations, integer(module, 6))


def _instruction(message: Message) -> Instruction:
    names = [text(metadata, 2) for metadata in messages(message, 7)]
    opcode = text(message, 2)
    return Instruction(
        integer(message, 35),
        text(message, 1),
        opcode,
        next((_shape(shape) for shape in messages(message, 3)), Shape(0)),
        frozenset(int(n) for name in names for n in _NODE.findall(name)),
        tuple(integers(message, 36)),
        tuple(integers(message, 38)),
        integer(message, 9 if opcode == "parameter" else 13),
        text(message, 28),
    )


def _shape(message: Message) -> Shape:
    parts = tuple(map(_shape, messages(message, 4)))
    bits = _BITS.get(integer(message, 2), 0)
    for extent in integers(message, 3):
        bits *= extent
    layout = next(messages(message, 5), {})
    return Shape(-(-bits // 8), integer(layout, 8) == _ON_CHIP, parts)
