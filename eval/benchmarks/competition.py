"""MATH and MATH-500 (Hendrycks et al. 2021, arXiv 2103.03874; Lightman et al. 2023, arXiv 2305.20050).

Prompt: zero-shot, the user turn is the problem and a request for `\\boxed`. With shots, and for raw completion, the
layout is that of lm-eval's minerva_math ("Problem:", "Solution:"), with worked examples from the MATH train set: those
with the smallest digest of their text (so that file and Hub yield the same ones), without drawings, and never the
problem that train and test share. Verdicts: "equivalent" asks math-verify about the last `\\boxed` of the answer,
"exact match" compares the two as text without white space, "undecided" means that math-verify did not finish, which
counts as not equivalent. MATH-500 is a subset of the MATH test set: Math can leave it out, so that running both counts
no problem twice.
"""

import hashlib
import importlib.metadata
from typing import Any, Unpack

from data.rows import DataRow, Rows, math500_rows, math_rows, math_training_rows, same_problem
from dspec.errors import UserError
from eval.benchmarks.base import Extent, FileBenchmark, Item, check_switch, check_whole
from eval.benchmarks.equivalence import Equivalence

_REQUEST = "Work it out step by step and give the final answer as \\boxed{...}."


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`, with matched braces; None without a closed one."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    return _braced(rest) if rest.startswith("{") else (rest[:1].strip("$.") or None)


def _braced(text: str) -> str | None:
    """The content of the brace that `text` starts with; `\\{` and `\\}` do not count as braces."""
    depth = i = 0
    while i < len(text):
        if text[i] == "\\":
            i += 1
        else:
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[1:i]
        i += 1
    return None


def digest(problem: str) -> str:
    """A problem's id, the same for every copy of it."""
    return hashlib.sha256(same_problem(problem).encode()).hexdigest()[:12]


def _framed(row: DataRow) -> str:
    return f"Problem:\n{row['problem']}\n\nSolution:"


def _worked(shots: int) -> str:
    rows = [row for row in math_training_rows().rows if "[asy]" not in row["problem"] + row["solution"]]
    rows = sorted(rows, key=lambda row: digest(row["problem"]))[:shots]
    return "".join(f"{_framed(row)} {row['solution'].strip()}\n\n" for row in rows)


class Settings(Extent):
    """Settings of both competitions."""

    shots: int
    chat: bool
    timeout_s: float


class _Competition(FileBenchmark):
    quality = "equivalent"

    def __init__(
        self, data: Rows, *, name: str, shots: int, chat: bool, timeout_s: float, **extent: Unpack[Extent]
    ) -> None:
        check_whole(0, shots=shots)
        self.chat = chat
        self._framed = shots > 0 or not chat
        self.stop: tuple[str, ...] = ("Problem:",) if self._framed else ()
        self._worked = _worked(shots) if shots else ""
        self._same = Equivalence(timeout_s=timeout_s)
        how = f"{shots} worked examples of the train set, lm-eval's layout" if self._framed else f"problem; {_REQUEST}"
        super().__init__(data, key=lambda _, r: f"{name}/{digest(r['problem'])}", describes=how, **extent)
        self._gold = {id_: _reference(row) for id_, row in self._rows.items()}

    def source(self) -> dict[str, Any]:
        return {**super().source(), "math_verify": importlib.metadata.version("math-verify")}

    def prompt(self, row: DataRow) -> str:
        return self._worked + _framed(row) if self._framed else f"{row['problem']}\n\n{_REQUEST}"

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        gold, boxed = self._gold[item.id], last_boxed(answer)
        exact = boxed is not None and "".join(gold.split()) == "".join(boxed.split())
        same = boxed is not None and self._same(gold, boxed)
        return {"equivalent": same is True, "exact match": exact, "undecided": same is None}


def _reference(row: DataRow) -> str:
    """The answer, from its own field (MATH-500) or the box in the solution (MATH)."""
    reference = row["answer"] if "answer" in row else last_boxed(row["solution"])
    if reference is None:
        raise UserError(f"no \\boxed answer in the solution of {row['problem'][:60]!r}; fix or delete that row")
    return str(reference)


class Math(_Competition):
    """The 5,000 test problems, or the 4,500 that are not in MATH-500."""

    def __init__(self, *, without_math500: bool, **settings: Unpack[Settings]) -> None:
        check_switch(without_math500=without_math500)
        data = _without(math_rows("test"), math500_rows()) if without_math500 else math_rows("test")
        super().__init__(data, name="math/test", **settings)


class Math500(_Competition):
    def __init__(self, **settings: Unpack[Settings]) -> None:
        super().__init__(math500_rows(), name="math500", **settings)


def _without(data: Rows, left_out: Rows) -> Rows:
    gone = {same_problem(row["problem"]) for row in left_out.rows}
    kept = [row for row in data.rows if same_problem(row["problem"]) not in gone]
    return Rows(kept, f"{data.origin} less {left_out.origin}", data.sha256)
