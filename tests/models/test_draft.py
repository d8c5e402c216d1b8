"""The drafter: training form against decoding form, what a block can see, geometry and configuration."""

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import rotate_half

from dspec.attention import masks
from dspec.errors import UserError
from dspec.models import draft as draft_module
from dspec.models.draft import Draft, DraftConfig, RMSNorm, build_draft, default_target_layers

EXACT = {"rtol": 0, "atol": 1e-10}
CPU = torch.device("cpu")


def _train_form(draft: Draft, tokens_BN: Tensor, anchor_BN: Tensor, features_BSF: Tensor, build: Any = masks.dense):  # type: ignore[no-untyped-def]
    """All blocks of all rows at once: [B, N, K, D]."""
    (B, N), K, S = anchor_BN.shape, draft.config.block_size, features_BSF.shape[1]
    predicate = masks.draft_blocks(anchor_BN, torch.full((B,), S), block=K)
    mask = build(predicate, batch=B, queries=N * K, keys=S + N * K, device=CPU)
    positions = (anchor_BN[..., None] + torch.arange(K)).flatten(1)
    hidden = draft(draft.block_ids(tokens_BN), positions, mask=mask, features_BSF=features_BSF)
    return hidden.view(B, N, K, -1)


def _case(toys: SimpleNamespace, *, block: int = 3, seed: int = 0) -> tuple[Draft, Tensor, Tensor, Tensor]:
    draft = toys.draft(toys.target(seed=seed), block=block, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.tensor([[0, 2, 3, 9], [1, 1, 5, 8], [4, 6, 7, 9]])
    tokens = torch.randint(10, anchors.shape, generator=generator)
    features = torch.randn(3, 10, 32, generator=generator, dtype=torch.float64)
    return draft, tokens, anchors, features


@torch.no_grad()
@pytest.mark.parametrize("block", [1, 3, 6])
def test_training_form_equals_decoding_form(toys: SimpleNamespace, block: int) -> None:
    """Many blocks over features = one block at a time over a cache, in ragged batches and alone."""
    draft, tokens, anchors, features = _case(toys, block=block)
    whole = _train_form(draft, tokens, anchors, features)
    for n in range(anchors.shape[1]):
        for rows in ([0, 1, 2], [2, 0], [1]):
            cache, starts = draft.new_cache(), anchors[rows, n].tolist()
            rng = random.Random(n)
            for first in (0, 2, 4):  # features arrive in ragged overlapping pieces, beyond the anchor too
                at = [max(0, first - rng.randint(0, 2)) for _ in rows]
                piece = torch.stack([features[r, s : s + 6] for r, s in zip(rows, at, strict=True)])
                draft.extend(piece, start_B=at, cache=cache)
            at = [4] * len(rows)
            draft.extend(features[rows, 4:], start_B=at, cache=cache)
            window = cache.window(starts, block)
            start = torch.tensor(starts)
            predicate = masks.draft_blocks(start[:, None], start, block=block)
            mask = masks.dense(predicate, batch=len(rows), queries=block, keys=window.end, device=CPU)
            ids = draft.block_ids(tokens[rows, n : n + 1])
            got = draft(ids, start[:, None] + torch.arange(block), mask=mask, window=window)
            torch.testing.assert_close(got, whole[rows, n], **EXACT)
            if len(rows) == 1:  # a single row needs no mask
                window = cache.window(starts, block)
                bare = draft(ids, start[:, None] + torch.arange(block), mask=None, window=window)
                torch.testing.assert_close(bare, whole[rows, n], **EXACT)


@torch.no_grad()
def test_flex_form_equals_dense_form(toys: SimpleNamespace) -> None:
    case = _case(toys)
    torch.testing.assert_close(_train_form(*case, build=masks.block_mask), _train_form(*case), **EXACT)


@torch.no_grad()
def test_what_a_block_can_see(toys: SimpleNamespace) -> None:
    """A block depends on every feature before its anchor, on its own token and position, and on nothing else."""
    draft, tokens, anchors, features = _case(toys)
    before = _train_form(draft, tokens, anchors, features)

    def changed(**new: Tensor) -> Tensor:
        after = _train_form(
            draft, new.get("tokens", tokens), new.get("anchors", anchors), new.get("features", features)
        )
        return (after - before).abs().amax((2, 3)) > 1e-9  # [B, N]

    for row in range(3):
        for position in range(10):
            other = features.clone()
            other[row, position] += 1
            expected = torch.zeros(3, 4, dtype=torch.bool)
            expected[row] = anchors[row] > position
            assert torch.equal(changed(features=other), expected)
        for n in range(4):
            only = torch.zeros(3, 4, dtype=torch.bool)
            only[row, n] = True
            token = tokens.clone()
            token[row, n] = (token[row, n] + 1) % 10
            assert torch.equal(changed(tokens=token), only)
            moved = anchors.clone()
            moved[row, n] = (moved[row, n] + 1) % 10
            assert torch.equal(changed(anchors=moved), only)


@torch.no_grad()
def test_slots_see_each_other_both_ways(toys: SimpleNamespace) -> None:
    draft, tokens, _, features = _case(toys)
    K, ids = 3, draft.block_ids(tokens[:1, 2:3])
    positions = 3 + torch.arange(K)[None]
    before = draft(ids, positions, mask=None, features_BSF=features[:1, :3])
    for slot in range(K):
        other = ids.clone()
        other[0, slot] = (other[0, slot] + 1) % 11
        after = draft(other, positions, mask=None, features_BSF=features[:1, :3])
        assert ((after - before).abs().amax(-1) > 1e-9).all()


def test_block_ids(toys: SimpleNamespace) -> None:
    draft = toys.draft(toys.target(vocab=11), block=3)
    assert draft.block_ids(torch.tensor([[4, 5], [6, 7]])).tolist() == [[4, 10, 10, 5, 10, 10], [6, 10, 10, 7, 10, 10]]


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_transition_is_the_head_slot_by_slot(toys: SimpleNamespace, head: str) -> None:
    draft = toys.draft(toys.target(), head=head)
    previous, hidden = torch.randint(10, (2, 3, 4)), torch.randn(2, 3, 4, 16, dtype=torch.float64)
    codes, state = draft.markov_head.transition(previous, hidden), None
    for k in range(4):
        code, state = draft.markov_head.step(previous[..., k], hidden[..., k, :], state)
        torch.testing.assert_close(codes[..., k, :], code, **EXACT)
    if head == "rnn":  # the state carries the first token to the last slot
        other = previous.clone()
        other[..., 0] = (other[..., 0] + 1) % 10
        assert not torch.allclose(draft.markov_head.transition(other, hidden)[..., 3, :], codes[..., 3, :])


def test_without_heads(toys: SimpleNamespace) -> None:
    draft = toys.draft(toys.target())
    assert draft.markov_head is None
    assert draft.confidence(torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, 16)) is None


