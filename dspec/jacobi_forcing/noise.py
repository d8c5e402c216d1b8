"""Which state of its Jacobi trajectory represents a block in training: noise ratios and schedules over blocks.

Source: Jacobi Forcing (arXiv 2512.14681), noise schedule and training sequence preparation: block i should have the
noise ratio t_i = W[i mod w], W = {0, 1/w, ..., (w-1)/w}, and the state with the nearest ratio is taken.

Legend: N = blocks, K = states of a trajectory (the last one is the fixed point), n = tokens of a block.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dspec.errors import UserError

Distance = Callable[[Tensor, Tensor, Tensor], Tensor]


def divergent_suffix(states_NKn: Tensor, clean_Nn: Tensor, length_N: Tensor) -> Tensor:
    """Fraction [N, K] of a block's `length_N` tokens from the first wrong one on: decoding accepts none of them."""
    diverged = _wrong(states_NKn, clean_Nn, length_N).long().cummax(-1).values
    return (diverged * _inside(clean_Nn, length_N)[:, None]).sum(-1) / length_N[:, None]


def hamming(states_NKn: Tensor, clean_Nn: Tensor, length_N: Tensor) -> Tensor:
    """Fraction [N, K] of a block's `length_N` tokens that are wrong."""
    return _wrong(states_NKn, clean_Nn, length_N).sum(-1) / length_N[:, None]


def depth(state_Nn: Tensor, clean_Nn: Tensor, length_N: Tensor) -> Tensor:
    """Distance [N, n] of each token from its block's first wrong one: 0 up to the wrong one, then 1, 2, ..."""
    wrong_Nn = _wrong(state_Nn[:, None], clean_Nn, length_N)[:, 0]
    slot_n = torch.arange(clean_Nn.shape[-1], device=clean_Nn.device)
    first_N = torch.where(wrong_Nn.any(-1), wrong_Nn.long().argmax(-1), len(slot_n))
    return (slot_n - first_N[:, None]).clamp(min=0)


def _inside(clean_Nn: Tensor, length_N: Tensor) -> Tensor:
    return torch.arange(clean_Nn.shape[-1], device=clean_Nn.device) < length_N[:, None]


def _wrong(states_NKn: Tensor, clean_Nn: Tensor, length_N: Tensor) -> Tensor:
    return (states_NKn != clean_Nn[:, None]) & _inside(clean_Nn, length_N)[:, None]


class Schedule(Protocol):
    """Chooses the state of its trajectory that each block's noisy copy takes."""

    def choose(self, ratio_NK: Tensor, count_N: Tensor, index_N: Tensor, uniform_N: Tensor) -> Tensor:
        """State indices [N], given the noise ratios of each block's first `count_N` states, its index in the response,
        and a uniform in [0, 1) for any randomness."""
        ...


def nearest_state(ratio_NK: Tensor, count_N: Tensor, target_N: Tensor) -> Tensor:
    """Index [N] of the state, among each block's first `count_N`, whose ratio is nearest to the target; the earliest on
    ties."""
    beyond = torch.arange(ratio_NK.shape[1], device=ratio_NK.device) >= count_N[:, None]
    return (ratio_NK - target_N[:, None]).abs().masked_fill(beyond, torch.inf).argmin(1)


class RatioSchedule(ABC):
    """A schedule that assigns each block a noise ratio t_i; the state with the nearest ratio is chosen."""

    def __init__(self, *, window: int) -> None:
        """`window` in blocks: the paper's w. Raises UserError below 1."""
        if window < 1:
            raise UserError(f"a noise schedule needs a window of at least 1 block, not {window}")
        self.window = window

    @abstractmethod
    def ratio(self, index_N: Tensor, uniform_N: Tensor) -> Tensor:
        """t_i [N] for blocks at these indices in the response; `uniform_N` in [0, 1) is for any randomness."""

    def choose(self, ratio_NK: Tensor, count_N: Tensor, index_N: Tensor, uniform_N: Tensor) -> Tensor:
        return nearest_state(ratio_NK, count_N, self.ratio(index_N, uniform_N))


class Progressive(RatioSchedule):
    """From clean to noisy over each window of blocks: t_i = (i mod w) / w."""

    def ratio(self, index_N: Tensor, uniform_N: Tensor) -> Tensor:
        return index_N % self.window / self.window


class Reverse(RatioSchedule):
    """From noisy to clean over each window of blocks: t_i = (w - 1 - i mod w) / w."""

    def ratio(self, index_N: Tensor, uniform_N: Tensor) -> Tensor:
        return (self.window - 1 - index_N % self.window) / self.window


class RandomSchedule(RatioSchedule):
    """t_i drawn uniformly from the window's ratios, anew in each step."""

    def ratio(self, index_N: Tensor, uniform_N: Tensor) -> Tensor:
        return (uniform_N * self.window).floor() / self.window


class AnyState:
    """A uniformly drawn state of the trajectory: no ratio, no schedule (CLLM)."""

    def choose(self, ratio_NK: Tensor, count_N: Tensor, index_N: Tensor, uniform_N: Tensor) -> Tensor:
        return (uniform_N * count_N).long()
