"""GSM8K test questions, zero-shot chat (Cobbe et al. 2021; data MIT, openai/grade-school-math).

The user turn is the question alone; the answer is the last number of the response ("flexible" extraction), compared
with the number after `####` in the reference.
"""

import re
from collections.abc import Sequence

from data.prompts import load_rows
from eval.benchmarks.base import Item

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """The last number in a text, thousands separators removed; None when there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


class Gsm8k:
    """The first `count` test questions."""

    quality = "flexible exact match"

    def __init__(self, *, count: int, max_new_tokens: int) -> None:
        self.max_new_tokens = max_new_tokens
        self._rows = load_rows("gsm8k_test", hub=("openai/gsm8k", "main", "test"))[:count]

    def items(self) -> list[Item]:
        return [Item(f"gsm8k/test/{i:05d}", row["question"]) for i, row in enumerate(self._rows)]

    def score(self, answers: Sequence[str]) -> list[bool]:
        expected = [last_number(row["answer"].split("####")[-1]) for row in self._rows]
        return [last_number(text) == number for text, number in zip(answers, expected, strict=True)]
