"""Ready diffusion LMs: folders in the layouts of Dream and LLaDA give the logits of the native models they hold."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dspec.config.compose import composed
from dspec.errors import UserError
from dspec.models import diffusion_lm
from dspec.models.diffusion_lm import load_diffusion_lm
from dspec.models.export import export_language_model
from dspec.models.language_model import LanguageModel, load_language_model
from dspec.models.training_record import TrainingRecord

VOCAB, MASK, ENDS = 20, 18, [15, 16]
IDS = torch.tensor([[3, 1, 18, 7, 18, 2]])
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
}  # fmt: skip
DREAM: dict[str, Any] = SIZES | {
    "model_type": "Dream", "architectures": ["DreamModel"], "tie_word_embeddings": False, "hidden_act": "silu",
    "use_mrope": False, "use_sliding_window": False, "rope_scaling": None, "sliding_window": None,
    "max_window_layers": 2, "mask_token_id": MASK, "attention_dropout": 0.0, "transformers_version": "4.46.2",
    "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
}  # fmt: skip
LLADA: dict[str, Any] = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "activation_type": "silu", "alibi": False,
    "attention_layer_norm": False, "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama",
    "d_model": 16, "embedding_size": VOCAB, "vocab_size": VOCAB - 1, "include_bias": False, "include_qkv_bias": False,
    "input_emb_norm": False, "layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": MASK,
    "max_sequence_length": 64, "mlp_hidden_size": 24, "mlp_ratio": 4, "multi_query_attention": None, "n_heads": 4,
    "n_kv_heads": 2, "n_layers": 2, "rms_norm_eps": 1e-5, "rope": True, "rope_theta": 5e5, "scale_logits": False,
    "weight_tying": False, "eos_token_id": 15, "pad_token_id": 15,
    "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig", "AutoModel": "modeling_llada.LLaDAModelLM"},
}  # fmt: skip
RENAMED = {
    "model.embed_tokens.": "model.transformer.wte.", "model.norm.": "model.transformer.ln_f.",
    "lm_head.": "model.transformer.ff_out.", "model.layers.": "model.transformer.blocks.",
    "input_layernorm.": "attn_norm.", "post_attention_layernorm.": "ff_norm.", "self_attn.o_proj.": "attn_out.",
    "self_attn.": "", "mlp.gate_proj.": "ff_proj.", "mlp.up_proj.": "up_proj.", "mlp.down_proj.": "ff_out.",
}  # fmt: skip


def native(kind: str, *, tie: bool = False) -> Any:
    """A random model, with the biases and norms that its class has."""
    settings = SIZES | {"tie_word_embeddings": tie}
    model = Qwen2ForCausalLM(Qwen2Config(**settings)) if kind == "Dream" else LlamaForCausalLM(LlamaConfig(**settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator) + name.endswith("norm.weight"))
    return model.eval()


def llada_name(name: str) -> str:
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    return name


def words(**special: str) -> PreTrainedTokenizerFast:
    vocab = {f"t{i}": i for i in range(VOCAB - 4)} | {"<eos>": 16, "<x>": 17, "<mask>": MASK}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocab, "t0")), eos_token="t15", **special)


def byte_pairs(folder: Path) -> None:
    """As in Dream's repository: vocab.json, merges.txt and special tokens beside them, no tokenizer.json."""
    pieces = [*"abcdefghijkl", "ab", "Ġ", "Ġa"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\nĠ a\n")
    special = {15: "<|endoftext|>", 16: "<|im_end|>", 17: "<|beginoftext|>", 18: "<|mask|>"}
    config = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {
            str(i): {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                     "special": True} for i, text in special.items()
        },
        "bos_token": "<|beginoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>", "unk_token": None, "add_bos_token": False,
        "chat_template": "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write(folder: Path, kind: str, model: Any, *, shards: int = 1, **change: Any) -> Path:
    """`model` as a folder of the foreign layout."""
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if kind == "llada":
        tensors = {llada_name(name): tensor for name, tensor in tensors.items()}
        words().save_pretrained(folder)
    else:
        byte_pairs(folder)
    names = sorted(tensors)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::shards]}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: files[i % shards] for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = (DREAM if kind == "Dream" else LLADA) | change
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "gone"}))
    (folder / "generation_config.json").write_text(json.dumps({"alg": "origin", "temperature": 0.2, "eps": 1e-3}))
    for name in ("modeling_dream.py", "configuration_dream.py", "tokenization_dream.py", "modeling_llada.py",
                 "configuration_llada.py"):  # fmt: skip
        (folder / name).write_text("raise SystemExit('remote code was run')\n")
    return folder


