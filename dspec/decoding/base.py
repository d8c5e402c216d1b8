"""The decoder protocol and what a decoder reports. Counting follows design.md: see the properties below."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dspec.decoding.sampling import Sampling, Streams, draw
from dspec.errors import UserError
from dspec.models.cache import PositionCache
from dspec.models.language_model import LanguageModel
from dspec.spans import span

# stop strings: the length of the shortest beginning of these tokens, longer than so many, that ends the answer
Ends = Callable[[Sequence[int], int], int | None]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where an answer ends: at a stop token, where `ends` says so, or after `max_new_tokens`."""

    max_new_tokens: int
    stop_ids: Sequence[int]
    ends: Ends | None = None

    def end(self, tokens: Sequence[int], known: int) -> int | None:
        """Length of the shortest beginning of `tokens`, longer than `known`, that a stop token or `ends` ends."""
        stop = next((i + 1 for i in range(known, len(tokens)) if tokens[i] in self.stop_ids), None)
        text = None if self.ends is None else self.ends(tokens if stop is None else tokens[:stop], known)
        return stop if text is None else text


@dataclass(frozen=True)
class Round:
    """One draft-verify round of one prompt."""

    drafted: int  # draft tokens sent to verification
    accepted: int  # leading draft tokens accepted, cut at the stop and the length limit
    valid: int  # leading slots that count: not behind a drafted stop token or the length limit
    confidence: tuple[float, ...] = ()  # confidence logits of the drafted slots, when recorded


@dataclass
class Generation:
    """What one prompt gave. `tokens` run up to and including the first stop token; prompts are not in it."""

    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    prefill_tokens: int = 0  # tokens that the prefill pass emitted
    prefill_forwards: int = 0
    forwards: int = 0  # forward passes of the big model that are not prefill
    positions_computed: int = 0  # outside prefill: in all branches, and while it rides along when done
    branches: int = 0  # rows of those forwards beyond the first, where candidates are verified side by side
    rounds: list[Round] = field(default_factory=list)

    @property
    def nfe(self) -> int:
        """Forward passes of the big model, prefill counted."""
        return self.prefill_forwards + self.forwards

    @property
    def branch_forwards(self) -> int:
        """Rows of the passes after the prefill: a pass over k + 1 branches is one forward and k + 1 rows."""
        return self.forwards + self.branches

    def emit(self, tokens: Sequence[int], limits: Limits) -> None:
        """Appends tokens up to and including the first stop, within the length limit."""
        known = len(self.tokens)
        self.tokens += tokens[: limits.max_new_tokens - known]
        if (end := limits.end(self.tokens, known)) is not None:
            del self.tokens[end:]
            self.stopped = True

    def done(self, limits: Limits) -> bool:
        return self.stopped or len(self.tokens) >= limits.max_new_tokens


class Decoder(Protocol):
    """Prompts in, generations out, for any batch size; row i depends on prompt i and seed i alone."""

    sampling: Sampling
    lossless: bool  # its output follows the law of plain AR of the same target (greedy: its tokens, up to rounding)

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        seeds: Sequence[int],
        ends: Ends | None = None,
    ) -> list[Generation]: ...

    def settings(self) -> dict[str, Any]:
        """What stands in the results beside the decoder's name."""
        ...


@dataclass
class Prefill:
    """State after the prompts' forward pass: caches hold lengths_B[b] positions, anchors are not in them yet."""

    cache: PositionCache
    lengths_B: list[int]
    anchors_B: list[int]
    features_BLF: Tensor
    streams: Streams
    generations: list[Generation]


def prefill(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    limits: Limits,
    seeds: Sequence[int],
) -> Prefill:
    """One pass over right-padded prompts that emits each row's first token.

    Raises UserError for no prompts, an empty prompt, one that does not fit the context, max_new_tokens < 1, or
    another number of seeds than of prompts.
    """
    if not prompts:
        raise UserError("no prompts to decode: give at least one")
    if len(seeds) != len(prompts):
        raise UserError(f"{len(seeds)} seeds for {len(prompts)} prompts: give each prompt its own")
    if limits.max_new_tokens < 1:
        raise UserError(f"max_new_tokens={limits.max_new_tokens}: at least one token must be asked for")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {i} is empty: every prompt needs at least one token")
        target.check_length(len(prompt), limits.max_new_tokens)
    lengths = [len(p) for p in prompts]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    cache, streams = target.new_cache(), Streams(seeds, target.device)
    with span("prefill"):
        output = target(ids.to(target.device), cache=cache)
        last = output.hidden_BLD[torch.arange(len(prompts)), torch.tensor(lengths) - 1]
        anchors = next_tokens(target.logits(last), sampling, streams)
    generations = []
    for anchor in anchors:
        generation = Generation(prefill_forwards=1, prefill_tokens=1)
        generation.emit([anchor], limits)
        generations.append(generation)
    return Prefill(cache, lengths, anchors, output.features_BLF, streams, generations)


def next_tokens(logits_BV: Tensor, sampling: Sampling, streams: Streams) -> list[int]:
    if sampling.greedy:
        return logits_BV.argmax(-1).tolist()
    return draw(sampling.probs(logits_BV), streams.take(1)[:, 0]).tolist()


def rows_to_keep(active: Sequence[bool]) -> list[int] | None:
    """Rows still decoding, once they are at most half of the batch (else None): finished rows ride along till then."""
    rows = [i for i, on in enumerate(active) if on]
    return rows if 0 < len(rows) <= len(active) // 2 else None


def record(
    generation: Generation,
    drafts: Sequence[int],
    accepted: int,
    following: int,
    confidence: tuple[float, ...],
    limits: Limits,
) -> None:
    """Appends a round's tokens and what its slots showed.

    Slots behind the first drafted stop (accepted or not: validity must not hang on the outcome) or behind the
    length limit do not count.
    """
    known = len(generation.tokens)
    text = [*generation.tokens, *drafts[: limits.max_new_tokens - known]]
    valid = (limits.end(text, known) or len(text)) - known
    emitted = [*drafts[:accepted], following]
    generation.emit(emitted, limits)
    generation.rounds.append(Round(len(drafts), min(accepted, valid), valid, confidence))
    generation.forwards += 1
