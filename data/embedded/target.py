"""Fresh models, with the tokenizer of the embedded corpus: one of the embedded target's shape, and an XLNet."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, XLNetConfig, XLNetLMHeadModel

from data.embedded.corpus import corpus
from data.embedded.tokenizer import build_tokenizer
from dspec.devices import local_device
from dspec.models.language_model import LanguageModel, embedded_tokenizer
from dspec.models.xlnet import XLNet


def fresh_target(
    *,
    dtype: str,
    device: str,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    max_positions: int,
    corpus_counts: Mapping[str, int] | None,
    seed: int,
) -> LanguageModel:
    """Random weights from the global generator, the same on every device; the tokenizer is learned from the training
    corpus, or (None) the embedded target's. Raises UserError for a device that cannot be used here."""
    place = local_device(device)
    tokenizer = embedded_tokenizer() if corpus_counts is None else _learned(corpus_counts, vocab_size, seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).to(place, getattr(torch, dtype))
    return LanguageModel(model, tokenizer, name="tiny")


def _learned(counts: Mapping[str, int], vocab_size: int, seed: int) -> PreTrainedTokenizerFast:
    examples = corpus(counts=counts, split="train", seed=seed)
    return build_tokenizer([text for e in examples for text in (e.prompt, e.response)], vocab_size=vocab_size)


def fresh_xlnet(
    *,
    name: str,
    dtype: str,
    device: str,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
) -> XLNet:
    """An XLNet with random weights from the global generator and the embedded target's tokenizer."""
    tokenizer = embedded_tokenizer()
    config = XLNetConfig(
        vocab_size=len(tokenizer),
        d_model=hidden_size,
        n_layer=num_layers,
        n_head=num_heads,
        d_inner=intermediate_size,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = XLNetLMHeadModel(config).to(getattr(torch, dtype))
    return XLNet(model.to(local_device(device)), tokenizer, name=name)
