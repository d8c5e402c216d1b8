"""The embedded corpus: generated text and its tokenizer, so that everything runs without downloads."""
