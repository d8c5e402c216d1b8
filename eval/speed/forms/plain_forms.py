"""What `python -m eval.speed.forms` measures: pairs of forms with the same result, the plain one and dspec's.

The plain forms are short references that exist only here; dspec's are called unchanged. Models are random: the
measurements do not depend on weights.

Legend: B = rows, L = positions, N = anchors, K = slots of a block, P = supervised slots, D = width, V = vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from dspec.attention import attend as attention
from dspec.attention import masks
from dspec.losses import chunked_sum, draft_loss
from dspec.method import Batch
from dspec.methods import drafter
from dspec.methods.drafter import Blocks
from dspec.methods.dspark import DSpark
from dspec.models.draft import build_draft
from dspec.models.language_model import LanguageModel, ModelOutput
from dspec.models.target_model import lm_logits

Form = Callable[[], object]
CHUNK_MB = 32.0


@dataclass(frozen=True)
class Pair:
    """Two forms of the same computation; each call does it once."""

    plain: Form
    ours: Form


@contextmanager
def replaced(module: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def plain_loss(
    terms: Sequence[tuple[Tensor, Tensor]], constants: Sequence[Tensor], target_head: Tensor
) -> tuple[Tensor, Tensor]:
    """DSpark's CE and L1 on full logits with autograd: (sum, statistics)."""
    weight, label, target = constants
    (hidden, head), (code, w2) = terms
    log_draft = (F.linear(hidden, head) + F.linear(code, w2)).float().log_softmax(-1)
    target_logits = F.linear(target, target_head).float()
    l1 = (log_draft.exp() - target_logits.softmax(-1)).abs().sum(-1)
    ce = F.nll_loss(log_draft, label, reduction="none")
    match = (log_draft.argmax(-1) == target_logits.argmax(-1)).float()
    stats = torch.stack([ce, l1, match], -1).detach()
    return (weight * (0.1 * ce + 0.9 * l1)).sum(), stats


def dense_blocks(anchor_BN: Tensor, *, context: int, block: int) -> Tensor:
    """The training mask as one dense tensor."""
    (B, N), device = anchor_BN.shape, anchor_BN.device
    predicate = masks.draft_blocks(anchor_BN, torch.full((B,), context, device=device), block=block)
    return masks.dense(predicate, batch=B, queries=N * block, keys=context + N * block, device=device)


class PlainDSpark(DSpark):
    """Full logits and a dense mask."""

    def draft_blocks(self, *args: Any) -> Blocks:
        with replaced(masks, "training_blocks", dense_blocks):
            return super().draft_blocks(*args)

    def _chunked(self, *args: Any) -> tuple[Tensor, Tensor]:
        def whole(criterion: object, *, terms: Any, constants: Any, chunk_mb: float) -> object:
            return plain_loss(terms, constants, self.target.lm_head.weight)

        with replaced(drafter, "chunked_sum", whole):
            return super()._chunked(*args)


def _target(
    dtype: torch.dtype, *, vocab: int, width: int, layers: int, heads: tuple[int, int], positions: int
) -> LanguageModel:
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=width // heads[0],
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LanguageModel(
        AutoModelForCausalLM.from_config(config).to(dtype), None, name="random", mask_token_id=vocab - 1
    )


