"""Which slots of an answer are masked in training: rates by block, then one draw per slot.

`constant`: all of a row's slots have one rate t (masked diffusion: LLaDA, Dream). D2F (arXiv 2508.09192): the rates
rise over the blocks of a row, as in its decoder, where later blocks are less filled. With N blocks and u ~ U(0, 1)

    p_1 ~ U(low, high),   p_{b+1} = p_b + u (high - p_1) / (N - 1)      (released code, SJTU-DENG-Lab/
                                                                        Discrete-Diffusion-Forcing@771f745)

`blockwise` (ours): the states of decoding block after block. One block b has the rate t, each equally likely of those
up to the first that is all EOS, and

    p_1 ... p_{b-1} = 0,   p_b = t,   p_{b+1} = t + u (high - t),   p_{b+2} ... p_N = 1

Later occurrences of a number, from which it could be copied, are then masked while it is computed. Blocks b and b + 1
have a loss: what stands in later ones is largely a guess.

t and p_1 follow one low-discrepancy sequence over rows, accumulated batches and ranks.

Departures: N is the row's own number of blocks (released code: the batch's largest), so that a row does not depend on
its company. At least one slot that can have a loss is masked: if none of these N was, one of them, each equally likely.
`probability` takes that into account: p + (1 - p_1) ... (1 - p_N) / N in place of p, for weights that are one over it:
1 / t would give a row with few slots a huge weight at small t.

Legend: B = rows, L = places of a row, N = slots of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Generator, Tensor

from dspec.errors import UserError
from dspec.masked_diffusion.answers import OUTSIDE, Answers
from dspec.precision import widest
from dspec.seeding import low_discrepancy

CONSTANT: Final = "constant"
MONOTONE: Final = "monotone"
RANDOM: Final = "random"
BLOCKWISE: Final = "blockwise"
SCHEDULES: Final = (CONSTANT, MONOTONE, RANDOM, BLOCKWISE)


class BlockRates:
    """The probability with which the slots of each of a row's blocks are masked."""

    def __init__(self, *, schedule: str, low: float, high: float) -> None:
        """`schedule` constant | monotone | random (each block's rate is uniform in [low, high], whatever the others) |
        blockwise. Raises UserError for settings out of range."""
        if schedule not in SCHEDULES:
            raise UserError(f"method.rates.schedule={schedule} is unknown; choose one of {', '.join(SCHEDULES)}")
        if not 0 < low <= high <= 1:
            raise UserError(f"method.rates: low={low}, high={high} must satisfy 0 < low <= high <= 1")
        self.schedule, self.low, self.high = schedule, low, high

    def draw(self, blocks: int, uniform: float, generator: Generator, *, last: int) -> Tensor:
        """The rates [blocks], float64; `uniform` in [0, 1) places t, or the first one; `last` is the last block that
        can be b of `blockwise`."""
        first = self.low + (self.high - self.low) * uniform
        rate = torch.full((blocks,), first, dtype=torch.float64)
        if self.schedule == CONSTANT or blocks == 1:
            return rate
        if self.schedule == BLOCKWISE:
            current = int(torch.randint(last + 1, (), generator=generator))
            rate[:current], rate[current + 1 :] = 0, 1
            next_up = torch.rand(1, generator=generator, dtype=torch.float64)
            rate[current + 1 : current + 2] = first + next_up * (self.high - first)
            return rate
        uniform_b = torch.rand(blocks - 1, generator=generator, dtype=torch.float64)
        if self.schedule == MONOTONE:
            rate[1:] += uniform_b.cumsum(0) * (self.high - first) / (blocks - 1)
        else:
            rate[1:] = self.low + (self.high - self.low) * uniform_b
        return rate

    def in_loss(self, rate_b: Tensor) -> Tensor:
        """Which blocks [blocks] have a loss: all, or the first two that are not clean."""
        if self.schedule == BLOCKWISE:
            place = (rate_b > 0).cumsum(0)
            return (place == 1) | (place == 2)
        return torch.ones_like(rate_b, dtype=torch.bool)


@dataclass(frozen=True)
class Noise:
    """What is masked in each row, how probable that was (1 outside of the answer), and which slots have a loss if they
    are masked."""

    masked_BL: Tensor  # bool
    probability_BL: Tensor  # the device's widest float
    in_loss_BL: Tensor  # bool


def draw_masked(rate_N: Tensor, in_loss_N: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Which of a row's slots are masked, at least one of those that have a loss, and the probability of each."""
    masked_N = torch.rand(len(rate_N), generator=generator, dtype=torch.float64) < rate_N
    slots = in_loss_N.nonzero()[:, 0]
    if not masked_N[slots].any():
        masked_N[slots[torch.randint(len(slots), (), generator=generator)]] = True
    forced = (1 - rate_N[slots]).prod() / len(slots)
    return masked_N, rate_N + forced * in_loss_N


def draw_noise(
    answers: Answers, rates: BlockRates, *, row_numbers: Sequence[int], generators: Sequence[Generator]
) -> Noise:
    """The noise of a batch, each row by its number and its own generator."""
    masked_BL = torch.zeros(answers.ids_BL.shape, dtype=torch.bool)
    in_loss_BL = masked_BL.clone()
    probability_BL = torch.ones(answers.ids_BL.shape, dtype=torch.float64)
    slot_BL = answers.slot_BL.cpu()
    rows = zip(answers.slots, answers.response_slots, row_numbers, generators, strict=True)
    for b, (slots, response, number, generator) in enumerate(rows):
        if slots:
            blocks, first_tail = (-(-n // answers.block_size) for n in (slots, response))
            rate_b = rates.draw(blocks, low_discrepancy(number), generator, last=min(first_tail, blocks - 1))
            rate_N, in_loss_N = (
                x.repeat_interleave(answers.block_size)[:slots] for x in (rate_b, rates.in_loss(rate_b))
            )
            where = slot_BL[b] != OUTSIDE
            masked_BL[b, where], probability_BL[b, where] = draw_masked(rate_N, in_loss_N, generator)
            in_loss_BL[b, where] = in_loss_N
    device = answers.ids_BL.device
    return Noise(masked_BL.to(device), probability_BL.to(widest(device)).to(device), in_loss_BL.to(device))
