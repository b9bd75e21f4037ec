"""Protobuf's encoding, as far as Rollway's own messages need it.

Its own library comes in versions that trainers and engines disagree about, and takes ten times as
long for a small message.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

_VARINT, _BYTES = 0, 2
"""Types of fields."""
_FIXED = {1: 8, 5: 4}


def encode_varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def encode_number(field: int, number: int) -> bytes:
    """Return a field with a number that is not negative."""
    return encode_varint(field << 3 | _VARINT) + encode_varint(number)


def encode_bytes(field: int, body: bytes) -> bytes:
    """Return a field with bytes: those of a text, or of another message."""
    size = len(body)
    if field < 16 and size < 0x4000:  # nearly always
        length = (size & 0x7F | 0x80, size >> 7) if size > 0x7F else (size,)
        return bytes((field << 3 | _BYTES, *length)) + body
    return encode_varint(field << 3 | _BYTES) + encode_varint(size) + body


def decode(message: object) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message: numbers, and texts and messages as bytes.

    Raises:
        ValueError: this is no message.
    """
    if not isinstance(message, bytes):
        raise ValueError("a field is no message")
    data = io.BytesIO(message)
    while data.tell() < len(message):
        key = _read_varint(data)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            yield number, _read_varint(data)
        elif kind == _BYTES:
            yield number, _read(data, _read_varint(data))
        elif kind in _FIXED:
            yield number, _read(data, _FIXED[kind])
        else:
            raise ValueError(f"a field has the type {kind}")


def _read_varint(data: io.BytesIO) -> int:
    value = 0
    for shift in range(0, 64, 7):
        byte = _read(data, 1)[0]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
    raise ValueError("a number has more than 64 bits")


def _read(data: io.BytesIO, count: int) -> bytes:
    raw = data.read(count)
    if len(raw) < count:
        raise ValueError("a message ends within a field")
    return raw
