"""XLNet's pass over places against transformers' own pass over the text, and how it is loaded and refused."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import XLNetConfig, XLNetLMHeadModel

from data.embedded.target import fresh_xlnet
from dspec.decoding.any_subset.queries import RowQuery, query_logits
from dspec.errors import UserError
from dspec.methods.ar_base import ARBase
from dspec.models.draft import build_draft
from dspec.models.language_model import load_language_model
from dspec.models.xlnet import XLNet

SMALL: dict[str, Any] = {
    "name": "x", "dtype": "float32", "device": "cpu", "hidden_size": 16, "num_layers": 2, "num_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip


def inquiry(rng: random.Random, vocab: int) -> RowQuery:
    """A prompt, some generated tokens, and queries for the next ones: each with its own limit, or one for all."""
    length = rng.randint(4, 14)
    positions = rng.sample(range(length + rng.choice([0, 5])), length)
    prompt = rng.randint(1, length - 2)
    known = rng.randint(prompt, length - 1)
    asked = range(rng.randint(prompt, known), length)
    limits = [rng.randint(prompt, min(known, place)) for place in asked]
    tokens = [rng.randrange(vocab - 1) for _ in range(known)]
    return RowQuery(tokens=tokens, start=0, prompt=prompt, positions=positions, queried=asked, limits=limits)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_two_stream_pass_of_transformers(toys: SimpleNamespace, seed: int) -> None:
    rng, of = random.Random(seed), toys.xlnet(seed=seed)
    rows = [inquiry(rng, 11) for _ in range(5)]
    for row, got in zip(rows, query_logits(of, rows), strict=True):
        for q, (place, limit) in enumerate(zip(row.queried, row.limits, strict=True)):
            known = row.tokens[:limit]
            alone = toys.conditional(of, known, row.positions, prompt=row.prompt, place=place)
            torch.testing.assert_close(got[q], alone, rtol=0, atol=1e-10)


@torch.no_grad()
def test_equals_transformers_in_float32(toys: SimpleNamespace) -> None:
    """Position encodings, too, as transformers computes them: nothing of it is replaced here."""
    config = XLNetConfig(vocab_size=11, d_model=32, n_layer=3, n_head=4, d_inner=48, initializer_range=0.3)
    torch.manual_seed(0)
    of = XLNet(XLNetLMHeadModel(config), None, name="x", mask_token_id=10)
    row = RowQuery(tokens=[1, 4, 2], start=0, prompt=2, positions=[0, 37, 4, 1, 39], queried=[3, 4], limits=[3, 2])
    (got,) = query_logits(of, [row])
    for q, (place, limit) in enumerate(zip(row.queried, row.limits, strict=True)):
        known = row.tokens[:limit]
        alone = toys.conditional(of, known, row.positions, prompt=row.prompt, place=place)
        torch.testing.assert_close(got[q], alone, rtol=1e-4, atol=1e-4)
        assert alone[:10].std() > 0.1


def test_bfloat16_weights_run(toys: SimpleNamespace) -> None:
    """transformers' own two-stream pass crashes on them."""
    row = RowQuery(tokens=[1, 4, 2], start=0, prompt=2, positions=[0, 3, 1, 2, 4], queried=[3, 4], limits=[3, 3])
    with torch.no_grad():
        exact, rounded = (query_logits(toys.xlnet(scale=0.2, dtype=d), [row]) for d in (torch.float32, torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.1, atol=0.1)


def test_a_query_that_sees_nothing_is_refused(toys: SimpleNamespace) -> None:
    of = toys.xlnet()
    row = RowQuery(tokens=[], start=0, prompt=0, positions=[0, 1], queried=[0, 1], limits=[0, 0])
    with pytest.raises(UserError, match="at least one token must be visible"):
        query_logits(of, [row])


@pytest.mark.parametrize("odd", [{"attn_type": "uni"}, {"bi_data": True}, {"clamp_len": 8}])
def test_other_kinds_of_attention_are_refused(odd: dict[str, Any]) -> None:
    model = XLNetLMHeadModel(XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=2, d_inner=8, **odd))
    with pytest.raises(UserError, match="attn_type"):
        XLNet(model, None, name="x")


def test_every_trained_weight_gets_a_gradient(toys: SimpleNamespace) -> None:
    """Ranks wait for each; those of segments are saved but not trained."""
    of = fresh_xlnet(**SMALL)
    of.model.requires_grad_(True)
    row = {"positions_BL": torch.tensor([[0, 2, 1]]), "limit_BL": torch.tensor([[1, 2, 2]])}
    hidden = of.any_subset(torch.tensor([[5, 6, 0]]), query_BL=torch.tensor([[False, False, True]]), **row)
    of.logits(hidden[0, 2]).logsumexp(-1).backward()
    assert [name for name, p in of.model.named_parameters() if p.grad is None] == []
    assert any("seg_embed" in name for name in of.model.state_dict())


def test_a_folder_of_its_own(tmp_path: Path) -> None:
    of = fresh_xlnet(**SMALL)
    assert of.mask_token_id == of.tokenizer.mask_token_id
    of.model.save_pretrained(tmp_path)
    of.tokenizer.save_pretrained(tmp_path)
    read = load_language_model(path=str(tmp_path), name="x", dtype="float32", device="cpu", mask_token=None)
    assert isinstance(read, XLNet)
    assert read.mask_token_id == of.mask_token_id
    assert of.model.state_dict().keys() == read.model.state_dict().keys()
    for name, weight in of.model.state_dict().items():
        assert torch.equal(weight, read.model.state_dict()[name]), name


def test_what_writes_from_left_to_right_refuses_it(toys: SimpleNamespace) -> None:
    of = fresh_xlnet(**SMALL)
    for refused in (
        lambda: toys.build_decoder("autoregressive", target=of, draft=None),
        lambda: toys.build_decoder("prompt_lookup", target=of, draft=None, num_drafts=2, max_ngram=2),
        lambda: ARBase(target=of, chunk_mb=1.0),  # type: ignore[arg-type]
        lambda: build_draft(
            target=of, num_layers=1, intermediate_size=None, block_size=4, layout="anchor_first", num_taps=1,
            target_layer_ids=None, markov_head_type=None, markov_rank=0, confidence_head=False,
            confidence_head_with_markov=False,
        ),  # type: ignore[arg-type]
    ):  # fmt: skip
        with pytest.raises(UserError, match="only fills holes"):
            refused()
