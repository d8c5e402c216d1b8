"""The target: taps against a forward pass layer by layer, cached and ragged against plain, refusals."""

import json
import random
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import dspec
from dspec.attention import masks
from dspec.devices import check_bfloat16
from dspec.errors import UserError
from dspec.models import language_model as target_module
from dspec.models.language_model import _NORMS, ASSETS, LanguageModel, load_language_model
from dspec.models.target_model import lm_logits
from dspec.provenance import fingerprint

EXACT = {"rtol": 0, "atol": 1e-10}


def _layer_by_layer(target: LanguageModel, ids_BL: Tensor) -> tuple[list[Tensor], Tensor]:
    """Each decoder layer's output, and the final norm of the last."""
    decoder, L = target.model.get_decoder(), ids_BL.shape[1]
    positions = torch.arange(L)[None]
    mask = torch.full((L, L), float("-inf"), dtype=target.dtype).triu(1)[None, None]
    x, outputs = decoder.embed_tokens(ids_BL), []
    rotation = decoder.rotary_emb(x, positions)
    for layer in decoder.layers:
        x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        x = x[0] if isinstance(x, tuple) else x
        outputs.append(x)
    return outputs, decoder.norm(x)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_taps_are_layer_outputs_before_the_final_norm(toys: SimpleNamespace, family: str) -> None:
    target = toys.target(family, layers=4)
    ids = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(0))
    layers, final = _layer_by_layer(target, ids)
    for taps in ((0,), (3,), (0, 2, 3), (3, 1), (1, 1)):
        out = target(ids, taps=taps)
        torch.testing.assert_close(out.features_BLF, torch.cat([layers[i] for i in taps], -1), **EXACT)
        torch.testing.assert_close(out.hidden_BLD, final, **EXACT)
    assert not torch.allclose(layers[3], final)  # the last id is not the normed output
    assert target(ids).features_BLF.shape == (2, 7, 0)
    logits = target.model(ids).logits
    torch.testing.assert_close(target.logits(final), logits, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_float64_norms_keep_weights_and_agree_with_transformers(toys: SimpleNamespace, family: str) -> None:
    plain, exact = toys.target(family, dtype=torch.float32), toys.target(family)
    assert any(isinstance(m, _NORMS) for m in plain.model.modules())
    assert not any(isinstance(m, _NORMS) for m in exact.model.modules())
    assert plain.model.state_dict().keys() == exact.model.state_dict().keys()
    ids = torch.randint(11, (2, 9))
    single, double = (t.logits(t(ids).hidden_BLD).double() for t in (plain, exact))
    torch.testing.assert_close(single, double, rtol=1e-4, atol=1e-4)
    assert not torch.equal(single, double)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("seed", range(3))
def test_cached_equals_uncached(toys: SimpleNamespace, family: str, seed: int) -> None:
    """Ragged rows fed in chunks, wrong tokens written and overwritten, rows dropped: logits within 1e-10."""
    rng = random.Random(seed)
    target = toys.target(family, seed=seed)
    texts = [[rng.randrange(11) for _ in range(80)] for _ in range(4)]
    whole = target(torch.tensor(texts), taps=(0, 2))
    logits = target.logits(whole.hidden_BLD)
    cache, known, rows, ragged = target.new_cache(), [0] * 4, list(range(4)), 0
    while min(known) < 25:
        length, ragged = rng.randint(1, 6), ragged + (len(set(known)) > 1)
        ids = [texts[r][k : k + length] for r, k in zip(rows, known, strict=True)]
        right = [rng.randint(1, length) for _ in rows]  # tokens after these are drafts gone wrong
        ids = [row[:n] + [rng.randrange(11) for _ in row[n:]] for row, n in zip(ids, right, strict=True)]
        out = target(torch.tensor(ids), start_B=known, cache=cache, taps=(0, 2))
        got = target.logits(out.hidden_BLD)
        for i, (r, k, n) in enumerate(zip(rows, known, right, strict=True)):
            torch.testing.assert_close(got[i, :n], logits[r, k : k + n], **EXACT)
            torch.testing.assert_close(out.features_BLF[i, :n], whole.features_BLF[r, k : k + n], **EXACT)
        known = [k + n for k, n in zip(known, right, strict=True)]
        if len(rows) == 4 and min(known) > 8:
            cache.select([3, 1])
            rows, known = [3, 1], [known[3], known[1]]
    assert len(rows) == 2
    assert ragged > 3


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_several_tokens_at_one_position_and_positions_out_of_order(toys: SimpleNamespace, family: str) -> None:
    """Continuations side by side in one row behind a cached text give what each gives alone; so do positions that are
    computed out of order, where the mask says who comes before whom."""
    target, texts = toys.target(family, seed=1), [[1, 2, 3, 4], [5, 6]]
    drafts = [[[7, 8, 1], [2, 2, 2]], [[3, 4, 5], [9, 1, 0]]]
    cache = target.new_cache()
    target(torch.tensor([texts[0], [*texts[1], 0, 0]]), cache=cache)
    starts, branch = [len(text) for text in texts], torch.tensor([[1, 1, 1, 2, 2, 2]] * 2)
    positions = torch.tensor([[s + i for i in (0, 1, 2, 0, 1, 2)] for s in starts])
    ids = torch.tensor([[*one, *two] for one, two in drafts])
    mask = masks.branches(torch.tensor(starts), branch)
    out = target(ids, positions_BL=positions, mask=mask, cache=cache, start_B=starts, taps=(1,))
    for b, text in enumerate(texts):
        for n, draft in enumerate(drafts[b]):
            alone = target(torch.tensor([[*text, *draft]]), taps=(1,))
            at = slice(3 * n, 3 * n + 3)
            torch.testing.assert_close(out.hidden_BLD[b, at], alone.hidden_BLD[0, -3:], **EXACT)
            torch.testing.assert_close(out.features_BLF[b, at], alone.features_BLF[0, -3:], **EXACT)
    order = torch.tensor([3, 0, 2, 1])  # position p of the text is computed at place order.argsort()[p]
    text = torch.tensor(texts[:1])
    shuffled = target(text[:, order], positions_BL=order[None], mask=lambda b, h, q, kv: order[kv] <= order[q])
    torch.testing.assert_close(shuffled.hidden_BLD[0, order.argsort()], target(text).hidden_BLD[0], **EXACT)


@torch.no_grad()
def test_nothing_stays_behind_between_calls(toys: SimpleNamespace) -> None:
    """Two texts whose passes alternate, with other taps each: as if each had the model alone."""
    target, texts = toys.target(seed=2), ([1, 2, 3, 4, 5, 6], [9, 8, 7, 1, 2, 3])
    taps, caches = ((0,), (2, 1)), [target.new_cache(), target.new_cache()]
    before = {name: value for name, value in vars(target).items() if not name.startswith("_")}
    whole = [target(torch.tensor([text]), taps=t) for text, t in zip(texts, taps, strict=True)]
    for at in range(0, 6, 2):
        for text, cache, t, expected in zip(texts, caches, taps, whole, strict=True):
            out = target(torch.tensor([text[at : at + 2]]), start_B=[at], cache=cache, taps=t)
            torch.testing.assert_close(out.features_BLF[0], expected.features_BLF[0, at : at + 2], **EXACT)
            torch.testing.assert_close(out.hidden_BLD[0], expected.hidden_BLD[0, at : at + 2], **EXACT)
    assert {name: value for name, value in vars(target).items() if not name.startswith("_")} == before


@torch.no_grad()
def test_padding_and_packing_change_nothing(toys: SimpleNamespace) -> None:
    target = toys.target()
    a, b = [1, 2, 3, 4, 5], [6, 7, 8]
    alone = [target(torch.tensor([x])).hidden_BLD[0] for x in (a, b)]
    padded = target(torch.tensor([a, [*b, 9, 9]])).hidden_BLD
    torch.testing.assert_close(padded[1, :3], alone[1], **EXACT)
    document = torch.tensor([0] * 5 + [1] * 3)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    packed = target(
        torch.tensor([a + b]), positions_BL=positions, mask=masks.document_causal(document[None])
    ).hidden_BLD[0]
    torch.testing.assert_close(packed, torch.cat(alone), **EXACT)


@torch.no_grad()
def test_a_pass_from_position_0_has_no_mask(toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any lengths, fresh cache or written anew: the causal kernel; and it gives what rows alone give."""
    seen: list[bool] = []
    plain = target_module.attend

    def spy(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        seen.append(isinstance(mask, str) and mask == masks.CAUSAL)
        return plain(q, k, v, mask, **options)

    monkeypatch.setattr(target_module, "attend", spy)
    target = toys.target()
    rows = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 0, 0], [5, 0, 0, 0, 0, 0]]
    lengths, cache = [6, 3, 1], target.new_cache()
    target(torch.tensor([[9] * 9] * 3), cache=cache)  # what was held before is overwritten
    for prompts, held in ((rows[:1], target.new_cache()), (rows, target.new_cache()), (rows, cache)):
        seen.clear()
        whole = target(torch.tensor(prompts), cache=held).hidden_BLD
        assert seen == [True] * 3
        for i, n in enumerate(lengths[: len(prompts)]):
            alone = target(torch.tensor([rows[i][:n]])).hidden_BLD[0]
            torch.testing.assert_close(whole[i, :n], alone, **EXACT)
    seen.clear()
    after = target(torch.tensor([[7], [6], [5]]), start_B=lengths, cache=cache).hidden_BLD
    assert seen == [False] * 3  # rows at different lengths need one
    for i, n in enumerate(lengths):
        alone = target(torch.tensor([[*rows[i][:n], 7 - i]])).hidden_BLD[0, -1]
        torch.testing.assert_close(after[i, 0], alone, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3,), (1, 7), (3, 5), (2, 4), (0,), (3, 1, 1)])
def test_large_heads_get_another_row_where_that_is_faster(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3, 7, 15 rows in float32; the logits are the same."""
    generator = torch.Generator().manual_seed(0)
    head, rows = torch.nn.Linear(6, 9, bias=False).to(dtype), []
    hidden = torch.randn(*shape, 6, generator=generator).to(dtype)
    plain = head.forward
    monkeypatch.setattr(head, "forward", lambda x: rows.append(x.shape[:-1].numel()) or plain(x))
    expected = hidden.double() @ head.weight.double().T
    for large in (10**9, 0):
        monkeypatch.setattr("dspec.models.target_model._LARGE_HEAD", large)
        got = lm_logits(head, hidden)
        assert got.shape == (*shape, 9)
        torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol={torch.bfloat16: 1e-2}.get(dtype, 1e-6))
    count = hidden.shape[:-1].numel()
    padded = dtype == torch.float32 and count % 4 == 3
    assert rows == [count, count + padded]


def test_target_is_frozen_and_describes_itself(toys: SimpleNamespace) -> None:
    target = toys.target("llama", vocab=13, layers=5, positions=77)
    assert not any(p.requires_grad for p in target.parameters())
    assert not target.model.training
    assert (target.num_layers, target.vocab_size, target.hidden_size, target.max_positions) == (5, 13, 16, 77)
    assert (target.dtype, target.mask_token_id) == (torch.float64, 12)


def test_fingerprint_follows_the_weights(toys: SimpleNamespace) -> None:
    a, b = toys.target(seed=1), toys.target(seed=1)
    assert fingerprint(a.model) == fingerprint(b.model) != fingerprint(toys.target(seed=2).model)
    with torch.no_grad():
        b.lm_head.weight[0, 0] += 1e-3
    assert fingerprint(a.model) != fingerprint(b.model)


def _refused(words: str) -> pytest.RaisesExc:
    return pytest.raises(UserError, match=words)


def test_refusals(toys: SimpleNamespace, tmp_path: Path) -> None:
    small = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"intermediate_size": 16, "num_key_value_heads": 1}
    sliding = Qwen2ForCausalLM(Qwen2Config(**small, use_sliding_window=True, sliding_window=8, max_window_layers=1))
    with _refused("'windows' has sliding-window layers"):
        LanguageModel(sliding, None, name="windows")
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9))
    for model in (MistralForCausalLM(MistralConfig(**small)), gpt2):
        with _refused("llama, qwen2, qwen3"):
            LanguageModel(model, None, name="foreign")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with _refused("dynamic rotary embeddings"):
        LanguageModel(Qwen2ForCausalLM(Qwen2Config(**small, rope_parameters=rope)), None, name="stretched")
    target = toys.target(positions=20)
    for bad in ((3,), (-1,), (0, 7)):
        with _refused("layers 0..2; set draft.target_layer_ids"):
            target.check_taps(bad)
    target.check_length(12, 8)
    with _refused("prompt of 13 tokens and max_new_tokens=8 exceed .*20 positions"):
        target.check_length(13, 8)
    with _refused("cannot load target"):
        load_language_model(path=str(tmp_path), name="x", dtype="float32", device="cpu", mask_token=None)


