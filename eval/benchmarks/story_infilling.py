"""Short stories of five sentences of which some are hidden (arXiv 2504.20456, table 3), scored by ROUGE F1.

A decoder is told how many tokens the hidden sentences have (the gold length; the results say so), and sees all others,
left and right. ROUGE-1, -2 and -L (rouge-score with its defaults: no stemming) compare what it wrote with the hidden
sentences alone.
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from data.rows import Rows
from data.story_rows import SENTENCES, fables, roc_stories
from dspec.errors import UserError
from eval.benchmarks.base import FileBenchmark, Item

_ROUGE = ("rouge1", "rouge2", "rougeL")


class _Stories(FileBenchmark):
    quality = ""
    chat = False
    stop: tuple[str, ...] = ()

    def __init__(
        self, data: Rows, *, name: str, hidden_sentences: Sequence[int], limit: int | None, seed: int | None
    ) -> None:
        """`hidden_sentences` counts from 1."""
        self._hidden = _check_hidden(hidden_sentences)
        _ = self._scorer  # so that it is asked for before anything is decoded
        super().__init__(
            data,
            key=lambda i, _: f"{name}/{i:04d}",
            describes=f"five sentences, hidden: {', '.join(map(str, self._hidden))}",
            limit=limit,
            seed=seed,
            max_new_tokens=1,
        )

    @cached_property
    def _scorer(self) -> Any:
        """Raises UserError if rouge-score is not installed."""
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError as error:
            raise UserError("ROUGE needs rouge-score: pip install -e '.[infill]'") from error
        logging.getLogger("absl").setLevel(logging.WARNING)  # it tells that it takes its default tokenizer
        return RougeScorer(list(_ROUGE))

    def prompt(self, row: dict[str, Any]) -> str:
        return " ".join(row["sentences"])

    def items(self) -> list[Item]:
        return [Item(id_, "", parts=self._parts(row["sentences"])) for id_, row in self._rows.items()]

    def _parts(self, sentences: Sequence[str]) -> tuple[tuple[str, bool], ...]:
        """The space before a sentence belongs to it."""
        return tuple((f" {s}" if i > 1 else s, i in self._hidden) for i, s in enumerate(sentences, 1))

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        return {}

    def measured(self, item: Item, answer: str) -> dict[str, float]:
        wanted = "".join(text for text, hidden in item.parts if hidden)
        return {name: score.fmeasure for name, score in self._scorer.score(wanted, answer).items()}

    def source(self) -> dict[str, Any]:
        return super().source() | {"gold_length": True}


class RocStories(_Stories):
    """ROCStories, from the user's file."""

    def __init__(self, *, hidden_sentences: Sequence[int], limit: int | None, seed: int | None) -> None:
        super().__init__(roc_stories(), name="rocstories", hidden_sentences=hidden_sentences, limit=limit, seed=seed)


class Fables(_Stories):
    """Pieces of Aesop's fables, which stand in where there is no ROCStories."""

    def __init__(self, *, hidden_sentences: Sequence[int], limit: int | None, seed: int | None) -> None:
        super().__init__(fables(), name="fables", hidden_sentences=hidden_sentences, limit=limit, seed=seed)


def _check_hidden(hidden: Sequence[int]) -> list[int]:
    """Raises UserError unless these are some of the sentences, and not all."""
    numbers = [hidden] if isinstance(hidden, int | str) else list(hidden)
    right = all(type(i) is int and 1 <= i <= SENTENCES for i in numbers) and 1 <= len(set(numbers)) < SENTENCES
    if not right or len(set(numbers)) < len(numbers):
        raise UserError(
            f"hidden_sentences={numbers} must name some of the sentences 1 to {SENTENCES}, and not all, such as [3] or "
            "[2,3,4]"
        )
    return sorted(numbers)
