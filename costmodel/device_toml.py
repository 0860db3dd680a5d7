"""Read and write the figures of a device as TOML: ``read_fields`` and ``written``.

A file has a line for each field of ``DeviceSpec``; the pairs of ``matrix_flops_per_s`` and of ``sources`` are
tables. A fraction that is whole, such as ``4.8e12``, is read as an integer.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from costmodel.device_fields import FIELDS, InvalidDeviceError, Pairs, Whole


def read_fields(path: Path, cls: type[Any]) -> dict[str, Any]:
    """The fields of the device that a file describes, for the dataclass ``cls``. Their values are not
    checked.

    Raises:
        OSError: the file cannot be read.
        InvalidDeviceError: it is not TOML, has an unknown field, or lacks one.
    """
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidDeviceError(
            "", f"expected TOML, a line `field = value` for each field: {error}"
        ) from None
    for name in read:
        if name not in FIELDS:
            close = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; the fields are {', '.join(FIELDS)}"
            raise InvalidDeviceError(name, f"a device has no such field{hint}")
    for field in dataclasses.fields(cls):
        has_default = field.default is not dataclasses.MISSING
        if field.name not in read and not has_default:
            accepts = FIELDS[field.name]
            raise InvalidDeviceError(
                field.name, f"the field is missing: expected {accepts.accepted}: {accepts.remedy}"
            )
    return {name: _value(name, value) for name, value in read.items()}


def _value(name: str, value: Any) -> Any:
    """A value of TOML as a field has it."""
    accepts = FIELDS[name]
    if isinstance(accepts, Pairs):
        if not isinstance(value, dict):
            raise InvalidDeviceError(
                name, f"expected a table [{name}] with a line `name = value` for each, got {value!r}"
            )
        return tuple((key, _whole(item)) for key, item in value.items())
    return _whole(value) if isinstance(accepts, Whole) else value


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def written(device: Any) -> str:
    """The TOML of a device: its fields in order, but for those that have their defaults, and the units of
    numbers as comments."""
    lines, tables = [], []
    for field in dataclasses.fields(device):
        value, accepts = getattr(device, field.name), FIELDS[field.name]
        if value == field.default:
            continue
        if isinstance(accepts, Pairs):
            unit = f"  # {accepts.item.unit}" if isinstance(accepts.item, Whole) else ""
            tables += ["", f"[{field.name}]{unit}"]
            tables += [f"{_key(key)} = {_text(item)}" for key, item in value]
        else:
            unit = f"  # {accepts.unit}" if isinstance(accepts, Whole) else ""
            lines.append(f"{field.name} = {_text(value)}{unit}")
    return "\n".join([*lines, *tables, ""])


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else _text(text)


def _text(value: str | int | bool) -> str:
    """A text, an integer or a boolean in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:_}"
    # The escapes of JSON are those of TOML, which also escapes the character DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
