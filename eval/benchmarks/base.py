"""The benchmark protocol."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Item:
    id: str
    prompt: str  # text of the user turn


class Benchmark(Protocol):
    """Prompts and a verdict for each answer; knows no model."""

    quality: str  # what `score` measures, such as "exact match"
    max_new_tokens: int

    def items(self) -> list[Item]: ...

    def score(self, answers: Sequence[str]) -> list[bool]:
        """One verdict an item, in the order of `items`."""
        ...
