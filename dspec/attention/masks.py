"""Every attention mask of dspec, as a predicate over logical positions, and its two physical forms.

A predicate has the signature of flex attention's mask_mod, `(b, h, q, kv) -> bool`, and works elementwise on index
tensors. `dense` turns it into a boolean SDPA mask (CPU: flex attention has no backward there), `block_mask` into a
flex BlockMask (CUDA). Training and the cached decoders read the same predicates; this module knows no model.

Legend: B = batch, Q = queries, K = keys, N = blocks (anchors) a row, L = positions.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Mask = Tensor | BlockMask | None


def causal(start_B: Tensor) -> Predicate:
    """Query q of row b stands at position start[b] + q and sees keys at positions up to its own.

    start=2:  q0  1 1 1 . .
              q1  1 1 1 1 .
    """

    def predicate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= start_B[b] + q

    return predicate


def document_causal(document_BL: Tensor) -> Predicate:
    """Causal within each packed document: rows hold several documents that do not see each other."""

    def predicate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (document_BL[b, q] == document_BL[b, kv])

    return predicate


def draft_blocks(anchor_BN: Tensor, context_B: Tensor, *, block: int) -> Predicate:
    """A drafter's blocks over injected target features (DFlash section 3; DeepSpec's training mask).

    Keys are `context_B[b]` feature positions, then N blocks of `block` slots. A slot sees the features strictly
    before its block's anchor and, in both directions, the slots of its own block; blocks never see each other.
    The decoder is the case N = 1 with context_B = anchor: the cache holds the context, then the block.

    context=4, block=2, anchors (1, 3):   q00  1 . . . | 1 1 . .
                                          q01  1 . . . | 1 1 . .
                                          q10  1 1 1 . | . . 1 1
                                          q11  1 1 1 . | . . 1 1
    """

    def predicate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        in_context = kv < context_B[b]
        own_block = (kv - context_B[b]) // block == q // block
        return torch.where(in_context, kv < anchor_BN[b, q // block], own_block)

    return predicate


def noise_conditioned(document_BL: Tensor, block_BL: Tensor, noisy_BL: Tensor, *, window: int | None) -> Predicate:
    """Jacobi Forcing's training mask over packed rows [prompt][noisy 0][clean 0][noisy 1][clean 1] ...

    `block_BL` numbers a document's blocks (-1 in its prompt), `noisy_BL` marks the noisy copies. Each token sees its
    document's prompt and its own copy of its own block up to itself; a clean block sees the clean blocks before it, so
    the clean copies are a plain causal text. A noisy block j sees the blocks before it noisy, as several blocks in
    flight do; with a `window` w the blocks before w * floor(j / w) are seen clean, as decoding has verified them.
    `window` None has no such border (the paper's mask), 1 is CLLM's: every block before is clean.

    one token a block,    prompt   1 . . . . . .      window=1:  1 . . . . . .
    prompt n0 c0 n1 c1    noisy 0  1 1 . . . . .                 1 1 . . . . .
    n2 c2:                clean 0  1 . 1 . . . .                 1 . 1 . . . .
                          noisy 1  1 1 . 1 . . .                 1 . 1 1 . . .
                          clean 1  1 . 1 . 1 . .                 1 . 1 . 1 . .
                          noisy 2  1 1 . 1 . 1 .                 1 . 1 . 1 1 .
                          clean 2  1 . 1 . 1 . 1                 1 . 1 . 1 . 1
    """

    def predicate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block_q, block_kv = block_BL[b, q], block_BL[b, kv]
        first_noisy = block_q // window * window if window is not None else 0 * block_q
        wants_noisy = noisy_BL[b, q] & (block_kv >= first_noisy)
        visible = (block_kv < 0) | (noisy_BL[b, kv] == wants_noisy)
        return (kv <= q) & (document_BL[b, q] == document_BL[b, kv]) & visible

    return predicate


def dense(predicate: Predicate, *, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """The predicate as a boolean mask [batch, 1, queries, keys] for scaled_dot_product_attention."""
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    q = torch.arange(queries, device=device).view(1, 1, -1, 1)
    kv = torch.arange(keys, device=device).view(1, 1, 1, -1)
    return predicate(b, torch.zeros_like(b), q, kv).expand(batch, 1, queries, keys)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as what is added to scores (0 or -inf): SDPA would else convert it anew in every layer."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def block_mask(predicate: Predicate, *, batch: int, queries: int, keys: int, device: torch.device) -> BlockMask:
    """The predicate as a flex attention BlockMask, shared by all heads."""
    return create_block_mask(predicate, batch, None, queries, keys, device=device.type)


def training_mask(predicate: Predicate, *, batch: int, queries: int, keys: int, device: torch.device) -> Mask:
    """The form that trains on this device: flex on CUDA, dense elsewhere."""
    build = block_mask if device.type == "cuda" else dense
    return build(predicate, batch=batch, queries=queries, keys=keys, device=device)
