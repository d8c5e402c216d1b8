"""The embedded tasks with holes in their reference responses: some of the tokens, drawn at random, are to be filled in.

A decoder is told how long the response is and where the holes are (the gold length: results carry it in their
source). A problem is right if every equation of the filled response holds and its answer is the reference's; a function
if it passes its hidden tests.
"""

import re
from typing import Any

from dspec.errors import UserError
from eval.benchmarks.base import Item
from eval.benchmarks.embedded import Functions, Problems, solves
from eval.sandbox.judge import Judge

_EQUATION = re.compile(r"(-?\d+) ([-+*/]) (-?\d+) = (-?\d+)")


class FilledProblems(Problems):
    """Word problems; right if all equations hold and the answer is the reference's."""

    quality = "consistent"

    def __init__(self, *, count: int, hidden: float, seed: int) -> None:
        """`hidden` is the share of the response's tokens that are holes."""
        super().__init__(count=count, unseen=False, max_new_tokens=1, seed=seed)
        self._hidden = check_share(hidden)

    def items(self) -> list[Item]:
        return [Item(e.id, e.prompt, e.response, self._hidden) for e in self._examples.values()]

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        right = solves(answer, self._examples[item.id].answer) and equations_hold(answer)
        return {self.quality: right}

    def source(self) -> dict[str, Any]:
        return super().source() | _described(self._hidden)


class FilledFunctions(Functions):
    """Python functions; right if the filled body passes all hidden tests."""

    def __init__(self, *, judge: Judge, count: int, hidden: float, seed: int) -> None:
        super().__init__(judge=judge, count=count, max_new_tokens=1, seed=seed)
        self._hidden = check_share(hidden)

    def items(self) -> list[Item]:
        return [Item(e.id, e.prompt, e.response, self._hidden) for e in self._examples.values()]

    def source(self) -> dict[str, Any]:
        return super().source() | _described(self._hidden)


def check_share(hidden: float) -> float:
    """Raises UserError for a share that leaves nothing to fill in, or nothing to see."""
    if not 0 < hidden <= 1:
        raise UserError(f"hidden={hidden} must be a share of the response's tokens, above 0 and at most 1")
    return hidden


def equations_hold(text: str) -> bool:
    """Whether there is an equation `a op b = c` of whole numbers in `text`, and all of them are true."""
    found = _EQUATION.findall(text)
    return bool(found) and all(_holds(int(a), op, int(b), int(c)) for a, op, b, c in found)


def _holds(a: int, op: str, b: int, c: int) -> bool:
    if op == "/":
        return b != 0 and a == b * c
    return c == {"+": a + b, "-": a - b, "*": a * b}[op]


def _described(hidden: float) -> dict[str, Any]:
    return {
        "prompt": f"the task and its reference response with {hidden:g} of the tokens hidden",
        "gold_length": True,  # the number of tokens that the reference has is given
    }