def load(folder: Path, **change: Any) -> LanguageModel:
    settings: dict[str, Any] = {
        "name": "x", "dtype": "float32", "device": "cpu", "mask_token": MASK, "stop_tokens": ENDS, "logit_shift": True,
    }  # fmt: skip
    return load_diffusion_lm(path=str(folder), **settings | change)


def everything(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv >= 0


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(IDS, mask=everything).hidden_BLD)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["Dream", "llada"])
def test_logits_are_those_of_the_native_model(kind: str, shards: int, tie: bool, tmp_path: Path) -> None:
    """Under the full mask, to the last bit; also what transformers itself computes, within rounding."""
    made = native(kind, tie=tie)
    tied = {"tie_word_embeddings" if kind == "Dream" else "weight_tying": tie}
    loaded = load(write(tmp_path / "x", kind, made, shards=shards, **tied))
    expected = LanguageModel(made, None, name="native", mask_token_id=MASK)
    assert torch.equal(logits(loaded), logits(expected))
    assert not torch.allclose(logits(loaded)[:, 0], loaded.logits(loaded(IDS).hidden_BLD)[:, 0])  # causal
    again = native(kind, tie=tie)
    with torch.no_grad():
        theirs = again(IDS, attention_mask=torch.zeros(1, 1, 6, 6)).logits
    torch.testing.assert_close(logits(loaded), theirs)
    assert loaded.model.state_dict().keys() == made.state_dict().keys()
    assert loaded.max_positions == 64


