"""Decoding of one answer of a diffusion LM as a pure state machine: which slots are open, which are filled next.

It knows neither tensors nor a model. The answer has `limit` slots, cut into blocks from the prompt's end on; each holds
a token or nothing yet (the model sees the mask token). A round is one forward pass: it guesses a token for every open
slot, `choose` says which guesses are kept, `advance` keeps them.

    prompt | a  b  c  d | e  f  g  h | i  _  j  _ | _  _  _  _ | (not appended yet)
             CACHED       DONE         ACTIVE,      ACTIVE,
                                       activated    not activated yet

A block is ACTIVE until all of its slots are filled, then DONE: the next pass computes its final tokens' keys and
values, which stay in the cache (CACHED) if all earlier blocks are filled, too. Until the block before is filled to the
ratio `activate_ratio`, a block fills only slots whose guess is probable enough; from then on (activated) at least
`min_fills` slots per round. Once the last block is filled to the ratio `append_ratio`, another one is appended. With
append_ratio = 1 blocks come one after another.

After a stop token no block is appended; the answer is complete once all slots up to its first stop token are filled.

Departures from D2F: slots after a stop token are neither filled nor waited for (its code fills open blocks to their
end). The last block may be shorter than the others (its code rounds the answer's length down to whole blocks). At most
one block is appended per round, as in its code.

Source: D2F (arXiv 2508.09192), section 4.3; Fast-dLLM (arXiv 2505.22618), confidence-aware decoding.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from dspec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class BlockRules:
    """`block_size` slots per block (None: one block over the whole answer). Another block is appended once the last one
    is filled to the ratio `append_ratio` (tau_add), and activated once the block before it is filled to the ratio
    `activate_ratio` (tau_act). A round fills the slots whose guess is more probable than `threshold` (tau_conf), and in
    an activated block the most confident ones besides, until it has filled `min_fills` there."""

    block_size: int | None
    append_ratio: float
    activate_ratio: float
    threshold: float
    min_fills: int

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size < 1:
            raise UserError(f"block_size={self.block_size} must be at least 1 (null: one block over the whole answer)")
        for name in ("append_ratio", "activate_ratio", "threshold"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise UserError(f"{name}={value} is a ratio or a probability: it must lie in [0, 1]")
        if self.min_fills < 1:
            raise UserError(f"a round must fill at least one slot, not {self.min_fills}")

    def check(self, limit: int) -> None:
        """Raises UserError where a block is larger than the answer."""
        if self.block_size is not None and self.block_size > limit:
            raise UserError(
                f"block_size={self.block_size} is larger than max_new_tokens={limit}: lower it, or set it to null "
                "(one block over the whole answer)"
            )


class Guess(NamedTuple):
    """The model's token for a slot, its probability, and its confidence, which orders guesses."""

    token: int
    probability: float
    confidence: float


class Phase(Enum):
    ACTIVE = "active"  # has slots without a token
    DONE = "done"  # filled, keys and values not in the cache yet
    CACHED = "cached"


@dataclass(frozen=True)
class Block:
    """Slots first .. end - 1. `activated`: fills at least `min_fills` slots per round (before: sure ones only)."""

    first: int
    end: int
    activated: bool


