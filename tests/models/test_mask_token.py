"""`target.mask_token`: an unused token, or a new learned one."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from dspec.decoding.generation import Request
from dspec.decoding.loop import decode
from dspec.decoding.sampling import GREEDY
from dspec.errors import UserError
from dspec.models.export import export_language_model
from dspec.models.language_model import ASSETS, LanguageModel, load_language_model

WORDS = 10  # in the tokenizer, <eos> included


def base(toys: SimpleNamespace, folder: Path, *, rows: int = WORDS, tie: bool = False, **special: str) -> Any:
    """An autoregressive model with `rows` embeddings and a tokenizer of ten words; the last one ends answers."""
    made = toys.target("llama", dtype=torch.float32, vocab=rows, tie=tie)
    made.model.save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(WORDS - 1)} | {"<eos>": WORDS - 1}
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocab, "t0")), eos_token="<eos>", unk_token="t0", **special
    )
    words.save_pretrained(folder)
    return made


def load(folder: Path, mask_token: int | str | None) -> LanguageModel:
    made = load_language_model(path=str(folder), name="x", dtype="float32", device="cpu", mask_token=mask_token)
    assert isinstance(made, LanguageModel)
    return made


def test_without_one_both_ways_out_are_named(toys: SimpleNamespace, tmp_path: Path) -> None:
    base(toys, tmp_path)
    with pytest.raises(UserError, match=r"no mask token .*target\.mask_token=<.*target\.mask_token=add") as caught:
        load(tmp_path, None).required_mask_token()
    assert "\n" not in str(caught.value)


def test_an_existing_token(toys: SimpleNamespace, tmp_path: Path) -> None:
    made = base(toys, tmp_path)
    loaded = load(tmp_path, 4)
    assert loaded.mask_token_id == 4
    assert torch.equal(loaded.embed_tokens.weight, made.embed_tokens.weight)
    for wrong, words in (
        (WORDS, "outside the vocabulary"), (-1, "outside"), (WORDS - 1, "ends the answers"), ("new", "no token id"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=rf"target\.mask_token={wrong} .*{words}"):
            load(tmp_path, wrong)


@pytest.mark.parametrize("rows", [WORDS, WORDS + 1, WORDS + 6], ids=["full", "one-unused", "padded"])
@pytest.mark.parametrize("tie", [False, True])
def test_a_new_token(toys: SimpleNamespace, tmp_path: Path, rows: int, tie: bool, caplog: Any) -> None:
    """Takes the first unused row, else a new one: the mean of the tokens' rows; all other rows stay."""
    made = base(toys, tmp_path, rows=rows, tie=tie)
    with caplog.at_level("INFO"):
        loaded = load(tmp_path, "add")
    row = WORDS
    assert loaded.mask_token_id == loaded.tokenizer.mask_token_id == row
    assert loaded.vocab_size == loaded.model.config.vocab_size == max(rows, row + 1)
    assert ("unused until now" if rows > row else "a new row") in caplog.text
    kept = [i for i in range(rows) if i != row]
    for ours, theirs in ((loaded.embed_tokens, made.embed_tokens), (loaded.lm_head, made.lm_head)):
        assert torch.equal(ours.weight[kept], theirs.weight[kept])
        torch.testing.assert_close(ours.weight[row], theirs.weight[:WORDS].mean(0))
    assert (loaded.embed_tokens.weight is loaded.lm_head.weight) == tie
    assert torch.equal(load(tmp_path, "add").embed_tokens.weight, loaded.embed_tokens.weight)
    assert not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("tie", [False, True])
def test_it_is_never_predicted(toys: SimpleNamespace, tmp_path: Path, tie: bool) -> None:
    base(toys, tmp_path, tie=tie)
    loaded = load(tmp_path, "add")
    with torch.no_grad():
        loaded.lm_head.weight[WORDS] = 3 * loaded.lm_head.weight[:WORDS].abs().max(0).values
    decoder = toys.build_decoder("diffusion", target=loaded, tokens_per_step=1, block_size=None, attention=None)
    asked = Request(ids=[1, 2], sampling=GREEDY, max_new_tokens=12, stop_ids=(), seed=0)
    assert WORDS not in decode(decoder, [asked])[0].tokens


@pytest.mark.parametrize("rows", [WORDS, WORDS + 6])
def test_the_export_needs_no_option(toys: SimpleNamespace, tmp_path: Path, rows: int) -> None:
    base(toys, tmp_path / "base", rows=rows)
    loaded = load(tmp_path / "base", "add")
    folder = export_language_model(loaded, tmp_path / "out", dtype=None, card="a card")
    assert json.loads((folder / "config.json").read_text())["mask_token_id"] == WORDS
    again = load(folder, None)
    assert again.required_mask_token() == again.tokenizer.mask_token_id == WORDS
    assert again.tokenizer("t1 <|mask|>")["input_ids"][-1] == WORDS
    for name, weight in again.model.state_dict().items():
        assert torch.equal(weight, loaded.model.state_dict()[name])
    with pytest.raises(UserError, match=rf"has a mask token already \(id {WORDS}\)"):
        load(folder, "add")


def test_what_contradicts_a_new_token(toys: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has a mask token already .*leave it out"):
        load(ASSETS / "tiny", "add")
    base(toys, tmp_path, rows=WORDS + 1, additional_special_tokens=["<|mask|>"])
    with pytest.raises(UserError, match=rf"has a token <\|mask\|> already; use target\.mask_token={WORDS}"):
        load(tmp_path, "add")
