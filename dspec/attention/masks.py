"""All attention masks of dspec: predicates over logical positions, and their physical forms.

A predicate has the signature of flex attention's mask_mod, `(b, h, q, kv) -> bool`, and works elementwise on index
tensors. `build` turns it into what attention takes: a flex BlockMask for training on CUDA, else a dense SDPA mask (flex
attention has no backward on CPUs); `tiles` are dense masks over the keys that neighbouring queries see. Training and
the cached decoders read the same predicates; this module knows no model.

Legend: B = batch, Q = queries, K = keys, N = blocks (anchors) per row, L = positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_TILE = 32  # blocks per tile: with fewer, matmuls get too small; with more, too many keys are masked out


@dataclass(frozen=True)
class Tile:
    """Neighbouring queries and all keys that any of them sees: the `leading` ones, and the slots of their blocks."""

    queries: slice
    leading: int
    beside: slice
    mask: Tensor  # bool [B, 1, queries, leading + beside]


Tiles = tuple[Tile, ...]
CAUSAL: Final = "causal"  # as many keys as queries, each query sees those up to its own
PADDING: Final = -1  # the block of slots past a row's end
Mask = Tensor | BlockMask | Tiles | Literal["causal"] | None  # None: every query sees every key


def causal(start_B: Tensor) -> Predicate:
    """Query q of row b is at position start[b] + q and sees keys at positions up to its own.

    start=2:  q0  1 1 1 . .
              q1  1 1 1 1 .
    """

    def predicate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= start_B[b] + q

    return predicate


def branches(start_B: Tensor, branch_BQ: Tensor) -> Predicate:
    """Several continuations of one text, packed in one row: `branch_BQ` numbers them, 0 is the part they share.

    Query q of row b fills cache slot start[b] + q. It sees the slots before start[b] and, up to its own, the shared
    slots and those of its own branch; branches never see each other.

    start=2, branch (0, 1, 1, 2, 2):   q0  1 1 1 . . . .     the anchor
                                       q1  1 1 1 1 . . .     a draft of two tokens
                                       q2  1 1 1 1 1 . .
                                       q3  1 1 1 . . 1 .     another draft, at the same positions
                                       q4  1 1 1 . . 1 1
    """
    last = branch_BQ.shape[1] - 1

    def predicate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        offset = kv - start_B[b]  # index among the pass's inputs
        branch_kv = branch_BQ[b, offset.clamp(0, last)]
        in_prefix, earlier = offset < 0, offset <= q
        shared, own = branch_kv == 0, branch_kv == branch_BQ[b, q]
        return in_prefix | earlier & (shared | own)

    return predicate


def any_subset(limit_BQ: Tensor, start_B: Tensor) -> Predicate:
    """Two streams of an any-subset model in one pass (arXiv 2504.20456, eq. 6; XLNet, arXiv 1906.08237).

    Places are the order of generation, whatever the positions: the prompt first, then one token after the other. Query
    q of row b computes place start[b] + q and sees the places before limit[b, q], and its own. The limit of a prompt
    token is the prompt's end (prompt tokens see each other), that of a later token its own place; a position query,
    which holds no content, asks for the distribution of a token given the places before its limit: those before that
    token's place (joint density) or before all tokens that are drafted together (parallel draft). Only the query itself
    sees its slot.

    prompt c0 c1, tokens t2 t3, position queries   c0  1 1 . . . .      draft:  q2  1 1 1 .
    q2 q3 for the same two, start=0:               c1  1 1 . . . .              q3  1 1 . 1
                                                   t2  1 1 1 . . .
                                                   t3  1 1 1 1 . .
                                                   q2  1 1 . . 1 .
                                                   q3  1 1 1 . . 1
    """

    def predicate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv < limit_BQ[b, q]) | (kv == start_B[b] + q)

    return predicate


def block_causal(block_BQ: Tensor, start_B: Tensor) -> Predicate:
    """Block-causal: a query sees all slots of its own block and of earlier ones (D2F, arXiv 2508.09192, section 4).

    D2F training uses it directly; decoding uses `branch_windows` with a single branch.

    `block_BQ` numbers the blocks of a pass's slots, in order: the prompt is block 0, PADDING sees itself only. Query q
    of row b fills cache slot start[b] + q and sees all slots before start[b].

    start=1, blocks (0, 1, 1, 2, 2):   q0  1 1 . . . .     the end of the prompt
                                       q1  1 1 1 1 . .     block 1
                                       q2  1 1 1 1 . .
                                       q3  1 1 1 1 1 1     block 2
                                       q4  1 1 1 1 1 1
    """
    return branch_windows(block_BQ, torch.zeros_like(block_BQ), start_B)


def full(end_B: Tensor) -> Predicate:
    """Bidirectional: every query sees all slots before its row's end, which leaves the padding out. For training of a
    diffusion LM.

    end=3:  q0  1 1 1 .
            q1  1 1 1 .
            q2  1 1 1 .
            q3  1 1 1 .     padding
    """

    def predicate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv < end_B[b]) & (q >= 0)

    return predicate


def branch_windows(block_BQ: Tensor, branch_BQ: Tensor, start_B: Tensor) -> Predicate:
    """Several versions of one window of blocks, side by side in one row (LoPA).

    A row is [cached slots | what all branches share | window of branch 1 | window of branch 2 | ...]; `branch_BQ` is 0
    for the shared slots. A query sees the slots before start[b], and those of its own and earlier blocks that are
    shared or of its own branch; branches never see each other. With one block number for all of a window its slots see
    each other: full attention. A slot of block PADDING sees itself only, and nobody else sees it.

    start=1, blocks (1, 2, 3, 2, 3),   q0  1 1 . . . .     shared: block 1
    branches (0, 1, 1, 2, 2):          q1  1 1 1 . . .     branch 1: blocks 2 and 3
                                       q2  1 1 1 1 . .
                                       q3  1 1 . . 1 .     branch 2, at the same positions
                                       q4  1 1 . . 1 1
    """
    last = block_BQ.shape[1] - 1

    def predicate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        offset = kv - start_B[b]  # index among the pass's inputs
        index = offset.clamp(0, last)
        block, branch = block_BQ[b, index], branch_BQ[b, index]
        same = (branch == 0) | (branch == branch_BQ[b, q])
        earlier = (block != PADDING) & (block <= block_BQ[b, q])
        cached = (offset < 0) & (block_BQ[b, q] != PADDING)
        return cached | (offset == q) | (offset >= 0) & (offset <= last) & earlier & same

    return predicate


def two_streams(limit_BQ: Tensor, start_B: Tensor, query_BQ: Tensor) -> Predicate:
    """`any_subset` for XLNet, where a position query (`query_BQ`) has no key of its own: it does not see itself.

    prompt c0 c1, tokens t2 t3, position queries   c0  1 1 . . . .
    q2 q3 for the same two, start=0:               c1  1 1 . . . .
                                                   t2  1 1 1 . . .
                                                   t3  1 1 1 1 . .
                                                   q2  1 1 . . . .
                                                   q3  1 1 1 . . .
    """

    def predicate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv < limit_BQ[b, q]) | (kv == start_B[b] + q) & ~query_BQ[b, q]

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
    Decoding is the case N = 1 with context_B = anchor: the cache holds the context, then the block.

    context=4, block=2, anchors (1, 3):   q00  1 . . . | 1 1 . .
                                          q01  1 . . . | 1 1 . .
                                          q10  1 1 1 . | . . 1 1
                                          q11  1 1 1 . | . . 1 1
    """

    def predicate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        in_context = kv < context_B[b]
        same_block = (kv - context_B[b]) // block == q // block
        return torch.where(in_context, kv < anchor_BN[b, q // block], same_block)

    return predicate


def noise_conditioned(document_BL: Tensor, block_BL: Tensor, noisy_BL: Tensor, *, window: int | None) -> Predicate:
    """Jacobi Forcing's training mask over packed rows [prompt][noisy 0][clean 0][noisy 1][clean 1] ...

    `block_BL` numbers a document's blocks (-1 in its prompt), `noisy_BL` marks the noisy copies. Each token sees its
    document's prompt and its own copy of its own block up to itself; a clean block sees the clean blocks before it, so
    the clean copies are a plain causal text. A noisy block j sees the blocks before it noisy, as several blocks in
    flight do; with a `window` w the blocks before w * floor(j / w) are seen clean, as decoding has verified them.
    `window` None has no such limit (the paper's mask); 1 is CLLM's: all earlier blocks are clean.

    one token per block,  prompt   1 . . . . . .      window=1:  1 . . . . . .
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
    q, kv = torch.arange(queries, device=device), torch.arange(keys, device=device)
    return _table(predicate, batch, q, kv)


def _table(predicate: Predicate, batch: int, q: Tensor, kv: Tensor) -> Tensor:
    """The predicate at these queries and keys: bool [batch, 1, len(q), len(kv)]."""
    b = torch.arange(batch, device=q.device).view(-1, 1, 1, 1)
    table = predicate(b, torch.zeros_like(b), q.view(1, 1, -1, 1), kv.view(1, 1, 1, -1))
    return table.expand(batch, 1, len(q), len(kv))


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask in additive form (0 or -inf), which SDPA would otherwise recompute in every layer."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def build(
    predicate: Predicate,
    *,
    batch: int,
    queries: int,
    keys: int,
    device: torch.device,
    additive_dtype: torch.dtype | None,
    flex: bool = False,
) -> Mask:
    """The predicate in the form that attention takes: a flex BlockMask if `flex`, else a tensor.

    `additive_dtype` is the dtype of an additive mask (SDPA would otherwise recompute one in every layer); None returns
    a boolean one (under autocast the scores' dtype is not known here).
    """
    if flex:
        return block_mask(predicate, batch=batch, queries=queries, keys=keys, device=device)
    mask = dense(predicate, batch=batch, queries=queries, keys=keys, device=device)
    return mask if additive_dtype is None else additive(mask, additive_dtype)


def build_causal(
    start_B: Sequence[int],
    *,
    queries: int,
    device: torch.device,
    additive_dtype: torch.dtype | None,
    keys: int | None = None,
) -> Mask:
    """`causal` in its cheapest form: None for a single query of a single row, CAUSAL if all rows start at slot 0
    (nothing past a row's end is ever read), else as in `build`. `keys` None: all up to the last query's own."""
    if not any(start_B):
        return CAUSAL
    if queries == len(start_B) == 1:
        return None
    return build(
        causal(torch.tensor(start_B, device=device)),
        batch=len(start_B),
        queries=queries,
        keys=max(start_B) + queries if keys is None else keys,
        device=device,
        additive_dtype=additive_dtype,
    )


def block_mask(predicate: Predicate, *, batch: int, queries: int, keys: int, device: torch.device) -> BlockMask:
    """The predicate as a flex attention BlockMask, shared by all heads."""
    return create_block_mask(predicate, batch, None, queries, keys, device=device.type)


def tiles(anchor_BN: Tensor, *, context: int, block: int, size: int = _TILE) -> Tiles:
    """`draft_blocks` over `context` features in tiles of `size` blocks: no tile reads features past its anchors.

    With sorted anchors that halves the work, and blocks of other tiles are skipped entirely.
    """
    B, N = anchor_BN.shape
    contexts = torch.full((B,), context, device=anchor_BN.device)
    predicate, made = draft_blocks(anchor_BN, contexts, block=block), []
    for first in range(0, N, size):
        last = min(first + size, N)
        leading = int(anchor_BN[:, first:last].max())
        q = torch.arange(first * block, last * block, device=anchor_BN.device)
        kv = torch.cat([torch.arange(leading, device=q.device), context + q])
        beside = slice(context + first * block, context + last * block)
        made.append(Tile(slice(first * block, last * block), leading, beside, _table(predicate, B, q, kv)))
    return tuple(made)


def training_blocks(anchor_BN: Tensor, *, context: int, block: int) -> Mask:
    """`draft_blocks` in a form with a backward pass on the anchors' device: flex on CUDA, tiles elsewhere."""
    if anchor_BN.device.type != "cuda":
        return tiles(anchor_BN, context=context, block=block)
    (B, N), device = anchor_BN.shape, anchor_BN.device
    predicate = draft_blocks(anchor_BN, torch.full((B,), context, device=device), block=block)
    return block_mask(predicate, batch=B, queries=N * block, keys=context + N * block, device=device)
