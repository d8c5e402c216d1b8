"""GSM8K test questions, zero-shot chat (Cobbe et al. 2021; data MIT, openai/grade-school-math).

The user turn is the question alone; the answer is the last number of the response ("flexible" extraction), compared
with the number after `####` in the reference.
"""

import re
from typing import Any

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
    chat = True
    stop = ()

    def __init__(self, *, count: int, max_new_tokens: int) -> None:
        self.max_new_tokens = max_new_tokens
        rows = load_rows("gsm8k_test", hub=("openai/gsm8k", "main", "test"))[:count]
        self._rows = {f"gsm8k/test/{i:05d}": row for i, row in enumerate(rows)}

    def items(self) -> list[Item]:
        return [Item(name, row["question"]) for name, row in self._rows.items()]

    def score(self, item: Item, answer: str) -> dict[str, bool]:
        expected = last_number(self._rows[item.id]["answer"].split("####")[-1])
        return {self.quality: last_number(answer) == expected}

    def source(self) -> dict[str, Any]:
        return {"origin": "gsm8k_test", "rows": len(self._rows)}
