"""Ready diffusion LMs in classes of transformers, without the code in their folders: Dream, DiffuCoder, LLaDA.

Their config.json names Python files of their own, which dspec never runs. Dream and DiffuCoder are Qwen2, weight by
weight, and LLaDA is Llama with other names for weights and settings; all attend in both directions. Which tokens mask
and end an answer, and whether logits are shifted, conf/target/*.yaml says. It enters the config in memory, so that
decoders, methods and exports find it where an exported folder has it (docs/diffusion.md).

Facts: config.json and model.safetensors.index.json of Dream-org/Dream-v0-Instruct-7B and GSAI-ML/LLaDA-8B-Instruct.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
)

from dspec.errors import UserError
from dspec.models.language_model import (
    LanguageModel,
    check_tokenizer,
    checked_device,
    checkpoint_path,
    load_language_model,
    one_line_failure,
    require_causal,
)
from dspec.models.mask_token import choose_mask_token
from dspec.models.training_record import FULL, STORED_ATTENTION, TrainingRecord


@dataclass(frozen=True)
class _Layout:
    """How a foreign folder is read."""

    config: type[PreTrainedConfig]
    tokenizer: type[PreTrainedTokenizerBase]
    settings: Mapping[str, str]  # of its config.json: the name in the native class
    same_as: Mapping[str, str]  # settings that may be null, and then are another one
    required: Mapping[str, Any]  # settings that the native class has no other value for; null is no other value
    weights: Mapping[str, str]  # patterns of names of weights: the names in the native class; none: the same


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
)
_DREAM = _Layout(
    config=Qwen2Config,
    tokenizer=Qwen2Tokenizer,
    settings={name: name for name in _SIZES},
    same_as={},
    required={"hidden_act": "silu", "use_mrope": False, "use_sliding_window": False, "rope_scaling": None},
    weights={},
)
_BLOCK = r"^model\.transformer\.blocks\.(\d+)\."
_LLADA = _Layout(
    config=LlamaConfig,
    tokenizer=PreTrainedTokenizerFast,
    settings={
        "embedding_size": "vocab_size",
        "d_model": "hidden_size",
        "mlp_hidden_size": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "max_sequence_length": "max_position_embeddings",
        "rms_norm_eps": "rms_norm_eps",
        "rope_theta": "rope_theta",
        "weight_tying": "tie_word_embeddings",
    },
    same_as={"embedding_size": "vocab_size", "n_kv_heads": "n_heads"},
    required={
        "block_type": "llama",
        "block_group_size": 1,
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "multi_query_attention": False,
        "rope": True,
        "alibi": False,
        "scale_logits": False,
        "clip_qkv": None,
    },
    weights={
        r"^model\.transformer\.wte\.": "model.embed_tokens.",
        r"^model\.transformer\.ln_f\.": "model.norm.",
        r"^model\.transformer\.ff_out\.": "lm_head.",
        _BLOCK + r"attn_norm\.": r"model.layers.\1.input_layernorm.",
        _BLOCK + r"ff_norm\.": r"model.layers.\1.post_attention_layernorm.",
        _BLOCK + r"q_proj\.": r"model.layers.\1.self_attn.q_proj.",
        _BLOCK + r"k_proj\.": r"model.layers.\1.self_attn.k_proj.",
        _BLOCK + r"v_proj\.": r"model.layers.\1.self_attn.v_proj.",
        _BLOCK + r"attn_out\.": r"model.layers.\1.self_attn.o_proj.",
        _BLOCK + r"ff_proj\.": r"model.layers.\1.mlp.gate_proj.",
        _BLOCK + r"up_proj\.": r"model.layers.\1.mlp.up_proj.",
        _BLOCK + r"ff_out\.": r"model.layers.\1.mlp.down_proj.",
    },
)
_LAYOUTS: Final = {"Dream": _DREAM, "llada": _LLADA}  # by model_type; DiffuCoder's is Dream


def load_diffusion_lm(
    *, path: str, name: str, dtype: str, device: str, mask_token: int, stop_tokens: list[int], logit_shift: bool
) -> LanguageModel:
    """A diffusion LM from a local folder or the Hub: one of the above, or one stored as an ordinary Qwen2 or Llama.

    `stop_tokens` end an answer; with `logit_shift` the token at a place is predicted one place before. Raises UserError
    where the folder's own record says otherwise, and where it does not hold what such a model has.
    """
    local = checked_device(device, dtype=dtype)
    path = checkpoint_path(path)
    with one_line_failure(path):
        said, _ = PreTrainedConfig.get_config_dict(path)
    _check_record(said, mask_token=mask_token, logit_shift=logit_shift, name=name)
    layout = _LAYOUTS.get(said.get("model_type", ""))
    if layout is None:
        read = load_language_model(path=path, name=name, dtype=dtype, device=device, mask_token=mask_token)
        loaded = require_causal(read)
    else:
        model, tokenizer = _read(path, _native_config(said, layout, name=name), layout, dtype=dtype, name=name)
        mask_token_id = choose_mask_token(model, tokenizer, mask_token, name=name)
        loaded = LanguageModel(model.to(local), tokenizer, name=name, mask_token_id=mask_token_id)
    _record(loaded, stop_tokens, logit_shift=logit_shift)
    return loaded


def _check_record(said: Mapping[str, Any], *, mask_token: int, logit_shift: bool, name: str) -> None:
    """Raises UserError where config.json contradicts the target's keys."""
    stored = {"mask_token_id": mask_token, "dspec_logit_shift": logit_shift, "dspec_attention": STORED_ATTENTION[FULL]}
    keys = {"mask_token_id": "target.mask_token", "dspec_logit_shift": "target.logit_shift"}
    for key, asked in stored.items():
        if (value := said.get(key)) in (None, asked):
            continue
        if key not in keys:
            raise UserError(
                f"{key}={value} in the config.json of target {name!r}: it was not trained under {asked} attention; "
                "load it with target=hf"
            )
        raise UserError(f"{keys[key]}={asked}, but the config.json of target {name!r} says {key}={value}")


