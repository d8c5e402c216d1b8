"""Which slots are masked: rates by block, their laws, and one draw per slot from each row's own generator."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from data.conversations import pad
from dspec.errors import UserError
from dspec.masked_diffusion.answers import AnswerLayout, Answers
from dspec.masked_diffusion.noise import SCHEDULES, BlockRates, Noise, draw_masked, draw_noise
from dspec.method import Batch
from dspec.seeding import low_discrepancy

EOS = 9


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(schedule: str, blocks: int, count: int, *, low: float = 0.2, high: float = 0.7) -> Tensor:
    """Rates [count, blocks] of rows 0, 1, ..."""
    rates, g = BlockRates(schedule=schedule, low=low, high=high), generator()
    return torch.stack([rates.draw(blocks, low_discrepancy(n), g, last=blocks - 1) for n in range(count)])


def answers(rows: Sequence[tuple[int, int]], *, first: int = 0, block: int = 4) -> Answers:
    made = pad([([1] * prompt + [2] * (response - 1) + [EOS], prompt) for prompt, response in rows])
    batch = Batch(made.ids_BL, made.supervised_BL, row_numbers=range(first, first + len(rows)))
    return AnswerLayout(block_size=block, tail_blocks=0, tail_rows=1).answers(batch, stop_ids=(EOS,), max_places=99)


def noise(made: Answers, schedule: str, *, seeds: Sequence[int], first: int = 0, **bounds: float) -> Noise:
    rates = BlockRates(**({"schedule": schedule, "low": 0.2, "high": 0.7} | bounds))  # type: ignore[arg-type]
    numbers = range(first, first + len(seeds))
    return draw_noise(made, rates, row_numbers=numbers, generators=[generator(s) for s in seeds])


# ---- rates


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_first_rate_fills_its_range_evenly_over_any_stretch_of_rows(schedule: str) -> None:
    """Batches, accumulated batches and ranks are such stretches: of 64 rows, 8 +- 1 in each eighth of the range.
    Blockwise: the rate of the first block that is not clean."""
    rates = drawn(schedule, 3, 320)
    first = (rates.gather(1, (rates > 0).int().argmax(1, keepdim=True))[:, 0] - 0.2) / 0.5
    for start in (0, 1, 77, 256):
        counts = torch.histc(first[start : start + 64], 8, 0, 1)
        assert ((counts - 8).abs() <= 1).all()


def test_constant_rates() -> None:
    rates = drawn("constant", 5, 50)
    assert (rates == rates[:, :1]).all()


def test_monotone_rates_rise_to_at_most_the_highest() -> None:
    """p_b is uniform increments above p_1: the mean of p_b is p_1 + (b - 1) / (N - 1) (high - p_1) / 2."""
    rates = drawn("monotone", 5, 20000)
    steps = rates.diff(dim=1)
    assert (steps >= 0).all()
    assert (rates <= 0.7).all()
    assert (rates[:, 0] >= 0.2).all()
    share = steps * 4 / (0.7 - rates[:, :1])
    assert (share <= 1).all()
    assert ((share.mean(0) - 0.5).abs() < 5 / (12 * 20000) ** 0.5).all()
    assert abs(float(share.var()) - 1 / 12) < 2e-3
    assert abs(float(torch.corrcoef(share.T)[0, 1])) < 0.04
    assert abs(float(rates[:, -1].mean()) - 0.575) < 5e-3  # 0.45 + (0.7 - 0.45) / 2


def test_random_rates_are_independent() -> None:
    rates = drawn("random", 4, 20000)
    assert ((rates.mean(0) - 0.45).abs() < 5 * 0.5 / (12 * 20000) ** 0.5).all()
    assert ((torch.corrcoef(rates.T) - torch.eye(4)).abs() < 0.04).all()
    assert (rates >= 0.2).all()
    assert (rates <= 0.7).all()


def test_blockwise_rates_are_states_of_decoding_block_after_block() -> None:
    """Clean blocks, one at t, one between t and the highest rate, masked blocks; the middle two have a loss."""
    rates, made = BlockRates(schedule="blockwise", low=0.2, high=0.7), drawn("blockwise", 4, 12000)
    current = (made > 0).int().argmax(1)
    counts = torch.bincount(current, minlength=4)
    assert ((counts / 12000 - 0.25).abs() < 5 * (0.25 * 0.75 / 12000) ** 0.5).all()
    shares = []
    for row, b in zip(made, current.tolist(), strict=True):
        t = float(row[b])
        assert (row[:b] == 0).all()
        assert 0.2 <= t <= 0.7
        assert (row[b + 2 :] == 1).all()
        assert rates.in_loss(row).tolist() == [b <= i <= b + 1 for i in range(4)]
        shares += [(float(row[b + 1]) - t) / (0.7 - t)] if b < 3 else []
    assert 0 <= min(shares) <= max(shares) <= 1
    assert abs(sum(shares) / len(shares) - 0.5) < 5 / (12 * len(shares)) ** 0.5
    assert all(BlockRates(schedule=other, low=0.2, high=1.0).in_loss(made[0]).all() for other in SCHEDULES[:3])


def test_blocks_of_eos_alone_are_not_decoded_but_the_first() -> None:
    """A response of 6 slots in blocks of 4, and up to three blocks of EOS: b is 0, 1 or 2; without a tail 0 or 1."""
    rows = pad([([1] * 3 + [2] * 5 + [EOS], 3)] * 600)
    batch = Batch(rows.ids_BL, rows.supervised_BL, row_numbers=range(600))
    for tail_blocks, lasts in ((3, {0, 1, 2}), (None, {0, 1})):
        layout = AnswerLayout(block_size=4, tail_blocks=tail_blocks, tail_rows=1)
        made = layout.answers(batch, stop_ids=(EOS,), max_places=99)
        loss_BL = noise(made, "blockwise", seeds=range(600)).in_loss_BL
        first = made.blocks.masked_fill(~loss_BL, 99).amin(1) - 1
        assert set(first.tolist()) == lasts
        assert (torch.bincount(first) > 100).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_block(schedule: str) -> None:
    assert drawn(schedule, 1, 3)[:, 0].tolist() == [0.2 + 0.5 * low_discrepancy(n) for n in range(3)]


@pytest.mark.parametrize("bounds", [(0.0, 0.7), (0.7, 0.2), (0.2, 1.1)])
def test_rates_out_of_range(bounds: tuple[float, float]) -> None:
    with pytest.raises(UserError, match="0 < low <= high <= 1"):
        BlockRates(schedule="random", low=bounds[0], high=bounds[1])
    with pytest.raises(UserError, match="constant, monotone, random"):
        BlockRates(schedule="rising", low=0.2, high=0.7)


# ---- draws


@pytest.mark.parametrize("rate", [[0.3, 0.3, 0.3], [0.1, 0.6, 0.9, 0.05], [0.01] * 4, [1.0, 1.0]])
def test_a_slot_is_masked_with_the_probability_said(rate: list[float]) -> None:
    """At least one slot is, and one over the probability weights all slots equally."""
    g, count, rate_N = generator(), 5000, torch.tensor(rate, dtype=torch.float64)
    draws = [draw_masked(rate_N, torch.ones_like(rate_N, dtype=torch.bool), g) for _ in range(count)]
    table, p = torch.stack([masked for masked, _ in draws]), draws[0][1]
    assert table.any(1).all()
    assert ((table.double().mean(0) - p).abs() <= 5 * (p * (1 - p) / count).clamp(min=0).sqrt()).all()
    n = len(rate)
    nothing = torch.tensor([1 - x for x in rate], dtype=torch.float64).prod()
    torch.testing.assert_close(p, torch.tensor(rate, dtype=torch.float64) + nothing / n)


def test_at_least_one_slot_with_a_loss_is_masked() -> None:
    """Here slots 1 and 2; clean and later blocks stay as their rates say."""
    g, rate_N = generator(), torch.tensor([0.0, 0.1, 0.3, 1.0], dtype=torch.float64)
    draws = [draw_masked(rate_N, torch.tensor([False, True, True, False]), g) for _ in range(5000)]
    table, p = torch.stack([masked for masked, _ in draws]), draws[0][1]
    assert table[:, 1:3].any(1).all()
    torch.testing.assert_close(p, rate_N + 0.9 * 0.7 / 2 * torch.tensor([0, 1, 1, 0]))
    assert ((table.double().mean(0) - p).abs() <= 5 * (p * (1 - p) / 5000).clamp(min=0).sqrt()).all()


def test_slots_are_masked_independently() -> None:
    g, rate_N = generator(), torch.full((6,), 0.5, dtype=torch.float64)
    every = torch.ones(6, dtype=torch.bool)
    table = torch.stack([draw_masked(rate_N, every, g)[0] for _ in range(8000)]).double()
    assert ((torch.corrcoef(table.T) - torch.eye(6)).abs() < 0.05).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_slots_are_masked_each_block_at_its_rate(schedule: str) -> None:
    rows = [(3, 6), (1, 2), (5, 11), (2, 4)] * 8
    made = answers(rows)
    result = noise(made, schedule, seeds=range(len(rows)))
    inside = made.slot_BL >= 0
    assert not ((result.masked_BL | result.in_loss_BL) & ~inside).any()
    assert (result.probability_BL[~inside] == 1).all()
    assert (result.masked_BL.any(1)).all()
    for b, slots in enumerate(made.slots):
        g = generator(b)
        rates = BlockRates(schedule=schedule, low=0.2, high=0.7)
        rate = rates.draw(-(-slots // 4), low_discrepancy(b), g, last=-(-slots // 4) - 1)
        in_loss = rates.in_loss(rate).repeat_interleave(4)[:slots]
        masked, probability = draw_masked(rate.repeat_interleave(4)[:slots], in_loss, g)
        assert torch.equal(result.in_loss_BL[b][inside[b]], in_loss)
        assert torch.equal(result.masked_BL[b][inside[b]], masked)
        assert torch.equal(result.probability_BL[b][inside[b]], probability)


def test_a_rows_noise_does_not_depend_on_its_company() -> None:
    rows = [(3, 6), (1, 2), (5, 11)]
    whole = noise(answers(rows), "monotone", seeds=(5, 6, 7), first=3)
    for i, row in enumerate(rows):
        alone = noise(answers([row], first=3 + i), "monotone", seeds=(5 + i,), first=3 + i)
        width = alone.masked_BL.shape[1]
        assert torch.equal(alone.masked_BL[0], whole.masked_BL[i, :width])


def test_everything_is_masked_at_rate_one() -> None:
    made = answers([(3, 6), (1, 2)])
    result: Any = noise(made, "constant", seeds=(0, 1), low=1.0, high=1.0)
    assert torch.equal(result.masked_BL, made.slot_BL >= 0)
    assert (result.probability_BL == 1).all()
