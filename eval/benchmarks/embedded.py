"""The embedded benchmarks: held-out word problems (seen and unseen templates) and Python functions."""

from collections.abc import Sequence

from data.embedded.corpus import generate
from data.embedded.scoring import FunctionItem, score_functions, score_problem
from eval.benchmarks.base import Item


class Problems:
    """Word problems; right if the last `#### <integer>` is the answer."""

    quality = "exact match"

    def __init__(self, *, count: int, unseen: bool, max_new_tokens: int, seed: int) -> None:
        """`unseen` takes the templates that occur in no training split."""
        self.max_new_tokens = max_new_tokens
        self._examples = generate(task="problems", split="test", count=count, seed=seed, unseen=unseen)

    def items(self) -> list[Item]:
        return [Item(e.id, e.prompt) for e in self._examples]

    def score(self, answers: Sequence[str]) -> list[bool]:
        return [score_problem(text, e.answer) for text, e in zip(answers, self._examples, strict=True)]


class Functions:
    """Python functions; right if all hidden unit tests pass (pass@1)."""

    quality = "pass@1"

    def __init__(self, *, count: int, max_new_tokens: int, timeout_s: float, seed: int) -> None:
        self.max_new_tokens, self._timeout_s = max_new_tokens, timeout_s
        self._examples = generate(task="functions", split="test", count=count, seed=seed)

    def items(self) -> list[Item]:
        return [Item(e.id, e.prompt) for e in self._examples]

    def score(self, answers: Sequence[str]) -> list[bool]:
        items = [FunctionItem(e.prompt, body, e.tests) for body, e in zip(answers, self._examples, strict=True)]
        return score_functions(items, timeout_s=self._timeout_s)
