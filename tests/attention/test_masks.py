"""Masks against boolean tables written out with loops, and flex attention against dense attention."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask

from dspec.attention import masks
from dspec.attention.attend import _folded, _folds, attend

CPU = torch.device("cpu")


def _equal(predicate: masks.Predicate, table: list[list[list[bool]]]) -> None:
    expected = torch.tensor(table)
    B, Q, K = expected.shape
    shape = {"batch": B, "queries": Q, "keys": K, "device": CPU}
    got = masks.dense(predicate, **shape)
    assert got.dtype == torch.bool
    assert torch.equal(got[:, 0], expected)
    flex = masks.block_mask(predicate, **shape)  # what a GPU trains with: element by element, and block by block
    assert torch.equal(create_mask(flex.mask_mod, B, 1, Q, K, device="cpu")[:, 0], expected)
    assert flex.to_dense()[:, 0].bool().flatten(1).tolist() == [[bool(row.any())] for row in expected]


def test_causal() -> None:
    starts = [0, 3, 1]
    table = [[[key <= s + q for key in range(8)] for q in range(4)] for s in starts]
    _equal(masks.causal(torch.tensor(starts)), table)
    assert table[1][0] == [True] * 4 + [False] * 4  # a query at position 3 sees positions 0..3


@pytest.mark.parametrize("seed", range(5))
def test_branches(seed: int) -> None:
    rng = random.Random(seed)
    starts, width = [rng.randint(0, 3) for _ in range(3)], rng.randint(1, 7)
    rows = [[0, *sorted(rng.randint(0, 3) for _ in range(width - 2)), -1][:width] for _ in starts]
    table = [
        [
            [k < s or (k - s <= q and row[k - s] in (0, row[q])) for k in range(max(starts) + width)]
            for q in range(width)
        ]
        for s, row in zip(starts, rows, strict=True)
    ]
    _equal(masks.branches(torch.tensor(starts), torch.tensor(rows)), table)


def _ragged_blocks(rng: random.Random, width: int) -> list[int]:
    """Block numbers that rise by 0 or 1, then padding."""
    row, at = [], rng.randint(0, 2)
    for _ in range(rng.randint(1, width)):
        row.append(at)
        at += rng.random() < 0.4
    return row + [masks.PADDING] * (width - len(row))


@pytest.mark.parametrize("seed", range(6))
def test_block_causal(seed: int) -> None:
    rng = random.Random(seed)
    starts, width = [rng.randint(0, 4) for _ in range(3)], rng.randint(1, 8)
    rows = [_ragged_blocks(rng, width) for _ in starts]
    table = []
    for start, row in zip(starts, rows, strict=True):
        blocks = [-5] * start + row  # what is cached is earlier than all
        queries = []
        for q in range(start, start + width):
            seen = []
            for k in range(max(starts) + width):
                inside = k < len(blocks) and blocks[k] != masks.PADDING and blocks[q] != masks.PADDING
                seen.append(k == q or (inside and blocks[k] <= blocks[q]))
            queries.append(seen)
        table.append(queries)
    _equal(masks.block_causal(torch.tensor(rows), torch.tensor(starts)), table)


def test_drawing_of_block_causal() -> None:
    predicate = masks.block_causal(torch.tensor([[0, 1, 1, 2, 2]]), torch.tensor([1]))
    got = masks.dense(predicate, batch=1, queries=5, keys=6, device=CPU)[0, 0].int().tolist()
    assert got == [[1, 1, 0, 0, 0, 0], *[[1, 1, 1, 1, 0, 0]] * 2, *[[1] * 6] * 2]


def test_full() -> None:
    ends = [2, 5, 1]
    table = [[[k < end for k in range(6)] for _ in range(4)] for end in ends]
    _equal(masks.full(torch.tensor(ends)), table)


@pytest.mark.parametrize("seed", range(8))
def test_windows(seed: int) -> None:
    """Shared slots, then several branches at blocks of their own, then padding."""
    rng = random.Random(seed)
    starts, rows, numbers = [rng.randint(0, 3) for _ in range(3)], [], []
    for _ in starts:
        shared = sorted(rng.randint(0, 2) for _ in range(rng.randint(0, 2)))
        window = sorted(rng.randint(2, 4) for _ in range(rng.randint(1, 3)))
        branches = rng.randint(1, 3)
        rows.append(shared + window * branches)
        numbers.append([0] * len(shared) + [1 + j for j in range(branches) for _ in window])
    width = max(map(len, rows))
    rows = [row + [masks.PADDING] * (width - len(row)) for row in rows]
    numbers = [row + [0] * (width - len(row)) for row in numbers]
    table = []
    for start, block, branch in zip(starts, rows, numbers, strict=True):
        queries = []
        for q in range(width):
            seen = [False] * (max(starts) + width)
            seen[start + q] = True
            if block[q] != masks.PADDING:
                seen[:start] = [True] * start
                for k in range(width):
                    if block[k] != masks.PADDING and branch[k] in (0, branch[q]) and block[k] <= block[q]:
                        seen[start + k] = True
            queries.append(seen)
        table.append(queries)
    _equal(masks.branch_windows(torch.tensor(rows), torch.tensor(numbers), torch.tensor(starts)), table)


def test_drawing_of_windows() -> None:
    blocks, branches = torch.tensor([[1, 2, 3, 2, 3]]), torch.tensor([[0, 1, 1, 2, 2]])
    predicate = masks.branch_windows(blocks, branches, torch.tensor([1]))
    got = masks.dense(predicate, batch=1, queries=5, keys=6, device=CPU)[0, 0].int().tolist()
    assert got == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 1]]


@torch.no_grad()
@pytest.mark.parametrize("block", range(4))
def test_blocks_do_not_see_the_future(toys: SimpleNamespace, block: int) -> None:
    """Another token in a block changes the logits there and in all later blocks, not in earlier ones; under `full` it
    changes all, and what stands behind a row's end changes nothing."""
    of = toys.target(seed=block)
    blocks = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 3, 3]])
    ids = torch.tensor([[1, 4, 2, 7, 3, 5, 5, 9, 0, 6]])
    for place in (blocks[0] == block).nonzero()[:, 0].tolist():
        other = ids.clone()
        other[0, place] = 8
        mask = masks.block_causal(blocks, torch.tensor([0]))
        moved = (of(ids, mask=mask).hidden_BLD - of(other, mask=mask).hidden_BLD)[0].abs().amax(-1)
        assert (moved[blocks[0] < block] == 0).all()
        assert (moved[blocks[0] >= block] > 1e-6).all()
        for end in (10, place):
            mask = masks.full(torch.tensor([max(1, end)]))
            moved = (of(ids, mask=mask).hidden_BLD - of(other, mask=mask).hidden_BLD)[0].abs().amax(-1)
            assert (moved[:end] > 1e-6).all() if end == 10 else (moved[:end] == 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_any_subset(seed: int) -> None:
    """Whatever the limits, and rows that begin at places of their own."""
    rng = random.Random(seed)
    starts, width = [rng.randint(0, 5) for _ in range(3)], rng.randint(1, 7)
    limits = [[rng.randint(0, start + width) for _ in range(width)] for start in starts]
    table = [
        [[k < row[q] or k == start + q for k in range(max(starts) + width)] for q in range(width)]
        for start, row in zip(starts, limits, strict=True)
    ]
    _equal(masks.any_subset(torch.tensor(limits), torch.tensor(starts)), table)
    assert all(table[b][q][starts[b] + q] for b in range(3) for q in range(width))  # no row of a softmax is empty


@pytest.mark.parametrize("seed", range(6))
def test_two_streams(seed: int) -> None:
    """A position query has no key: it does not even see itself."""
    rng = random.Random(seed)
    starts, width = [rng.randint(0, 5) for _ in range(3)], rng.randint(1, 7)
    limits = [[rng.randint(0, start + width) for _ in range(width)] for start in starts]
    queries = [[rng.random() < 0.5 for _ in range(width)] for _ in starts]
    table = [
        [
            [k < limits[b][q] or (k == start + q and not queries[b][q]) for k in range(max(starts) + width)]
            for q in range(width)
        ]
        for b, start in enumerate(starts)
    ]
    _equal(masks.two_streams(torch.tensor(limits), torch.tensor(starts), torch.tensor(queries)), table)


@pytest.mark.parametrize("seed", range(4))
def test_any_subset_over_a_rank_vector(seed: int) -> None:
    """The two streams in words, over ranks: prompt tokens are alike, later ones follow one another."""
    rng = random.Random(seed)
    prompt, text = rng.randint(1, 4), rng.randint(5, 8)
    n = rng.randint(prompt, text - 1)  # draft queries ask behind so many known tokens
    streams = [("content", i) for i in range(text)] + [("oracle", i) for i in range(prompt, text)]
    streams += [("draft", i) for i in range(n, text)]

    def sees(q: tuple[str, int], k: tuple[str, int]) -> bool:
        if k[0] != "content":
            return q == k
        rank_q, rank_k = (0 if place < prompt else place for place in (q[1], k[1]))
        bar = n if q[0] == "draft" else rank_q
        return rank_k <= rank_q if q[0] == "content" else rank_k < bar

    limit = {"content": lambda i: max(prompt, i + 1), "oracle": lambda i: i, "draft": lambda i: n}
    limits = torch.tensor([[limit[kind](i) for kind, i in streams]])
    _equal(masks.any_subset(limits, torch.tensor([0])), [[[sees(q, k) for k in streams] for q in streams]])


def test_build_takes_the_cheapest_form() -> None:
    """No mask, the causal kernel, or a table: boolean, or as what is added to scores."""
    causal = {"device": CPU, "additive_dtype": torch.float64}
    assert masks.build_causal([0, 0], queries=3, **causal) == masks.CAUSAL
    assert masks.build_causal([5], queries=1, **causal) is None
    for starts, queries in (([5], 2), ([5, 5], 1), ([0, 5], 3)):
        shape = {"batch": len(starts), "queries": queries, "keys": max(starts) + queries, "device": CPU}
        table = masks.dense(masks.causal(torch.tensor(starts)), **shape)
        added = masks.build_causal(starts, queries=queries, **causal)
        assert added.dtype == torch.float64
        assert torch.equal(added == 0, table)
        assert torch.equal(masks.build_causal(starts, queries=queries, device=CPU, additive_dtype=None), table)
    shape = {"batch": 1, "queries": 4, "keys": 4, "device": CPU, "additive_dtype": None}
    assert isinstance(masks.build(masks.causal(torch.tensor([0])), **shape, flex=True), BlockMask)


def test_document_causal() -> None:
    documents = [[0, 0, 1, 1, 1, -1], [4, 5, 5, 5, 6, 6]]
    table = [[[k <= q and row[k] == row[q] for k in range(6)] for q in range(6)] for row in documents]
    _equal(masks.document_causal(torch.tensor(documents)), table)


def _block_table(anchors: list[int], context: int, *, block: int, keys: int) -> list[list[bool]]:
    table = [[False] * keys for _ in range(len(anchors) * block)]
    for n, anchor in enumerate(anchors):
        for q in range(n * block, (n + 1) * block):
            for key in range(min(anchor, context)):
                table[q][key] = True
            for other in range(block):
                table[q][context + n * block + other] = True
    return table


@pytest.mark.parametrize("seed", range(10))
def test_draft_blocks(seed: int) -> None:
    rng = random.Random(seed)
    block, N, context = rng.randint(1, 4), rng.randint(1, 3), rng.randint(2, 7)
    anchors = [sorted(rng.randrange(context) for _ in range(N)) for _ in range(3)]
    keys = context + N * block
    predicate = masks.draft_blocks(torch.tensor(anchors), torch.full((3,), context), block=block)
    _equal(predicate, [_block_table(row, context, block=block, keys=keys) for row in anchors])


def test_draft_blocks_of_the_decoder() -> None:
    """One block a row behind a ragged context: whatever lies behind the row's own block is never seen."""
    starts, block = [2, 5, 0], 3
    start = torch.tensor(starts)
    table = [_block_table([s], s, block=block, keys=8) for s in starts]
    _equal(masks.draft_blocks(start[:, None], start, block=block), table)
    assert table[0][0] == [True] * 5 + [False] * 3


@pytest.mark.parametrize("seed", range(12))
def test_tiles_hold_all_that_the_dense_mask_holds(seed: int) -> None:
    """Each tile is the dense mask at its queries and keys, whatever it leaves out is False there; sorted or not."""
    rng = random.Random(seed)
    block, N, context, size = rng.randint(1, 4), rng.randint(1, 7), rng.randint(2, 9), rng.randint(1, 8)
    anchors = torch.tensor([[rng.randrange(context) for _ in range(N)] for _ in range(3)])
    anchors = anchors if seed % 3 == 0 else anchors.sort(1).values
    predicate = masks.draft_blocks(anchors, torch.full((3,), context), block=block)
    rest = masks.dense(predicate, batch=3, queries=N * block, keys=context + N * block, device=CPU).clone()
    tiles = masks.tiles(anchors, context=context, block=block, size=size)
    assert [tile.queries.start for tile in tiles] == list(range(0, N * block, size * block))
    assert tiles[-1].queries.stop == N * block
    for tile in tiles:
        assert tile.leading == anchors[:, tile.queries.start // block : tile.queries.stop // block].max()
        part = rest[:, :, tile.queries]
        assert torch.equal(tile.mask, torch.cat([part[..., : tile.leading], part[..., tile.beside]], -1))
        part[..., : tile.leading], part[..., tile.beside] = False, False
    assert not rest.any()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_tiles_equal_the_dense_mask(groups: int, size: int) -> None:
    """Attention in value and in all three gradients; a row with anchors at 0 has tiles without any feature."""
    B, block, context, N, H, W = 2, 3, 20, 7, 4, 8
    generator = torch.Generator().manual_seed(size)
    anchors = torch.randint(context, (B, N), generator=generator).sort(1).values
    anchors[:, :2] = 0
    predicate = masks.draft_blocks(anchors, torch.full((B,), context), block=block)
    dense = masks.dense(predicate, batch=B, queries=N * block, keys=context + N * block, device=CPU)
    inputs = [
        torch.randn(B, heads, length, W, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, length in ((H, N * block), (groups, context + N * block), (groups, context + N * block))
    ]
    out = [attend(*inputs, mask) for mask in (dense, masks.tiles(anchors, context=context, block=block, size=size))]
    torch.testing.assert_close(out[1], out[0], rtol=0, atol=1e-12)
    weights = torch.randn(out[0].shape, generator=generator, dtype=torch.float64)
    expected, got = (torch.autograd.grad((weights * x).sum(), inputs) for x in out)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_training_takes_tiles_on_a_cpu() -> None:
    made = masks.training_blocks(torch.arange(100)[None], context=100, block=2)
    assert isinstance(made, tuple)
    assert len(made) > 1
    assert sum(tile.mask.numel() for tile in made) < 200 * 300 / 2


def _packed_row(rng: random.Random, length: int) -> tuple[list[int], list[int], list[bool]]:
    """Documents of [prompt][noisy 0][clean 0]... with blocks of one to three tokens, then padding."""
    document, block, noisy = [], [], []
    for number in range(2):
        parts = [(-1, False, rng.randint(1, 3))]
        for j in range(rng.randint(1, 4)):
            tokens = rng.randint(1, 3)
            parts += [(j, True, tokens), (j, False, tokens)]
        for j, own, tokens in parts:
            document += [number] * tokens
            block += [j] * tokens
            noisy += [own] * tokens
    rest = length - len(document)
    return [*document, *[-1] * rest], [*block, *[-1] * rest], [*noisy, *[False] * rest]


@pytest.mark.parametrize("window", [None, 1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_noise_conditioned(seed: int, window: int | None) -> None:
    """Against the rules in words, one pair of places at a time."""
    rng, length = random.Random(seed), 60
    rows = [_packed_row(rng, length) for _ in range(2)]

    def sees(row: tuple[list[int], list[int], list[bool]], q: int, k: int) -> bool:
        document, block, noisy = (part for part in row)
        if document[q] != document[k] or k > q:
            return False
        if block[k] == -1:  # the document's prompt (or padding, for padding)
            return True
        if block[q] == -1:
            return False
        if block[k] == block[q]:  # its own copy of its own block
            return noisy[k] == noisy[q]
        if not noisy[q]:  # clean sees clean
            return not noisy[k]
        border = 0 if window is None else window * (block[q] // window)
        return noisy[k] if block[k] >= border else not noisy[k]

    table = [[[sees(row, q, k) for k in range(length)] for q in range(length)] for row in rows]
    parts = [torch.tensor([row[i] for row in rows]) for i in range(3)]
    _equal(masks.noise_conditioned(*parts, window=window), table)


def test_docstring_pictures() -> None:
    draft = masks.draft_blocks(torch.tensor([[1, 3]]), torch.tensor([4]), block=2)
    rows = masks.dense(draft, batch=1, queries=4, keys=8, device=CPU)[0, 0].int().tolist()
    assert rows == [[1, 0, 0, 0, 1, 1, 0, 0]] * 2 + [[1, 1, 1, 0, 0, 0, 1, 1]] * 2
    causal = masks.dense(masks.causal(torch.tensor([2])), batch=1, queries=2, keys=5, device=CPU)[0, 0]
    assert causal.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    limits = torch.tensor([[2, 2, 2, 3, 2, 3]])  # t2 and t3 see themselves anyway
    pairs = masks.dense(masks.any_subset(limits, torch.tensor([0])), batch=1, queries=6, keys=6, device=CPU)[0, 0]
    own = [[1, 1, 0, 0, 0, 0]] * 2 + [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 1]]
    assert pairs.int().tolist() == own
    parallel = masks.any_subset(torch.tensor([[2, 2]]), torch.tensor([2]))  # behind a cache that holds c0 c1
    rows = masks.dense(parallel, batch=1, queries=2, keys=4, device=CPU)[0, 0].int().tolist()
    assert rows == [[1, 1, 1, 0], [1, 1, 0, 1]]
    document, block = torch.zeros(1, 7, dtype=torch.long), torch.tensor([[-1, 0, 0, 1, 1, 2, 2]])
    noisy = torch.tensor([[False, True, False, True, False, True, False]])
    for window in (None, 1):
        predicate = masks.noise_conditioned(document, block, noisy, window=window)
        got = masks.dense(predicate, batch=1, queries=7, keys=7, device=CPU)[0, 0].int().tolist()
        assert got[5] == ([1, 1, 0, 1, 0, 1, 0] if window is None else [1, 0, 1, 0, 1, 1, 0])
        assert got[6] == [1, 0, 1, 0, 1, 0, 1]


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_flex_equals_dense(groups: int) -> None:
    generator = torch.Generator().manual_seed(groups)
    B, block, context, N, H, W = 2, 3, 130, 5, 4, 16
    Q, K = N * block, context + N * block
    anchors = torch.randint(context, (B, N), generator=generator).sort(1).values
    anchors[0, 0] = 0  # a block without any context
    predicates = {
        "draft": (masks.draft_blocks(anchors, torch.full((B,), context), block=block), Q, K),
        "causal": (masks.causal(torch.tensor([7, 100])), 20, 120),
        "documents": (masks.document_causal(torch.arange(140).repeat(B, 1) // 33), 140, 140),
    }
    for name, (predicate, queries, keys) in predicates.items():
        q, k, v = (
            torch.randn(B, heads, length, W, generator=generator, dtype=torch.float64)
            for heads, length in ((H, queries), (groups, keys), (groups, keys))
        )
        dense = masks.dense(predicate, batch=B, queries=queries, keys=keys, device=CPU)
        flex = masks.block_mask(predicate, batch=B, queries=queries, keys=keys, device=CPU)
        assert isinstance(flex, BlockMask)
        out = attend(q, k, v, dense)
        torch.testing.assert_close(attend(q, k, v, flex), out, rtol=0, atol=1e-10, msg=name)
        k, v = (x.repeat_interleave(H // groups, 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) / W**0.5).masked_fill(~dense, float("-inf"))
        torch.testing.assert_close(scores.softmax(-1) @ v, out, rtol=0, atol=1e-10, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("queries", [1, 2, 8])
@pytest.mark.parametrize("form", ["none", "bool", "float", "one row"])
def test_folded_heads_equal_plain_ones(form: str, queries: int, scale: float | None) -> None:
    """Heads that share keys as queries of one head, against scores written out; strided inputs as the models give."""
    B, H, G, K, W = 3, 6, 2, 11, 4
    generator = torch.Generator().manual_seed(queries)
    q, k, v = (
        torch.randn(B, length, heads, W, generator=generator, dtype=torch.float64).transpose(1, 2)
        for heads, length in ((H, queries), (G, K), (G, K))
    )
    allowed = torch.rand(1 if form == "one row" else B, 1, queries, K, generator=generator) < 0.7
    allowed[..., 0] = True
    mask = {"none": None, "float": masks.additive(allowed, torch.float64)}.get(form, allowed)
    if mask is None:
        allowed = torch.ones_like(allowed)
    assert _folds(q.bfloat16(), k.bfloat16(), mask)
    scores = q @ k.repeat_interleave(3, 1).transpose(-1, -2) * (W**-0.5 if scale is None else scale)
    expected = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v.repeat_interleave(3, 1)
    torch.testing.assert_close(attend(q, k, v, mask, scale=scale), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(_folded(q, k, v, mask, scale), expected, rtol=0, atol=1e-12)


def test_when_heads_are_folded() -> None:
    """Few queries in 16 bit on a CPU; with a mask on CUDA, while the mask is smaller than the keys and values."""

    def on(device: str, queries: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = torch.empty(1, 4, queries, 8, device="meta"), torch.empty(1, 2, 50, 8, device="meta")
        return SimpleNamespace(shape=q.shape, dtype=dtype, is_cuda=device == "cuda"), k

    mask = torch.empty(1, 1, 1, 50, device="meta")
    assert [n for n in range(1, 20) if _folds(*on("cpu", n), None)] == list(range(1, 9))
    assert not _folds(*on("cpu", 1, torch.float32), None)
    assert not _folds(*on("cuda", 1), None)
    assert [n for n in range(1, 99) if _folds(*on("cuda", n), mask)] == list(range(1, 2 * 2 * 8))


def test_no_mask_attends_everywhere() -> None:
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64) for n in (3, 5, 5))
    full = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    torch.testing.assert_close(attend(q, k, v, None), attend(q, k, v, full))


def test_predicates_work_on_any_index_shape() -> None:
    """flex calls them with scalars, `dense` with broadcast tensors."""
    predicate = masks.draft_blocks(torch.tensor([[1, 3]]), torch.tensor([4]), block=2)
    whole = masks.dense(predicate, batch=1, queries=4, keys=8, device=CPU)[0, 0]
    zero = torch.tensor(0)
    for q, kv in itertools.product(range(4), range(8)):
        assert bool(predicate(zero, zero, torch.tensor(q), torch.tensor(kv))) == bool(whole[q, kv])
