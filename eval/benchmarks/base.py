"""The benchmark protocol."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Item:
    id: str
    prompt: str  # the user turn of a chat, or raw text to go on from


class Benchmark(Protocol):
    """Prompts and verdicts on answers; knows no model."""

    quality: str | None  # the headline verdict, such as "exact match"; None where there is none (speed only)
    chat: bool  # the prompt goes through the target's chat template
    stop: tuple[str, ...]  # strings that end an answer; text and tokens are cut there
    max_new_tokens: int

    def items(self) -> list[Item]: ...

    def score(self, item: Item, answer: str) -> dict[str, bool]:
        """Verdicts by name, `quality` among them."""
        ...

    def source(self) -> dict[str, Any]:
        """Where the prompts come from: file or Hub id, checksum, rows, how they are put."""
        ...
