"""Prompts as decoders take them: visible token ids and, for a text with holes, the positions of all tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from data.chat import PromptPolicy, prompt_ids, response_ids
from dspec.decoding.generation import Request, ShouldStop
from dspec.decoding.sampling import Sampling
from eval.benchmarks.base import Benchmark, Item


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Visible tokens `ids`, to be followed by at most `max_new_tokens`; `positions` is then None.

    With holes, `positions` are those of `ids` and then of the `max_new_tokens` holes, each part ascending, and the
    response is the text from position `start` on.
    """

    ids: list[int]
    max_new_tokens: int
    positions: list[int] | None = None
    start: int = 0

    @property
    def key(self) -> list[int]:
        """Identifies the prompt among those of its benchmark."""
        return self.ids if self.positions is None else [*self.ids, *self.positions]

    def request(self, *, sampling: Sampling, seed: int, stop_ids: Sequence[int], stop: ShouldStop | None) -> Request:
        """With holes, no token or string ends the answer early: each hole gets a token."""
        filled = self.positions is not None
        return Request(
            ids=self.ids,
            sampling=sampling,
            max_new_tokens=self.max_new_tokens,
            stop_ids=() if filled else stop_ids,
            seed=seed,
            should_stop=None if filled else stop,
            positions=self.positions,
        )

    def response(self, tokens: Sequence[int]) -> list[int]:
        """The whole response with `tokens` in its holes; without holes, `tokens`."""
        if self.positions is None:
            return list(tokens)
        text = dict(zip(self.positions, [*self.ids, *tokens], strict=True))
        return [text[position] for position in range(self.start, len(text))]


def encode(tokenizer: PreTrainedTokenizerBase, benchmark: Benchmark, item: Item, policy: PromptPolicy) -> Prompt:
    """The user turn of a chat, or raw text to go on from; where the item has a response, that with holes."""
    if benchmark.chat:
        ids = prompt_ids(tokenizer, item.prompt, policy)
    else:
        ids = list(tokenizer(item.prompt)["input_ids"])
    if item.response is None:
        return Prompt(ids=ids, max_new_tokens=benchmark.max_new_tokens)
    response = response_ids(tokenizer, item.response)
    start, most = len(ids), len(response) - 1  # the end of the turn stays: it says how long the response is
    drawn = random.Random(item.id).sample(range(start, start + most), max(1, round(item.hidden * most)))
    holes = set(drawn)
    text = [*ids, *response]
    seen = [position for position in range(len(text)) if position not in holes]
    return Prompt(
        ids=[text[position] for position in seen],
        max_new_tokens=len(holes),
        positions=[*seen, *sorted(holes)],
        start=start,
    )
