"""Scaled dot-product attention with one signature for every physical form of a mask."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dspec.attention.masks import Mask, Tile

_FEW = 8  # queries on a CPU: seven drafts and their anchor


@cache
def _compiled_flex() -> object:
    return torch.compile(flex_attention, dynamic=True)


def attend(
    q_BHQW: Tensor,
    k_BGKW: Tensor,
    v_BGKW: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attention output [B, H, Q, W]; G key/value heads serve H query heads (H a multiple of G).

    `mask` is a tensor [B or 1, 1, Q, K] (boolean: True = may attend; float: added to the scores), tiles of such, a
    flex BlockMask, CAUSAL (Q = K, each position sees those up to its own) or None (all may attend).
    `scale` None is W ** -0.5.
    """
    if isinstance(mask, tuple):
        return torch.cat([_attend_tile(q_BHQW, k_BGKW, v_BGKW, tile, scale) for tile in mask], 2)
    if isinstance(mask, BlockMask):
        # under autocast norms leave float32; SDPA casts by itself
        q_BHQW, k_BGKW = q_BHQW.to(v_BGKW), k_BGKW.to(v_BGKW)
        flex = _compiled_flex() if q_BHQW.is_cuda else flex_attention
        return flex(q_BHQW, k_BGKW, v_BGKW, block_mask=mask, scale=scale, enable_gqa=True)  # type: ignore[operator]
    groups = q_BHQW.shape[1] // k_BGKW.shape[1]
    if isinstance(mask, str):
        return F.scaled_dot_product_attention(
            q_BHQW, k_BGKW, v_BGKW, scale=scale, is_causal=q_BHQW.shape[2] > 1, enable_gqa=groups > 1
        )
    if groups > 1 and _folds(q_BHQW, k_BGKW, mask):
        return _folded(q_BHQW, k_BGKW, v_BGKW, mask, scale)
    if groups > 1 and q_BHQW.is_cuda and mask is not None:  # no fused CUDA kernel takes both grouped heads and a mask
        k_BGKW = k_BGKW.repeat_interleave(groups, dim=1)
        v_BGKW = v_BGKW.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q_BHQW, k_BGKW, v_BGKW, attn_mask=mask, scale=scale, enable_gqa=groups > 1)


def _folds(q_BHQW: Tensor, k_BGKW: Tensor, mask: Tensor | None) -> bool:
    """Whether to fold the query heads that share keys into extra queries of one head.

    On CPUs it pays off in 16 bit with few queries (3x and more with one), not in float32 (1.1x slower). On CUDA a mask
    would otherwise force a copy of all keys and values; the mask is copied instead where it is smaller.
    """
    queries = q_BHQW.shape[2]
    if q_BHQW.is_cuda:
        return mask is not None and queries < 2 * k_BGKW.shape[1] * k_BGKW.shape[3]
    return queries <= _FEW and q_BHQW.dtype.itemsize < 4


def _folded(q_BHQW: Tensor, k_BGKW: Tensor, v_BGKW: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The same attention with the H / G heads of a group as additional queries of one head."""
    (B, H, Q, W), G = q_BHQW.shape, k_BGKW.shape[1]
    if mask is not None:
        mask = mask.expand(-1, -1, H // G, -1) if Q == 1 else mask.repeat(1, 1, H // G, 1)
    out = F.scaled_dot_product_attention(q_BHQW.reshape(B, G, -1, W), k_BGKW, v_BGKW, attn_mask=mask, scale=scale)
    return out.reshape(B, H, Q, -1)


def _attend_tile(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float | None) -> Tensor:
    k, v = (torch.cat([x[:, :, : tile.leading], x[:, :, tile.beside]], 2) for x in (k, v))
    return attend(q[:, :, tile.queries], k, v, tile.mask, scale=scale)