def test_one_rotary_table_for_block_and_context(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, where the two differ in type: built once, in float32, whatever is decoded in between."""
    draft, tokens, anchors, features = _case(toys)
    draft, features = draft.float(), features.float()
    draft.embed_tokens.weight.data = draft.embed_tokens.weight.data.bfloat16()
    made, seen = [], []
    plain, rotate = draft.rotary_emb.forward, draft_module._rotate
    monkeypatch.setattr(draft.rotary_emb, "forward", lambda *args: made.append(1) or plain(*args))

    def spy(x: Tensor, rotation: Any) -> Tensor:
        seen.append((x.dtype, rotation[0].dtype, rotate(x, rotation).dtype))
        return rotate(x, rotation)

    monkeypatch.setattr(draft_module, "_rotate", spy)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _train_form(draft, tokens, anchors, features)
        with torch.inference_mode():
            draft.extend(features, start_B=[0] * 3, cache=draft.new_cache())
    assert len(made) == 1
    assert {table for _, table, _ in seen} == {torch.float32}
    assert all(before == after for before, _, after in seen)


def test_rotation_is_rounded_once() -> None:
    """bf16 queries far out are rotated by exact angles: rounded tables would be wrong in each product."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 5, 8, generator=generator).bfloat16()
    angle = torch.rand(1, 1, 5, 4, generator=generator).double().repeat(1, 1, 1, 2) * 6
    exact = x.double() * angle.cos() + rotate_half(x.double()) * angle.sin()
    got = draft_module._rotate(x, (angle.cos().float(), angle.sin().float()))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.float().bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    norm, x = RMSNorm(8, eps=1e-5).to(dtype), torch.randn(4, 8).to(dtype)
    torch.nn.init.normal_(norm.weight)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    got = norm(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


# ---- configuration


def test_default_target_layers() -> None:
    assert default_target_layers(5, num_layers=36) == (1, 9, 17, 25, 33)
    assert default_target_layers(5, num_layers=40) == (1, 10, 19, 28, 37)
    assert default_target_layers(1, num_layers=6) == (3,)
    assert default_target_layers(3, num_layers=6) == (0, 2, 4)
    assert default_target_layers(2, num_layers=4) == (0, 2)
    for layers in range(2, 64):
        for count in range(1, layers + 2):
            if count > 1 and count > layers - (1 if layers < 8 else 3):  # more taps than distinct layers
                with pytest.raises(UserError, match=r"draft\.num_taps"):
                    default_target_layers(count, num_layers=layers)
                continue
            ids = default_target_layers(count, num_layers=layers)
            assert len(set(ids)) == len(ids) == count
            assert list(ids) == sorted(ids)
            assert 0 <= ids[0] <= ids[-1] < layers - (count > 1)  # the last layer is never tapped
    for count in (0, -1, 6):
        with pytest.raises(UserError, match=r"does not fit a target of 6 layers \(1\.\.5\)"):
            default_target_layers(count, num_layers=6)


SOUND = {
    "transformer": Qwen3Config(hidden_size=8),
    "layout": "anchor_first",
    "block_size": 4,
    "target_layer_ids": (0, 1),
    "num_target_layers": 3,
    "mask_token_id": 1,
    "markov_head_type": "vanilla",
    "markov_rank": 2,
    "confidence_head": True,
    "confidence_head_with_markov": True,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "guess"}, "anchor_first, fill_in"),
        ({"markov_head_type": "lstm"}, "vanilla, gated, rnn"),
        ({"layout": "fill_in"}, "no heads"),
        ({"layout": "fill_in", "markov_head_type": None, "confidence_head_with_markov": False}, "no heads"),
        ({"markov_head_type": None}, "set markov_head_type"),
        ({"markov_rank": 0}, "markov_rank >= 1"),
        ({"block_size": 0}, "no draft slot"),
        ({"block_size": 99_999}, "exceeds the model's .* positions"),
        ({"target_layer_ids": ()}, "set draft.target_layer_ids"),
    ],
)
def test_config_refusals(change: dict[str, Any], words: str) -> None:
    config = DraftConfig(**SOUND)
    assert (config.first_slot, config.num_drafts) == (0, 4)
    with pytest.raises(UserError, match=words):
        dataclasses.replace(config, **change)


