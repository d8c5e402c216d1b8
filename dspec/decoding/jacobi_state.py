"""Jacobi decoding of one prompt as a pure state machine: the blocks in flight, and the pool of rejected n-grams.

It knows no model: `drafts` says which tokens to verify, `advance` takes what the model predicts after each of them.
A prediction is whatever the model's next token is under the text before it, so the verified text is the model's own.

    verified text (cache)      real-active block   pseudo-active block
    ... the  cat  sat  [on]  |  a   mat  and       slept  the  whole
                       anchor   draft: verified    draft: updated under a left context that is not verified yet

Source: Jacobi Forcing (arXiv 2512.14681), inference: multiblock decoding, rejection recycling. Departures: a
pseudo-active block's stable tokens are not frozen, they go on being updated; where a pass verifies the whole
real-active block, what it saw of the next block stood behind verified text already and is accepted at once. A promoted
block keeps its draft, whose tokens are all verified again under the now verified text.
"""

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dspec.errors import UserError


@dataclass(frozen=True, kw_only=True)
class JacobiConfig:
    """How many tokens are in flight and what else is tried.

    `block_size` n; at most `blocks` K in flight; a further block opens once `activation` r of the newest one's tokens
    agree with the model's predictions. `candidates` recycled n-grams are verified beside the draft, found in the last
    `pool_size` passes' predictions (0 candidates: no recycling).
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
            raise UserError(f"jacobi's activation={self.activation} is a share of a block: it lies in [0, 1]")
        if self.candidates < 0 or self.pool_size < (1 if self.candidates else 0):
            raise UserError(
                f"jacobi's candidates={self.candidates} need a pool to come from: pool_size={self.pool_size} must be "
                "at least 1 (candidates=0 turns recycling off)"
            )


class Pool:
    """The predictions that the last passes left unverified, for rejection recycling."""

    def __init__(self, size: int) -> None:
        self._runs: deque[list[int]] = deque(maxlen=size)

    def add(self, run: list[int]) -> None:
        self._runs.append(run)

    def after(self, token: int) -> Iterator[list[int]]:
        """What followed `token` in the runs, the newest run first."""
        for run in reversed(self._runs):
            for i, other in enumerate(run[:-1]):
                if other == token:
                    yield run[i + 1 :]


class JacobiState:
    """One prompt's verified text and the draft behind it.

    Block j holds the output's tokens j * n .. (j + 1) * n - 1; the real-active block is the one that holds the next
    unverified token. `text` is the prompt and all verified tokens, its last one is the anchor. `draft` reaches to the
    end of the newest block, or to the length limit.
    """

    def __init__(self, prompt: Sequence[int], first: int, *, config: JacobiConfig, limit: int, seed: int) -> None:
        """`first` is the prefill's token; `limit` tokens are the longest output, `seed` draws a new block's tokens."""
        self.config, self.start = config, len(prompt)
        self.text: list[int] = [*prompt, first]
        self.draft: list[int] = []
        self.opened = 0  # blocks ever opened
        self._limit = self.start + limit
        self._end = self.start  # position behind the newest block
        self._random = random.Random(seed)
        self._pool = Pool(config.pool_size)
        self._open_blocks(agreed=0, ahead=[])

    @property
    def in_flight(self) -> int:
        """Blocks from the real-active to the newest one."""
        return self.opened - (len(self.text) - self.start) // self.config.block_size

    def block(self, number: int) -> list[int]:
        """The present tokens of a block, verified or drafted."""
        begin = number * self.config.block_size
        known = [*self.text[self.start :], *self.draft]
        return known[begin : begin + self.config.block_size]

    def drafts(self) -> list[list[int]]:
        """Rows to verify behind the anchor, all of one length: the draft, then recycled n-grams filled up with it."""
        rows = [self.draft]
        if self.config.candidates:
            for run in self._pool.after(self.text[-1]):
                row = [*run, *self.draft[len(run) :]][: len(self.draft)]
                if row not in rows:
                    rows.append(row)
                if len(rows) > self.config.candidates:
                    break
        return rows

    def advance(self, rows: Sequence[list[int]], predictions: Sequence[list[int]]) -> tuple[int, int]:
        """Takes the predictions after the anchor and after each token of each row; (row that wins, drafts accepted).

        The verified text grows by the winner's accepted drafts and the model's own token behind them; what the winner
        predicted beyond becomes the draft.
        """
        accepted = [_agreeing(row, predicted) for row, predicted in zip(rows, predictions, strict=True)]
        count = max(accepted)
        winner = accepted.index(count)
        row, predicted = rows[winner], predictions[winner]
        newest = self.start + (self.opened - 1) * self.config.block_size
        before = len(self.text)
        self.text += predicted[: count + 1]
        ahead = predicted[count + 1 :]  # up to the position behind the newest block
        self._pool.add(predicted[count:])
        self.draft, ahead = ahead[:-1], ahead[-1:]
        if len(self.text) > newest:
            agreed = min(len(self.text), self._end) - newest
        else:
            agreed = _agreeing(row[newest - before :], predicted[newest - before :])
        self._open_blocks(agreed=agreed, ahead=ahead)
        return winner, count

    def _open_blocks(self, *, agreed: int, ahead: list[int]) -> None:
        """Opens a block when none is left, and further ones while the newest has `agreed` enough."""
        while self._end < self._limit:
            if self._end > len(self.text):
                ripe = agreed >= math.ceil(self.config.activation * self.config.block_size)
                if not ripe or self.in_flight >= self.config.blocks:
                    return
            self._end = min(self._end + self.config.block_size, self._limit)
            self.opened += 1
            room = max(0, self._end - len(self.text) - len(self.draft))
            guess = ahead[:room] + self._random.choices(self.text, k=max(0, room - len(ahead)))
            self.draft += guess
            agreed, ahead = max(0, len(self.text) - (self._end - self.config.block_size)), []


def _agreeing(draft: Sequence[int], predicted: Sequence[int]) -> int:
    """Leading drafts that equal the predictions."""
    return next((i for i, (d, p) in enumerate(zip(draft, predicted, strict=False)) if d != p), len(draft))
