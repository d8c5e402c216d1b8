"""Noise ratios against loops, and what each schedule asks for."""

import random

import pytest
import torch

from dspec.errors import UserError
from dspec.jacobi_forcing import noise
from dspec.jacobi_forcing.noise import AnyState


def _blocks(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random blocks of one to six tokens whose last state is the fixed point; padding repeats garbage."""
    rng = random.Random(seed)
    N, K, n = 7, 5, 6
    states = torch.tensor([[[rng.randrange(3) for _ in range(n)] for _ in range(K)] for _ in range(N)])
    count = torch.tensor([rng.randint(1, K) for _ in range(N)])
    length = torch.tensor([rng.randint(1, n) for _ in range(N)])
    return states, states[torch.arange(N), count - 1], count, length


@pytest.mark.parametrize("seed", range(5))
def test_ratios(seed: int) -> None:
    states, clean, _, length = _blocks(seed)
    suffix, hamming = noise.divergent_suffix(states, clean, length), noise.hamming(states, clean, length)
    for i, own in enumerate(states.tolist()):
        n = int(length[i])
        for k, state in enumerate(own):
            wrong = [a != b for a, b in zip(state[:n], clean[i, :n].tolist(), strict=True)]
            first = wrong.index(True) if any(wrong) else n
            assert float(suffix[i, k]) == pytest.approx((n - first) / n)
            assert float(hamming[i, k]) == pytest.approx(sum(wrong) / n)
            behind = noise.depth(states[:, k], clean, length)[i, :n].tolist()
            assert behind == [max(0, t - first) for t in range(n)]
    assert not torch.equal(suffix, hamming)


def _asked(schedule: noise.Schedule, *, blocks: int = 12, seed: int = 0) -> list[float]:
    """The ratio of the state that is chosen out of a fine grid."""
    grid = torch.arange(101).flip(0) / 100
    chosen = schedule.choose(
        grid.expand(blocks, -1),
        torch.full((blocks,), 101),
        torch.arange(blocks),
        torch.rand(blocks, generator=torch.Generator().manual_seed(seed)),
    )
    return [round(float(grid[k]), 2) for k in chosen]


def test_schedules_over_the_window() -> None:
    assert _asked(noise.Progressive(window=4)) == [0, 0.25, 0.5, 0.75] * 3
    assert _asked(noise.Reverse(window=4)) == [0.75, 0.5, 0.25, 0] * 3
    assert _asked(noise.Progressive(window=3), blocks=4) == [0, 0.33, 0.67, 0]
    assert _asked(noise.Progressive(window=1)) == [0] * 12
    drawn = _asked(noise.RandomSchedule(window=4), blocks=400)
    assert set(drawn) == {0, 0.25, 0.5, 0.75}
    assert all(60 < drawn.count(ratio) < 140 for ratio in set(drawn))
    assert drawn == _asked(noise.RandomSchedule(window=4), blocks=400)
    assert drawn != _asked(noise.RandomSchedule(window=4), blocks=400, seed=1)
    free = _asked(noise.AnyState(), blocks=400)
    assert len(set(free)) > 80


def test_the_nearest_real_state_is_taken_the_first_on_ties() -> None:
    ratio = torch.tensor([[0.9, 0.4, 0.0, 0.5], [0.75, 0.25, 0.0, 0.0], [1.0, 0.5, 0.5, 0.0]])
    count = torch.tensor([3, 3, 4])  # the first row's last state is padding
    assert noise.nearest_state(ratio, count, torch.tensor([0.5, 0.5, 0.5])).tolist() == [1, 0, 1]
    assert noise.nearest_state(ratio, count, torch.tensor([1.0, 0.0, 0.1])).tolist() == [0, 2, 3]
    for uniform in (0.0, 0.5, 1 - 2**-24):  # the last one is the largest that torch.rand gives
        chosen = noise.AnyState().choose(ratio, count, count, torch.full((3,), uniform))
        assert chosen.tolist() == [int(uniform * n) for n in count.tolist()]


def test_a_ratio_can_be_had_without_states() -> None:
    """Other families corrupt by ratio and have no trajectory to choose from."""
    index, uniform = torch.arange(5), torch.tensor([0.0, 0.24, 0.25, 0.6, 0.99])
    assert noise.Progressive(window=4).ratio(index, uniform).tolist() == [0, 0.25, 0.5, 0.75, 0]
    assert noise.Reverse(window=4).ratio(index, uniform).tolist() == [0.75, 0.5, 0.25, 0, 0.75]
    assert noise.RandomSchedule(window=4).ratio(index, uniform).tolist() == [0, 0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("schedule", [noise.Progressive, noise.Reverse, noise.RandomSchedule])
def test_refusals(schedule: type) -> None:
    with pytest.raises(UserError, match="at least 1 block"):
        schedule(window=0)


def test_any_state_draws_every_state_alike() -> None:
    count_N = torch.tensor([1, 2, 5] * 2000)
    uniform_N = torch.rand(6000, generator=torch.Generator().manual_seed(0))
    chosen_N = AnyState().choose(torch.zeros(6000, 5), count_N, torch.zeros_like(count_N), uniform_N)
    for count in (1, 2, 5):
        drawn = torch.bincount(chosen_N[count_N == count], minlength=count)
        assert len(drawn) == count
        assert (drawn / 2000 - 1 / count).abs().max() < 0.04
