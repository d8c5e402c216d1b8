"""Plain values as JSON and back, strictly: what `unpack` returns is built from exact builtin and collections types.

Subclasses (named tuples, IntEnum) are packed as the builtin they extend. Anything else goes to `opaque`, which the two
ends define: the worker returns a handle, the checker a proxy. `unpack` trusts nothing: malformed data raises, and no
method of the sender's objects ever runs. Frames are an 8-byte length and JSON.
"""

import base64
import builtins
import json
import os
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from itertools import compress, repeat
from operator import is_, not_
from types import EllipsisType
from typing import Any

Opaque = Callable[[Any], Any]

_WORD = 1 << 63
_LONG = 64  # minimum length of a list of numbers that is sent as bytes
_ITEMS: dict[type, str] = {
    **{tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"},
    **{type({}.keys()): "keys", type({}.values()): "values"},
}
_PAIRS: dict[type, str] = {
    **{dict: "dict", Counter: "Counter", OrderedDict: "OrderedDict", defaultdict: "defaultdict"},
    **{type({}.items()): "items"},
}
_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    **{"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque},
    "keys": lambda items: dict.fromkeys(items).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
}
_FROM_PAIRS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    **{"dict": dict, "OrderedDict": OrderedDict},
    "Counter": lambda pairs: Counter(dict(pairs)),
    "defaultdict": lambda pairs: defaultdict(None, pairs),
    "items": lambda pairs: dict(pairs).items(),
}
_SCALARS: dict[type, Callable[[Any], Any]] = {
    int: lambda v: v if -_WORD < v < _WORD else {"int": hex(v)},
    str: lambda v: v if _is_text(v) else {"str": v.encode("utf-8", "surrogatepass").hex()},
    bytes: lambda v: {"bytes": v.hex()},
    bytearray: lambda v: {"bytearray": v.hex()},
    complex: lambda v: {"complex": [v.real, v.imag]},
    range: lambda v: {"range": [pack(part, _nothing) for part in (v.start, v.stop, v.step)]},
    EllipsisType: lambda v: {"ellipsis": 0},
}
_FROM_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda data: int(data, 16),
    "str": lambda data: bytes.fromhex(data).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda data: complex(*data),
    "range": lambda data: range(*(unpack(part, _nothing) for part in data)),
    "ellipsis": lambda data: ...,
    "type": lambda data: _builtin_type(data),
    "Fraction": lambda data: _fraction(data),
    "Decimal": lambda data: _decimal(data),
}
_BASES: dict[type, Callable[[Any], Any]] = {
    **{int: int.__pos__, float: float.__pos__, complex: complex.__pos__, str: str.__str__},
    bytes: lambda v: bytes.__getitem__(v, slice(None)),
    list: lambda v: list.__getitem__(v, slice(None)),
    tuple: lambda v: tuple.__getitem__(v, slice(None)),
    dict: dict.copy,
    set: lambda v: set().union(v),
    frozenset: lambda v: frozenset().union(v),
}


def pack(value: Any, opaque: Opaque) -> Any:
    """JSON for `value`; `opaque(x)` returns the JSON of a non-plain value, or raises."""
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return value
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if kind is list:
        return _pack_items(value, opaque)
    if kind in _ITEMS:
        return {_ITEMS[kind]: _pack_items(list(value), opaque)}
    if kind in _PAIRS:
        pairs = value if kind is type({}.items()) else value.items()
        return {_PAIRS[kind]: [[pack(k, opaque), pack(v, opaque)] for k, v in pairs]}
    return _pack_rare(value, opaque)


def _pack_items(items: list[Any], opaque: Opaque) -> Any:
    """Long lists of numbers are sent as bytes: a reference's answers can be millions, and JSON spells every digit."""
    numbers = _pack_numbers(items) if len(items) >= _LONG and {*map(type, items)} <= {int, float} else None
    return [pack(item, opaque) for item in items] if numbers is None else numbers


def _pack_numbers(items: list[Any]) -> dict[str, Any] | None:
    """A mask of the floats, the ints, the floats; None if an int is too long. No Python loop over the items."""
    floating = bytes(map(is_, map(type, items), repeat(float)))
    try:
        whole = array("q", compress(items, map(not_, floating)))
    except OverflowError:
        return None
    real = array("d", compress(items, floating))
    return {"numbers": [base64.b64encode(part).decode() for part in (floating, whole, real)]}


def _unpack_numbers(data: Any) -> list[Any]:
    floating, whole, real = (base64.b64decode(part, validate=True) for part in data)
    ints, floats = array("q", whole), array("d", real)
    if (floating.count(0), floating.count(1), len(floating)) != (len(ints), len(floats), len(ints) + len(floats)):
        raise ValueError("inconsistent list of numbers")
    return list(map(next, map((iter(ints), iter(floats)).__getitem__, floating)))


def _pack_rare(value: Any, opaque: Opaque) -> Any:
    kind: type = type(value)
    if f"{kind.__module__}.{kind.__name__}" in ("fractions.Fraction", "decimal.Decimal"):
        return {kind.__name__: str(value)}
    if kind is type and value in vars(builtins).values():
        return {"type": value.__name__}
    for base, plain in _BASES.items():
        if isinstance(value, base):
            return pack(plain(value), opaque)
    return opaque(value)


def unpack(data: Any, opaque: Opaque) -> Any:
    """The value of `pack`'s JSON; `opaque(n)` returns the object of handle n. Raises on anything malformed."""
    if isinstance(data, list):
        return _unpack_items(data, opaque)
    if not isinstance(data, dict):
        return data
    ((tag, inner),) = data.items()
    if tag == "numbers":
        return _unpack_numbers(inner)
    if tag in _FROM_ITEMS:
        return _FROM_ITEMS[tag](_unpack_items(inner, opaque))
    if tag in _FROM_PAIRS:
        return _FROM_PAIRS[tag]([(unpack(k, opaque), unpack(v, opaque)) for k, v in inner])
    return opaque(inner) if tag == "handle" else _FROM_SCALARS[tag](inner)


def _unpack_items(data: Any, opaque: Opaque) -> list[Any]:
    if isinstance(data, dict):
        return _unpack_numbers(data["numbers"])
    kinds = {*map(type, data)}
    return data if list not in kinds and dict not in kinds else [unpack(item, opaque) for item in data]


def send(fd: int, message: Any) -> None:
    text = json.dumps(message).encode()
    left = memoryview(len(text).to_bytes(8, "big") + text)
    while left:
        left = left[os.write(fd, left) :]


def receive(fd: int) -> Any:
    """The next message. Raises EOFError if the other end is gone, ValueError if it is not JSON."""
    return json.loads(_exactly(fd, int.from_bytes(_exactly(fd, 8), "big")))


def _exactly(fd: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            raise EOFError("the other end is gone")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _is_text(value: str) -> bool:
    """Whether it survives JSON's escapes: two lone surrogates in a row would become one character."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _builtin_type(name: str) -> type:
    found = vars(builtins)[name]
    if not isinstance(found, type):
        raise TypeError(f"{name} is not a type")
    return found


def _fraction(data: str) -> Any:
    from fractions import Fraction  # slow to import, rarely needed

    return Fraction(data)


def _decimal(data: str) -> Any:
    from decimal import Decimal

    return Decimal(data)


def _nothing(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is no plain value")