@pytest.mark.parametrize("code", [0, -4])
def test_bfloat16_is_refused_where_it_kills_the_process(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspec.devices.subprocess.run", lambda *a, **k: SimpleNamespace(returncode=code))
    check_bfloat16.cache_clear()
    try:
        with _refused("ONEDNN_MAX_CPU_ISA") if code else nullcontext():
            check_bfloat16()
    finally:
        check_bfloat16.cache_clear()


def test_load_target(toys: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "check_bfloat16", lambda: None)  # nothing is multiplied here
    made = toys.target("llama", dtype=torch.float32)
    made.model.save_pretrained(tmp_path)
    vocab = {f"t{i}": i for i in range(10)} | {"<mask>": 10}
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, "t0")), mask_token="<mask>")
    words.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        target = load_language_model(path=str(tmp_path), name="x", dtype=name, device="cpu", mask_token=None)
        assert (target.dtype, target.mask_token_id) == (dtype, 10)
        assert torch.equal(target.lm_head.weight, made.lm_head.weight.to(dtype))
    with _refused("float32, bfloat16, float64"):
        load_language_model(path=str(tmp_path), name="x", dtype="float16", device="cpu", mask_token=None)
    target = load_language_model(path=str(tmp_path), name="x", dtype="float32", device="cpu", mask_token=4)
    assert target.mask_token_id == 4


