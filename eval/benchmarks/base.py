"""The benchmark protocol, and the common base of benchmarks with one data file. Knows no model and no tokenizer."""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, TypeVar

from data.rows import DataRow, Rows
from dspec.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    id: str
    prompt: str  # text of the user turn (chat), or raw text to complete
    response: str | None = None  # infilling: the reference, of which some tokens are hidden; None: all is to be written
    hidden: float = 0.0  # the share of its tokens that are
    length: int | None = None  # only the first so many tokens of the response are used; None: all
    left_to_right: bool = False  # the hidden tokens are the last ones, not random ones
    contiguous: bool = False  # the hidden tokens are neighbours
    parts: tuple[tuple[str, bool], ...] = ()  # infilling, in place of a response: consecutive texts, True: hidden whole
    exact: bool = False  # the tokens of the parts must give their texts back to the character

    @property
    def infills(self) -> bool:
        """Whether it asks for the hidden part of a text, and not for all that follows the prompt."""
        return self.response is not None or bool(self.parts)


class Benchmark(Protocol):
    """Prompts, verdicts on answers, and their provenance; knows no model."""

    quality: str  # name of the headline verdict, such as "exact match"; "" if there is none
    chat: bool  # True: the prompt goes through the target's chat template; False: it is completed as raw text
    stop: tuple[str, ...]  # strings that end an answer; text and tokens are cut before the first of them
    max_new_tokens: int

    def items(self) -> list[Item]: ...

    def score(self, item: Item, answer: str) -> dict[str, bool]:
        """Verdicts by name, including `quality`; empty if answers are not judged."""
        ...

    def continuous_scores(self, item: Item, answer: str) -> dict[str, float]:
        """Scores by name that are no verdicts, such as ROUGE; an answer may lack one that is not defined for it."""
        ...

    def source(self) -> dict[str, Any]:
        """Provenance, JSON-ready: origin and sha256 of the data, number of rows used, a description of the prompt."""
        ...


def check_whole(least: int, /, **settings: Any) -> None:
    """Raises UserError for a setting that is not an integer, or less than `least`."""
    for name, value in settings.items():
        if type(value) is not int or value < least:
            raise UserError(f"{name}={value} must be an integer, at least {least}")


def check_switch(**settings: Any) -> None:
    """Raises UserError for a setting that is neither true nor false: any string would otherwise count as true."""
    for name, value in settings.items():
        if not isinstance(value, bool):
            raise UserError(f"{name}={value} must be true or false")


def subset(rows: Sequence[T], *, limit: int | None, seed: int | None) -> list[T]:
    """The first `limit` rows, or with a seed that many at random, in their original order; None takes all."""
    if seed is not None:
        check_whole(0, seed=seed)
    if limit is None:
        return list(rows)
    check_whole(1, limit=limit)
    if limit >= len(rows) or seed is None:
        return list(rows[:limit])
    return [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), limit))]


class Scored:
    """Caches verdicts and scores, so that equal answers to an item are judged once: lossless decoders give the same
    text."""

    def __init__(self, *, max_new_tokens: int) -> None:
        check_whole(1, max_new_tokens=max_new_tokens)
        self.max_new_tokens = max_new_tokens
        self._verdicts: dict[tuple[str, str], dict[str, bool]] = {}
        self._measured: dict[tuple[str, str], dict[str, float]] = {}

    def verdicts(self, item: Item, answer: str) -> dict[str, bool]:
        """The uncached `score`."""
        raise TypeError(f"{type(self).__name__} has no verdicts")

    def score(self, item: Item, answer: str) -> dict[str, bool]:
        if (item.id, answer) not in self._verdicts:
            self._verdicts[item.id, answer] = self.verdicts(item, answer)
        return dict(self._verdicts[item.id, answer])

    def measured(self, item: Item, answer: str) -> dict[str, float]:
        """The uncached `continuous_scores`."""
        return {}

    def continuous_scores(self, item: Item, answer: str) -> dict[str, float]:
        if (item.id, answer) not in self._measured:
            self._measured[item.id, answer] = self.measured(item, answer)
        return dict(self._measured[item.id, answer])


class Extent(TypedDict):
    """How much of a data file is used, and how long answers may be: settings of all file benchmarks."""

    limit: int | None
    seed: int | None
    max_new_tokens: int


class FileBenchmark(Scored):
    """Items of one data file, each with its row."""

    chat: bool

    def __init__(
        self,
        data: Rows,
        *,
        key: Callable[[int, DataRow], str],
        describes: str,
        limit: int | None,
        seed: int | None,
        max_new_tokens: int,
    ) -> None:
        """`key` maps a row's index and the row to its id; `describes` is a description of the prompt in words."""
        super().__init__(max_new_tokens=max_new_tokens)
        check_switch(chat=self.chat)
        self._data, self._describes = data, describes
        self._all = {key(i, row): row for i, row in enumerate(data.rows)}
        if len(self._all) < len(data.rows):
            raise UserError(f"{data.origin} has rows with the same id; each needs its own")
        self._rows = dict(subset(list(self._all.items()), limit=limit, seed=seed))

    def prompt(self, row: DataRow) -> str:
        raise TypeError(f"{type(self).__name__} has no prompt")

    def items(self) -> list[Item]:
        return [Item(id_, self.prompt(row)) for id_, row in self._rows.items()]

    def source(self) -> dict[str, Any]:
        """`prompts_sha256` covers all ids and prompts, and so reflects worked examples and rows left out."""
        prompts = json.dumps([[id_, self.prompt(row)] for id_, row in self._all.items()])
        return {
            "origin": self._data.origin,
            "sha256": self._data.sha256,
            "prompts_sha256": hashlib.sha256(prompts.encode()).hexdigest(),
            "rows": len(self._rows),
            "rows_in_file": len(self._data.rows),
            "prompt": self._describes,
        }
