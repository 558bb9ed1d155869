"""Requests with extreme values: right ones in which a few fields, at any depth, hold what nobody should send."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)

FLOATS = (math.nan, math.inf, -math.inf, 1e38, -1e38, -1e30, 1e-30, -1e-30, -1.0, -0.0, 0.0, 0.5, 1.0, 1e6, 2e6)
DOUBLES = (*FLOATS, 1e308, -1e308, 5e-324)
TEXTS = ("", "x", "../x", "a\0b", "%s%n{}", "x" * 65, "x" * 5000, "🜁ä" * 3000)
ENUMS = (0, 1, 2, 3, 99, -1, 2**31 - 1, -(2**31))
INTS: dict[int, tuple[int, int]] = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SFIXED32: (-(2**31), 2**31 - 1),
}
MANY = 5000


@dataclass(frozen=True)
class Point:
    """A place in a message, and what may be put there."""

    path: str
    values: tuple[Any, ...]
    put: Callable[[Any], object]


def extreme(right: M) -> st.SearchStrategy[M]:
    """Return copies of a right message with one to three fields changed."""

    @st.composite
    def changed(draw: st.DrawFn) -> M:
        message = type(right)()
        message.CopyFrom(right)
        for _ in range(draw(st.integers(1, 3))):
            point = draw(st.sampled_from(list(points(message))))
            point.put(draw(st.sampled_from(point.values)))
        return message

    return changed()


def points(message: Message, path: str = "") -> Iterator[Point]:
    """Yield every field of a message and of the messages in it."""
    for field in message.DESCRIPTOR.fields:
        here = f"{path}{field.name}"
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield from _map_points(message, field, here)
        elif field.is_repeated:
            yield from _list_points(message, field, here)
        elif field.message_type is not None:
            yield Point(here, (None,), lambda _, name=field.name: _clear(message, name))
            yield from points(getattr(message, field.name), f"{here}.")
        else:
            yield Point(here, _scalars(field), lambda value, name=field.name: setattr(message, name, value))


def _clear(message: Message, name: str) -> None:
    # Clearing an unset member of a oneof may clear the one that is set (protobuf 6, upb).
    if message.HasField(name):
        message.ClearField(name)


def _map_points(message: Message, field: FieldDescriptor, here: str) -> Iterator[Point]:
    entries: Any = getattr(message, field.name)
    value_type: Any = field.message_type.fields_by_name["value"]
    a_value = _scalars(value_type)[0]
    yield Point(f"{here}[]", _scalars(value_type), lambda value: entries.update({"key": value}))
    yield Point(f"{here}.keys", TEXTS, lambda key: entries.update({key: a_value}))
    yield Point(here, (100, MANY), lambda count: entries.update({str(i): a_value for i in range(count)}))


def _list_points(message: Message, field: FieldDescriptor, here: str) -> Iterator[Point]:
    items: Any = getattr(message, field.name)
    yield Point(here, (None,), lambda _: message.ClearField(field.name))
    if field.message_type is None:
        yield Point(here, (1, 100, MANY), lambda count: items.extend([_scalars(field)[0]] * count))
        yield Point(f"{here}[]", _scalars(field), lambda value: items.__setitem__(slice(0, 1), [value]))
        return
    yield Point(here, (1, 70), lambda count: items.extend([items[0] if items else items.add()] * count))
    for position, item in enumerate(items[:3]):
        yield from points(item, f"{here}[{position}].")


def _scalars(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.type in INTS:
        low, high = INTS[field.type]
        near = (0, 1, 2, 7, 1025, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, -1, low, high)
        return tuple(value for value in near if low <= value <= high)
    return {
        FieldDescriptor.TYPE_DOUBLE: DOUBLES,
        FieldDescriptor.TYPE_FLOAT: FLOATS,
        FieldDescriptor.TYPE_BOOL: (True, False),
        FieldDescriptor.TYPE_STRING: TEXTS,
        FieldDescriptor.TYPE_BYTES: (b"x", b"\0" * 100, b"\xff" * 5000),
        FieldDescriptor.TYPE_ENUM: ENUMS,
    }[field.type]
