"""XLNet of transformers as an any-subset model: its weights and modules, one pass over places in order of generation.

XLNet (arXiv 1906.08237) has two streams over the same weights: a content stream, whose tokens see themselves, and a
query stream, which begins with one learned vector at each position asked for, reads the content stream's keys and
values, and never its own token. transformers computes both for a whole text by position (`perm_mask`,
`target_mapping`). Here content and queries stand in one sequence, in order of generation, as in the other backbone:
attention/masks.py `two_streams` says who sees whom, and the relative positions come from `positions_BL`. Logits equal
those of XLNetLMHeadModel, and four of its limits are gone: a pass computes the queries asked for and no others,
attention is fused, bfloat16 and float64 weights work, and keys and values of places that were computed are cached.

Source: arXiv 2504.20456 trains this model. Departure: no dropout, so that a row's loss depends on its own generator
alone. Segments are not used.
Legend: B = batch, L = places that a pass computes, K = those it can see, H = heads, E = head width, D = model width,
T = distances between two positions.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dspec.attention import masks
from dspec.attention.attend import attend
from dspec.errors import UserError
from dspec.models.cache import PositionCache, Window
from dspec.models.target_model import TargetModel
from dspec.precision import widest
from dspec.spans import span

MODEL_TYPE = "xlnet"
_OF_SEGMENTS = ("r_s_bias", "seg_embed")  # weights that no pass reads: no text here has segments


@dataclass(frozen=True)
class _LayerInputs:
    """What all layers share."""

    mask_B1LK: Tensor  # bool
    distance_TD: Tensor  # sinusoids of all distances that occur
    index_B1LK: Tensor  # each pair's distance, as a row of that table
    window: Window | None


class XLNet(TargetModel):
    """An XLNet with its tokenizer: fills holes in any order, and does not continue a text as causal models do."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        mask_token_id: int | None = None,
    ) -> None:
        """Raises UserError for an XLNet of another attention."""
        config = model.config
        if config.attn_type != "bi" or config.bi_data or config.clamp_len > 0:
            raise UserError(
                f"target {name!r} has attn_type={config.attn_type}, bi_data={config.bi_data}, "
                f"clamp_len={config.clamp_len}: dspec runs XLNet with bi, false, -1"
            )
        super().__init__(model, tokenizer, name=name, mask_token_id=mask_token_id)
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        for layer in self._layers:
            _not_trained(layer.rel_attn, _OF_SEGMENTS)

    @property
    def _layers(self) -> Sequence[Any]:
        return self.model.transformer.layer

    @property
    def max_positions(self) -> int:
        """Positions are relative: there is no last one."""
        return sys.maxsize

    def new_cache(self) -> PositionCache:
        return PositionCache(self.num_layers + 1)  # the last for the positions of places

    def any_subset(
        self,
        ids_BL: Tensor,
        *,
        positions_BL: Tensor,
        limit_BL: Tensor,
        query_BL: Tensor,
        cache: PositionCache | None = None,
        start_B: Sequence[int] | None = None,
    ) -> Tensor:
        """Raises UserError for a position query that sees nothing: its softmax has no meaning."""
        if bool((query_BL & (limit_BL == 0)).any()):
            raise UserError(f"{self.name!r} is asked for a token given nothing: at least one token must be visible")
        starts = list(start_B) if start_B is not None else [0] * len(ids_BL)
        window = cache.window(starts, ids_BL.shape[1]) if cache is not None else None
        shared = self._layer_inputs(positions_BL, limit_BL, query_BL, starts, window)
        x_BLD = torch.where(query_BL[..., None], self.model.transformer.mask_emb, self.embed_tokens(ids_BL))
        for number, layer in enumerate(self._layers):
            x_BLD = layer.ff(_attention(layer.rel_attn, x_BLD, shared, number))
        return x_BLD

    def _layer_inputs(
        self, positions_BL: Tensor, limit_BL: Tensor, query_BL: Tensor, starts: Sequence[int], window: Window | None
    ) -> _LayerInputs:
        (B, L), device = positions_BL.shape, positions_BL.device
        key_positions = positions_BL[:, None, :, None]
        if window is not None:
            key_positions, _ = window.update(key_positions, key_positions, self.num_layers)
        predicate = masks.two_streams(limit_BL, torch.tensor(starts, device=device), query_BL)
        mask = masks.dense(predicate, batch=B, queries=L, keys=key_positions.shape[2], device=device)
        distance = positions_BL[:, None, :, None] - key_positions.transpose(2, 3)
        low, high = (int(bound) for bound in distance.aminmax())
        table = _sinusoids(torch.arange(low, high + 1, device=device), self.hidden_size)
        return _LayerInputs(mask, table.to(self.dtype), distance - low, window)


def _attention(attention: Any, x_BLD: Tensor, shared: _LayerInputs, number: int) -> Tensor:
    """Relative attention of layer `number`, its residual and norm: XLNetRelativeAttention with our mask and cache."""
    with span("attention"):
        q, k, v = (torch.einsum("bld,dhe->bhle", x_BLD, w) for w in (attention.q, attention.k, attention.v))
        if shared.window is not None:
            k, v = shared.window.update(k, v, number)
        r_HTE = torch.einsum("td,dhe->hte", shared.distance_TD, attention.r)
        by_distance = torch.einsum("bhle,hte->bhlt", q + attention.r_r_bias[:, None], r_HTE)
        index = shared.index_B1LK.expand(-1, q.shape[1], -1, -1)
        bias = (by_distance.gather(3, index) * attention.scale).masked_fill(~shared.mask_B1LK, -torch.inf)
        seen = attend(q + attention.r_w_bias[:, None], k, v, bias, scale=attention.scale)
        return attention.layer_norm(x_BLD + torch.einsum("bhle,dhe->bld", seen, attention.o))


def _sinusoids(distance_T: Tensor, width: int) -> Tensor:
    """[T, D]: sines, then cosines, of wavelengths from 2 pi to 2 pi 10^4 (query position less key position)."""
    wide = widest(distance_T.device)
    frequency = 10000 ** -(torch.arange(0, width, 2, device=distance_T.device, dtype=wide) / width)
    angle = distance_T.to(wide)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)


def _not_trained(module: nn.Module, names: Sequence[str]) -> None:
    """Makes parameters buffers: saved with the others, and no optimizer or rank waits for their gradients."""
    for name in names:
        weight = getattr(module, name).detach()
        delattr(module, name)
        module.register_buffer(name, weight)