def _native_config(said: Mapping[str, Any], layout: _Layout, *, name: str) -> PreTrainedConfig:
    """Raises UserError for a setting that is missing, or that the native class does not have."""
    for key, value in layout.required.items():
        if said.get(key) not in (None, value):
            raise UserError(
                f"target {name!r} has {key}={said[key]} in its config.json; dspec reads {said['model_type']} models "
                f"with {key}={value} only"
            )
    values = dict(said)
    for key, other in layout.same_as.items():
        values[key] = values.get(other) if values.get(key) is None else values[key]
    if missing := [key for key in layout.settings if values.get(key) is None]:
        raise UserError(f"the config.json of target {name!r} lacks {', '.join(missing)}: it is no complete checkpoint")
    return layout.config(**{native: values[key] for key, native in layout.settings.items()})


def _read(
    path: str, config: PreTrainedConfig, layout: _Layout, *, dtype: str, name: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Raises UserError unless the folder holds exactly the weights of such a model."""
    with one_line_failure(path):
        model, loading = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=getattr(torch, dtype),
            key_mapping=dict(layout.weights) or None,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # what did not fit is named below
            output_loading_info=True,
        )
        tokenizer = layout.tokenizer.from_pretrained(path)
    check_tokenizer(tokenizer, path)
    wrong = {
        "lacks weights that such a model has": loading["missing_keys"],
        "has weights that such a model lacks": loading["unexpected_keys"],
        "has weights of other shapes": {key for key, *_ in loading["mismatched_keys"]},
    }
    for what, keys in wrong.items():
        if keys:
            raise UserError(f"target {name!r} {what}: {', '.join(sorted(keys)[:4])}")
    return model, tokenizer


def _record(loaded: LanguageModel, stop_tokens: Sequence[int], *, logit_shift: bool) -> None:
    """Raises UserError for a stop token that no answer can hold."""
    wrong = [token for token in stop_tokens if not 0 <= token < loaded.vocab_size or token == loaded.mask_token_id]
    if wrong or not stop_tokens:
        raise UserError(
            f"target.stop_tokens={list(stop_tokens)}: give at least one id, all below {loaded.vocab_size} and none the "
            f"mask token's ({loaded.mask_token_id})"
        )
    # the folder's own has settings of its authors' sampler, which transformers refuses to save
    loaded.model.generation_config = GenerationConfig(eos_token_id=list(stop_tokens), pad_token_id=stop_tokens[0])
    TrainingRecord(FULL, None, logit_shift).write(loaded)
    config: Any = loaded.model.config
    config.eos_token_id, config.pad_token_id = list(stop_tokens), stop_tokens[0]
