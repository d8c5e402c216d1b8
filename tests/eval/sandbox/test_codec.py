"""What crosses between program and test, and when an answer counts as right."""

import json
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from eval.sandbox.contain.codec import pack, unpack
from eval.sandbox.contain.oracles import Comparison


@pytest.mark.parametrize(
    ("dataset", "name", "atol", "answer", "right", "arguments", "holds"),
    [
        (None, "f", 0, 1, 1, (), True),
        (None, "f", 0, 1, True, (), True),
        (None, "f", 0, 1 + 1e-7, 1.0, (), True),
        (None, "f", 0, 1, 1.0, (), True),
        (None, "f", 0, 2, 1.0, (), False),
        (None, "f", 1e-4, 1, 1.00001, (), False),  # not of one type
        (None, "f", 1e-4, [1.0, 2.00001], [1.0, 2.0], (), True),
        (None, "f", 1e-4, (1.0, 2.0), [1.0, 2.0], (), False),
        (None, "f", 1e-4, [1.0], [1.0, 2.0], (), False),
        (None, "f", 1e-4, "a", "b", (), False),
        (None, "f", 0, float("nan"), float("nan"), (), False),
        (None, "f", 0, float("inf"), float("inf"), (), True),
        (None, "f", 0, 1e300, float("inf"), (), False),
        (None, "f", 0, 1 + 1e-9j, 1 + 0j, (), False),  # complex is not float: no tolerance of its own
        (None, "f", 1e-4, 1 + 1e-9j, 1 + 0j, (), True),
        ("mbpp", "are_equivalent", 0, 1, 2, (), True),
        ("mbpp", "sum_div", 0, 0, 7, (), True),
        ("mbpp", "sum_div", 0, 1, 7, (), False),
        ("mbpp", "Diff", 0, [2, 1, 1], [1, 2], (), True),
        ("mbpp", "Diff", 0, [2], [1, 2], (), False),
        (None, "Diff", 0, [2, 1], [1, 2], (), False),
        ("mbpp", "check_str", 0, "match", True, (), True),
        ("mbpp", "check_str", 0, None, True, (), False),
        ("mbpp", "check_str", 0, False, True, (), False),
        ("mbpp", "surface_Area", 0, 33, 0, (3, 4), False),
        ("mbpp", "surface_Area", 0, round(9 + 6 * (1.5**2 + 16) ** 0.5), 0, (3, 4), True),
        ("mbpp", "digit_distance_nums", 0, 2 + 2 + 3, 0, (23, 256), False),
        ("mbpp", "digit_distance_nums", 0, 2 + 3 + 3, 0, (23, 256), True),
        ("humaneval", "find_zero", 1e-4, -0.5, None, ([1, 2],), True),
        ("humaneval", "find_zero", 1e-4, 0.5, -0.5, ([1, 2],), False),
    ],
)
def test_comparison(
    dataset: str | None, name: str, atol: float, answer: Any, right: Any, arguments: Any, holds: bool
) -> None:
    assert Comparison(dataset, name, atol).holds(answer, right, arguments) is holds


VALUES = [
    *(None, True, 0, -1, 2**63 - 1, 2**63, -(2**70), 1.5, -0.0, float("inf"), 1j, "", "a\n\0é\U0001f600", "\ud800"),
    *(b"\0\xff", bytearray(b"x"), (), (1,), [], [[1, "a"], (2,)], {1, 2}, frozenset({1}), {}, {1: {2: [3]}}),
    *({(1, 2): None}, {1: 2}),
    *(list(range(100)), [1, 2.5, -0.0] * 50, (0.1,) * 100, [[*range(70)], "a"], {*range(200)}, deque([1.5] * 64)),
    *([2**63] * 100, [True, 2] * 50, [1, None] * 50, [float("-inf"), 2**63 - 1] * 40, [1.0, 2**63] * 40),
    *(range(0, 10, 3), Counter("aab"), OrderedDict(b=1, a=2), deque([1, (2,)])),
    *(..., int, Fraction(1, 3), Decimal("1.50")),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:40])
def test_plain_values_survive_the_crossing(value: Any) -> None:
    back = unpack(json.loads(json.dumps(pack(value, None))), None)
    assert type(back) is type(value)
    assert (back, repr(back)) == (value, repr(value))


def test_subclasses_arrive_as_builtins() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    for kind, value in ((int, Liar(3)), (list, type("L", (list,), {})([1])), (str, type("S", (str,), {})("s"))):
        assert type(unpack(pack(value, None), None)) is kind
    assert unpack(pack(defaultdict(list, a=1), None), None) == {"a": 1}


@pytest.mark.parametrize(
    "data",
    [
        *({}, {"tuple": 5}, {"int": "x"}, {"no": 1}, {"a": 1, "b": 2}, {"set": [[1]]}, {"type": "print"}, {"bytes": 3}),
        *({"tuple": {"str": "61"}}, {"numbers": ["AA==", "", ""]}, {"numbers": ["Ag==", "", ""]}, {"numbers": "AA=="}),
        *({"numbers": ["AA==", "AAAA", ""]}, {"numbers": ["AQ==", "AAAAAAAAAAA=", ""]}, {"numbers": ["*", "", ""]}),
    ],
)
def test_malformed_data_raise(data: Any) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011
        unpack(data, None)
