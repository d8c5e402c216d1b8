"""HumanEval and its single-line infilling (Chen et al. 2021, arXiv 2107.03374; Bavarian et al. 2022, arXiv 2207.14255;
data MIT, openai/human-eval and openai/human-eval-infilling).

HumanEval. Prompt: the problem's own text, completed raw up to the stop strings of lm-eval's task, the program being
prompt + completion; or as chat, a request to complete the function in a code block (our own wording), the program being
the prompt (a function whose body is its docstring) followed by the block, which redefines it. Judged by its `check`.

Infilling. Decoders here write left to right. Raw: the model sees only the text before the missing line, and its first
line is taken: a lower bound on infilling, comparable between methods on one target, not with published infilling
scores. Chat: it sees both sides with the gap marked at the line's own indentation, which is added to an answer that
has none. The judged program is prefix + line + suffix; "exact match" compares the lines.
"""

from typing import Any, Unpack

from data.rows import DataRow, Hub, load_rows
from eval.benchmarks.base import Extent, FileBenchmark, Item
from eval.benchmarks.code import code_block, code_prompt, cut
from eval.sandbox.judge import Judge

_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_COMPLETE = "Complete this function. Answer with the whole function in one code block."
_FILL = "One line is missing where the comment says MISSING LINE. Answer with that line alone in one code block."
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")


def passes_check(judge: Judge, program: str, row: DataRow, *, trusted: str) -> bool:
    """Whether the program passes the problem's tests. `trusted` is source not written by the model, from which helper
    functions that some tests call are taken."""
    test, name = f"{row['test']}\ncheck({row['entry_point']})\n", row["entry_point"]
    return judge.passes(program=program, test=test, entry_point=name, trusted=trusted).passed


def task_id(_: int, row: DataRow) -> str:
    return str(row["task_id"])


class HumanEval(FileBenchmark):
    quality = "pass@1"

    def __init__(self, *, judge: Judge, chat: bool, **extent: Unpack[Extent]) -> None:
        self.chat, self._judge = chat, judge
        self.stop: tuple[str, ...] = () if chat else _STOP
        how = f"chat; {_COMPLETE}" if chat else "raw completion of the problem's text"
        hub = Hub("openai/openai_humaneval", ["openai_humaneval"], "test")
        data = load_rows("humaneval", hub=hub, fields=FIELDS)
        super().__init__(data, key=task_id, describes=how, **extent)

    def prompt(self, row: DataRow) -> str:
        return code_prompt(row["prompt"], ask=_COMPLETE) if self.chat else str(row["prompt"])

    def program(self, item: Item, answer: str) -> str:
        """The program to judge for an answer."""
        prompt = str(self._rows[item.id]["prompt"])
        if self.chat:
            block = code_block(answer)
            return f"{prompt}\n{answer if block is None else block}\n"
        return prompt + cut(answer, self.stop)

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        row = self._rows[item.id]
        return {self.quality: passes_check(self._judge, self.program(item, answer), row, trusted=row["prompt"])}

    def source(self) -> dict[str, Any]:
        return {**super().source(), "sandbox": self._judge.level}


class Infilling(FileBenchmark):
    quality = "pass@1"

    def __init__(self, *, judge: Judge, chat: bool, **extent: Unpack[Extent]) -> None:
        self.chat, self._judge = chat, judge
        self.stop: tuple[str, ...] = () if chat else ("\n",)
        how = (
            f"chat, both sides of the gap; {_FILL}" if chat else "raw completion of the prefix; the suffix is not seen"
        )
        data = load_rows("humaneval_infilling_single_line", hub=None, fields=(*FIELDS, "suffix"))
        super().__init__(data, key=task_id, describes=how, **extent)

    def prompt(self, row: DataRow) -> str:
        if not self.chat:
            return str(row["prompt"])
        return code_prompt(f"{row['prompt']}{_indent(row)}# MISSING LINE\n{row['suffix']}", ask=_FILL)

    def line(self, item: Item, answer: str) -> str:
        """The line to judge for an answer, without its line end."""
        if not self.chat:
            return cut(answer, self.stop).rstrip()
        lines = (code_block(answer) or answer).splitlines()
        first = next((line.rstrip() for line in lines if line.strip()), "")
        return first if first[:1].isspace() else _indent(self._rows[item.id]) + first

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        row, line = self._rows[item.id], self.line(item, answer)
        program = f"{row['prompt']}{line}\n{row['suffix']}"
        whole = row["prompt"] + row["canonical_solution"] + row["suffix"]
        passed = passes_check(self._judge, program, row, trusted=whole)
        return {self.quality: passed, "exact match": line == row["canonical_solution"].rstrip()}

    def source(self) -> dict[str, Any]:
        return {**super().source(), "sandbox": self._judge.level}


def _indent(row: DataRow) -> str:
    line = str(row["canonical_solution"])
    return line[: len(line) - len(line.lstrip())]
