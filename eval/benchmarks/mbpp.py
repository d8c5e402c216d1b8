"""MBPP, test split (task ids 11 to 510), few-shot or chat (Austin et al. 2021, arXiv 2108.07732; data CC-BY-4.0).

Raw: prompt, stop string and layout are read at run time from the task "mbpp" of the installed lm-eval, its worked
examples (ids 2, 3 and 4, as in the paper) from the data. Chat: the problem, a request for a code block (our own
wording) and the three tests, without worked examples. The program is the answer up to the stop string, or its first
code block if it has one. It is judged by the problem's set-up code followed by its tests.
"""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import yaml
from jinja2 import Template

from data.rows import DataRow, Hub, Rows, load_rows
from dspec.errors import UserError
from eval.benchmarks.base import Extent, FileBenchmark, Item, check_whole
from eval.benchmarks.code import code_block, code_prompt, cut
from eval.sandbox.judge import Judge, function_under_test

_WORKED = (2, 3, 4)
_TEST = range(11, 511)
_ASK = "Answer with the whole function, and the imports that it needs, in one code block. It must pass these tests:"


class _Loader(yaml.SafeLoader):
    """Reads a task of lm-eval without importing the functions that it names."""


_Loader.add_constructor("!function", lambda loader, node: node.value)


def lm_eval_task(name: str) -> Mapping[str, Any]:
    """A task of the installed lm-eval, read from its YAML file without importing lm-eval."""
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.origin is None:
        raise UserError(f"the prompts of {name} are read from lm-eval: run `pip install 'dspec[lm-eval]'`")
    path = Path(found.origin).parent / "tasks" / name / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"the installed lm-eval has no {path}; run `pip install 'dspec[lm-eval]'`")
    return dict(yaml.load(path.read_text("utf-8"), _Loader))


class Mbpp(FileBenchmark):
    quality = "pass@1"

    def __init__(self, *, judge: Judge, shots: int, chat: bool, **extent: Unpack[Extent]) -> None:
        check_whole(0, shots=shots)
        if shots > len(_WORKED):
            raise UserError(f"shots={shots}: MBPP has {len(_WORKED)} worked examples; use 0 to {len(_WORKED)}")
        if chat and shots:
            raise UserError(f"shots={shots}: MBPP as chat has no worked examples; add benchmark.mbpp.shots=0")
        task = lm_eval_task("mbpp")
        self.chat, self._judge = chat, judge
        self.stop: tuple[str, ...] = () if chat else tuple(task["generation_kwargs"]["until"])
        self._text = Template(task["doc_to_text"], keep_trailing_newline=True)
        data = _all_splits()
        by_id = {row["task_id"]: row for row in data.rows}
        if missing := [n for n in _WORKED[:shots] if n not in by_id]:
            raise UserError(f"{data.origin} has no task {missing[0]}, a worked example; fetch it again or set shots=0")
        target = Template(task["doc_to_target"], keep_trailing_newline=True)
        shown = [by_id[n] for n in _WORKED[:shots]]
        self._worked = "".join(f"{self._text.render(row)}{target.render(row, is_fewshot=True)}\n\n" for row in shown)
        tested = Rows([row for row in data.rows if row["task_id"] in _TEST], data.origin, data.sha256)
        describes = f"chat; {_ASK}" if chat else f"raw text, lm-eval's layout, {shots} worked examples"
        key = "mbpp/{:03d}".format
        super().__init__(tested, key=lambda _, r: key(r["task_id"]), describes=describes, **extent)

    def prompt(self, row: DataRow) -> str:
        if self.chat:
            return code_prompt("\n".join(row["test_list"]), ask=f"{row['text'].strip()} {_ASK}")
        return self._worked + str(self._text.render(row))

    def program(self, answer: str) -> str:
        text = cut(answer, self.stop)
        block = code_block(text)
        return text if block is None else block

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        row = self._rows[item.id]
        program = f"{self.program(answer)}\n{row['test_setup_code']}\n"  # defines what program and tests share
        test = "\n".join(row["test_list"])
        name = function_under_test(row["code"], test)  # may be that of a builtin
        return {self.quality: self._judge.passes(program=program, test=test, entry_point=name).passed}

    def source(self) -> dict[str, Any]:
        judged_by = {"lm_eval": importlib.metadata.version("lm-eval"), "sandbox": self._judge.level}
        return {**super().source(), **judged_by}


def _all_splits() -> Rows:
    hub = Hub("google-research-datasets/mbpp", ["full"], "prompt+test")
    return load_rows("mbpp", hub=hub, fields=("task_id", "text", "code", "test_list", "test_setup_code"))
