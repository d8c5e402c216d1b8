"""Which slots of an answer are masked in training: rates by block, then one draw per slot.

`constant`: all of a row's slots have one rate t (masked diffusion: LLaDA, Dream). D2F (arXiv 2508.09192): the rates
rise over the blocks of a row, as in its decoder, where later blocks are less filled. With N blocks and u ~ U(0, 1)

    p_1 ~ U(low, high),   p_{b+1} = p_b + u (high - p_1) / (N - 1)      (released code, SJTU-DENG-Lab/
                                                                        Discrete-Diffusion-Forcing@771f745)

t and p_1 follow one low-discrepancy sequence over rows, accumulated batches and ranks.

Departures: N is the row's own number of blocks (released code: the batch's largest), so that a row does not depend on
its company. At least one slot of a row is masked: if none was, one of them, each equally likely. `probability` takes
that into account: p + (1 - p_1) ... (1 - p_N) / N in place of p, for weights that are one over it: 1 / t would give a
row with few slots a huge weight at small t.

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
SCHEDULES: Final = (CONSTANT, MONOTONE, RANDOM)


class BlockRates:
    """The probability with which the slots of each of a row's blocks are masked."""

    def __init__(self, *, schedule: str, low: float, high: float) -> None:
        """`schedule` constant | monotone | random (each block's rate is uniform in [low, high], whatever the others).
        Raises UserError for settings out of range."""
        if schedule not in SCHEDULES:
            raise UserError(f"method.rates.schedule={schedule} is unknown; choose one of {', '.join(SCHEDULES)}")
        if not 0 < low <= high <= 1:
            raise UserError(f"method.rates: low={low}, high={high} must satisfy 0 < low <= high <= 1")
        self.schedule, self.low, self.high = schedule, low, high

    def draw(self, blocks: int, uniform: float, generator: Generator) -> Tensor:
        """The rates [blocks], float64; `uniform` in [0, 1) places the first one."""
        first = self.low + (self.high - self.low) * uniform
        rate = torch.full((blocks,), first, dtype=torch.float64)
        if self.schedule == CONSTANT or blocks == 1:
            return rate
        uniform_b = torch.rand(blocks - 1, generator=generator, dtype=torch.float64)
        if self.schedule == MONOTONE:
            rate[1:] += uniform_b.cumsum(0) * (self.high - first) / (blocks - 1)
        else:
            rate[1:] = self.low + (self.high - self.low) * uniform_b
        return rate


@dataclass(frozen=True)
class Noise:
    """What is masked in each row, and how probable that was; False and 1 outside of the answer."""

    masked_BL: Tensor  # bool
    probability_BL: Tensor  # the device's widest float


def draw_masked(rate_N: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Which of a row's slots are masked, at least one, and the probability with which each one is."""
    masked_N = torch.rand(len(rate_N), generator=generator, dtype=torch.float64) < rate_N
    if not masked_N.any():
        masked_N[torch.randint(len(rate_N), (), generator=generator)] = True
    return masked_N, rate_N + (1 - rate_N).prod() / len(rate_N)


def draw_noise(
    answers: Answers, rates: BlockRates, *, row_numbers: Sequence[int], generators: Sequence[Generator]
) -> Noise:
    """The noise of a batch, each row by its number and its own generator."""
    masked_BL = torch.zeros(answers.ids_BL.shape, dtype=torch.bool)
    probability_BL = torch.ones(answers.ids_BL.shape, dtype=torch.float64)
    slot_BL = answers.slot_BL.cpu()
    for b, (slots, number, generator) in enumerate(zip(answers.slots, row_numbers, generators, strict=True)):
        if slots:
            blocks = -(-slots // answers.block_size)
            rate_N = rates.draw(blocks, low_discrepancy(number), generator).repeat_interleave(answers.block_size)
            where = slot_BL[b] != OUTSIDE
            masked_BL[b, where], probability_BL[b, where] = draw_masked(rate_N[:slots], generator)
    device = answers.ids_BL.device
    return Noise(masked_BL.to(device), probability_BL.to(widest(device)).to(device))
