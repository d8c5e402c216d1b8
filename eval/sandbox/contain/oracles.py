"""When an answer counts as correct given a reference's, as in evalplus 0.3.1 (`untrusted_check`).

Equal; or, if the task has a tolerance or the reference is float, close in the sense of numpy's allclose with
rtol = 1e-7. A few tasks with several correct answers have their own rules. Two departures: nested lists must have the
same shape (numpy broadcasts), and HumanEval/32 is judged by its polynomial, which evalplus 0.3.1 also intends but then
fails every answer, because it never counts the input as done.
"""

import math
from collections.abc import Sequence
from typing import Any

_RTOL, _FLOAT_ATOL = 1e-7, 1e-6
# MBPP tasks 2, 7, 111, 140, 232, 249, 579, 769: lists whose order and repeats do not count
_AS_SETS = frozenset(
    "similar_elements find_char_long common_in_nested_lists extract_singly larg_nnum intersection_array "
    "find_dissimilar Diff".split()
)
# MBPP tasks whose reference returns a match object: only whether there is one counts
_FOUND_OR_NOT = frozenset("check_str text_match_three text_starta_endb".split())


class Comparison:
    """The rule for one task; `dataset` is "humaneval", "mbpp" or None for no rules beyond equal and close."""

    def __init__(self, dataset: str | None, entry_point: str, atol: float) -> None:
        self._dataset, self._name, self._atol = dataset, entry_point, atol

    def reference(self, answer: Any) -> Any:
        """The form in which a reference's answer is stored."""
        return answer is not None if self._dataset == "mbpp" and self._name in _FOUND_OR_NOT else answer

    def holds(self, answer: Any, right: Any, arguments: Sequence[Any]) -> bool:
        """Whether `answer` is correct; raises if the two cannot be compared, which counts as wrong."""
        if self._dataset == "humaneval" and self._name == "find_zero":
            return abs(math.fsum(c * answer**i for i, c in enumerate(arguments[0]))) <= self._atol
        exact = bool(answer == right)
        if self._dataset == "mbpp":
            exact = self._mbpp(exact, answer, right, arguments)
        if self._atol == 0 and _is_float(right):
            self._atol = _FLOAT_ATOL  # also for the task's later inputs, as in evalplus
        if exact or self._atol == 0:
            return exact
        return type(answer) is type(right) and _close(answer, right, self._atol)

    def _mbpp(self, exact: bool, answer: Any, right: Any, arguments: Sequence[Any]) -> bool:
        if self._name == "are_equivalent":  # 164
            return True
        if self._name == "sum_div":  # 295
            return exact or bool(answer == 0)
        if self._name == "surface_Area":  # 581
            return exact or abs(answer - _pyramid_surface(*arguments)) <= self._atol
        if self._name == "digit_distance_nums":  # 558
            return exact or bool(answer == _digit_distance(*arguments))
        if self._name in _AS_SETS:
            return set(answer) == set(right)
        if self._name in _FOUND_OR_NOT:
            return bool((answer if isinstance(answer, bool) else answer is not None) == right)
        return exact


def _is_float(value: Any) -> bool:
    if isinstance(value, list | tuple) and value:
        return all(isinstance(item, float) for item in value)
    return isinstance(value, float)


def _close(answer: Any, right: Any, atol: float) -> bool:
    if isinstance(right, list | tuple):
        same = isinstance(answer, list | tuple) and len(answer) == len(right)
        return same and all(_close(a, r, atol) for a, r in zip(answer, right, strict=True))
    if not (isinstance(answer, int | float | complex) and isinstance(right, int | float | complex)):
        return False
    # equality covers the infinities; a NaN is close to nothing
    return answer == right or (_finite(right) and abs(answer - right) <= atol + _RTOL * abs(right))


def _finite(value: complex) -> bool:
    return math.isfinite(abs(value))


def _pyramid_surface(base: float, height: float) -> int:
    """Surface of a square pyramid whose height is measured to the apex."""
    slant = math.hypot(base / 2, height)
    return round(base * base + 2 * base * slant)


def _digit_distance(first: int, second: int) -> int:
    """Sum of the digits' differences, the shorter number padded with zeros."""
    one, two = str(first), str(second)
    width = max(len(one), len(two))
    return sum(abs(int(a) - int(b)) for a, b in zip(one.zfill(width), two.zfill(width), strict=True))
