"""Jacobi decoding of one prompt as a pure state machine: the blocks in flight, and the pool of rejected n-grams.

It knows no model: `drafts` returns the tokens to verify, `advance` takes the model's prediction after each of them.
A prediction is the model's next token given the text before it; drafts are accepted as long as they equal it.

    verified text (cache)      real-active block   pseudo-active block
    ... the  cat  sat  [on]  |  a   mat  and       slept  the  whole
                       anchor   draft: verified    draft: updated, but its left context is not verified yet

Source: Jacobi Forcing (arXiv 2512.14681), inference: multiblock decoding, rejection recycling. Departures: a
pseudo-active block's stable tokens are not frozen but keep being updated; if a pass verifies the whole real-active
block, its predictions for the next block already followed verified text and are accepted in the same pass. A promoted
block keeps its draft, whose tokens are all verified again after the now verified text.
"""

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dspec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class JacobiConfig:
    """How many tokens are in flight, and how many recycled n-grams are verified next to the draft.

    Blocks of `block_size` n, at most `blocks` K in flight; another block opens once a fraction `activation` r of the
    newest one's tokens agrees with the model's predictions. `candidates` n-grams recycled from the last `pool_size`
    passes' predictions are verified next to the draft (0: no recycling).
    """

    block_size: int
    blocks: int
    activation: float
    pool_size: int
    candidates: int

    def __post_init__(self) -> None:
        if self.block_size < 2 or self.blocks < 1:
            raise UserError(
                f"jacobi needs block_size >= 2 and blocks >= 1, not {self.block_size} and {self.blocks}: "
                "a block of one token is plain autoregressive decoding"
            )
        if not 0 <= self.activation <= 1:
            raise UserError(f"jacobi's activation={self.activation} is a fraction of a block: it must lie in [0, 1]")
        if self.candidates < 0 or self.pool_size < (1 if self.candidates else 0):
            raise UserError(
                f"jacobi's candidates={self.candidates} are drawn from a pool: pool_size={self.pool_size} must be "
                "at least 1 (candidates=0 turns recycling off)"
            )


class Pool:
    """The unverified predictions of the last `size` passes, for rejection recycling."""

    def __init__(self, size: int) -> None:
        self._predictions: deque[list[int]] = deque(maxlen=size)

    def add(self, predicted: list[int]) -> None:
        self._predictions.append(predicted)

    def after(self, token: int) -> Iterator[list[int]]:
        """The predictions that followed `token` in a pass, newest pass first."""
        for predicted in reversed(self._predictions):
            for i, other in enumerate(predicted[:-1]):
                if other == token:
                    yield predicted[i + 1 :]


class JacobiState:
    """One prompt's verified text, and the draft that follows it.

    Block j holds output tokens j * n .. (j + 1) * n - 1; the real-active block is the one with the next unverified
    token. `text` is the prompt and all verified tokens; its last token is the anchor. `draft` extends to the end of
    the newest block, or to the length limit.
    """

    def __init__(self, prompt: Sequence[int], first: int, *, config: JacobiConfig, limit: int, seed: int) -> None:
        """`first` is the prefill's token, `limit` the longest output in tokens; `seed` draws a new block's tokens."""
        self.config, self.start = config, len(prompt)
        self.text: list[int] = [*prompt, first]
        self.draft: list[int] = []
        self.opened = 0  # blocks opened so far
        self._limit = self.start + limit
        self._end = self.start  # position just past the newest block
        self._random = random.Random(seed)
        self._pool = Pool(config.pool_size)
        self._open_blocks(agreed=0, ahead=[])

    @property
    def in_flight(self) -> int:
        """Blocks from the real-active to the newest one."""
        return self.opened - (len(self.text) - self.start) // self.config.block_size

    def block(self, number: int) -> list[int]:
        """The current tokens of a block, verified or drafted."""
        begin = number * self.config.block_size
        known = [*self.text[self.start :], *self.draft]
        return known[begin : begin + self.config.block_size]

    def drafts(self) -> list[list[int]]:
        """Continuations to verify after the anchor, all of the draft's length: the draft, then recycled n-grams, each
        followed by the rest of the draft."""
        rows = [self.draft]
        if self.config.candidates:
            for ngram in self._pool.after(self.text[-1]):
                row = [*ngram, *self.draft[len(ngram) :]][: len(self.draft)]
                if row not in rows:
                    rows.append(row)
                if len(rows) > self.config.candidates:
                    break
        return rows

    def advance(self, rows: Sequence[list[int]], predictions: Sequence[list[int]]) -> tuple[int, int]:
        """Takes the predictions after the anchor and after each token of each continuation in `rows`; returns (index of
        the continuation with most accepted tokens, how many).

        The verified text grows by those tokens and the model's prediction after them; the remaining predictions for
        that continuation become the draft.
        """
        # 1. the continuation that agrees longest wins
        accepted = [_agreeing(row, predicted) for row, predicted in zip(rows, predictions, strict=True)]
        count = max(accepted)
        winner = accepted.index(count)
        row, predicted = rows[winner], predictions[winner]
        # 2. its agreeing tokens and the prediction after them are verified text; later predictions are the new draft
        newest = self.start + (self.opened - 1) * self.config.block_size
        before = len(self.text)
        self.text += predicted[: count + 1]
        ahead = predicted[count + 1 :]  # up to the position just past the newest block
        self._pool.add(predicted[count:])
        self.draft, ahead = ahead[:-1], ahead[-1:]
        # 3. how many of the newest block's tokens the model agrees with decides whether another block opens
        if len(self.text) > newest:
            agreed = min(len(self.text), self._end) - newest
        else:
            agreed = _agreeing(row[newest - before :], predicted[newest - before :])
        self._open_blocks(agreed=agreed, ahead=ahead)
        return winner, count

    def _open_blocks(self, *, agreed: int, ahead: list[int]) -> None:
        """Opens a block when none is left, and more while enough of the newest one's tokens `agreed`. The first one
        begins with `ahead`, what was predicted after the newest block; what follows it is drawn from the text."""
        while self._end < self._limit:
            if self._end > len(self.text):
                ready = agreed >= math.ceil(self.config.activation * self.config.block_size)
                if not ready or self.in_flight >= self.config.blocks:
                    return
            self._end = min(self._end + self.config.block_size, self._limit)
            self.opened += 1
            room = max(0, self._end - len(self.text) - len(self.draft))
            guess = ahead[:room] + self._random.choices(self.text, k=max(0, room - len(ahead)))
            self.draft += guess
            # of the block just opened nothing has been predicted: it agrees as far as the text already reaches into it
            agreed, ahead = max(0, len(self.text) - (self._end - self.config.block_size)), []


def _agreeing(draft: Sequence[int], predicted: Sequence[int]) -> int:
    """How many leading drafts equal the predictions."""
    return next((i for i, (d, p) in enumerate(zip(draft, predicted, strict=False)) if d != p), len(draft))