@pytest.mark.parametrize("kind", ["Dream", "llada"])
def test_dtype_and_what_the_target_says(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspec.models.language_model.check_bfloat16", lambda: None)
    folder = write(tmp_path / "x", kind, native(kind))
    loaded = load(folder, dtype="bfloat16", logit_shift=kind == "Dream")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert (loaded.mask_token_id, set(loaded.stop_ids)) == (MASK, set(ENDS))
    assert TrainingRecord.read(loaded) == TrainingRecord("full", None, shift=kind == "Dream")


def test_settings_that_follow_from_others(tmp_path: Path) -> None:
    """LLaDA's config may leave the number of key heads and the padded vocabulary to other keys."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 4}))
    folder = write(tmp_path / "x", "llada", model, n_kv_heads=None, embedding_size="gone", vocab_size=VOCAB)
    assert load(folder).model.config.num_key_value_heads == 4


def test_dreams_tokenizer_needs_no_code_of_its_own(tmp_path: Path) -> None:
    loaded = load(write(tmp_path / "x", "Dream", native("Dream")))
    tokenizer = loaded.tokenizer
    assert tokenizer("ab<|mask|>ab a<|im_end|>")["input_ids"] == [12, 18, 12, 14, 16]
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id, tokenizer.bos_token_id) == (15, 18, 17)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab<|im_end|>"


@pytest.mark.parametrize("kind", ["Dream", "llada"])
def test_the_export_is_an_ordinary_folder(kind: str, tmp_path: Path) -> None:
    """Which transformers and target=hf read alone, mask token, record and end tokens included."""
    loaded = load(write(tmp_path / "x", kind, native(kind)))
    folder = export_language_model(loaded, tmp_path / "out", dtype=None, card="a card")
    said = json.loads((folder / "config.json").read_text())
    assert said["model_type"] == ("qwen2" if kind == "Dream" else "llama")
    assert "auto_map" not in said
    assert set(load_file(folder / "model.safetensors")) == set(native(kind).state_dict())
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is type(native(kind))
    again = load_language_model(path=str(folder), name="y", dtype="float32", device="cpu", mask_token=None)
    assert isinstance(again, LanguageModel)
    assert torch.equal(logits(again), logits(loaded))
    assert (again.mask_token_id, set(again.stop_ids)) == (MASK, set(ENDS))
    assert TrainingRecord.read(again) == TrainingRecord("full", None, shift=True)
    assert torch.equal(logits(load(folder)), logits(loaded))  # its record says the same
    with pytest.raises(UserError, match=r"target\.logit_shift=False, but .* says dspec_logit_shift=True"):
        load(folder, logit_shift=False)
    said |= {"dspec_attention": "block_causal", "dspec_block_size": 16}
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match=r"dspec_attention=block_causal .*load it with target=hf"):
        load(folder)


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(name)


def _with(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(2)})


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("llada", _without("model.transformer.blocks.1.ff_proj.weight"),
         r"lacks weights that such a model has: model\.layers\.1\.mlp\.gate_proj\.weight"),
        ("llada", _with("model.transformer.blocks.1.attn_out.bias"), "has weights that such a model lacks: .*bias"),
        ("llada", _with("model.transformer.wpe.weight"), r"has weights .*: model\.transformer\.wpe\.weight"),
        ("Dream", _without("model.layers.0.self_attn.q_proj.bias"), r"lacks weights .*0\.self_attn\.q_proj\.bias"),
        ("Dream", _with("model.layers.0.self_attn.q_norm.weight"), "has weights .*q_norm"),
        ("Dream", _with("model.norm.weight"),
         r"has weights of other shapes: model\.norm\.weight"),
    ],
)  # fmt: skip
def test_weights_that_are_missing_or_left_over(kind: str, change: Any, words: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "x", kind, native(kind))
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, path.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("llada", {"block_type": "sequential"}, "block_type=sequential .* block_type=llama only"),
        ("llada", {"include_qkv_bias": True}, "include_qkv_bias=True"),
        ("llada", {"rope": False}, "rope=False"),
        ("llada", {"clip_qkv": 8.0}, r"clip_qkv=8\.0"),
        ("llada", {"d_model": "gone", "n_layers": None}, "lacks d_model, n_layers"),
        ("Dream", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("Dream", {"rope_scaling": {"type": "yarn"}}, "rope_scaling="),
        ("Dream", {"rope_theta": "gone"}, "lacks rope_theta"),
        ("Dream", {"mask_token_id": 5}, r"target\.mask_token=18, but .* says mask_token_id=5"),
        ("Dream", {"model_type": "gpt_foreign"}, "cannot load target"),
    ],
)  # fmt: skip
def test_configs_of_other_models(kind: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "x", kind, native(kind), **change)
    with pytest.raises(UserError, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_ids_are_checked(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", "llada", native("llada"), mask_token_id=None)
    for change, words in (
        ({"stop_tokens": []}, r"target\.stop_tokens=\[\]"),
        ({"stop_tokens": [15, VOCAB]}, "all below 20"),
        ({"stop_tokens": [15, MASK]}, "none the mask token's"),
        ({"mask_token": VOCAB}, "outside the vocabulary"),
        ({"mask_token": 15}, "ends the answers"),
        ({"path": "gone"}, "cannot load target"),
    ):
        with pytest.raises(UserError, match=words):
            load(Path(str(change.pop("path", folder))), **change)


def test_code_in_a_folder_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the user asked to."""
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("asked"))
    folder = write(tmp_path / "x", "Dream", native("Dream"))
    with pytest.raises(UserError, match=r"custom code .*target=dream, diffucoder or llada"):
        load_language_model(path=str(folder), name="x", dtype="float32", device="cpu", mask_token=None)


@pytest.mark.parametrize("name", ["dream", "diffucoder", "llada"])
def test_the_choices_name_their_tokens(name: str) -> None:
    target = composed("eval", [f"target={name}", "decoder=diffusion", "benchmark=tiny"]).target
    known = {"dream": (151666, 151643, True), "diffucoder": (151666, 151643, True), "llada": (126336, 126081, False)}
    assert (target.mask_token, target.stop_tokens[0], target.logit_shift) == known[name]
    assert target._target_ == f"{diffusion_lm.__name__}.{load_diffusion_lm.__name__}"
    assert re.match(r"(Dream-org|apple|GSAI-ML)/", target.path)
