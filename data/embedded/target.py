"""A fresh model of the embedded target's shape, with the tokenizer of the embedded corpus."""

from collections.abc import Mapping

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from data.embedded.corpus import corpus
from data.embedded.tokenizer import build_tokenizer
from dspec.models.language_model import LanguageModel, local_device


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
    corpus_counts: Mapping[str, int],
    seed: int,
) -> LanguageModel:
    """Random weights from the global generator, the same on every device; the tokenizer is learned from the training
    corpus. Raises UserError for a device that cannot be used here."""
    place = local_device(device)
    examples = corpus(counts=corpus_counts, split="train", seed=seed)
    texts = [text for e in examples for text in (e.prompt, e.response)]
    tokenizer = build_tokenizer(texts, vocab_size=vocab_size)
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
