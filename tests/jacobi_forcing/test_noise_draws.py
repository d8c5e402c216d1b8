"""Schedules that draw: every state can be chosen, the first draft and the fixed point too."""

import torch

from dspec.jacobi_forcing.noise import AnyState


def test_any_state_draws_every_state_alike() -> None:
    count_N = torch.tensor([1, 2, 5] * 2000)
    uniform_N = torch.rand(6000, generator=torch.Generator().manual_seed(0))
    chosen_N = AnyState().choose(torch.zeros(6000, 5), count_N, torch.zeros_like(count_N), uniform_N)
    for count in (1, 2, 5):
        drawn = torch.bincount(chosen_N[count_N == count], minlength=count)
        assert len(drawn) == count
        assert (drawn / 2000 - 1 / count).abs().max() < 0.04
