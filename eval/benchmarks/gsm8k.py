"""GSM8K test questions (Cobbe et al. 2021, arXiv 2110.14168; data MIT, openai/grade-school-math).

Prompt: zero-shot, the user turn is the question alone. With shots, and for raw completion, the layout is that of
lm-eval's task gsm8k ("Question:", "Answer:", blank lines between), with the first rows of the train split as worked
examples. Verdicts are those of lm-eval's two filters and its exact match: "strict" reads what follows the first
`#### `, "flexible" the last number of the answer; both are compared as text without commas, dollar signs and a final
full stop. Strict is mostly False zero-shot, since nothing asks for `####`.
"""

import re
from typing import Unpack

from data.rows import DataRow, gsm8k_rows
from dspec.errors import UserError
from eval.benchmarks.base import Extent, FileBenchmark, Item, check_whole

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


def normalise(number: str) -> str:
    """A number as text for comparison: without commas, dollar signs, what precedes `#### ` and a final full stop."""
    text = number.replace(",", "").replace("$", "")
    return re.sub(r"\.$", "", re.sub(r"(?s).*#### ", "", text))


def strict_number(text: str) -> str | None:
    """The number after the first `#### `, or None."""
    found = _STRICT.search(text)
    return normalise(found[1]) if found else None


def flexible_number(text: str) -> str | None:
    """The last number of a text, or None."""
    found = _FLEXIBLE.findall(text)
    return normalise(found[-1]) if found else None


class Gsm8k(FileBenchmark):
    quality = "flexible exact match"

    def __init__(self, *, shots: int, chat: bool, **extent: Unpack[Extent]) -> None:
        check_whole(0, shots=shots)
        self.chat = chat
        self._framed = shots > 0 or not chat
        self.stop: tuple[str, ...] = ("Question:",) if self._framed else ()
        worked = gsm8k_rows("train").rows[:shots] if shots else []
        if len(worked) < shots:
            raise UserError(f"shots={shots}: the train split has {len(worked)} rows")
        self._worked = "".join(f"{_framed(row)} {row['answer']}\n\n" for row in worked)
        how = f"{shots} worked examples of the train split, lm-eval's layout" if self._framed else "the question alone"
        key = "gsm8k/test/{:05d}".format
        super().__init__(gsm8k_rows("test"), key=lambda i, _: key(i), describes=how, **extent)

    def prompt(self, row: DataRow) -> str:
        return self._worked + _framed(row) if self._framed else str(row["question"])

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        expected = normalise(self._rows[item.id]["answer"])
        strict, flexible = strict_number(answer), flexible_number(answer)
        return {"strict exact match": strict == expected, "flexible exact match": flexible == expected}


def _framed(row: DataRow) -> str:
    return f"Question: {row['question']}\nAnswer:"
