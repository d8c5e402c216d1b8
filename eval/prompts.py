"""Prompts as decoders take them: visible token ids and, for a text with holes, the positions of all tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from data.chat import PromptPolicy, prompt_ids, response_ids
from dspec.decoding.generation import Request, ShouldStop
from dspec.decoding.sampling import Sampling
from dspec.errors import UserError
from eval.benchmarks.base import Benchmark, Item


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """Visible tokens `ids`, to be followed by at most `max_new_tokens`; `positions` is then None.

    With holes, `positions` are those of `ids` and then of the `max_new_tokens` holes, each part ascending, and the
    response is the text from position `start` on (None: the holes' tokens alone).
    """

    ids: list[int]
    max_new_tokens: int
    positions: list[int] | None = None
    start: int | None = 0

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
        """The whole response with `tokens` in its holes, or these tokens alone."""
        if self.positions is None or self.start is None:
            return list(tokens)
        text = dict(zip(self.positions, [*self.ids, *tokens], strict=True))
        return [text[position] for position in range(self.start, len(text))]


class UnfitError(UserError):
    """A text with holes that this model cannot be asked for: the evaluation leaves it out and says so."""


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """What verdicts are given on."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def encode(tokenizer: PreTrainedTokenizerBase, benchmark: Benchmark, item: Item, policy: PromptPolicy) -> EncodedPrompt:
    """The user turn of a chat, or raw text to go on from; where the item has a response or parts, a text with holes.

    Raises UnfitError for a text with nothing visible or nothing hidden, and for exact parts that their tokens do not
    give back.
    """
    if item.parts:
        return _hidden_parts(tokenizer, benchmark, item, policy)
    if benchmark.chat:
        ids = prompt_ids(tokenizer, item.prompt, policy)
    else:
        ids = (raw_ids if item.response is None else plain_ids)(tokenizer, item.prompt)
    if item.response is None:
        return EncodedPrompt(ids=ids, max_new_tokens=benchmark.max_new_tokens)
    if benchmark.chat:
        response = response_ids(tokenizer, item.response)
        most = len(response) - 1  # the end of the turn stays: it says how long the response is
    else:
        response = plain_ids(tokenizer, item.response)[: item.length]
        most = len(response)
    count = min(max(1, round(item.hidden * most)), len(ids) + len(response) - 1)  # at least one token is visible
    holes = _holes(item, range(len(ids), len(ids) + most), count)
    return _with_holes(item, [*ids, *response], set(holes), start=len(ids))


def _holes(item: Item, places: range, count: int) -> Sequence[int]:
    """The hidden ones of `places`: the last, a run of neighbours, or any, drawn by the item's id."""
    if item.left_to_right:
        return places[-count:]
    rng = random.Random(item.id)
    if not item.contiguous:
        return rng.sample(places, count)
    first = rng.randint(0, len(places) - count)
    return places[first : first + count]


def _hidden_parts(
    tokenizer: PreTrainedTokenizerBase, benchmark: Benchmark, item: Item, policy: PromptPolicy
) -> EncodedPrompt:
    """Each part's tokens apart, so that no token holds both hidden and visible text. In a chat the parts are the
    answer."""
    text = prompt_ids(tokenizer, item.prompt, policy) if benchmark.chat else []
    holes: set[int] = set()
    for part, hidden in item.parts:
        ids = plain_ids(tokenizer, part)
        if item.exact and text_of(tokenizer, ids) != part:
            raise UnfitError(
                f"{item.id}: the tokens of {tokenizer.name_or_path!r} do not give back its text exactly (spaces or "
                "characters change); infilling needs a tokenizer of bytes"
            )
        holes |= set(range(len(text), len(text) + len(ids))) if hidden else set()
        text += ids
    text += [int(tokenizer.eos_token_id)] if benchmark.chat else []
    return _with_holes(item, text, holes, start=None)


def _with_holes(item: Item, text: Sequence[int], holes: set[int], *, start: int | None) -> EncodedPrompt:
    seen = [position for position in range(len(text)) if position not in holes]
    if not (seen and holes):
        raise UnfitError(f"{item.id} has no {'hidden' if seen else 'visible'} token: infilling needs one of each")
    return EncodedPrompt(
        ids=[text[position] for position in seen],
        max_new_tokens=len(holes),
        positions=[*seen, *sorted(holes)],
        start=start,
    )


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The text's tokens without any that the tokenizer would add."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def raw_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text that goes on: after those that the tokenizer puts before every text (BOS), and without those
    that it puts after one (XLNet's <sep><cls>, the end of a document)."""
    with_added, letter = list(tokenizer("a")["input_ids"]), plain_ids(tokenizer, "a")
    before = next(i for i in range(len(with_added)) if with_added[i : i + len(letter)] == letter)
    return [*with_added[:before], *plain_ids(tokenizer, text)]