@dataclass(frozen=True, kw_only=True)
class AnswerState:
    """One answer while it is decoded; `cached` is the number of the text's tokens (prompt included) whose final keys
    and values are in the cache."""

    rules: BlockRules
    prompt: int
    stop_ids: Collection[int]
    tokens: tuple[int | None, ...]
    blocks: tuple[Block, ...]
    cached: int = 0

    @classmethod
    def begin(cls, *, rules: BlockRules, prompt: int, limit: int, stop_ids: Collection[int]) -> "AnswerState":
        """The first block's slots are open, nothing is cached. Raises UserError for a block larger than `limit`."""
        rules.check(limit)
        first = Block(0, rules.block_size or limit, activated=True)
        return cls(
            rules=rules, prompt=prompt, stop_ids=frozenset(stop_ids), tokens=(None,) * limit, blocks=(first,), cached=0
        )

    @property
    def limit(self) -> int:
        return len(self.tokens)

    @cached_property
    def stopped(self) -> bool:
        """Whether a slot holds a stop token."""
        return any(token in self.stop_ids for token in self.tokens)

    @cached_property
    def end(self) -> int:
        """The number of slots up to and including the first stop token; without one, all."""
        return next((i + 1 for i, token in enumerate(self.tokens) if token in self.stop_ids), self.limit)

    @cached_property
    def open(self) -> tuple[int, ...]:
        """The slots that wait for a token: unfilled, in an appended block, not after a stop token."""
        return tuple(i for i in range(min(self.end, self.blocks[-1].end)) if self.tokens[i] is None)

    @cached_property
    def filled_prefix(self) -> list[int]:
        """The leading tokens that are final, up to the first stop token."""
        known: list[int] = []
        for token in self.tokens[: self.end]:
            if token is None:
                break
            known.append(token)
        return known

    @property
    def done(self) -> bool:
        return len(self.filled_prefix) == self.end

    def phase(self, block: Block) -> Phase:
        if any(token is None for token in self.tokens[block.first : block.end]):
            return Phase.ACTIVE
        return Phase.CACHED if self.prompt + block.end <= self.cached else Phase.DONE

    @cached_property
    def settled(self) -> int:
        """The prompt and the leading filled blocks: what has its final keys and values after the next pass."""
        active = next((b.first for b in self.blocks if self.phase(b) is Phase.ACTIVE), self.blocks[-1].end)
        return self.prompt + active

    def choose(self, guesses: Mapping[int, Guess]) -> dict[int, int]:
        """The tokens, by slot, that a round with these guesses (one for each open slot) fills."""
        fills = dict[int, int]()
        for block in self.blocks:
            slots = [slot for slot in self.open if block.first <= slot < block.end]
            kept = [slot for slot in slots if guesses[slot].probability > self.rules.threshold]
            if block.activated and (lacking := self.rules.min_fills - len(kept)) > 0:
                kept += [slot for slot in by_confidence(slots, guesses) if slot not in kept][:lacking]
            fills |= {slot: guesses[slot].token for slot in kept}
        return fills

    def filled(self, fills: Mapping[int, int]) -> "AnswerState":
        """With these tokens in open slots. Raises ValueError for a slot that is not open."""
        if wrong := fills.keys() - set(self.open):
            raise ValueError(f"slots {sorted(wrong)} are not open")
        tokens = tuple(fills.get(slot, token) for slot, token in enumerate(self.tokens))
        return replace(self, tokens=tokens)._activated()

    def advance(self, fills: Mapping[int, int], *, cached: int | None = None) -> "AnswerState":
        """After a pass: these slots are filled, the text's first `cached` tokens (None: all that were settled before
        it) are in the cache, and a block is appended if it is time."""
        after = self.filled(fills)
        return replace(after, cached=self.settled if cached is None else cached)._appended()._activated()

    def _filled_ratio(self, block: Block) -> float:
        """The part of a block's slots that is filled, in [0, 1]."""
        return sum(token is not None for token in self.tokens[block.first : block.end]) / (block.end - block.first)

    def _appended(self) -> "AnswerState":
        last = self.blocks[-1]
        if self.stopped or last.end == self.limit or self._filled_ratio(last) < self.rules.append_ratio:
            return self
        end = min(last.end + (self.rules.block_size or self.limit), self.limit)
        return replace(self, blocks=(*self.blocks, Block(last.end, end, activated=False)))

    def _activated(self) -> "AnswerState":
        blocks = self.blocks[:1] + tuple(
            replace(block, activated=True) if self._filled_ratio(before) >= self.rules.activate_ratio else block
            for before, block in zip(self.blocks, self.blocks[1:], strict=False)
        )
        return replace(self, blocks=blocks)


def by_confidence(slots: Sequence[int], guesses: Mapping[int, Guess]) -> list[int]:
    """The most confident first; of equals, the earliest."""
    return sorted(slots, key=lambda slot: (-guesses[slot].confidence, slot))
