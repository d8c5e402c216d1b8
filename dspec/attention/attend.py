"""One call for scaled dot-product attention under any of the masks' physical forms."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dspec.attention.masks import Mask


@cache
def _compiled_flex() -> object:
    return torch.compile(flex_attention, dynamic=True)


def attend(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, mask: Mask) -> Tensor:
    """Attention output [B, H, Q, D]; G key/value heads serve H query heads (H a multiple of G).

    `mask` is a boolean tensor [B or 1, 1, Q, K] (True = may attend), a flex BlockMask, or None (all may attend).
    """
    if isinstance(mask, BlockMask):
        flex = _compiled_flex() if q_BHQD.is_cuda else flex_attention
        return flex(q_BHQD, k_BGKD, v_BGKD, block_mask=mask, enable_gqa=True)  # type: ignore[operator]
    groups = q_BHQD.shape[1] // k_BGKD.shape[1]
    if groups > 1:
        k_BGKD = k_BGKD.repeat_interleave(groups, dim=1)
        v_BGKD = v_BGKD.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q_BHQD, k_BGKD, v_BGKD, attn_mask=mask)
