"""Rows of different lengths as one row: nothing is lost on the way, and a packed pass gives what rows give alone."""

import random
from types import SimpleNamespace

import pytest
import torch

from dspec.models.ragged import RaggedRows

CPU = torch.device("cpu")
EXACT = {"rtol": 0, "atol": 1e-10}
LENGTHS = [(3,), (1,), (2, 2, 2), (1, 1), (4, 1, 2), (1, 5), (5, 1), (1, 1, 7, 1)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("inner", [(), (3,), (0,), (2, 3)])
def test_there_and_back(lengths: tuple[int, ...], inner: tuple[int, ...]) -> None:
    rows = RaggedRows(lengths, CPU)
    padded = torch.randn(len(lengths), max(lengths), *inner)
    packed = rows.pack(padded)
    expected = torch.cat([row[:n] for row, n in zip(padded, lengths, strict=True)])
    assert torch.equal(packed, expected[None])
    assert torch.equal(packed[0, rows.last], torch.stack([row[n - 1] for row, n in zip(padded, lengths, strict=True)]))
    again = rows.unpack(packed)
    assert again.shape == padded.shape
    for b, n in enumerate(lengths):
        assert torch.equal(again[b, :n], padded[b, :n])
        assert torch.equal(again[b, n:], padded[b, n - 1 : n].expand_as(again[b, n:]))  # finite if the row is
    assert list(zip(*(place.tolist() for place in rows.places), strict=True)) == [
        (b, i) for b, n in enumerate(lengths) for i in range(n)
    ]


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("seed", range(2))
def test_a_packed_pass_gives_what_each_row_gives_alone(toys: SimpleNamespace, family: str, seed: int) -> None:
    """Prompts and then drafts of any lengths, some of them wrong and overwritten; grouped-query heads."""
    rng = random.Random(seed)
    target = toys.target(family, seed=seed)
    texts = [[rng.randrange(11) for _ in range(60)] for _ in range(4)]
    whole = [target(torch.tensor([text]), taps=(0, 2)) for text in texts]
    cache, known, ragged = target.new_cache(), [0] * 4, 0
    while min(known) < 25:
        lengths = [rng.choice([1, rng.randint(1, 9)]) for _ in texts]
        right = [rng.randint(1, n) for n in lengths]
        ids = [
            [*text[k : k + r], *(rng.randrange(11) for _ in range(n - r))]
            for text, k, r, n in zip(texts, known, right, lengths, strict=True)
        ]
        rows, ragged = RaggedRows(lengths, CPU), ragged + (len(set(lengths)) > 1)
        packed = torch.tensor([[token for row in ids for token in row]])
        out = target.packed(packed, rows, start_B=known, cache=cache, taps=(0, 2))
        assert out.hidden_BLD.shape[:2] == out.features_BLF.shape[:2] == packed.shape
        hidden, features = rows.unpack(out.hidden_BLD), rows.unpack(out.features_BLF)
        for b, (k, r) in enumerate(zip(known, right, strict=True)):
            torch.testing.assert_close(hidden[b, :r], whole[b].hidden_BLD[0, k : k + r], **EXACT)
            torch.testing.assert_close(features[b, :r], whole[b].features_BLF[0, k : k + r], **EXACT)
        known = [k + r for k, r in zip(known, right, strict=True)]
    assert ragged > 3


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_pass_in_other_types(toys: SimpleNamespace, dtype: torch.dtype) -> None:
    """The padded pass up to rounding, in bfloat16 through folded heads; the cache holds the same."""
    target = toys.target(dtype=dtype, scale=0.2)
    ids, lengths = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(0)), [6, 1, 3]
    rows, caches = RaggedRows(lengths, CPU), [target.new_cache(), target.new_cache()]
    tolerance = {"rtol": 0, "atol": {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]}
    for starts in ([0, 0, 0], lengths):
        padded = target(ids, start_B=starts, cache=caches[0]).hidden_BLD
        packed = rows.unpack(target.packed(rows.pack(ids), rows, start_B=starts, cache=caches[1]).hidden_BLD)
        for b, n in enumerate(lengths):
            torch.testing.assert_close(packed[b, :n], padded[b, :n], **tolerance)
            end = starts[b] + n
            for one, other in zip(*(cache.layers for cache in caches), strict=True):
                torch.testing.assert_close(one.keys[b, :, :end], other.keys[b, :, :end], **tolerance)


@torch.no_grad()
def test_linear_layers_see_the_sum_of_the_lengths(toys: SimpleNamespace) -> None:
    target, seen = toys.target(), []
    for layer in target.model.get_decoder().layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp):
            part.register_forward_hook(lambda _, args, out: seen.append(args[0][..., 0].numel()))
    cache = target.new_cache()
    for lengths, starts in (([5, 1, 2], None), ([1, 1, 4], [5, 1, 2]), ([2, 2, 2], [6, 2, 6])):
        seen.clear()
        rows = RaggedRows(lengths, CPU)
        target.packed(torch.zeros(1, sum(lengths), dtype=torch.long), rows, start_B=starts, cache=cache)
        assert set(seen) == {sum(lengths)}
