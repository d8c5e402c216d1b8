"""The embedded benchmarks: held-out word problems (seen and unseen templates) and Python functions.

Both prompt with the task's own text; data and scores come from data/embedded, nothing is read from disk.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from data.embedded.corpus import Example, generate
from data.embedded.scoring import score_function, score_problem
from eval.benchmarks.base import Item


class _Embedded:
    chat = True
    stop: tuple[str, ...] = ()

    def __init__(self, examples: Sequence[Example], *, max_new_tokens: int) -> None:
        self._examples = {example.id: example for example in examples}
        self.max_new_tokens = max_new_tokens

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


class Problems(_Embedded):
    """Word problems; right if the last `#### <integer>` is the answer."""

    quality = "exact match"

    def __init__(self, *, count: int, unseen: bool, max_new_tokens: int, seed: int) -> None:
        """`unseen` takes the templates that occur in no training split."""
        examples = generate(task="problems", split="test", count=count, seed=seed, unseen=unseen)
        super().__init__(examples, max_new_tokens=max_new_tokens)

    def score(self, item: Item, answer: str) -> dict[str, bool]:
        return {self.quality: score_problem(answer, self._examples[item.id].answer)}


class Functions(_Embedded):
    """Python functions; right if all hidden unit tests pass (pass@1)."""

    quality = "pass@1"

    def __init__(self, *, count: int, max_new_tokens: int, timeout_s: float, seed: int) -> None:
        self._timeout_s = timeout_s
        examples = generate(task="functions", split="test", count=count, seed=seed)
        super().__init__(examples, max_new_tokens=max_new_tokens)

    def score(self, item: Item, answer: str) -> dict[str, bool]:
        tests = self._examples[item.id].tests
        return {self.quality: score_function(item.prompt, answer, tests, timeout_s=self._timeout_s)}
