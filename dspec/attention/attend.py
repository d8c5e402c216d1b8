"""One call for scaled dot-product attention under any of the masks' physical forms."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dspec.attention.masks import Mask, Tile


@cache
def _compiled_flex() -> object:
    return torch.compile(flex_attention, dynamic=True)


def attend(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attention output [B, H, Q, D]; G key/value heads serve H query heads (H a multiple of G).

    `mask` is a tensor [B or 1, 1, Q, K] (boolean: True = may attend; float: added to the scores), tiles of such, a
    flex BlockMask, or None (all may attend, or with `is_causal` Q = K and each position sees those up to its own).
    `scale` None is D ** -0.5.
    """
    if isinstance(mask, tuple):
        return torch.cat([_attend_tile(q_BHQD, k_BGKD, v_BGKD, tile, scale) for tile in mask], 2)
    if isinstance(mask, BlockMask):
        flex = _compiled_flex() if q_BHQD.is_cuda else flex_attention
        return flex(q_BHQD, k_BGKD, v_BGKD, block_mask=mask, scale=scale, enable_gqa=True)  # type: ignore[operator]
    groups = q_BHQD.shape[1] // k_BGKD.shape[1]
    if groups > 1 and q_BHQD.is_cuda and mask is not None:  # no fused CUDA kernel takes both grouped heads and a mask
        k_BGKD = k_BGKD.repeat_interleave(groups, dim=1)
        v_BGKD = v_BGKD.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(
        q_BHQD, k_BGKD, v_BGKD, attn_mask=mask, scale=scale, is_causal=is_causal, enable_gqa=groups > 1
    )


def _attend_tile(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float | None) -> Tensor:
    k, v = (torch.cat([x[:, :, : tile.leading], x[:, :, tile.own]], 2) for x in (k, v))
    return attend(q[:, :, tile.queries], k, v, tile.mask, scale=scale)
