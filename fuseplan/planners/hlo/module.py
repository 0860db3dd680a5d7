"""Read an optimized HLO module from its protocol buffer: computations, instructions, and sizes of arrays.

The first half decodes the wire format of Protocol Buffers ("Encoding" in its documentation) without the
schema's library; unknown fields are skipped. Field numbers and wire types never change once a field is in
use, unlike the text that XLA prints. The numbers here are those of ``xla/service/hlo.proto`` and
``xla/xla_data.proto``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

Message = dict[int, list[int | bytes]]
"""The values of each field that is present, in order: integers, or the bytes of strings and messages."""

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5


def fields(data: bytes) -> Message:
    """The fields of one message by number, without those of fixed width.

    Raises:
        ValueError: the bytes are not a message.

    Example:
        >>> fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02]) + b"ok")
        {1: [150], 2: [b'ok']}
    """
    found: Message = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            found.setdefault(number, []).append(value)
        elif kind == _BYTES:
            size, at = _varint(data, at)
            found.setdefault(number, []).append(data[at : at + size])
            at += size
        elif kind in (_FIXED_32, _FIXED_64):
            at += 4 if kind == _FIXED_32 else 8
        else:
            raise ValueError(f"no wire type {kind} at byte {at}")
    if at > len(data):
        raise ValueError("the message ends before its last field")
    return found


def text(message: Message, number: int) -> str:
    """The string in a field; empty if the field is absent."""
    return b"".join(v for v in message.get(number, ())[-1:] if isinstance(v, bytes)).decode()


def integer(message: Message, number: int) -> int:
    """The integer in a field; 0 if the field is absent."""
    found = message.get(number, [0])[-1]
    assert isinstance(found, int), f"field {number} holds bytes"
    return found


def integers(message: Message, number: int) -> Iterator[int]:
    """The integers of a repeated field, packed or not."""
    for value in message.get(number, ()):
        if isinstance(value, int):
            yield value
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            yield one


def messages(message: Message, number: int) -> Iterator[Message]:
    """The messages of a repeated field."""
    for value in message.get(number, ()):
        assert isinstance(value, bytes), f"field {number} holds an integer"
        yield fields(value)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer of seven bits a byte, the lowest first, and the position behind it."""
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("the message ends inside of a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


# Bits of an element, by PrimitiveType; tuples, tokens and opaque values have none of their own.
_BITS = {1: 8, 2: 8, 3: 16, 4: 32, 5: 64, 6: 8, 7: 16, 8: 32, 9: 64, 10: 16, 11: 32, 12: 64, 15: 64, 16: 16}
_BITS |= {18: 128, 19: 8, 20: 8, 21: 4, 22: 4, 23: 8, 24: 8, 25: 8, 26: 2, 27: 2, 28: 8, 29: 8, 30: 1}
_BITS |= {31: 1, 32: 4, 33: 8}

_ON_CHIP = 1
"""The memory space of a layout in a TPU's VMEM (printed as ``S(1)``)."""

_SCALAR_MEMORY = 6
"""The memory space of a layout in a TPU's SMEM (printed as ``S(6)``)."""

SCOPE = "fuseplan.node."
"""Prefix of the named scope of each equation; the number of its node follows."""

_NODE = re.compile(re.escape(SCOPE) + r"(\d+)")


@dataclass(frozen=True, slots=True)
class Shape:
    """An array, or a tuple of shapes."""

    array_bytes: int
    """Size of the array; 0 for a tuple."""
    on_chip: bool = False
    parts: tuple[Shape, ...] = ()
    in_scalar_memory: bool = False
    """Whether the compiler placed the array in a TPU's scalar memory."""

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        return sum(p.nbytes for p in self.parts) + self.array_bytes

    @property
    def on_chip_bytes(self) -> int:
        """Size of all arrays that the compiler placed on chip."""
        return sum(p.on_chip_bytes for p in self.parts) + (self.array_bytes if self.on_chip else 0)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; operands are ids of the same computation."""

    id: int
    name: str
    opcode: str
    shape: Shape
    nodes: frozenset[int]
    """The graph nodes whose equations it was compiled from."""
    operands: tuple[int, ...]
    called: tuple[int, ...]
    """The computations that it calls."""
    index: int
    """Number of a parameter or of a tuple element."""
    target: str
    """Target of a custom call."""


@dataclass(frozen=True, slots=True)
class Computation:
    """The instructions of a computation by id, in the order of the schedule, or else in an order that can
    run."""

    instructions: dict[int, Instruction]
    root: int
    users: dict[int, list[Instruction]] = field(default_factory=dict)

    def parameter(self, index: int) -> Instruction | None:
        """The parameter of that number; None if it is unused."""
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
        scheduled = set(sequence)
        # The schedule leaves out nothing that is launched, but may leave out constants.
        ranked = [i for i in known if i not in scheduled] + sequence
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
    space = integer(layout, 8)
    return Shape(-(-bits // 8), space == _ON_CHIP, parts, space == _SCALAR_MEMORY)
