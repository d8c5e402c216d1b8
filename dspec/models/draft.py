"""The DFlash / DSpark drafter: a shallow block-diffusion transformer that reads the target's hidden states.

Sources: DFlash (arXiv 2602.06036; KV injection: K_i = [W_i^K H_t; W_i^K H_d]), DSpark (arXiv 2607.05147; sequential
and confidence heads), tensor names and arithmetic of DeepSpec@afdfa7c. One class serves both methods: DFlash is the
drafter without heads. This module knows no training loop and no decoder.

Slot layouts (never guessed; stored in the checkpoint):
  anchor_first  [anchor, mask, mask, ...]: slot k predicts position anchor + k + 1; B slots give B drafts (DeepSpec).
  fill_in       [anchor, mask, mask, ...]: slot k predicts position anchor + k; slot 0 is void, B - 1 drafts (z-lab).

Legend: B = batch, S = context positions, N = blocks, K = block size, Q = N * K, D = width, F = feature width,
H/G = query / key-value heads, W = head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RotaryEmbedding, rotate_half

from dspec.attention.attend import attend
from dspec.attention.masks import Mask
from dspec.errors import UserError
from dspec.models.cache import PositionCache, Window
from dspec.models.heads import SEQUENTIAL_HEADS, ConfidenceHead, MarkovHead
from dspec.models.language_model import LanguageModel, require_causal
from dspec.models.rotary import Rotary
from dspec.models.temperatures import Calibration

LAYOUTS = ("anchor_first", "fill_in")


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A drafter's architecture; `transformer` holds the dimensions of its Qwen3 layers."""

    transformer: Qwen3Config
    layout: str
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    markov_head_type: str | None
    markov_rank: int
    confidence_head: bool
    confidence_head_with_markov: bool

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UserError(f"draft layout {self.layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
        if self.markov_head_type is not None and self.markov_head_type not in SEQUENTIAL_HEADS:
            heads = ", ".join(SEQUENTIAL_HEADS)
            raise UserError(f"markov_head_type {self.markov_head_type!r} is unknown; use null or one of {heads}")
        if self.layout == "fill_in" and (self.markov_head_type or self.confidence_head):
            raise UserError("the fill_in layout has no heads: set layout=anchor_first, or use recipe=dflash")
        if self.confidence_head_with_markov and self.markov_head_type is None:
            raise UserError("confidence_head_with_markov=true needs a Markov head: set markov_head_type")
        if self.markov_head_type is not None and self.markov_rank < 1:
            raise UserError("a Markov head needs markov_rank >= 1")
        if self.block_size < 1 + self.first_slot:
            raise UserError(f"block_size={self.block_size} leaves no draft slot in the {self.layout} layout")
        if self.block_size > (positions := self.transformer.max_position_embeddings):
            raise UserError(f"block_size={self.block_size} exceeds the model's {positions} positions")
        if not self.target_layer_ids:
            raise UserError("a drafter needs at least one target layer: set draft.target_layer_ids")

    @property
    def first_slot(self) -> int:
        """First slot whose prediction is a draft."""
        return 1 if self.layout == "fill_in" else 0

    @property
    def num_drafts(self) -> int:
        """Draft tokens per round."""
        return self.block_size - self.first_slot


@dataclass(kw_only=True)
class DraftMetadata:
    """What training and calibration record about a drafter; stored in its checkpoint."""

    calibration: Calibration | None = None  # STS temperatures, once fitted
    prompt_policy: dict[str, Any] = field(default_factory=dict)  # how training prompts were rendered
    num_anchors: int | None = None  # blocks per row in training, a key of DeepSpec's config.json


class RMSNorm(nn.Module):
    """RMS norm with statistics in at least float32 (float64 stays float64)."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype.itemsize >= 4:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.weight * F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)


Rotation = tuple[Tensor, Tensor]  # cosines and sines [B, 1, L, W]


def _rotate(x_BHLW: Tensor, rotation: Rotation) -> Tensor:
    """Computed in the table's precision; only the result is rounded to x's."""
    cos, sin = rotation
    return (x_BHLW * cos + rotate_half(x_BHLW) * sin).to(x_BHLW.dtype)


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from both the target features and the block."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        width, eps, bias = config.head_dim, config.rms_norm_eps, config.attention_bias
        self.head_dim = width
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * width, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * width, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(width, eps=eps)
        self.k_norm = RMSNorm(width, eps=eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim)

    def key_value(self, x_BLD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, G, L, W] of features or block states."""
        k = self.k_norm(self._heads(self.k_proj(x_BLD))).transpose(1, 2)
        v = self._heads(self.v_proj(x_BLD)).transpose(1, 2)
        return _rotate(k, rotation), v

    def forward(self, x_BQD: Tensor, rotation: Rotation, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        q = self.q_norm(self._heads(self.q_proj(x_BQD))).transpose(1, 2)
        out = attend(_rotate(q, rotation), k, v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DraftLayer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Draft(nn.Module):
    """A drafter bound to its target's embeddings and LM head (frozen; shared with the target where equal)."""

    def __init__(self, config: DraftConfig, *, embed_tokens: nn.Embedding, lm_head: nn.Linear) -> None:
        super().__init__()
        geometry = config.transformer
        width, taps = geometry.hidden_size, len(config.target_layer_ids)
        vocab = lm_head.weight.shape[0]
        self.config = config
        self.fc = nn.Linear(taps * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps=geometry.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(geometry) for _ in range(geometry.num_hidden_layers))
        self.norm = RMSNorm(width, eps=geometry.rms_norm_eps)
        self.rotary_emb = Rotary(Qwen3RotaryEmbedding(geometry))
        self.markov_head: MarkovHead | None = None
        if config.markov_head_type is not None:
            head = SEQUENTIAL_HEADS[config.markov_head_type]
            self.markov_head = head(vocab_size=vocab, hidden_size=width, rank=config.markov_rank)
        self.confidence_head: ConfidenceHead | None = None
        if config.confidence_head:
            rank = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(hidden_size=width, markov_rank=rank)
        self.apply(self._initialise)
        self.embed_tokens, self.lm_head = embed_tokens, lm_head
        self.metadata = DraftMetadata()
        self._table: Rotation | None = None
        for module in (embed_tokens, lm_head):
            module.requires_grad_(False)

    def _initialise(self, module: nn.Module) -> None:
        std = self.config.transformer.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The drafter's own parameters by name: all but the target's embeddings and head."""
        shared = ("embed_tokens.", "lm_head.")
        return {name: p for name, p in self.named_parameters() if not name.startswith(shared)}

    @property
    def _stack(self) -> list[DraftLayer]:
        return cast(list[DraftLayer], list(self.layers))

    def new_cache(self) -> PositionCache:
        return PositionCache(len(self.layers))

    def _rotation(self, x: Tensor, positions_BL: Tensor) -> Rotation:
        """Rows of a precomputed table of all positions: computing them would cost a small drafter as much as attention.

        At least float32, whatever x's dtype: under autocast those of the block's and the context's states differ.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self._table is None or self._table[0].dtype != dtype or self._table[0].device != x.device:
            count = self.config.transformer.max_position_embeddings + self.config.block_size
            with torch.inference_mode(False):  # training may read a table built during decoding
                like = torch.empty(0, dtype=dtype, device=x.device)
                cos, sin = self.rotary_emb(like, torch.arange(count, device=x.device)[None])
                self._table = cos[0], sin[0]
        cos, sin = self._table
        return cos[positions_BL][:, None], sin[positions_BL][:, None]

    def context(self, features_BSF: Tensor) -> Tensor:
        """Target context feature H_t = RMSNorm(W_c [H^(l1); ...]) [B, S, D], shared by all layers."""
        return self.hidden_norm(self.fc(features_BSF))

    def extend(self, features_BSF: Tensor, *, start_B: Sequence[int], cache: PositionCache) -> None:
        """Writes the keys and values of verified positions start_B[b] .. start_B[b] + S - 1 into the cache."""
        x = self.context(features_BSF)
        length = x.shape[1]
        start = torch.tensor(start_B, device=x.device)
        rotation = self._rotation(x, start[:, None] + torch.arange(length, device=x.device))
        window = cache.window(start_B, length)
        for i, layer in enumerate(self._stack):
            window.update(*layer.self_attn.key_value(x, rotation), i)

    def block_ids(self, anchor_BN: Tensor) -> Tensor:
        """Block inputs [B, N * K]: each anchor token followed by mask tokens."""
        ids = anchor_BN.new_full((*anchor_BN.shape, self.config.block_size), self.config.mask_token_id)
        ids[..., 0] = anchor_BN
        return ids.flatten(1)

    def forward(
        self,
        ids_BQ: Tensor,
        positions_BQ: Tensor,
        *,
        mask: Mask,
        features_BSF: Tensor | None = None,
        window: Window | None = None,
    ) -> Tensor:
        """Hidden states after the final norm [B, Q, D] of block inputs.

        Training passes the features of positions 0..S-1; decoding passes a window, into which the block is written, of
        a cache that holds their keys and values. `mask` covers context keys, then block keys.
        """
        x = self.embed_tokens(ids_BQ)
        rotation = self._rotation(x, positions_BQ)
        context = None
        if features_BSF is not None:
            context = self.context(features_BSF)
            context_rotation = self._rotation(context, torch.arange(context.shape[1], device=x.device)[None])
        for i, layer in enumerate(self._stack):
            normed = layer.input_layernorm(x)
            # keys: the context's (of its features, or from the cache), then the block's
            k, v = layer.self_attn.key_value(normed, rotation)
            if window is not None:
                k, v = window.update(k, v, i)
            elif context is not None:
                k_context, v_context = layer.self_attn.key_value(context, context_rotation)
                k, v = torch.cat([k_context, k], 2), torch.cat([v_context, v], 2)
            x = x + layer.self_attn(normed, rotation, k, v, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def confidence(self, previous: Tensor, hidden: Tensor) -> Tensor | None:
        """Confidence logits [...] for previous tokens [...] and hidden [..., D]; None without the head."""
        if self.confidence_head is None:
            return None
        markov = self.markov_head.markov_w1(previous) if self.confidence_head.markov_rank and self.markov_head else None
        return self.confidence_head(hidden, markov)


def default_target_layers(count: int, *, num_layers: int) -> tuple[int, ...]:
    """Layers spread evenly from shallow to deep (DeepSpec, z-lab: round(1 + i (L - 4) / (n - 1))).

    That formula repeats ids on shallow targets: below 8 layers ids are spread evenly over 0..L-2; one tap uses L // 2.
    """
    if count < 1 or count > max(1, num_layers - 1):
        raise UserError(f"draft.num_taps={count} does not fit a target of {num_layers} layers (1..{num_layers - 1})")
    if count == 1:
        return (num_layers // 2,)
    if num_layers < 8:
        return tuple(round(i * (num_layers - 2) / (count - 1)) for i in range(count))
    ids = tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
    if len(set(ids)) < count:
        raise UserError(f"draft.num_taps={count} repeats layers on a target of {num_layers}; use fewer taps")
    return ids


def build_draft(
    *,
    target: LanguageModel,
    num_layers: int,
    intermediate_size: int | None,
    block_size: int,
    layout: str,
    num_taps: int,
    target_layer_ids: Sequence[int] | None,
    markov_head_type: str | None,
    markov_rank: int,
    confidence_head: bool,
    confidence_head_with_markov: bool,
) -> Draft:
    """A fresh drafter with the target's width and heads; null ids and sizes are taken from the target. Without a Markov
    head its rank and its part in the confidence head are 0.

    Raises UserError if the target has no mask token, or for layer ids out of range.
    """
    source = require_causal(target).model.config
    ids = tuple(target_layer_ids or default_target_layers(num_taps, num_layers=target.num_layers))
    target.check_taps(ids)
    geometry: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": intermediate_size or source.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": source.num_attention_heads,
        "num_key_value_heads": source.num_key_value_heads,
        "head_dim": getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        "max_position_embeddings": source.max_position_embeddings,
        "rope_parameters": source.rope_parameters,
        "rms_norm_eps": source.rms_norm_eps,
        "hidden_act": source.hidden_act,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    config = DraftConfig(
        transformer=Qwen3Config(**geometry),
        layout=layout,
        block_size=block_size,
        target_layer_ids=ids,
        num_target_layers=target.num_layers,
        mask_token_id=target.required_mask_token(),
        markov_head_type=markov_head_type,
        markov_rank=markov_rank if markov_head_type is not None else 0,
        confidence_head=confidence_head,
        confidence_head_with_markov=confidence_head_with_markov and markov_head_type is not None,
    )
    return Draft(config, embed_tokens=target.embed_tokens, lm_head=target.lm_head)
