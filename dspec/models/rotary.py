"""Rotary position embeddings whose frequencies stay float32 whatever the model is cast to.

In bfloat16 a frequency has 8 bits: at distance 1,000 the angle is off by a radian. Positions and frequencies are
multiplied in float32, and only cosines and sines are rounded to the model's dtype, as in transformers.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Same output as transformers' rotary module of the same config, for types with fixed frequencies."""

    inv_freq: Tensor

    def __init__(self, source: nn.Module) -> None:
        """`source` is a transformers rotary module that has not been cast."""
        super().__init__()
        self.register_buffer("inv_freq", source.get_buffer("inv_freq").detach().float(), persistent=False)
        self.scaling = float(source.attention_scaling)  # type: ignore[arg-type]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)  # moved with its model, but never cast
        return self

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, L, W] in x's dtype at positions [B, L]."""
        angle = position_ids[..., None].float() * self.inv_freq
        angle = torch.cat([angle, angle], -1)
        return (angle.cos() * self.scaling).to(x.dtype), (angle.sin() * self.scaling).to(x.dtype)
