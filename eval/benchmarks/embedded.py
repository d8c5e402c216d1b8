"""The embedded benchmarks: held-out word problems (seen and unseen templates) and Python functions."""

from typing import Any

from data.embedded.corpus import generate
from data.embedded.scoring import score_function, score_problem
from eval.benchmarks.base import Item


class Problems:
    """Word problems; right if the last `#### <integer>` is the answer."""

    quality = "exact match"
    chat = True
    stop = ()

    def __init__(self, *, count: int, unseen: bool, max_new_tokens: int, seed: int) -> None:
        """`unseen` takes the templates that occur in no training split."""
        self.max_new_tokens = max_new_tokens
        examples = generate(task="problems", split="test", count=count, seed=seed, unseen=unseen)
        self._examples = {e.id: e for e in examples}

    def items(self) -> list[Item]:
        return [Item(e.id, e.prompt) for e in self._examples.values()]

    def score(self, item: Item, answer: str) -> dict[str, bool]:
        return {self.quality: score_problem(answer, self._examples[item.id].answer)}

    def source(self) -> dict[str, Any]:
        return {"origin": "data/embedded, split test", "rows": len(self._examples)}


class Functions:
    """Python functions; right if all hidden unit tests pass (pass@1)."""

    quality = "pass@1"
    chat = True
    stop = ()

    def __init__(self, *, count: int, max_new_tokens: int, timeout_s: float, seed: int) -> None:
        self.max_new_tokens, self._timeout_s = max_new_tokens, timeout_s
        self._examples = {e.id: e for e in generate(task="functions", split="test", count=count, seed=seed)}

    def items(self) -> list[Item]:
        return [Item(e.id, e.prompt) for e in self._examples.values()]

    def score(self, item: Item, answer: str) -> dict[str, bool]:
        tests = self._examples[item.id].tests
        return {self.quality: score_function(item.prompt, answer, tests, timeout_s=self._timeout_s)}

    def source(self) -> dict[str, Any]:
        return {"origin": "data/embedded, split test", "rows": len(self._examples)}
