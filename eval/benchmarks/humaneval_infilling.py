"""HumanEval infilling (Bavarian et al. 2022, arXiv 2207.14255; data MIT, openai/human-eval-infilling) for any-subset
models, which see the text on both sides of the gap.

Raw text, to the character: the text before the gap, the gap and the text after it are tokenised apart, so that filling
in changes nothing around it. A decoder is told how many tokens the reference has in the gap (the gold length: results
carry it in their source). The judged program is the whole text with the gap filled in; "exact match" compares it with
the reference's. Texts longer than the model's context are left out and counted (eval/evaluate.py).

`left_to_right` is the baseline: the same lines and tests, but the model sees only the text before the gap, writes from
left to right at whatever length, and is cut at the end of its first line. Any decoder can do that.

The released code of AS-ARM drops the first character of each completion and gives an empty one where nothing follows
the gap (156 of the 1,033 lines): its pass@1 cannot be compared with this one.
"""

from typing import Any, Unpack

from data.rows import DataRow, Hub, check_texts, load_rows
from dspec.errors import UserError
from eval.benchmarks.base import Extent, FileBenchmark, Item, check_switch
from eval.benchmarks.code import cut
from eval.benchmarks.humaneval import FIELDS, passes_check, task_id
from eval.sandbox.judge import Judge

_HUB = {
    "single_line": "HumanEval-SingleLineInfilling",
    "multi_line": "HumanEval-MultiLineInfilling",
    "random_span_light": "HumanEval-RandomSpanInfillingLight",
}


class HumanEvalInfilling(FileBenchmark):
    quality = "pass@1"
    chat = False

    def __init__(self, *, judge: Judge, split: str, left_to_right: bool, **extent: Unpack[Extent]) -> None:
        """`split`: single_line | multi_line | random_span_light."""
        check_switch(left_to_right=left_to_right)
        if split not in _HUB:
            raise UserError(f"split={split} is unknown; use one of {', '.join(_HUB)}")
        if left_to_right and split != "single_line":
            raise UserError(
                f"left_to_right cuts an answer at the end of its line: it needs split=single_line, not {split}"
            )
        self._judge, self._left_to_right = judge, left_to_right
        self.stop: tuple[str, ...] = ("\n",) if left_to_right else ()
        seen = "before the gap" if left_to_right else "on both sides of the gap"
        hub = Hub("loubnabnl/humaneval_infilling", [_HUB[split]], "test")
        fields = (*FIELDS, "suffix")
        data = check_texts(load_rows(f"humaneval_infilling_{split}", hub=hub, fields=fields), fields=fields)
        super().__init__(data, key=task_id, describes=f"the raw text {seen}", **extent)

    def prompt(self, row: DataRow) -> str:
        return str(row["prompt"])

    def items(self) -> list[Item]:
        if self._left_to_right:
            return super().items()
        return [Item(id_, self.prompt(row), parts=_parts(row), exact=True) for id_, row in self._rows.items()]

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        row, wanted = self._rows[item.id], str(self._rows[item.id]["canonical_solution"])
        filled = cut(answer, self.stop).rstrip() + "\n" if self._left_to_right else answer
        program, whole = ("".join((row["prompt"], gap, row["suffix"])) for gap in (filled, wanted))
        passed = passes_check(self._judge, program, row, trusted=whole)
        return {self.quality: passed, "exact match": filled == wanted}

    def source(self) -> dict[str, Any]:
        return {**super().source(), "sandbox": self._judge.level, "gold_length": not self._left_to_right}


def _parts(row: DataRow) -> tuple[tuple[str, bool], ...]:
    return (str(row["prompt"]), False), (str(row["canonical_solution"]), True), (str(row["suffix"]), False)