def loss(dtype: torch.dtype, *, vocab: int, rows: int, width: int = 256, rank: int = 64) -> Pair:
    """The loss alone: its value and the gradients of hidden states, codes and W2."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=g)).to(dtype)

    hidden, code, w2 = normal(rows, width), normal(rows, rank), normal(vocab, rank, scale=0.02)
    head, target_head = normal(vocab, width, scale=0.1), normal(vocab, width, scale=0.1)
    leaves = [t.requires_grad_() for t in (hidden, code, w2)]
    terms = [(hidden, head), (code, w2)]
    constants = [torch.rand(rows, generator=g), torch.randint(vocab, (rows,), generator=g), normal(rows, width)]

    def ours() -> object:
        criterion = draft_loss(target_head, ce_weight=0.1, tv_weight=0.9)
        total, _ = chunked_sum(criterion, terms=terms, constants=constants, chunk_mb=CHUNK_MB)
        return torch.autograd.grad(total, leaves)

    return Pair(lambda: torch.autograd.grad(plain_loss(terms, constants, target_head)[0], leaves), ours)


def step(dtype: torch.dtype, *, vocab: int, anchors: int, length: int, width: int = 256) -> Pair:
    """A DSpark step from given target features: a two-layer drafter with all heads, loss and gradients."""
    target = _target(dtype, vocab=vocab, width=width, layers=4, heads=(8, 2), positions=2 * length)
    draft = build_draft(
        target=target,
        num_layers=2,
        intermediate_size=None,
        block_size=7,
        layout="anchor_first",
        num_taps=2,
        target_layer_ids=None,
        markov_head_type="vanilla",
        markov_rank=64,
        confidence_head=True,
        confidence_head_with_markov=True,
    ).to(dtype)
    weights = {"loss_decay": 4.0, "ce_weight": 0.1, "tv_weight": 0.9, "confidence_weight": 1.0}
    ids = torch.randint(vocab, (1, length))
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool))
    output = ModelOutput(torch.randn(1, length, width).to(dtype), torch.randn(1, length, 2 * width).to(dtype))
    at = torch.randperm(length - 8)[:anchors].sort().values[None]
    valid = torch.ones_like(at, dtype=torch.bool)

    def form(cls: type[DSpark]) -> Form:
        method = cls(target=target, draft=draft, num_anchors=anchors, chunk_mb=CHUNK_MB, feature_cache_mb=0, **weights)
        trained = list(draft.trainable().values())
        return lambda: torch.autograd.grad(method.loss_at(batch, output, at, valid).loss_sum, trained)

    return Pair(form(PlainDSpark), form(DSpark))


def training_attention(dtype: torch.dtype, *, anchors: int, length: int) -> Pair:
    """Attention of a drafter's blocks, forward and backward."""
    block, (H, G, W) = 7, (8, 2, 32)
    at = torch.randperm(length)[:anchors].sort().values[None]
    q, k, v = (
        torch.randn(1, heads, n, W).to(dtype).requires_grad_()
        for heads, n in ((H, anchors * block), (G, length + anchors * block), (G, length + anchors * block))
    )

    def form(build: Callable[..., masks.Mask]) -> Form:
        return lambda: torch.autograd.grad(
            attention.attend(q, k, v, build(at, context=length, block=block)).sum(), (q, k, v)
        )

    return Pair(form(dense_blocks), form(masks.training_blocks))


def _unfolded(run: Form) -> Form:
    def plain() -> object:
        with replaced(attention, "_FEW", 0):
            return run()

    return plain


@torch.inference_mode()
def few_queries(dtype: torch.dtype, *, queries: int, rows: int, context: int) -> Pair:
    """Attention of a few queries over a cache, with nine query and three key-value heads as in SmolLM2-135M."""
    q, k, v = (
        torch.randn(rows, n, heads, 64).to(dtype).transpose(1, 2)
        for n, heads in ((queries, 9), (context, 3), (context, 3))
    )
    starts = torch.full((rows,), context - queries)
    mask = masks.dense(masks.causal(starts), batch=rows, queries=queries, keys=context, device=q.device)
    added = masks.additive(mask, dtype) if rows * queries > 1 else None
    run = torch.inference_mode()(lambda: attention.attend(q, k, v, added))
    return Pair(_unfolded(run), run)


@torch.inference_mode()
def ar_pass(dtype: torch.dtype, *, rows: int, context: int, layers: int = 30) -> Pair:
    """One autoregressive pass including the LM head, in SmolLM2-135M's shape."""
    target = _target(dtype, vocab=49152, width=576, layers=layers, heads=(9, 3), positions=2 * context)
    cache, ids = target.new_cache(), torch.randint(49152, (rows, context))
    target(ids, cache=cache)
    starts = [context - b for b in range(rows)]

    @torch.inference_mode()
    def run() -> object:
        return target.logits(target(ids[:, :1], start_B=starts, cache=cache).hidden_BLD)

    return Pair(_unfolded(run), run)


@torch.inference_mode()
def prefill(dtype: torch.dtype, *, rows: int, length: int, layers: int = 8) -> Pair:
    """A prompt's pass with the causal mask as a tensor and without one."""
    target = _target(dtype, vocab=1000, width=576, layers=layers, heads=(9, 3), positions=2 * length)
    ids, starts = torch.randint(1000, (rows, length)), torch.zeros(rows, dtype=torch.long)

    @torch.inference_mode()
    def masked() -> object:
        return target(ids, mask=masks.causal(starts))

    return Pair(masked, torch.inference_mode()(lambda: target(ids, cache=target.new_cache())))


@torch.inference_mode()
def head_rows(dtype: torch.dtype, *, rows: int, vocab: int, width: int = 576) -> Pair:
    """An LM head on this many rows."""
    head, x = nn.Linear(width, vocab, bias=False).to(dtype), torch.randn(1, rows, width).to(dtype)
    ours = torch.inference_mode()(lambda: lm_logits(head, x))
    return Pair(torch.inference_mode()(lambda: head(x)), ours)