def test_fill_in_leaves_slot_0_out() -> None:
    bare = {"markov_head_type": None, "confidence_head": False, "confidence_head_with_markov": False}
    config = DraftConfig(**(SOUND | bare | {"layout": "fill_in"}))
    assert (config.first_slot, config.num_drafts) == (1, 3)
    with pytest.raises(UserError, match="no draft slot"):
        dataclasses.replace(config, block_size=1)


def _build(target, **change: Any) -> Draft:  # type: ignore[no-untyped-def]
    options: dict[str, Any] = {
        "num_layers": 2,
        "intermediate_size": None,
        "block_size": 4,
        "layout": "anchor_first",
        "num_taps": 2,
        "target_layer_ids": None,
        "markov_head_type": "gated",
        "markov_rank": 3,
        "confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return build_draft(target=target, **(options | change))


def test_build_draft(toys: SimpleNamespace) -> None:
    target = toys.target("llama", vocab=13, layers=4)
    draft = _build(target)
    assert draft.config.target_layer_ids == (0, 2)
    assert draft.config.transformer.intermediate_size == 24
    assert _build(target, intermediate_size=40).config.transformer.intermediate_size == 40
    assert _build(target, target_layer_ids=[3, 1, 0]).fc.weight.shape == (16, 48)
    assert draft.embed_tokens is target.embed_tokens
    assert draft.lm_head is target.lm_head
    own = draft.trainable()
    assert all(p.requires_grad for p in own.values())
    assert not any(p.requires_grad for name, p in draft.named_parameters() if name not in own)
    assert draft.markov_head.markov_w1.weight.shape == (13, 3)
    assert draft.confidence_head.proj.weight.shape == (1, 19)
    assert _build(target, confidence_head_with_markov=False).confidence_head.proj.weight.shape == (1, 16)
    bare = _build(target, markov_head_type=None, confidence_head=False, confidence_head_with_markov=False)
    assert (bare.markov_head, bare.confidence_head, bare.config.markov_rank) == (None, None, 0)
    alone = _build(target, markov_head_type=None)  # no code of a Markov head for the confidence head to read
    assert alone.confidence_head.proj.weight.shape == (1, 16)
    assert not alone.config.confidence_head_with_markov


def test_initialisation(toys: SimpleNamespace) -> None:
    torch.manual_seed(0)
    target = toys.target(hidden=64)
    before = target.lm_head.weight.clone()
    draft = _build(target, markov_rank=16)
    std = draft.config.transformer.initializer_range
    for name, p in draft.trainable().items():
        if "norm" in name:
            assert (p == 1).all(), name
        elif name.endswith("bias"):
            assert (p == 0).all(), name
        elif p.numel() > 1000:
            assert abs(float(p.detach().std()) / std - 1) < 0.1, name
            assert abs(float(p.detach().mean())) < 0.2 * std, name
    assert torch.equal(before, target.lm_head.weight)


def test_build_refusals(toys: SimpleNamespace) -> None:
    target = toys.target()
    for ids in ((3,), (-1, 0)):
        with pytest.raises(UserError, match=r"0\.\.2"):
            _build(target, target_layer_ids=ids)
    target.mask_token_id = None
    with pytest.raises(UserError, match=r"set target\.mask_token="):
        _build(target)
    target.mask_token_id = 11
    with pytest.raises(UserError, match="outside the vocabulary of 11"):
        _build(target)
