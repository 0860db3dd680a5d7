"""Protocol buffers as bytes: the fields of a message by number, without the schema's library.

Numbers and wire types never change once a field is in use (Protocol Buffers, "Encoding"), unlike the text
that XLA prints; what is not asked for is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

Message = dict[int, list[int | bytes]]
"""For each field that is there, its values in order: integers, or the bytes of strings and messages."""

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5


def fields(data: bytes) -> Message:
    """The fields of one message; numbers of fixed width are left out.

    Raises ``ValueError`` if it is none.

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
    """The string in a field, empty where it is not there."""
    return b"".join(v for v in message.get(number, ())[-1:] if isinstance(v, bytes)).decode()


def integer(message: Message, number: int) -> int:
    """The integer in a field, 0 where it is not there."""
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
    """An integer of seven bits a byte, the lowest first, and where it ends."""
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
