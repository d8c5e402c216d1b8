"""The embedded benchmarks: held-out word problems (seen and unseen templates) and Python functions.

Figures are reported on the corpus's split `test`; settings are chosen on other prompts, those of `calibration`.

Both prompt with the task's own text; the data comes from data/embedded, nothing is read from disk. A problem is correct
if its last `#### <integer>` is the answer. A function is model output: if it passes a syntax whitelist it is judged
like any other program, by hidden tests in the sandbox; on machines that cannot contain programs, under limits alone.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from decimal import Decimal
from typing import Any

from data.embedded.corpus import generate
from dspec.errors import UserError
from eval.benchmarks.base import Item, Scored, check_switch, check_whole
from eval.benchmarks.whitelist import function_name
from eval.sandbox.judge import Judge

_ANSWER = re.compile(r"####[ \t]*(-?\d[\d,]*)")


_SPLITS = ("test", "calibration")


class Embedded(Scored):
    """Held-out examples of one task of the embedded corpus, as user turns."""

    chat = True
    stop: tuple[str, ...] = ()

    def __init__(self, *, task: str, split: str, unseen: bool, count: int, seed: int, max_new_tokens: int) -> None:
        super().__init__(max_new_tokens=max_new_tokens)
        check_whole(1, count=count)
        check_whole(0, seed=seed)
        check_switch(unseen=unseen)
        if split not in _SPLITS:
            raise UserError(f"split={split} has no held-out prompts; use one of {', '.join(_SPLITS)}")
        if unseen and split != "test":
            raise UserError(f"unseen templates are in split=test only, not in {split}")
        examples = generate(task=task, split=split, count=count, seed=seed, unseen=unseen)
        self._examples = {example.id: example for example in examples}

    def items(self) -> list[Item]:
        return [Item(e.id, e.prompt) for e in self._examples.values()]

    def source(self) -> dict[str, Any]:
        text = json.dumps([asdict(e) for e in self._examples.values()], sort_keys=True)
        checksum = hashlib.sha256(text.encode()).hexdigest()
        return {
            "origin": "data/embedded, generated",
            "sha256": checksum,
            "rows": len(self._examples),
            "prompt": "the task",
        }


class Problems(Embedded):
    """Word problems; correct if the last `#### <integer>` is the answer."""

    quality = "exact match"

    def __init__(self, *, split: str, count: int, unseen: bool, max_new_tokens: int, seed: int) -> None:
        """`unseen` uses the templates that occur in no training split."""
        super().__init__(
            task="problems", split=split, unseen=unseen, count=count, seed=seed, max_new_tokens=max_new_tokens
        )

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        return {self.quality: solves(answer, self._examples[item.id].answer)}


class Functions(Embedded):
    """Python functions; correct if all hidden unit tests pass (pass@1)."""

    quality = "pass@1"

    def __init__(self, *, judge: Judge, split: str, count: int, max_new_tokens: int, seed: int) -> None:
        self._judge = judge
        super().__init__(
            task="functions", split=split, unseen=False, count=count, seed=seed, max_new_tokens=max_new_tokens
        )

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        return {self.quality: passes(self._judge, item.prompt, answer, self._examples[item.id].tests)}

    def source(self) -> dict[str, Any]:
        return {**super().source(), "sandbox": f"whitelist of syntax+{self._judge.level}"}


class Stories(Embedded):
    """Short stories to write; no verdict."""

    quality = ""

    def __init__(self, *, split: str, count: int, max_new_tokens: int, seed: int) -> None:
        super().__init__(
            task="stories", split=split, unseen=False, count=count, seed=seed, max_new_tokens=max_new_tokens
        )

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        return {}


def solves(text: str, answer: str) -> bool:
    """Whether the last ``#### <integer>`` of ``text`` is ``answer``; thousands may have commas."""
    found = _ANSWER.findall(text)
    return bool(found) and Decimal(found[-1].replace(",", "")) == Decimal(answer)


def passes(judge: Judge, prompt: str, body: str, tests: Sequence[str]) -> bool:
    """Whether ``prompt`` completed by ``body`` is one function on the whitelist and passes every test."""
    program = f"{prompt}\n{body}\n"
    name = function_name(program)
    if name is None or not tests:
        return False
    return judge.passes(program=program, test="\n".join(tests), entry_point=name).passed
