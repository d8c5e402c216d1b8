"""The benchmark protocol, and what the benchmarks that read one data file share. Knows no model and no tokenizer."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from data.rows import Row, Rows
from dspec.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    id: str
    prompt: str  # text of the user turn (chat), or raw text to complete


class Benchmark(Protocol):
    """Prompts, a verdict for each answer, and where both come from; knows no model."""

    quality: str  # name of the headline verdict, such as "exact match"; "" where there is none
    chat: bool  # True: the prompt goes through the target's chat template; False: it is completed as it stands
    stop: tuple[str, ...]  # strings that end an answer; text and tokens are cut before the first of them
    max_new_tokens: int

    def items(self) -> list[Item]: ...

    def score(self, item: Item, answer: str) -> dict[str, bool]:
        """Verdicts by name, `quality` among them; none where answers are not judged."""
        ...

    def source(self) -> dict[str, Any]:
        """Provenance, JSON-ready: origin and sha256 of the data, number of rows used, the prompt in words."""
        ...


def subset(rows: Sequence[T], *, limit: int | None, seed: int | None) -> list[T]:
    """The first `limit` rows, or with a seed that many drawn at random and kept in their order; None takes all."""
    if limit is not None and limit < 1:
        raise UserError(f"limit={limit}: a benchmark needs at least one prompt; give limit >= 1 or null for all")
    if limit is None or limit >= len(rows):
        return list(rows)
    if seed is None:
        return list(rows[:limit])
    return [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), limit))]


class FileBenchmark:
    """Items of one data file, each with the row that it came from."""

    def __init__(
        self, data: Rows, *, key: Callable[[int, Row], str], limit: int | None, seed: int | None, describes: str
    ) -> None:
        """`key` gives the id of a row from its place in the file; `describes` says in words how it is prompted."""
        numbered = [(key(i, row), row) for i, row in enumerate(data.rows)]
        self._data, self._describes = data, describes
        self._rows = dict(subset(numbered, limit=limit, seed=seed))

    def prompt(self, row: Row) -> str:
        raise TypeError(f"{type(self).__name__} has no prompt")

    def items(self) -> list[Item]:
        return [Item(id_, self.prompt(row)) for id_, row in self._rows.items()]

    def source(self) -> dict[str, Any]:
        origin = {"origin": self._data.origin, "sha256": self._data.sha256}
        return {**origin, "rows": len(self._rows), "rows_in_file": len(self._data.rows), "prompt": self._describes}
