"""The embedded tasks with holes in their reference responses, which are to be filled in.

A decoder is told how long the response is and where the holes are (the gold length: results carry it in their
source). A problem is right if every "=" of the filled response stands in an equation that holds, and its answer is
the reference's; a function if it passes its hidden tests.

`holes`: random tokens all over the response, one span of neighbouring tokens, or whole lines that follow one another;
`hidden` is the share of the tokens or of the lines, at least one. Where they lie is drawn by the item's id.
"""

import random
import re
from fractions import Fraction
from typing import Any

from data.embedded.corpus import Example
from dspec.errors import UserError
from eval.benchmarks.base import Item
from eval.benchmarks.embedded import Functions, Problems, solves
from eval.sandbox.judge import Judge

HOLES = ("random", "span", "line")
# no longer equation or number
_NO_MORE_BEFORE, _NO_MORE_AFTER = r"(?<![\w.,+*/=-])(?<![-+*/=] )", r"(?!\w|[.,]\d| ?[-+*/] ?-?\d)"
_EQUATION = re.compile(rf"{_NO_MORE_BEFORE}(-?\d+(?: [-+*/] -?\d+)+) = (-?\d+){_NO_MORE_AFTER}")
_LINE = re.compile(r"\n?[^\n]*")  # with the line break before it, in which the indentation is a part of one token


class FilledProblems(Problems):
    """Word problems; right if all equations hold and the answer is the reference's."""

    quality = "consistent"

    def __init__(self, *, count: int, holes: str, hidden: float, seed: int) -> None:
        super().__init__(count=count, unseen=False, max_new_tokens=1, seed=seed)
        self._holes, self._hidden = check_holes(holes), check_share(hidden)

    def items(self) -> list[Item]:
        return [with_holes(e, self._holes, self._hidden) for e in self._examples.values()]

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        response = filled(item, answer)
        right = solves(response, self._examples[item.id].answer) and equations_hold(response)
        return {self.quality: right}

    def source(self) -> dict[str, Any]:
        return super().source() | _described(self._holes, self._hidden)


class FilledFunctions(Functions):
    """Python functions; right if the filled body passes all hidden tests."""

    def __init__(self, *, judge: Judge, count: int, holes: str, hidden: float, seed: int) -> None:
        super().__init__(judge=judge, count=count, max_new_tokens=1, seed=seed)
        self._holes, self._hidden = check_holes(holes), check_share(hidden)

    def items(self) -> list[Item]:
        return [with_holes(e, self._holes, self._hidden) for e in self._examples.values()]

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        return super().verdicts(item, filled(item, answer))

    def source(self) -> dict[str, Any]:
        return super().source() | _described(self._holes, self._hidden)


def check_holes(holes: str) -> str:
    """Raises UserError for an unknown choice."""
    if holes not in HOLES:
        raise UserError(f"holes={holes} is unknown; use one of {', '.join(HOLES)}")
    return holes


def check_share(hidden: float) -> float:
    """Raises UserError for a share that leaves nothing to fill in, or nothing to see."""
    if not 0 < hidden <= 1:
        raise UserError(f"hidden={hidden} must be a share of the response's tokens or lines, above 0 and at most 1")
    return hidden


def with_holes(example: Example, holes: str, hidden: float) -> Item:
    """The example with a share of its response hidden."""
    if holes != "line":
        return Item(example.id, example.prompt, example.response, hidden, contiguous=holes == "span")
    lines = [line for line in _LINE.findall(example.response) if line]
    count = max(1, round(hidden * len(lines)))
    first = random.Random(example.id).randint(0, len(lines) - count)
    pieces = lines[:first], lines[first : first + count], lines[first + count :]
    parts = tuple(("".join(piece), i == 1) for i, piece in enumerate(pieces) if piece)
    return Item(example.id, example.prompt, parts=parts, exact=True)


def filled(item: Item, answer: str) -> str:
    """The whole response. `answer` is that already, or for an item of parts what stands in the one that is hidden."""
    return "".join(answer if hidden else text for text, hidden in item.parts) if item.parts else answer


def equations_hold(text: str) -> bool:
    """Whether `text` has an equation `a op b = c` or `a op b op c = d` of whole numbers, all of them are true, and each
    "=" is in one: what cannot be read as an equation is not right."""
    equations = _EQUATION.findall(text)
    if not 0 < len(equations) == text.count("="):
        return False
    return all(_value(left) == int(right) for left, right in equations)


def _value(expression: str) -> Fraction | None:
    """Of numbers joined by + - * /, products first; None for a division by zero."""
    first, *rest = expression.split()
    total, product = Fraction(0), Fraction(int(first))
    for operator, number in zip(rest[::2], map(int, rest[1::2]), strict=True):
        if operator in "+-":
            total, product = total + product, Fraction(number if operator == "+" else -number)
        elif operator == "*":
            product *= number
        elif not number:
            return None
        else:
            product /= number
    return total + product


def _described(holes: str, hidden: float) -> dict[str, Any]:
    which = {"random": "tokens hidden", "span": "tokens hidden, in one span", "line": "lines hidden, in one piece"}
    return {
        "prompt": f"the task and its reference response with {hidden:g} of the {which[holes]}",
        "gold_length": True,  # the number of tokens that the reference has is given
    }