def test_weights_that_are_not_a_language_models_are_refused(tmp_path: Path) -> None:
    """transformers would make up those that are missing, and leave out what it does not know: a drafter's own parts.
    Another name for the same weights does no harm."""
    how = {"name": "x", "dtype": "float32", "device": "cpu", "mask_token": None}
    with _refused(r"tiny_dspark' are not those of a language model \(confidence_head.proj.bias .* checkpoint="):
        load_language_model(path=str(ASSETS / "tiny_dspark"), **how)
    shutil.copytree(ASSETS / "tiny", tmp_path / "named")
    config = json.loads((tmp_path / "named" / "config.json").read_text())
    (tmp_path / "named" / "config.json").write_text(json.dumps(config | {"architectures": ["Ours"]}))
    assert load_language_model(path=str(tmp_path / "named"), **how).num_layers == 6
    shutil.copytree(ASSETS / "tiny", tmp_path / "torn")
    weights = load_file(tmp_path / "torn" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "torn" / "model.safetensors", metadata={"format": "pt"})
    with _refused(r"torn' are not those of a language model \(model.norm.weight is missing"):
        load_language_model(path=str(tmp_path / "torn"), **how)


@pytest.mark.parametrize("left", [1000, 0, 2_000_000])
def test_weights_cut_off_are_refused(tmp_path: Path, left: int) -> None:
    """As by a full disk or a copy that was interrupted."""
    shutil.copytree(ASSETS / "tiny", tmp_path / "cut")
    with (tmp_path / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(left)
    with _refused("cannot load target .*cut"):
        load_language_model(path=str(tmp_path / "cut"), name="x", dtype="float32", device="cpu", mask_token=None)


def test_a_folder_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    """transformers would make up one without a single word: every prompt would be empty."""
    shutil.copytree(ASSETS / "tiny", tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    with _refused(r"target .*mute' has no tokenizer \(text gives no tokens\)"):
        load_language_model(path=str(tmp_path / "mute"), name="x", dtype="float32", device="cpu", mask_token=None)


def test_a_target_whose_writer_was_killed_between_its_renames_is_found(tmp_path: Path) -> None:
    embedded = Path(dspec.__file__).parent / "assets" / "tiny"
    shutil.copytree(embedded, tmp_path / ".mine.old")
    own = {"name": "mine", "dtype": "float32", "device": "cpu", "mask_token": None}
    assert load_language_model(path=str(tmp_path / "mine"), **own).num_layers == 6
